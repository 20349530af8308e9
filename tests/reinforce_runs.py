"""Micro teams, tasks, recorders and a naive oracle for the tests of the REINFORCE family."""
import copy
from statistics import fmean, pstdev

import torch
from torch.nn import functional as F

from comlrl_nb.callbacks import Callback
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers import reinforce

TOKENIZER = micro_tokenizer()
FAMILY = {"MAGRPO": "mean", "MAREINFORCE": "raw", "MARLOO": "rloo", "MAReMax": "max"}
SMALL = dict(num_agents=2, num_train_epochs=1, agent_learning_rate=1e-2, logging_steps=1, max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=None,
             num_turns=1, num_generations=3, eval_interval=0, rollout_buffer_size=2, seed=0)


def rows(count=3):
    return [{"prompt": "say " + "ab" * (1 + i % 3), "answer": i} for i in range(count)]


def value_of(texts):
    """A rule that seldom ties."""
    return sum((3 + 28 * place) * sum(map(ord, text)) for place, text in enumerate(texts)) % 101 / 100


def letters(*texts):
    return [value_of([own[0] for own in texts])]


def onward(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    """The next turn quotes everybody's first letter."""
    heard = "".join(text[:1] or "-" for text in agent_completions)
    return [f"{len(prompt_history_per_agent[i])} {i} {heard}" for i in range(num_agents)]


LAYERS = {"gpt2": "n_layer", "llama": "num_hidden_layers"}


def team(kinds=("gpt2", "llama"), dtype=torch.float32, **overrides):
    """Models of one layer each."""
    return [micro_model(seed, kind, dtype, **{LAYERS[kind]: 1, **overrides}) for seed, kind in enumerate(kinds)]


def config(name="MAGRPO", **fields):
    return getattr(reinforce, f"{name}Config")(**{**SMALL, **fields})


def make(agents=None, *, name="MAGRPO", args=None, tokenizer=None, **given):
    """A small trainer that shows nothing; `given` are arguments of the trainer, then fields of the config."""
    trainer = getattr(reinforce, f"{name}Trainer")
    code = reinforce.MAGRPOTrainer.__init__.__code__
    names = {*code.co_varnames[:code.co_argcount + code.co_kwonlyargcount], "centralized_adapter"}
    fields = {key: given.pop(key) for key in [*given] if key not in names}
    central = name == "CentralizedMAGRPO"
    agents = agents or team(("gpt2",) if central else ("gpt2", "gpt2"))
    fields.setdefault("num_agents", given.get("num_agents", 2 if central else len(agents)))
    call = dict(train_dataset=rows(), reward_func=letters, callbacks=[])
    if fields.get("num_turns", 1) > 1:
        call["external_transition"] = onward
    return trainer(agents=agents, tokenizer=tokenizer or TOKENIZER, args=args or config(name, **fields), **{**call, **given})


class Halves:
    """Two roles in one text: the first half and the rest."""

    def build_prompt(self, batch_item, agent_prompts):
        return " and ".join(agent_prompts)

    def parse_completion(self, completion, batch_item, num_agents):
        middle = len(completion) // 2
        return [completion[:middle], completion[middle:]]


def weights(models):
    return [{name: value.detach().clone() for name, value in model.state_dict().items()} for model in getattr(models, "agents", models)]


def same(first, second):
    """Bit for bit."""
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(first, second, strict=True))


def unclocked(history):
    """The history without what depends on the clock on the wall."""
    return [{name: value for name, value in row.items() if not name.startswith("seconds/") and name != "tokens_per_second"} for row in history]


class Trees(Callback):
    """Keeps every tree that was played, by purpose."""

    def __init__(self):
        self.heard = []

    def on_nodes(self, kind, nodes):
        self.heard += [(kind, node) for node in nodes]

    def of(self, kind):
        return [node for found, node in self.heard if found == kind]


def scripted(model, *continuations):
    """Let `generate` return the prompt followed by the given ids, one list per sample and in turn; shorter ones are padded with pad ids."""
    seen = []

    def generate(input_ids, attention_mask, num_return_sequences, **keywords):
        repeated = input_ids.repeat_interleave(num_return_sequences, 0)
        width = max(map(len, continuations))
        pad = model.generation_config.pad_token_id
        chosen = [continuations[k % len(continuations)] for k in range(len(repeated))]
        seen.extend(row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask))
        tail = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in chosen], dtype=torch.long).reshape(len(repeated), width)
        return torch.cat([repeated, tail], 1)

    model.generate = generate
    return seen


