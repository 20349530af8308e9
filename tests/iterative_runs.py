"""Micro teams, recorders and round files for the tests of iterative training."""
import json
from contextlib import contextmanager
from pathlib import Path

from comlrl_nb.toy import micro_model
from comlrl_nb.trainers.preference import MADPOIterConfig, MADPOIterTrainer, MARLHFIterConfig, MARLHFIterTrainer
from comlrl_nb.types import Completion
from reinforce_runs import TOKENIZER, Halves, letters, rows, same, scripted, team, unclocked, weights

__all__ = ["Halves", "TOKENIZER", "letters", "micro_model", "rows", "same", "scripted", "team", "unclocked", "weights"]

TRAINERS = {"MADPO": (MADPOIterTrainer, MADPOIterConfig), "MARLHF": (MARLHFIterTrainer, MARLHFIterConfig)}
SMALL = dict(num_agents=2, num_iterations=2, num_train_epochs=1, agent_learning_rate=1e-2, logging_steps=1, max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=None,
             eval_interval=0, preference_num_candidates=4, preference_pairs_per_sample=2, train_batch_size=4, seed=0)
MORE = {"MADPO": {}, "MARLHF": dict(num_generations=3, rollout_buffer_size=2, reward_learning_rate=1e-2, reward_train_batch_size=2, reward_num_train_epochs=1)}
NAMES = {*MARLHFIterTrainer.__init__.__kwdefaults__, *MARLHFIterTrainer.__init__.__code__.co_varnames}
ROUND_KEYS = {"iteration", "num_pairs", "pairs"}


def config(kind="MADPO", **fields):
    return TRAINERS[kind][1](**{**SMALL, **MORE[kind], **fields})


def judge(seed=70):
    return micro_model(seed, "gpt2", n_layer=1)


def make(kind="MADPO", agents=None, *, args=None, **given):
    """A small trainer that shows nothing; `given` are arguments of the trainer, then fields of the config."""
    fields = {name: given.pop(name) for name in [*given] if name not in NAMES}
    central = fields.get("collaboration_mode") == "centralized"
    agents = agents or team(("gpt2",) if central else ("gpt2", "gpt2"))
    fields.setdefault("num_agents", 2 if central else len(agents))
    call = dict(train_dataset=rows(), reward_func=letters, callbacks=[], tokenizer=TOKENIZER)
    if kind == "MARLHF" and fields.get("reward_model_name") is None:
        call["reward_model"] = judge()
    return TRAINERS[kind][0](agents=agents, args=args or config(kind, **fields), **{**call, **given})


def trained(kind="MADPO", agents=None, **given):
    trainer = make(kind, agents, **given)
    trainer.train()
    return trainer


def files(folder):
    """The round files of a folder in order, without the run's name and what else may be added."""
    return [{key: content[key] for key in ROUND_KEYS} for content in map(json.loads, (path.read_text("utf-8") for path in sorted(Path(folder).glob("iteration_*.json"))))]


def stored(trainer):
    return files(trainer.rounds.store.index.folder)


def iter_rows(trainer):
    return [{name.removeprefix("iter/"): value for name, value in row.items()} for row in trainer.history if row["kind"] == "iter"]


def outcome(trainer):
    """All that a run leaves: weights, history without the clock, round files."""
    return weights(trainer), unclocked(trainer.history), stored(trainer)


def assert_same_run(first, second):
    assert same(weights(first), weights(second))
    assert unclocked(first.history) == unclocked(second.history)
    assert stored(first) == stored(second)


@contextmanager
def asked(trainer, iteration=1):
    """Inside the block the comparator answers: a function from a number of candidates to one `JointAnswers` per training item."""
    roles, items, comparator = trainer.setup.roles, trainer.setup.train.dataset, trainer.rounds.comparator
    with comparator.source.opened(iteration):
        yield lambda num: comparator.answers([roles.read(item) for item in items], items, num)


def joints(trainer, num=4, iteration=1):
    """What the comparator answers, `[items][candidates]`, one completion per actor."""
    with asked(trainer, iteration) as answers:
        return [each.joints for each in answers(num)]


def writers_weights(trainer):
    """A list that gets, round by round, the weights of the models that the comparator samples from."""
    seen, source = [], trainer.rounds.comparator.source
    real = source.write

    def write(prompts, num, items):
        seen.append(weights(source.open.models))
        return real(prompts, num, items)

    source.write = write
    return seen


def entering_weights(trainer):
    """A list that gets, round by round, the weights with which the actors enter."""
    seen, real = [], trainer.rounds._draw

    def draw(*given):
        seen.append(weights(trainer))
        return real(*given)

    trainer.rounds._draw = draw
    return seen


def in_ids(text, end=(2,)):
    """A text as an actor with the micro tokenizer would have written it."""
    return Completion(text, (*TOKENIZER(text, add_special_tokens=False)["input_ids"], *end), bool(end))
