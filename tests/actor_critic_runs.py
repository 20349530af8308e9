"""Micro teams with critics, recorders and a naive oracle for the tests of MAAC and IAC."""
import copy
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import pytest
import torch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from comlrl_nb.toy import MICRO_SPECIALS, fast_tokenizer, micro_model, micro_tokenizer
from comlrl_nb.trainers import actor_critic
from comlrl_nb.trainers.actor_critic import ac_base
from reinforce_runs import (SMALL as GROUPS, Trees, forwards, generate_calls, letters, naive_kl, onward, rows, same, scripted, team, token_logprobs, unclocked, value_of,
                            walked, weights)

__all__ = ["GROUPS", "Trees", "forwards", "generate_calls", "letters", "naive_kl", "onward", "rows", "same", "scripted", "team", "token_logprobs", "unclocked", "value_of",
           "walked", "weights"]

TOKENIZER = micro_tokenizer()
SMALL = {**GROUPS, "num_generations": 1, "critic_learning_rate": 1e-2, "max_new_tokens": 3}
DOUBLE = dict(dtype=torch.float64)
TWO_TURNS = dict(num_turns=2)
KINDS = {  # every way to have critics: the trainer and what it is made with
    "MAAC-V": dict(name="MAAC", critic_type="v"),
    "MAAC-Q": dict(name="MAAC", critic_type="q"),
    "IAC-V": dict(name="IAC", critic_type="v"),
    "IAC-Q": dict(name="IAC", critic_type="q"),
    "heads-V": dict(name="IAC", critic_type="v", use_separate_critic=False),
    "heads-Q": dict(name="IAC", critic_type="q", use_separate_critic=False, value_clip_range=None),
}
NAMES = {name: {*vars(cls.__init__)} | set(cls.__init__.__code__.co_varnames) for name, cls in (("MAAC", actor_critic.MAACTrainer), ("IAC", actor_critic.IACTrainer))}


def other_tokenizer():
    """The same bytes under other ids: what the micro tokenizer wrote means something else to it."""
    tokens = [*MICRO_SPECIALS, *reversed(sorted(pre_tokenizers.ByteLevel.alphabet()))]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return fast_tokenizer(core)


def config(name="MAAC", **fields):
    return getattr(actor_critic, f"{name}Config")(**{**SMALL, **fields})


def critic(seed=50, kind="gpt2", dtype=torch.float32, **overrides):
    return micro_model(seed, kind, dtype, **overrides)


def make(agents=None, *, name="MAAC", args=None, tokenizer=None, **given):
    """A small trainer that shows nothing; `given` are arguments of the trainer, then fields of the config."""
    fields = {key: given.pop(key) for key in [*given] if key not in NAMES[name]}
    agents = agents or team()
    fields.setdefault("num_agents", len(agents))
    call = dict(train_dataset=rows(), reward_func=letters, callbacks=[])
    if fields.get("use_separate_critic", True) and not {"critic_model", "critics"} & given.keys():
        dtype = next(agents[0].parameters()).dtype
        call["critics"] = [critic(50 + i, dtype=dtype) for i in range(1 if name == "MAAC" else len(agents))]
    if fields.get("num_turns", 1) > 1:
        call["external_transition"] = onward
    trainer = getattr(actor_critic, f"{name}Trainer")
    return trainer(agents=agents, tokenizer=tokenizer or TOKENIZER, args=args or config(name, **fields), **{**call, **given})


def trained(agents=None, **more):
    trainer = make(agents, **more)
    trainer.train()
    return trainer


def everything(trainer):
    """All weights: actors, heads, critics."""
    return weights([*trainer.agents, *trainer.critics])


def louder(trainer, factor=30.0):
    """New heads say values near 0; these speak up."""
    with torch.no_grad():
        for model in dict.fromkeys([*trainer.critics, *trainer.agents]):
            if model.value_head is not None:
                model.value_head.out.weight.mul_(factor)
                model.value_head.out.bias.add_(0.1)
    return trainer


def const_values(trainer, *values):
    """Let the critics say these values, whatever they read: one per node in the order of the trees, for every agent and sample."""
    order = iter(values * 1000)
    group = trainer.critic_group
    group.values = lambda team, nodes: [tuple((value,) * len(own) for own in node.generations) for node, value in ((node, next(order)) for node in nodes)]
    return trainer


