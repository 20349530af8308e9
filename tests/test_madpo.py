"""MADPO end to end on micro models: the gradient, the clocks, the verbs, determinism, interruptions, and a script for comlrl."""
import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models as bpe, pre_tokenizers

import comlrl_nb.update
from comlrl_nb.callbacks import Callback
from comlrl_nb.losses import NonFiniteError
from comlrl_nb.toy import fast_tokenizer, micro_model
from comlrl_nb.trainers.preference import MADPOConfig, MADPOTrainer
from comlrl_nb.types import Completion, PreferencePair, Prompt, Stats
from comlrl_nb.utils.reward_utils import batched_reward
from madpo_runs import TOKENIZER, closed_form, config, forwards, gradients, letters, logprob, make, margin, rows, same, team, weights

DOUBLE = dict(dtype=torch.float64)


def pair(seed=0, agents=2, lengths=(4, 3), prompt=5, reward=(1.0, 0.0), mean=0.5):
    """A pair of random ids that end with the end token."""
    rng = torch.Generator().manual_seed(seed)

    def ids(count):
        return tuple(torch.randint(3, 250, (count,), generator=rng).tolist())

    def completion(count):
        return Completion("text", (*ids(count - 1), 2), True)

    return PreferencePair(tuple(Prompt("p", (1, *ids(prompt - 1))) for _ in range(agents)), tuple(completion(lengths[0]) for _ in range(agents)),
                          tuple(completion(lengths[1]) for _ in range(agents)), *reward, mean)


def pairs(count, **more):
    return [pair(seed, prompt=4 + seed % 3, lengths=(2 + seed % 4, 5 - seed % 3), **more) for seed in range(count)]