def generate_calls(model):
    """Records how many rows every call of `generate` continues, in a list."""
    seen, real = [], model.generate

    def generate(*args, **keywords):
        seen.append(len(keywords["input_ids"]) * keywords["num_return_sequences"])
        return real(*args, **keywords)

    model.generate = generate
    return seen


def forwards(model):
    """Records the ids of every forward pass of the model in a list of lists of rows."""
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].tolist()))
    return seen


def gradients(trainer):
    """What every optimizer is about to use, at each of its steps: per optimizer a list of {parameter: gradient}."""
    found = {}
    for optimizer in dict.fromkeys(trainer.optimizers):
        def hook(opt, args, kwargs):
            taken = {p: p.grad.clone() for group in opt.param_groups for p in group["params"] if p.grad is not None}
            found.setdefault(opt, []).append(taken)
        optimizer.register_step_pre_hook(hook)
    return found


# the oracle: one completion at a time, whole sequences, plain Python numbers

def token_logprobs(model, prompt, completion):
    """log π of every token of the completion `[T]`: one sequence, no padding, no cache."""
    ids = torch.tensor([[*prompt, *completion]])
    table = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0].to(torch.float64 if model.dtype == torch.float64 else torch.float32), -1)
    places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(completion))
    return table[places, torch.tensor(completion, dtype=torch.long)]


@torch.no_grad()
def naive_kl(model, reference, prompt, completion):
    ratio = (token_logprobs(reference, prompt, completion) - token_logprobs(model, prompt, completion)).double()
    return (ratio.exp() - ratio - 1).sum().item()


def naive_returns(node, discount):
    below = [fmean(naive_returns(child, discount)) for child in node.children]
    return [joint.reward + (discount * below[j] if below else 0.0) for j, joint in enumerate(node.joints)]


def naive_advantages(returns, mode, normalize=True):
    count = len(returns)
    baseline = {"mean": lambda k: fmean(returns), "raw": lambda k: 0.0, "max": lambda k: max(returns),
                "rloo": lambda k: (sum(returns) - returns[k]) / (count - 1)}[mode]
    spread = max(pstdev(returns), 1e-6) if normalize else 1.0
    if normalize and pstdev(returns) == 0:
        return [0.0] * count
    return [(value - baseline(k)) / spread for k, value in enumerate(returns)]


def naive_credit(node, agent, discount=1.0, kl=None, coef=0.0):
    """The signal `[K]` of one agent: the mean return of the joint responses that hold each completion, less its own penalty."""
    returns = naive_returns(node, discount)
    own = [fmean(value for joint, value in zip(node.joints, returns) if joint.index[agent] == k) for k in range(len(node.generations[agent]))]
    return [value - coef * (kl[k] if kl else 0.0) for k, value in enumerate(own)]


def naive_loss(model, nodes, agent, mode, normalize=True, discount=1.0, reference=None, coef=0.0):
    """The mean over nodes of −(1/K) Σ A log π of one agent."""
    total = 0.0
    for node in nodes:
        prompt, completions = node.generations[agent].prompt.token_ids, node.generations[agent].completions
        kl = [naive_kl(model, reference, prompt, one.token_ids) for one in completions] if reference is not None else None
        advantages = naive_advantages(naive_credit(node, agent, discount, kl, coef), mode, normalize)
        total = total - sum(a * token_logprobs(model, prompt, one.token_ids).sum() for a, one in zip(advantages, completions)) / len(completions)
    return total / len(nodes)


def naive_gradient(model, *given, **more):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return dict(zip(parameters, torch.autograd.grad(naive_loss(model, *given, **more), parameters)))


def distance(taken, wanted):
    """Relative distance of two gradients, paired by position."""
    used, right = (torch.cat([value.flatten() for value in side.values()]) for side in (taken, wanted))
    assert right.norm() > 1e-3
    return ((used - right).norm() / right.norm()).item()


def walked(trees):
    return [node for tree in trees for node in tree.walk()]


def assert_step_follows(trainer, trees, run, mode, *, normalize=True, discount=1.0, coef=0.0):
    """`run()` makes one update on all nodes of `trees()`: what the optimizers use is the naive gradient at the weights before it."""
    frozen, references = copy.deepcopy(trainer.agents), [*trainer.reference_models] or [None] * len(trainer.agents)
    seen = gradients(trainer)
    run()
    nodes = walked(trees())
    for agent, (model, twin, optimizer) in enumerate(zip(trainer.agents, frozen, trainer.optimizers)):
        wanted = naive_gradient(twin, nodes, agent, mode, normalize, discount, references[agent], coef)
        taken, = seen[optimizer]
        taken = {p: taken[p] for p in model.parameters()}
        assert distance(taken, wanted) < (1e-10 if model.config.model_type == "gpt2" else 1e-5)
    return nodes