def batches_of(run):
    """The joint samples of every update that `run()` makes, in order."""
    seen, real = [], ac_base.actor_critic_update

    def spy(team, critics, samples, *args, **more):
        seen.append(list(samples))
        return real(team, critics, samples, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ac_base, "actor_critic_update", spy)
        run()
    return seen


def all_optimizers(trainer):
    return list(dict.fromkeys([*trainer.optimizers, *trainer.critic_optimizers]))


def gradients(trainer):
    """What every optimizer is about to use, at each of its steps: per optimizer a list of {parameter: gradient}."""
    found = {}
    for optimizer in all_optimizers(trainer):
        def hook(opt, args, kwargs):
            taken = {p: p.grad.clone() for group in opt.param_groups for p in group["params"] if p.grad is not None}
            found.setdefault(opt, []).append(taken)
        optimizer.register_step_pre_hook(hook)
    return found


# the oracle: one text at a time, whole sequences, plain Python numbers

def joint(prompts, completions=()):
    """The text that the shared critic reads."""
    return "\n\n".join([*(f"Agent {i} reads:\n{text}" for i, text in enumerate(prompts)), *(f"Agent {i} writes:\n{text}" for i, text in enumerate(completions))])


def critic_ids(trainer, node, agent, sample):
    """What the critic of this agent reads for this sample."""
    q = trainer.args.critic_type == "q"
    if trainer.algorithm_name == "MAAC":
        written = [generation.completions[sample].text for generation in node.generations] if q else ()
        return tuple(trainer.tokenizers[0](joint([prompt.text for prompt in node.prompts], written))["input_ids"])
    own = node.generations[agent]
    return own.prompt.token_ids + (own.completions[sample].token_ids if q else ())


def critic_of(trainer, agent, models=None):
    models = models or (trainer.critics or trainer.agents)
    return models[0 if trainer.algorithm_name == "MAAC" else agent]


def naive_value(model, ids):
    """The head on the last hidden state of the last token: one sequence, no padding, no cache."""
    hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states[-1]
    return model.value_head(hidden[0, -1])[0]


@dataclass
class Step:
    """What the oracle knows of one completion."""

    turn: int
    prompt: tuple
    completion: tuple
    ids: tuple
    reward: float
    kl: float
    value: float
    target: float
    ret: float
    advantage: float = field(default=0.0)

    @property
    def error(self):
        return self.target - self.value


def naive_steps(trainer, trees, agent, normalize=True):
    """The steps of one agent over all trees and samples, advantages z-scored within each turn."""
    coef, gamma = trainer.penalty, trainer.args.discount
    found = []
    for tree in trees:
        for k in range(len(tree.joints)):
            path = list(tree.walk())
            values, signals, kl = [], [], []
            for node in path:
                own, paid = node.generations[agent], node.joints[k].rewards
                values.append(naive_value(critic_of(trainer, agent), critic_ids(trainer, node, agent, k)).item())
                kl.append(naive_kl(trainer.agents[agent].model, trainer.reference_models[agent], own.prompt.token_ids, own.completions[k].token_ids) if trainer.reference_models else 0.0)
                signals.append(paid[agent if len(paid) > 1 else 0] - coef * kl[-1])
            for t, node in enumerate(path):
                own = node.generations[agent]
                target = signals[t] + gamma * values[t + 1] if t + 1 < len(path) else signals[t]
                found.append(Step(node.turn, own.prompt.token_ids, own.completions[k].token_ids, critic_ids(trainer, node, agent, k), node.joints[k].reward, kl[t], values[t], target,
                                  sum(signals[t:])))
    for turn in {step.turn for step in found}:
        group = [step for step in found if step.turn == turn]
        errors = [step.error for step in group]
        for step in group:
            step.advantage = (step.error - fmean(errors)) / max(pstdev(errors), 1e-6) if normalize and len(group) > 1 else step.error
    return found


def naive_actor_loss(model, steps):
    return -sum(step.advantage * token_logprobs(model, step.prompt, step.completion).sum() for step in steps) / len(steps)