def byte_tokenizer():
    """Another vocabulary: bytes without merges, and its special tokens at the end."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    core = Tokenizer(bpe.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return fast_tokenizer(core)


class Halves:
    """Two roles in one text: the first half and the rest."""

    def build_prompt(self, batch_item, agent_prompts):
        return " and ".join(agent_prompts)

    def parse_completion(self, completion, batch_item, num_agents):
        middle = len(completion) // 2
        return [completion[:middle], completion[middle:]]


def assert_step_follows(trainer, batch, beta, last, references=None):
    """One update on `batch`: what the optimizers used is the closed form at the weights before the update.

    GPT-2 computes in float64 throughout; Llama's norms and rotations stay in float32.
    """
    frozen = copy.deepcopy(trainer.agents)
    expected = closed_form(frozen, batch, beta, last, references)
    seen = gradients(trainer)
    trainer.train_on(batch, epochs=1)
    for model, twin, optimizer, wanted in zip(trainer.agents, frozen, trainer.optimizers, expected):
        taken, = seen[optimizer]
        assert taken.keys() == set(model.parameters())
        used = torch.cat([taken[p].flatten() for p in model.parameters()])
        right = torch.cat([wanted[q].flatten() for q in twin.parameters()])
        assert right.norm() > 1e-3 and (used - right).norm() < right.norm() * (1e-10 if model.config.model_type == "gpt2" else 1e-6)


# the gradient

@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kinds", [("gpt2", "gpt2"), ("gpt2", "llama"), ("llama", "llama", "gpt2")])
def test_update_is_the_closed_form(kinds, last):
    reward = letters if len(kinds) == 2 else lambda a, b, c: letters(a, b)
    trainer = make(team(kinds, **DOUBLE), reward_func=reward, num_agents=len(kinds), score_last_token=last, dpo_beta=0.7, train_batch_size=9)
    batch = trainer.collect()
    assert len(batch) >= 4
    assert_step_follows(trainer, batch, 0.7, last)


@pytest.mark.parametrize("last", [False, True])
def test_update_with_reference_margins_is_the_closed_form(last):
    trainer = make(team(**DOUBLE), dpo_reference=True, score_last_token=last, dpo_beta=0.5, train_batch_size=8)
    start = copy.deepcopy(trainer.agents)
    batch = pairs(6)
    trainer.train_on(batch, epochs=2)  # leave the initial policies, so that the reference's margins count
    assert not same(weights(start), weights(trainer))
    assert_step_follows(trainer, batch, 0.5, last, references=start)


def test_two_tokenizers():
    byte = byte_tokenizer()
    agents = [micro_model(0, "gpt2", torch.float64), micro_model(1, "llama", torch.float64, vocab_size=len(byte), eos_token_id=258, bos_token_id=257,
                                                                  pad_token_id=256)]
    trainer = make(agents, tokenizer=[TOKENIZER, byte], dpo_beta=0.3, train_batch_size=9, max_new_tokens=4)
    batch = trainer.collect()
    assert [prompt.token_ids[0] for prompt in batch[0].prompts] == [1, 257]
    assert_step_follows(trainer, batch, 0.3, False)


def test_central_actor_scores_its_whole_text():
    trainer = make(team(("gpt2",), **DOUBLE), collaboration_mode="centralized", centralized_comparator_adapter=Halves(), dpo_beta=0.3, train_batch_size=9)
    batch = trainer.collect()
    assert len(trainer.agents) == len(batch[0].prompts) == trainer.num_agents == 1
    assert " and " in batch[0].prompts[0].text
    assert_step_follows(trainer, batch, 0.3, True)


def test_gradient_within_a_token_budget_is_the_same(monkeypatch):
    batch, found = pairs(6), []
    for budget in (2**15, 30):
        defaults = comlrl_nb.update.madpo_update.__kwdefaults__
        monkeypatch.setitem(defaults, "budget", budget)
        trainer = make(team(**DOUBLE), dpo_beta=0.4, train_batch_size=6, score_last_token=True)
        seen = gradients(trainer)
        calls = forwards(trainer.agents[0])
        trainer.train_on(batch)
        found.append(([g for steps in seen.values() for g in steps[0].values()], len(calls), trainer.history.rows[-1]))
    (whole, once, row), (split, often, split_row) = found
    assert often > once
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11)
    for name in ("loss", "margin", "agent_0/margin", "agent_1/entropy"):
        assert row[name] == pytest.approx(split_row[name], rel=1e-9)


def test_the_gradient_test_notices_a_team_margin_that_lacks_an_agent(monkeypatch):
    def alone(margins, beta, reference_margins=None):
        delta = beta * margins  # every agent weighs its own margin only
        return -torch.nn.functional.logsigmoid(delta).mean(1).sum(), Stats()

    monkeypatch.setattr(comlrl_nb.update, "madpo_loss", alone)
    with pytest.raises(AssertionError):
        assert_step_follows(make(team(**DOUBLE), dpo_beta=0.7, train_batch_size=8), pairs(6), 0.7, False)


def test_numbers_of_the_row():
    trainer = make(team(**DOUBLE), dpo_beta=0.3, score_last_token=True, train_batch_size=8)
    batch, twins = pairs(4), copy.deepcopy(trainer.agents)
    own = torch.tensor([[margin(model, one, i).item() for one in batch] for i, model in enumerate(twins)], dtype=torch.float64)
    delta = own.sum(0)
    stats = trainer.train_on(batch)
    expected = {"loss": -torch.nn.functional.logsigmoid(0.3 * delta).mean(), "margin": delta.mean(), "preference_accuracy": (delta > 0).double().mean(),
                "weight": torch.sigmoid(-0.3 * delta).mean(), "agent_0/margin": own[0].mean(), "agent_1/margin": own[1].mean()}
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value.item(), rel=1e-6), name
    row = trainer.history.rows[-1]
    assert (row["kind"], row["update"], row["env_step"]) == ("train", 1, 8) and row["loss"] == stats["loss"]


def test_reported_gradient_norm():
    trainer = make(team(**DOUBLE), train_batch_size=8)
    seen = gradients(trainer)
    stats = trainer.train_on(pairs(3))
    for i, optimizer in enumerate(trainer.optimizers):
        norm = torch.stack([g.square().sum() for g in seen[optimizer][0].values()]).sum().sqrt()
        assert stats[f"agent_{i}/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)


def test_optimizer_is_adamw_with_the_learning_rate_and_torchs_weight_decay():
    trainer = make(agent_learning_rate=3e-4)
    for optimizer in trainer.optimizers:
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.defaults["lr"] == 3e-4 and optimizer.defaults["weight_decay"] == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]


def test_preferred_answers_become_likelier():
    trainer = make(score_last_token=True, train_batch_size=8, agent_learning_rate=3e-3)
    batch = pairs(4)
    before = [sum(margin(model, one, i).item() for one in batch) for i, model in enumerate(trainer.agents)]
    trainer.train_on(batch, epochs=10)
    after = [sum(margin(model, one, i).item() for one in batch) for i, model in enumerate(trainer.agents)]
    assert all(a > b for a, b in zip(after, before))
    assert trainer.history["loss"].iloc[-1] < trainer.history["loss"].iloc[0]


def test_reference_kl_fields_change_nothing():
    plain, other = (make(reference_kl_enabled=on, reference_kl_coef=9.0) for on in (False, True))
    for trainer in (plain, other):
        trainer.train()
    assert same(weights(plain), weights(other)) and other.reference_models == []


# the clocks

@pytest.mark.parametrize("count, size, epochs, updates", [(5, 2, 2, 6), (3, 8, 2, 2), (9, 4, 1, 3), (1, 1, 3, 3)])
def test_updates_and_env_steps(count, size, epochs, updates):
    trainer = make(train_batch_size=size, num_train_epochs=epochs, environment_steps_per_pair=3)
    trainer.train_on(pairs(count))
    assert (trainer.run.update, trainer.env_step) == (updates, 3 * count * epochs)
    assert [row["update"] for row in trainer.history if row["kind"] == "train"] == list(range(1, updates + 1))


def test_environment_steps_can_be_off():
    trainer = make(train_batch_size=2, use_environment_step=False, logging_steps=1)
    trainer.train_on(pairs(5))
    assert trainer.env_step == 0 and trainer.run.update == 3
    assert trainer.history.rows[-1]["update"] == 3


def test_batch_size_none_is_the_buffer_size():
    args = config(train_batch_size=None, rollout_buffer_size=3)
    trainer = make(args=args)
    trainer.train_on(pairs(7))
    assert [row["env_step"] for row in trainer.history] == [6, 12, 14]


def test_every_pair_once_per_epoch_in_a_new_order():
    trainer, batch, seen = make(train_batch_size=2), pairs(6), []
    update = comlrl_nb.update.madpo_update

    def spy(team, entries, *args, **kwargs):
        seen.append(list(entries))
        return update(team, entries, *args, **kwargs)

    import comlrl_nb.trainers.preference.madpo as module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "madpo_update", spy)
        trainer.train_on(batch, epochs=3)
    flat = [one for entries in seen for one in entries]
    epochs = [flat[k:k + 6] for k in (0, 6, 12)]
    assert all(sorted(map(batch.index, epoch)) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("interval, expected", [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 3, 5]), (3, [0, 3]), (9, [0, 3])])
def test_evaluations_count_updates_from_zero_in_every_epoch(interval, expected):
    trainer = make(train_batch_size=2, num_train_epochs=2, eval_interval=interval, eval_dataset=rows(2))
    trainer.train_on(pairs(5))
    assert [row["update"] for row in trainer.history if row["kind"] == "eval"] == expected


@pytest.mark.parametrize("steps, expected", [(1, [4, 8, 12, 16]), (8, [4, 12, 16]), (100, [4, 16])])
def test_logging_steps_are_the_least_distance_of_rows(steps, expected):
    trainer = make(train_batch_size=2, logging_steps=steps)
    trainer.train_on(pairs(8))
    assert [row["env_step"] for row in trainer.history if row["kind"] == "train"] == expected  # the last updates are never lost


def test_evaluations_do_not_change_what_is_logged():
    """A row is due by distance alone, whether or not anyone listens."""
    found = []
    for callbacks in ([], [Callback()]):
        trainer = make(train_batch_size=2, logging_steps=8, callbacks=callbacks, eval_interval=1, eval_dataset=rows(1))
        trainer.train_on(pairs(8))
        found.append([row["env_step"] for row in trainer.history if row["kind"] == "train"])
    assert found == [[4, 12, 16], [4, 12, 16]]


def test_a_row_is_the_mean_of_the_updates_since_the_last():
    fine, coarse = (make(train_batch_size=2, logging_steps=steps) for steps in (1, 100))
    for trainer in (fine, coarse):
        trainer.train_on(pairs(8))
    assert coarse.history["loss"].iloc[-1] == pytest.approx(fine.history["loss"].iloc[1:].mean(), rel=1e-12)
    assert same(weights(fine), weights(coarse))


# metric keys and evaluation

def test_metric_keys():
    trainer = make(eval_dataset=rows(2), eval_interval=1)
    trainer.train()
    train = next(row for row in trainer.history if row["kind"] == "train")
    assert {"turn_1/reward_mean", "turn_1/expected_return", "loss", "grad_norm", "entropy", "margin", "preference_accuracy", "agent_0/margin",
            "agent_1/grad_norm", "seconds/update"} <= train.keys()
    collect = trainer.history.rows[0]
    assert collect["kind"] == "collect"
    assert {"turn_1/reward_mean", "pairs", "tied_pairs", "identical_pairs", "agent_0/completion_length", "agent_1/finished_fraction",
            "tied_group_fraction", "seconds/collect"} <= collect.keys()
    assert {"eval/turn_1/reward_mean", "eval/turn_1/expected_return", "eval/completion_length"} <= set(trainer.evaluate())
    assert all(isinstance(value, float | int | str) for row in trainer.history for value in row.values())


def test_training_rewards_are_means_of_the_stored_candidate_rewards():
    trainer = make(train_batch_size=3)
    batch = [pair(0, mean=0.25), pair(1, mean=0.5), pair(2, mean=0.0)]
    stats = trainer.train_on(batch)
    assert stats["turn_1/reward_mean"] == stats["turn_1/expected_return"] == 0.25


def test_collected_records():
    trainer, scored = make(preference_pairs_per_sample=None), []

    def reward(first, second):
        scored.append(letters(first, second)[0])
        return scored[-1]

    trainer.setup.reward.func = reward
    batch = trainer.collect()
    for i in range(3):
        mine = [one for one in batch if one.prompts[0].text == rows()[i]["prompt"]]
        values = scored[4 * i:4 * i + 4]
        assert [one.candidate_reward_mean for one in mine] == pytest.approx([sum(values) / 4] * len(mine))
        assert all(one.winner_reward > one.loser_reward and {one.winner_reward, one.loser_reward} <= set(values) for one in mine)
        assert len(mine) == sum(a > b for a in values for b in values)


@pytest.mark.parametrize("count, expected", [(None, 4), (2, 2), (0, 0), (9, 6)])
def test_evaluation_uses_the_first_rows(count, expected):
    seen = []

    def reward(first, second, answer):
        seen.append(answer[0])
        return 0.5

    trainer = make(reward_func=reward, eval_dataset=rows(6), eval_num_samples=4, eval_batch_size=3)
    stats = trainer.evaluate() if count is None else trainer.evaluate(count)
    assert seen == list(range(expected))
    assert stats.get("eval/turn_1/reward_mean") == (0.5 if expected else None)


@pytest.mark.parametrize("count", [-1, True, 1.5, "3"])
def test_a_wrong_number_of_evaluation_samples(count):
    with pytest.raises(ValueError, match="num_eval_samples"):
        make(eval_dataset=rows(6)).evaluate(count)


def test_evaluation_without_dataset_is_empty():
    trainer = make(eval_interval=1)
    assert trainer.evaluate() == {}
    trainer.train()


@pytest.mark.parametrize("central", [False, True])
def test_eval_logger_and_aggregator(central):
    got = {}

    def logger(agent_completions_turns, batch_items, prompts):
        got.update(turns=agent_completions_turns, items=batch_items, prompts=prompts)
        return [{"length": len(first[0])} for first in agent_completions_turns[0]]

    def aggregator(details, num_turns):
        assert num_turns == 1
        return {"turn_1/length": sum(one["length"] for one in details) / len(details)}

    more = dict(collaboration_mode="centralized", centralized_comparator_adapter=Halves()) if central else {}
    trainer = make(team(("gpt2",)) if central else None, eval_dataset=rows(3), eval_logger=logger, eval_aggregator=aggregator, eval_num_samples=3, **more)
    stats = trainer.evaluate()
    assert [len(agent) for agent in got["turns"]] == [3, 3] and all(len(turns) == 1 and isinstance(turns[0], str) for agent in got["turns"] for turns in agent)
    assert [item["answer"] for item in got["items"]] == [0, 1, 2] and len(got["prompts"]) == 3
    assert stats["eval/turn_1/length"] == pytest.approx(sum(len(turns[0]) for turns in got["turns"][0]) / 3)


# verbs

def test_collect_changes_nothing_but_its_streams():
    trainer = make()
    before, row = weights(trainer), rows()
    batch = trainer.collect(row[:2])
    assert {one.prompts[1].text for one in batch} == {row[0]["prompt"], row[1]["prompt"]}
    assert same(before, weights(trainer)) and trainer.env_step == trainer.run.update == 0
    assert all(not optimizer.state for optimizer in trainer.optimizers)


def test_step_is_one_update_on_the_pairs_of_its_items():
    trainer = make()
    before = weights(trainer)
    stats = trainer.step(rows(2))
    assert trainer.run.update == 1 and trainer.env_step == 2 * 4 and "loss" in stats  # 2 items, 2 pairs each
    assert not same(before, weights(trainer))


def test_rollout_is_a_look():
    looked, plain = make(), make()
    node = looked.rollout({"prompt": "say ab"})
    assert len(node.joints) == 4 and [g.agent_idx for g in node.generations] == [0, 1]
    assert [joint.index for joint in node.joints] == [(k, k) for k in range(4)]
    assert len(looked.rollout({"prompt": "say ab"}, 7).joints) == 7
    looked.train(), plain.train()
    assert same(weights(looked), weights(plain))


@pytest.mark.parametrize("num", [0, -1])
def test_rollout_refuses_a_wrong_number(num):
    with pytest.raises(ValueError, match="num"):
        make().rollout({"prompt": "say ab"}, num)


@pytest.mark.parametrize("epochs", [0, -1, 1.5])
def test_train_on_refuses_a_wrong_number_of_epochs(epochs):
    with pytest.raises(ValueError, match="epochs"):
        make().train_on(pairs(2), epochs)


def test_train_returns_the_history_and_starts_anew_each_time():
    trainer = make()
    history = trainer.train()
    assert history is trainer.history
    updates = trainer.run.update
    assert updates and trainer.train() is history
    assert sum(row["kind"] == "collect" for row in history) == 2 and trainer.run.update > updates


def test_collect_and_train_on_by_hand_equal_train():
    whole, parts = make(num_train_epochs=2), make(num_train_epochs=2)
    whole.train()
    parts.train_on(parts.collect())
    assert same(weights(whole), weights(parts))


@pytest.mark.parametrize("mode, limit", [("reward_gap", 2), ("reward_gap", None), ("random", 2), ("random", None), ("all", None)])
def test_pair_selection(mode, limit):
    count = 6
    trainer = make(pair_selection=mode, preference_pairs_per_sample=limit, preference_num_candidates=count, train_dataset=rows(1))
    everything = make(pair_selection="all", preference_pairs_per_sample=None, preference_num_candidates=count, train_dataset=rows(1)).collect()
    chosen = trainer.collect()
    keys = [(one.winner, one.loser) for one in chosen]
    assert len(set(keys)) == len(keys) == (limit or len(everything)) and set(keys) <= {(one.winner, one.loser) for one in everything}
    gaps = [one.reward_gap for one in chosen]
    if mode == "reward_gap":
        assert gaps == sorted((one.reward_gap for one in everything), reverse=True)[:len(gaps)]
    if mode == "random" and limit is None:
        assert gaps != sorted(gaps, reverse=True)


def test_random_pairs_come_from_the_seed():
    draws = [[one.reward_gap for one in make(pair_selection="random", preference_num_candidates=8, seed=seed).collect()] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


# determinism

def trained(**more):
    trainer = make(**more)
    trainer.train()
    return trainer


def test_same_seed_same_run():
    first, second, other = trained(seed=5), trained(seed=5), trained(seed=6)
    assert same(weights(first), weights(second)) and not same(weights(first), weights(other))


def test_the_global_seed_does_not_matter_when_seed_is_given():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(trained(seed=0))
    assert same(weights(found[0]), weights(found[1]))


def test_without_seed_the_global_seed_decides():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(weights(trained(seed=None)))
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_shuffled_items():
    def order(shuffle, seed=0):
        seen = []
        trainer = make(shuffle=shuffle, seed=seed, train_dataset=rows(8), reward_func=lambda first, second, answer: seen.append(answer[0]) or letters(first, second))
        trainer.collect()
        return seen[::4]

    assert order(False) == list(range(8)) and order(True) == order(True) != order(False)
    assert sorted(order(True)) == list(range(8)) and order(True, 1) != order(True)


def test_mp_on_two_devices_equals_one():
    one = trained(num_train_epochs=2, eval_interval=1, eval_dataset=rows(2))
    two = trained(num_train_epochs=2, eval_interval=1, eval_dataset=rows(2), parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])
    assert two.team.workers.parallel and list(map(str, two.agent_devices)) == ["cpu:0", "cpu:1"]
    assert same(weights(one), weights(two))
    for a, b in zip(one.history, two.history, strict=True):
        assert all(a[name] == b[name] for name in a if not name.startswith("seconds/") and name != "tokens_per_second")


def test_mp_with_references_on_devices_of_their_own():
    one = trained(dpo_reference=True, num_train_epochs=2)
    two = trained(dpo_reference=True, num_train_epochs=2, parallel_training="mp", agent_devices=["cpu:0", "cpu:1"], reference_devices=["cpu:1", "cpu:2"])
    assert same(weights(one), weights(two)) and len(two.reference_models) == 2


# interruptions

class Stop(Callback):
    """Ctrl-C at the n-th advance of the run."""

    def __init__(self, at):
        self.left = at

    def on_advance(self, count, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def run_again(trainer):
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    return trainer


WHOLE = dict(num_train_epochs=2, train_batch_size=2)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_interrupted_between_updates(at):
    stopped = run_again(make(callbacks=[Stop(at)], **WHOLE))
    whole = trained(**WHOLE)
    assert same(weights(stopped), weights(whole)) and stopped.env_step == whole.env_step and stopped.run.update == whole.run.update


@pytest.mark.parametrize("at", [1, 4, 6])
@pytest.mark.parametrize("agent", [0, 1])
def test_interrupted_in_an_update(at, agent):
    trainer, left = make(**WHOLE), [at]

    def hook(module, inputs):
        if torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    trainer.agents[agent].register_forward_pre_hook(hook)
    run_again(trainer)
    assert left[0] < 0 and same(weights(trainer), weights(trained(**WHOLE)))


@pytest.mark.parametrize("at", [1, 6, 12])
def test_interrupted_in_the_reward(at):
    left = [at]

    def reward(first, second):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return letters(first, second)

    stopped = run_again(make(reward_func=reward, **WHOLE))
    assert same(weights(stopped), weights(trained(**WHOLE)))


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
def test_interrupted_between_the_agents_steps(place):
    trainer, left = make(**WHOLE), [2]

    def hook(*args):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    getattr(trainer.optimizers[1], place)(hook)
    run_again(trainer)
    assert left[0] < 0 and same(weights(trainer), weights(trained(**WHOLE)))


def test_interrupted_in_an_evaluation():
    left = [9]

    def reward(first, second, answer):
        if answer[0] == "eval":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return letters(first, second)

    more = dict(eval_interval=1, eval_dataset=[{"prompt": "say c", "answer": "eval"}] * 2, reward_func=reward, **WHOLE)
    stopped = run_again(make(**more))
    assert left[0] < 0 and same(weights(stopped), weights(trained(**WHOLE)))


def test_modes_and_settings_survive_an_interruption():
    trainer = make(callbacks=[Stop(2)])
    for model in trainer.agents:
        model.train()
    settings = [model.generation_config for model in trainer.agents]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(module.training for model in trainer.agents for module in model.modules()) and torch.is_grad_enabled()
    assert all(model.generation_config is one for model, one in zip(trainer.agents, settings))


# numbers that are not finite

def broken_in_updates(trainer, agent=1, times=10**6):
    """The agent's logits are NaN in the next `times` passes with gradients."""
    left = [times]

    def hook(module, inputs, output):
        if torch.is_grad_enabled() and left[0] > 0:
            left[0] -= 1
            return output * float("nan")

    trainer.agents[agent].get_output_embeddings().register_forward_hook(hook)


