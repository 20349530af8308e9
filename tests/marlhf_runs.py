"""Micro teams with a judge, hand-made pairs and recorders for the tests of MARLHF and its reward model."""
import torch

from comlrl_nb.models.reward import JointRewardModel
from comlrl_nb.reward_text import JointTextReader
from comlrl_nb.toy import micro_model
from comlrl_nb.trainers.preference import MARLHFConfig, MARLHFTrainer
from comlrl_nb.types import Completion, PreferencePair, Prompt
from actor_critic_runs import critic
from reinforce_runs import TOKENIZER, Trees, forwards, generate_calls, letters, rows, same, scripted, team, unclocked, weights

__all__ = ["TOKENIZER", "Trees", "forwards", "generate_calls", "letters", "rows", "same", "scripted", "team", "unclocked", "weights"]

ALGORITHMS = ("magrpo", "mareinforce", "marloo", "maremax", "maac", "iac")
SMALL = dict(num_agents=2, num_train_epochs=1, agent_learning_rate=1e-2, critic_learning_rate=1e-2, logging_steps=1, max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=None, eval_interval=0,
             preference_num_candidates=4, preference_pairs_per_sample=2, num_generations=3, rollout_buffer_size=2, reward_learning_rate=1e-2, reward_train_batch_size=2, seed=0)
NAMES = {*MARLHFTrainer.__init__.__kwdefaults__, *MARLHFTrainer.__init__.__code__.co_varnames}


def config(**fields):
    return MARLHFConfig(**{**SMALL, **fields})


def judge(seed=70, kind="gpt2", dtype=torch.float32, **overrides):
    """A backbone with room for joint texts."""
    return micro_model(seed, kind, dtype, **{"gpt2": {"n_layer": 1}, "llama": {"num_hidden_layers": 1}}[kind], **overrides)


def make(agents=None, *, args=None, tokenizer=None, **given):
    """A small trainer that shows nothing; `given` are arguments of the trainer, then fields of the config."""
    fields = {name: given.pop(name) for name in [*given] if name not in NAMES}
    agents = agents or team(("gpt2", "gpt2"))
    fields.setdefault("num_agents", given.get("num_agents", 2 if fields.get("collaboration_mode") == "centralized" else len(agents)))
    args = args or config(**fields)
    call = dict(train_dataset=rows(), reward_func=letters, callbacks=[])
    if args.reward_model_name is None:
        call["reward_model"] = judge()
    if (args.rl_algorithm == "maac" or args.rl_algorithm == "iac" and args.use_separate_critic) and "critic_model" not in given and args.critic_model_name is None:
        call["critics"] = [critic(50 + i) for i in range(1 if args.rl_algorithm == "maac" else args.num_actors)]
    return MARLHFTrainer(agents=agents, tokenizer=tokenizer or TOKENIZER, args=args, **{**call, **given})


def trained(agents=None, **more):
    trainer = make(agents, **more)
    trainer.train()
    return trainer


def everything(trainer):
    """All weights: actors, heads, critics, judge."""
    return weights([*trainer.agents, *trainer.critics, *([trainer.reward_model] if trainer.reward_model is not None else [])])


def text_pair(prompts, winner, loser, rewards=(1.0, 0.0)):
    """A pair of texts in the tokens of the micro tokenizer."""
    ids = lambda text, end=(): (*TOKENIZER(text, add_special_tokens=False)["input_ids"], *end)
    sides = [tuple(Completion(text, ids(text, (2,)), True) for text in side) for side in (winner, loser)]
    return PreferencePair(tuple(Prompt(text, (1, *ids(text))) for text in prompts), *sides, *rewards, sum(rewards) / 2)


def reward_model(seed=0, kind="gpt2", dtype=torch.float64, loud=30.0, **more):
    torch.manual_seed(seed)
    model = JointRewardModel(judge(seed, kind, dtype), **more).eval()
    with torch.no_grad():
        model.reward_head.weight.mul_(loud)
    return model


def joint_ids(prompts, texts):
    """The joint text by hand: every prompt, then every answer, under headings, encoded piece by piece."""
    ids = [1]
    for does, parts in (("reads", prompts), ("writes", texts)):
        for agent, part in enumerate(parts):
            for piece in (f"Agent {agent} {does}:\n", part, "\n\n"):
                ids += TOKENIZER(piece, add_special_tokens=False)["input_ids"]
    return tuple(ids)


def naive_score(model, ids):
    """The head on the last layer's state of the last token: one text, no padding, no cache."""
    hidden = model.backbone(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states[-1]
    return model.reward_head(hidden[0, -1])[0]


def reader(**more):
    return JointTextReader(TOKENIZER, **more)