def naive_critic_loss(model, steps, clip=None):
    total = 0.0
    for step in steps:
        value = naive_value(model, step.ids)
        error = (value - step.target) ** 2
        if clip is not None:
            error = torch.maximum(error, (step.value + (value - step.value).clamp(-clip, clip) - step.target) ** 2)
        total = total + error
    return total / len(steps)


def gradient(loss, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {p: torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)}


def distance(taken, wanted):
    """Relative distance of two gradients, paired by position; a parameter without a gradient counts as zero."""
    used = torch.cat([value.flatten() for value in taken])
    right = torch.cat([value.flatten() for value in wanted])
    assert right.norm() > 1e-3, right.norm()
    return ((used - right).norm() / right.norm()).item()


def taken_by(model, taken):
    return [taken.get(p, torch.zeros_like(p)) for p in model.parameters() if p.requires_grad]


def before(trainer):
    """Copies of the models and of the critics' optimizer states."""
    return copy.deepcopy((trainer.agents, trainer.critics, [optimizer.state_dict() for optimizer in trainer.critic_optimizers]))


def check_update(trainer, models, steps, seen, tolerance=1e-9):
    """What every optimizer used in its last steps (`seen`) is the naive gradient of `steps` at the weights before them (`models`)."""
    agents, critics, states = models
    args, coef = trainer.args, trainer.args.value_loss_coef
    for agent, twin in enumerate(agents):
        loss = naive_actor_loss(twin.model, steps[agent])
        if trainer.heads_on_actors:
            loss = loss + coef * naive_critic_loss(twin, steps[agent], args.value_clip_range)
        used = seen[trainer.optimizers[agent]][-1]
        assert distance(taken_by(trainer.agents[agent], used), gradient(loss, twin).values()) < tolerance
    for index, twin in enumerate(critics):
        turns = range(len(agents)) if trainer.algorithm_name == "MAAC" else [index]
        twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=args.critic_learning_rate)
        twin_optimizer.load_state_dict(states[index])
        for place, agent in enumerate(turns):
            wanted = gradient(coef * naive_critic_loss(twin, steps[agent]), twin)
            used = seen[trainer.critic_optimizers[index]][place - len(turns)]
            assert distance(taken_by(trainer.critics[index], used), wanted.values()) < tolerance
            for p, g in wanted.items():
                p.grad = g if g.any() else None
            twin_optimizer.step()
        for name, value in trainer.critics[index].state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-6, atol=1e-6)


def assert_step_follows(trainer, trees, run, *, tolerance=1e-9):
    """`run()` makes one update on all of `trees()`: every optimizer uses the naive gradient; the shared critic's steps follow one another."""
    models, seen = before(trainer), gradients(trainer)
    run()
    ghost = copy.copy(trainer)  # the oracle reads the weights of before
    ghost.team, ghost.critics = _Team(trainer.team, models[0]), models[1]
    steps = [naive_steps(ghost, trees(), agent, trainer.args.advantage_normalization) for agent in range(len(trainer.agents))]
    expected = len(trainer.agents) if trainer.algorithm_name == "MAAC" else 1
    assert all(len(seen[optimizer]) == 1 for optimizer in trainer.optimizers) and all(len(seen[optimizer]) == expected for optimizer in trainer.critic_optimizers)
    check_update(trainer, models, steps, seen, tolerance)
    return steps


def step_of(one):
    """An experience as the oracle writes it."""
    return Step(one.turn, one.prompt.token_ids, one.completion.token_ids, one.critic_ids, one.reward, one.kl, one.value, one.target, one.ret, one.advantage)


def assert_every_update_follows(trainer, run, *, tolerance=1e-9):
    """Every update inside `run()` uses the naive gradient, at the weights before it, of the values, targets and advantages from collection."""
    seen, real, done = gradients(trainer), ac_base.actor_critic_update, []

    def spy(team, critics, samples, *args, **more):
        models = before(trainer)
        found = real(team, critics, samples, *args, **more)
        steps = [[step_of(sample.experiences[agent]) for sample in samples] for agent in range(len(team))]
        check_update(trainer, models, steps, seen, tolerance)
        done.append(samples)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ac_base, "actor_critic_update", spy)
        run()
    return done


class _Team:
    """The trainer's team with other models."""

    def __init__(self, team, modules):
        self.actors, self.modules = team.actors, modules

    def __len__(self):
        return len(self.actors)