def test_nonfinite_raises_before_any_step():
    trainer = make(on_nonfinite="raise")
    before, batch = weights(trainer), pairs(3)
    broken_in_updates(trainer, agent=1)
    with pytest.raises(NonFiniteError, match=r"agent 1.*turn 1.*pair 0"):
        trainer.train_on(batch)
    assert same(before, weights(trainer)) and trainer.env_step == 0 and all(not optimizer.state for optimizer in trainer.optimizers)


def test_nonfinite_can_be_skipped_and_counted():
    trainer = make(on_nonfinite="skip", train_batch_size=2)
    batch, before = pairs(4), weights(trainer)
    broken_in_updates(trainer)
    stats = trainer.train_on(batch)
    assert same(before, weights(trainer)) and stats["nonfinite_skipped"] == 1.0 and trainer.run.update == 2
    healed = make(on_nonfinite="skip", train_batch_size=2)
    broken_in_updates(healed, times=1)
    healed.train_on(batch)
    assert not same(before, weights(healed)) and all(torch.isfinite(v).all() for model in weights(healed) for v in model.values())


def test_nonfinite_gradient_moves_nobody():
    trainer = make()
    before = weights(trainer)
    parameter = next(trainer.agents[1].parameters())
    parameter.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match="agent 1"):
        trainer.train_on(pairs(3))
    assert same(before, weights(trainer)) and trainer.run.update == 0


# what user code sees

def test_reward_sees_one_joint_response_at_a_time():
    seen = []

    def reward(first, second, prompts, batch_items):
        seen.append((first, second, list(prompts), batch_items))
        return letters(first, second)

    trainer = make(reward_func=reward, formatters=[lambda item: f"A {item['prompt']}", lambda item: f"B {item['prompt']}"])
    batch = trainer.collect()
    assert len(seen) == 3 * 4
    for call, (first, second, prompts, items) in enumerate(seen):
        row = rows()[call // 4]
        assert len(first) == len(second) == 1 and isinstance(first[0], str)
        assert prompts == [f"A {row['prompt']}", f"B {row['prompt']}"] and items == [row]
    assert {one.prompts[0].text for one in batch} == {f"A {row['prompt']}" for row in rows()}


def test_batched_reward_is_called_once_per_node():
    seen = []

    @batched_reward
    def reward(first, second, batch_items):
        seen.append((len(first), len(second), batch_items))
        return [letters([a], [b])[0] for a, b in zip(first, second)]

    one, many = make(reward_func=reward), make()
    one.train(), many.train()
    assert [call[:2] for call in seen] == [(4, 4)] * 3 and all(call[2] == [row] * 4 for call, row in zip(seen, rows()))
    assert same(weights(one), weights(many))


def test_reward_processor_shapes_what_is_compared():
    kept, turned = make(), make(reward_processor=lambda value: -value)
    first, second = ({(p.winner, p.loser) for p in trainer.collect()} for trainer in (kept, turned))
    assert first and second == {(loser, winner) for winner, loser in first}


def test_rows_are_never_mutated():
    data, held_out = rows(), rows(2)
    originals = copy.deepcopy((data, held_out))

    def reward(first, second, batch_items):
        batch_items[0]["answer"] = "spoiled"
        batch_items[0].pop("prompt", None)
        batch_items.append("more")
        return letters(first, second)

    def formatter(item):
        text = item["prompt"]
        item["prompt"] = "spoiled"
        return text

    for more in (dict(reward_func=reward), dict(formatters=[formatter, lambda item: "b"])):
        trainer = make(train_dataset=data, eval_dataset=held_out, eval_interval=1, train_batch_size=6, **more)
        trainer.train()
        trainer.rollout(data[0])
        trainer.step(data)
    assert (data, held_out) == originals


@pytest.mark.parametrize("way", ["instance", "class"])
def test_a_wrapped_generate_is_seen(way):
    agents, calls = team(), []
    original = type(agents[0]).generate

    def generate(self, *args, **kwargs):
        calls.append(kwargs)
        return original(self, *args, **kwargs)

    if way == "instance":
        agents[0].generate = generate.__get__(agents[0])
    else:
        agents[0].__class__ = type("Wrapped", (type(agents[0]),), {"generate": generate})
    wrapped, plain = make(agents), make()
    first, second = wrapped.collect(), plain.collect()
    assert calls and all(call["temperature"] == 1.0 and call["num_return_sequences"] == 4 and call["do_sample"] for call in calls)
    assert len(first) == len(second)


# attributes

def test_attributes():
    agents = team()
    trainer = make(agents, dpo_reference=True)
    assert trainer.agents == agents and trainer.agents[0] is agents[0] and trainer.num_agents == 2
    assert len(trainer.optimizers) == 2 and trainer.agent_optimizers == trainer.optimizers
    assert trainer.tokenizers == [TOKENIZER, TOKENIZER] and trainer.tokenizer is TOKENIZER
    assert trainer.critics == [] and trainer.critic_optimizers == [] and trainer.critic_optimizer is None
    assert len(trainer.reference_models) == 2 and not any(p.requires_grad for model in trainer.reference_models for p in model.parameters())
    assert trainer.env_step == 0 and isinstance(trainer.args, MADPOConfig) and trainer.algorithm_name == "MADPO"
    assert trainer.model_name is None and isinstance(trainer.verbose, bool) and trainer.wandb_config is None
    assert len(trainer.history) == 0


def test_model_name_and_distinct_copies(tmp_path):
    micro_model().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    trainer = MADPOTrainer(agent_model=str(tmp_path), num_agents=3, reward_func=lambda *texts: 0.0, train_dataset=rows(), args=config(num_agents=3), callbacks=[])
    assert trainer.model_name == str(tmp_path) and len(trainer.agents) == 3
    pointers = {model.get_input_embeddings().weight.data_ptr() for model in trainer.agents}
    assert len(pointers) == 3


def test_number_of_agents_comes_from_any_place():
    agents = team(("gpt2",) * 3)
    common = dict(tokenizer=TOKENIZER, reward_func=lambda *texts: 0.0, callbacks=[])
    assert MADPOTrainer(agents=agents, num_agents=3, args=config(num_agents=3), **common).num_agents == 3
    assert MADPOTrainer(agents=agents, args=config(num_agents=3), **common).num_agents == 3
    assert MADPOTrainer(agents=agents, **common).args.num_agents == 3
    assert MADPOTrainer(agents=agents[:2], **common).args.num_agents == 2
    assert MADPOTrainer(agents=agents[:1], num_agents=1, **common).num_agents == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_agents_trains(count):
    trainer = make(team(("gpt2",) * count), num_agents=count, reward_func=lambda *texts: letters(texts[0], texts[-1]), max_new_tokens=3)
    before = weights(trainer)
    trainer.train()
    assert all(not same([a], [b]) for a, b in zip(before, weights(trainer)))


def test_dataloaders():
    trainer = make(eval_dataset=rows(3), eval_batch_size=2)
    assert [batch for batch in trainer.get_train_dataloader()] == [[row] for row in rows()]
    assert [len(batch) for batch in trainer.get_eval_dataloader()] == [2, 1]
    assert make().get_eval_dataloader() is None


def test_callbacks_hear_everything():
    heard = []

    class Ear(Callback):
        def on_phase(self, name, total):
            heard.append(("phase", name, total))

        def on_nodes(self, kind, nodes):
            heard.append(("nodes", kind, len(nodes)))

        def on_row(self, row):
            heard.append(("row", row["kind"]))

        def on_end(self, history):
            heard.append(("end", len(history)))

    trainer = make(callbacks=[Ear()], eval_dataset=rows(2), eval_interval=1, eval_num_samples=2, train_batch_size=8)
    trainer.train()
    assert heard == [("phase", "collect", 3), ("nodes", "collect", 3), ("row", "collect"), ("nodes", "eval", 2), ("row", "eval"),
                     ("phase", "MADPO epoch 1", 1), ("row", "train"), ("end", 3)]


# a script that was written for comlrl

SCRIPT = '''
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from comlrl.trainers.preference import MADPOConfig, MADPOTrainer

torch.manual_seed(0)
vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>"] + sorted(pre_tokenizers.ByteLevel.alphabet()))}
core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def reward(first, second):
    return [0.1 * (len(set(a)) - len(set(b))) + 0.01 * len(a) for a, b in zip(first, second)]


def logger(agent_completions_turns, batch_items, prompts):
    return [len(turns[0]) for turns in agent_completions_turns[0]]


def aggregator(details, num_turns=1):
    return {"turn_1/length": sum(details) / len(details)}


args = MADPOConfig(num_train_epochs=2, agent_learning_rate=1e-3, num_agents=2, max_new_tokens=6, temperature=1.0, top_p=1.0, top_k=None,
    num_turns=1, eval_interval=1, eval_num_samples=2, rollout_buffer_size=2, train_batch_size=2, preference_num_candidates=4,
    preference_pairs_per_sample=2, dpo_beta=0.1)
data = [{"prompt": "first item"}, {"prompt": "second"}]
trainer = MADPOTrainer(agents=[model(), model()], num_agents=2, tokenizer=tokenizer, reward_func=reward,
    formatters=[lambda item: "A: " + item["prompt"], lambda item: "B: " + item["prompt"]], train_dataset=data, eval_dataset=data,
    eval_logger=logger, eval_aggregator=aggregator, wandb_config=None, args=args)
trainer.verbose = False
before = [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]
trainer.train()
after = [p.detach() for agent in trainer.agents for p in agent.parameters()]
assert any(not torch.equal(a, b) for a, b in zip(before, after))
metrics = trainer.evaluate(num_eval_samples=2)
assert {"eval/turn_1/reward_mean", "eval/turn_1/expected_return", "eval/turn_1/length"} <= set(metrics), sorted(metrics)
assert trainer.env_step == 2 * 2 * 2 * 2, trainer.env_step
assert len(trainer.agents) == len(trainer.optimizers) == len(trainer.tokenizers) == trainer.num_agents == 2
import tempfile, os
with tempfile.TemporaryDirectory() as folder:
    trainer.save_model(folder)
    assert sorted(os.listdir(folder)) == ["agent_0", "agent_1", "team.json"], os.listdir(folder)
print("finished")
'''


def test_a_script_for_comlrl_runs_with_the_import_replaced(capsys):
    exec(compile(SCRIPT.replace("comlrl.trainers", "comlrl_nb.trainers"), "script", "exec"), {"__name__": "script"})
    assert capsys.readouterr().out == "finished\n"


@pytest.mark.slow
def test_the_same_script_finishes_with_comlrl_and_here(tmp_path):
    peer = Path(os.environ.get("COMLRL_PEER_PYTHON", "/opt/peer/venv/bin/python"))
    if not peer.exists():
        pytest.skip("COMLRL_PEER_PYTHON names no environment with comlrl")
    for python, script in ((peer, SCRIPT), (sys.executable, SCRIPT.replace("comlrl.trainers", "comlrl_nb.trainers"))):
        (tmp_path / "script.py").write_text(script)
        done = subprocess.run([python, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=300, cwd=tmp_path,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"})
        assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr[-2000:]


def test_further_keywords_for_generate_while_collecting():
    seen = []
    trainer = make(eval_dataset=rows(1), eval_interval=1)
    for model in trainer.agents:
        real = model.generate
        model.generate = lambda real=real, **keywords: seen.append(keywords.get("repetition_penalty")) or real(**keywords)
    trainer.train(repetition_penalty=1.5)
    assert set(seen) == {1.5, None} and seen[0] == 1.5 and seen[-1] is None
    with pytest.raises(ValueError, match="top_k.*config"):
        make().train(top_k=3)


def test_a_bad_reward_stops_the_judging_at_once():
    asked = []
    with pytest.raises(ValueError, match="sample 1.*nan"):
        make(reward_func=lambda first, second: asked.append(1) or (float("nan") if len(asked) == 2 else 0.0)).train()
    assert len(asked) == 2
