"""The REINFORCE family end to end on micro models: gradient, clocks, turns, verbs, determinism, interruptions, and a script for comlrl."""
import copy
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from statistics import fmean

import pytest
import torch

import comlrl_nb.policy_update
from comlrl_nb.callbacks import Callback
from comlrl_nb.toy import micro_model
from comlrl_nb.trainers import reinforce
from comlrl_nb.trainers.reinforce import MAGRPOTrainer, magrpo
from comlrl_nb.utils.reward_utils import batched_reward
from reinforce_runs import (FAMILY, TOKENIZER, Halves, Trees, assert_step_follows, config, distance, forwards, generate_calls, gradients, letters, make,
                            naive_advantages, naive_credit, naive_gradient, naive_kl, naive_returns, onward, rows, same, team, unclocked, value_of, walked, weights)

DOUBLE = dict(dtype=torch.float64)
TWO_TURNS = dict(num_turns=2, num_generations=2)


def trained(agents=None, **more):
    trainer = make(agents, **more)
    trainer.train()
    return trainer


# the gradient

@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("name", FAMILY)
def test_an_update_is_the_naive_step(name, joint_mode, turns):
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), name=name, joint_mode=joint_mode, num_turns=turns, num_generations=2, discount=0.5, callbacks=[trees])
    nodes = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), FAMILY[name], discount=0.5)
    joints = 4 if joint_mode == "cross" else 2
    assert len(nodes) == 2 * (1 + joints * (turns - 1))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("name", FAMILY)
def test_an_update_with_a_penalty_is_the_naive_step(name, joint_mode, turns):
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), name=name, joint_mode=joint_mode, num_turns=turns, num_generations=2, discount=0.5, callbacks=[trees],
                   reference_kl_enabled=True, reference_kl_coef=0.3)
    start = weights(trainer.reference_models)
    trainer.step(rows(2))  # leave the references, so that the penalty counts
    trees.heard.clear()
    nodes = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), FAMILY[name], discount=0.5, coef=0.3)
    assert all(value > 0 for node in nodes for own in node.kl for value in own) and same(start, weights(trainer.reference_models))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kinds", [("gpt2", "llama"), ("llama", "llama"), ("gpt2", "gpt2", "llama")])
def test_other_teams_and_no_normalisation(kinds, normalize):
    trees = Trees()
    trainer = make(team(kinds, **DOUBLE), callbacks=[trees], advantage_normalization=normalize, num_generations=4)
    assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(3)), "mean", normalize=normalize)


@pytest.mark.parametrize("advantage_mode", FAMILY.values())
def test_the_field_decides_on_the_baseline(advantage_mode):
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), advantage_mode=advantage_mode, callbacks=[trees])
    assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), advantage_mode)


def test_a_central_actor_learns_its_whole_text():
    trees = Trees()
    trainer = make(team(("gpt2",), **DOUBLE), name="CentralizedMAGRPO", centralized_adapter=Halves(), callbacks=[trees])
    nodes = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), "mean")
    assert len(trainer.agents) == trainer.num_agents == 1 and all(len(joint.texts) == 2 for node in nodes for joint in node.joints)
    assert " and " in nodes[0].prompts[0].text


def test_gradient_in_pieces_is_the_same(monkeypatch):
    found = []
    for budget in (2**20, 30):
        monkeypatch.setitem(comlrl_nb.policy_update.POLICY_TOKENS, "cpu", budget)
        trainer = make(team(("gpt2", "gpt2"), **DOUBLE), num_turns=2, num_generations=3)
        seen, calls = gradients(trainer), forwards(trainer.agents[0])
        stats = trainer.step(rows(2))
        found.append(([g for steps in seen.values() for g in steps[0].values()], len(calls), stats))
    (whole, once, stats), (split, often, split_stats) = found
    assert often > once
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11)
    for name in ("loss", "agent_0/entropy", "agent_1/grad_norm", "scored_tokens"):
        assert stats[name] == pytest.approx(split_stats[name], rel=1e-9)


def test_the_gradient_test_notices_a_wrong_credit(monkeypatch):
    import comlrl_nb.credit as module
    monkeypatch.setattr(module, "credit", lambda returns, index, agent, count: torch.stack([returns[index[:, agent] == k].sum() for k in range(count)]))
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), name="MAREINFORCE", advantage_normalization=False, joint_mode="cross", num_generations=2, callbacks=[trees])
    with pytest.raises(AssertionError):
        assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), "raw", normalize=False)


@pytest.mark.parametrize("name", FAMILY)
def test_one_agent_is_a_handwritten_step(name):
    """C82: K samples of one policy, whitened by hand, one AdamW step by hand: the same weights."""
    trees, model = Trees(), micro_model(3, "gpt2", torch.float64)
    twin = copy.deepcopy(model)
    trainer = make([model], name=name, num_generations=4, callbacks=[trees], reward_func=lambda texts: value_of(texts), train_dataset=rows(1), rollout_buffer_size=1)
    trainer.train()
    node, = trees.of("policy")
    rewards = torch.tensor([joint.reward for joint in node.joints], dtype=torch.float64)
    baseline = {"MAGRPO": rewards.mean(), "MAREINFORCE": 0.0, "MARLOO": (rewards.sum() - rewards) / 3, "MAReMax": rewards.max()}[name]
    advantages = (rewards - baseline) / rewards.std(correction=0)
    optimizer, prompt = torch.optim.AdamW(twin.parameters(), lr=1e-2), node.prompts[0].token_ids
    loss = 0.0
    for advantage, completion in zip(advantages, node.generations[0].completions):
        ids = torch.tensor([prompt + completion.token_ids])
        logits = twin(ids, use_cache=False).logits[0, len(prompt) - 1:-1]
        loss = loss - advantage * -torch.nn.functional.cross_entropy(logits, ids[0, len(prompt):], reduction="sum") / 4
    loss.backward()
    optimizer.step()
    assert trainer.run.update == 1 and trainer.history.rows[-1]["loss"] == pytest.approx(loss.item(), rel=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-9, atol=1e-8)  # the first step of Adam divides by |g|


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_agents_trains(count, joint_mode):
    trainer = make(team(("gpt2",) * count), num_generations=2, joint_mode=joint_mode, max_new_tokens=3, train_dataset=rows(2))
    before = weights(trainer)
    trainer.train()
    assert trainer.num_agents == count and trainer.env_step == 2 * (2**count if joint_mode == "cross" else 2)
    assert all(not same([a], [b]) for a, b in zip(before, weights(trainer)))


def test_the_optimizer_is_adamw_with_torchs_weight_decay():
    for optimizer in make(agent_learning_rate=3e-4).optimizers:
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.defaults["lr"] == 3e-4 and optimizer.defaults["weight_decay"] == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]


# credit and advantages

@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("name", FAMILY)
def test_numbers_in_the_tree(name, joint_mode, turns):
    trainer = make(name=name, joint_mode=joint_mode, num_turns=turns, num_generations=2, discount=0.5, max_new_tokens=2)
    for node in trainer.rollout(rows()[1]).walk():
        assert node.returns == pytest.approx(naive_returns(node, 0.5), rel=1e-12)
        for agent in range(2):
            assert node.advantages[agent] == pytest.approx(naive_advantages(naive_credit(node, agent, 0.5), FAMILY[name]), rel=1e-9, abs=1e-9)


def test_cross_credit_is_the_mean_over_partners():
    values = {(0, 0): 1.0, (0, 1): 0.0, (0, 2): 0.5, (1, 0): 0.25, (1, 1): 0.5, (1, 2): 0.0, (2, 0): 0.0, (2, 1): 0.75, (2, 2): 1.0}
    order = iter(values.values())
    node = make(joint_mode="cross", reward_func=lambda a, b: next(order), name="MAREINFORCE", advantage_normalization=False).rollout(rows()[0])
    assert [joint.index for joint in node.joints] == list(values)
    assert node.advantages[0] == pytest.approx((0.5, 0.25, 1.75 / 3)) and node.advantages[1] == pytest.approx((1.25 / 3, 1.25 / 3, 0.5))


def test_scaling_does_not_recentre_so_the_four_differ():
    found = {name: make(name=name, num_generations=4).rollout(rows()[0]) for name in FAMILY}
    assert len({node.returns for node in found.values()}) == 1  # the same samples
    returns = torch.tensor(found["MAGRPO"].returns, dtype=torch.float64)
    spread = returns.std(correction=0)
    assert found["MAREINFORCE"].advantages[0] == pytest.approx((returns / spread).tolist())
    assert found["MAReMax"].advantages[0] == pytest.approx(((returns - returns.max()) / spread).tolist())
    assert found["MAGRPO"].advantages[0] == pytest.approx(((returns - returns.mean()) / spread).tolist())
    assert found["MARLOO"].advantages[0] == pytest.approx(((returns - returns.mean()) * 4 / 3 / spread).tolist())
    assert len({node.advantages for node in found.values()}) == 4


def test_a_later_turn_counts_by_the_discount():
    for discount in (0.0, 0.5, 1.0):
        tree = make(num_turns=2, num_generations=2, discount=discount).rollout(rows()[0])
        for joint, value, child in zip(tree.joints, tree.returns, tree.children, strict=True):
            assert value == pytest.approx(joint.reward + discount * fmean(one.reward for one in child.joints))


# ties

@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("name", FAMILY)
def test_tied_groups_leave_the_weights_bit_for_bit(name, joint_mode):
    trainer = make(name=name, joint_mode=joint_mode, reward_func=lambda a, b: [0.3], num_train_epochs=2, num_turns=2, num_generations=2)
    assert all(optimizer.defaults["weight_decay"] > 0 for optimizer in trainer.optimizers)
    before = weights(trainer)
    trainer.train(), trainer.step(rows())
    assert same(before, weights(trainer)) and all(not optimizer.state for optimizer in trainer.optimizers)
    assert {row["tied_group_fraction"] for row in trainer.history} == {1.0} and {row["loss"] for row in trainer.history} == {0.0}
    assert trainer.env_step == (2 if joint_mode == "aligned" else 4) * (3 if joint_mode == "aligned" else 5) * 3 * 3


def test_ties_after_some_training_do_not_move_weights_by_momentum():
    paid = [True]
    trainer = make(reward_func=lambda a, b: letters(a, b) if paid[0] else 1.0)
    trainer.train()
    paid[0], before = False, weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


def test_one_agent_without_signal_stays_as_it_is():
    """Only what agent 0 writes is paid, and agent 1's share of every mean is the same."""
    def reward(first, second):
        return value_of(first)

    trainer = make(reward_func=reward, joint_mode="cross")
    before = weights(trainer)
    trainer.train()
    assert same(before[1:], weights(trainer)[1:]) and not same(before[:1], weights(trainer)[:1]) and not trainer.optimizers[1].state


def test_tied_nodes_do_not_dilute_nor_disturb_the_others():
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), reward_func=lambda a, b, answer: 0.5 if answer[0] == 1 else letters(a, b), callbacks=[trees])
    nodes = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(3)), "mean")
    assert [any(node.advantages[0]) for node in nodes] == [True, False, True]


# numbers of a row

def test_numbers_of_the_row():
    trees = Trees()
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), callbacks=[trees], num_turns=2, num_generations=2, discount=0.5, reference_kl_enabled=True, reference_kl_coef=0.3)
    trainer.step(rows(1))
    trees.heard.clear()
    twins = copy.deepcopy(trainer.agents)
    seen = gradients(trainer)
    stats = trainer.step(rows(2))
    nodes = walked(trees.of("policy"))
    for turn in (0, 1):
        own = [node for node in nodes if node.turn == turn]
        assert stats[f"turn_{turn + 1}/reward_mean"] == pytest.approx(fmean(joint.reward for node in own for joint in node.joints))
        assert stats[f"turn_{turn + 1}/expected_return"] == pytest.approx(fmean(value for node in own for value in naive_returns(node, 0.5) or ()) if turn else
                                                                          fmean(v for tree in trees.of("policy") for v in naive_returns(tree, 0.5)))
        kl = [naive_kl(twin, reference, node.prompts[i].token_ids, one.token_ids) for i, (twin, reference) in enumerate(zip(twins, trainer.reference_models))
              for node in own for one in node.generations[i].completions]
        assert stats[f"turn_{turn + 1}/reference_kl_mean"] == pytest.approx(fmean(kl), rel=1e-9)
        assert stats[f"turn_{turn + 1}/reference_kl_penalty_mean"] == pytest.approx(0.3 * fmean(kl), rel=1e-9)
    assert stats["loss"] == pytest.approx(fmean(stats[f"agent_{i}/loss"] for i in range(2)))
    for i, optimizer in enumerate(trainer.optimizers):
        norm = torch.stack([g.square().sum() for g in seen[optimizer][0].values()]).sum().sqrt().item()
        assert stats[f"agent_{i}/grad_norm"] == pytest.approx(norm, rel=1e-9)
    row = trainer.history.rows[-1]
    assert (row["kind"], row["update"], row["env_step"]) == ("train", 2, 2 * 3 + 4 * 3) and row["loss"] == stats["loss"]


@pytest.mark.parametrize("name", [*FAMILY, "CentralizedMAGRPO"])
def test_metric_keys(name):
    more = dict(centralized_adapter=Halves()) if name == "CentralizedMAGRPO" else dict(TWO_TURNS)
    trainer = make(name=name, eval_dataset=rows(2), eval_interval=1, reference_kl_enabled=True, **more)
    trainer.train()
    found = {key for row in trainer.history for key in row}
    turns = (1, 2) if "num_turns" in more else (1,)
    for turn in turns:
        assert {f"{prefix}turn_{turn}/{key}" for prefix in ("", "eval/") for key in ("reward_mean", "expected_return")} <= found
        assert {f"turn_{turn}/reference_kl_mean", f"turn_{turn}/reference_kl_penalty_mean"} <= found
    assert {"loss", "grad_norm", "entropy", "completion_length", "finished_fraction", "tied_group_fraction", "tokens_per_second", "seconds/rollout", "seconds/update",
            "agent_0/loss", "agent_0/grad_norm", "agent_0/entropy", "agent_0/completion_length", "agent_0/reference_kl_mean", "eval/completion_length"} <= found
    assert all(isinstance(value, float | int | str) for row in trainer.history for value in row.values())


def test_a_plain_run_has_no_key_of_a_penalty():
    assert not any("reference_kl" in key for row in trained().history for key in row)


@pytest.mark.parametrize("steps, expected", [(1, [6, 12, 18, 24]), (9, [6, 18, 24]), (1000, [6, 24])])
def test_logging_steps_are_the_least_distance_of_rows(steps, expected):
    trainer = trained(logging_steps=steps, train_dataset=rows(8))
    assert [row["env_step"] for row in trainer.history if row["kind"] == "train"] == expected


# the buffer

def updates_of(trainer):
    """The nodes of every update, in order."""
    seen, real = [], magrpo.policy_update

    def spy(agents, nodes, **more):
        seen.append(list(nodes))
        return real(agents, nodes, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magrpo, "policy_update", spy)
        trainer.train()
    return seen


@pytest.mark.parametrize("count, capacity, size, expected", [(6, 2, None, [2, 2, 2]), (5, 2, None, [2, 2, 1]), (5, 4, 2, [2, 2, 1]), (3, 8, 2, [2, 1]), (3, 8, None, [3]),
                                                             (7, 3, 2, [2, 1, 2, 1, 1]), (1, 4, 1, [1]), (4, 2, 8, [2, 2])])
def test_sizes_of_the_updates(count, capacity, size, expected):
    trainer = make(train_dataset=rows(count), rollout_buffer_size=capacity, train_batch_size=size, num_train_epochs=2, num_generations=2)
    found = updates_of(trainer)
    assert [len(nodes) for nodes in found] == expected * 2 == expected + expected
    assert trainer.run.update == len(found) and trainer.env_step == 2 * 2 * count
    for epoch in (found[:len(expected)], found[len(expected):]):
        assert sorted(node.item["answer"] for nodes in epoch for node in nodes) == list(range(count))


@pytest.mark.parametrize("count, capacity, size", [(3, 3, None), (3, 4, 2), (5, 7, 3), (2, 100, None), (2, 1, None)])
def test_nodes_of_several_turns(count, capacity, size):
    """Three nodes an item: one of turn 1, two of turn 2. No update mixes turns; every buffer is used up turn by turn."""
    trainer = make(train_dataset=rows(count), rollout_buffer_size=capacity, train_batch_size=size, **TWO_TURNS)
    found = updates_of(trainer)
    assert all(len({node.turn for node in nodes}) == 1 for nodes in found)
    flat = [node for nodes in found for node in nodes]
    assert sorted((node.item["answer"], node.turn) for node in flat) == sorted((i, turn) for i in range(count) for turn in (0, 1, 1))
    order = [(i, turn) for i in range(count) for turn in (0, 1, 1)]  # how nodes enter the buffer
    sizes = []
    for start in range(0, len(order), capacity):
        part = [turn for _, turn in order[start:start + capacity]]
        for turn in (0, 1):
            left = part.count(turn)
            while left > 0:
                sizes.append((turn, min(left, size or capacity)))
                left -= sizes[-1][1]
    assert [(nodes[0].turn, len(nodes)) for nodes in found] == sizes
    assert trainer.env_step == count * (2 + 4) and trainer.run.update == len(sizes)


def test_env_step_counts_the_calls_of_the_reward_in_training():
    for more in (dict(), dict(joint_mode="cross"), TWO_TURNS, dict(joint_mode="cross", **TWO_TURNS), dict(name="CentralizedMAGRPO", centralized_adapter=Halves())):
        calls = []
        trainer = make(reward_func=lambda a, b: calls.append(1) or letters(a, b), num_train_epochs=2, **more)
        trainer.train()
        assert trainer.env_step == len(calls) == trainer.plan().joint_responses_per_item * 3 * 2


def test_minibatches_are_shuffled_by_the_seed():
    def order(seed):
        return [node.item["answer"] for nodes in updates_of(make(train_dataset=rows(8), rollout_buffer_size=8, train_batch_size=2, num_generations=2, seed=seed)) for node in nodes]

    assert order(0) == order(0) != list(range(8)) and order(1) != order(0) and sorted(order(1)) == list(range(8))


@pytest.mark.parametrize("capacity, turns, expected", [(2, 1, [[6], [6], [3]]), (5, 1, [[15]]), (100, 1, [[15]]), (7, 2, [[6, 18], [6, 18], [3, 9]]), (4, 2, [[3, 9]] * 5)])
def test_items_that_fill_a_buffer_are_generated_together(capacity, turns, expected):
    """Five items, three samples: per buffer one call of generate for each turn, of that many rows."""
    trainer = make(train_dataset=rows(5), rollout_buffer_size=capacity, num_turns=turns)
    calls, other = generate_calls(trainer.agents[0]), generate_calls(trainer.agents[1])
    trainer.train()
    assert calls == other == [rows for buffer in expected for rows in buffer]


@pytest.mark.parametrize("interval, expected", [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2, 3, 4, 5]), (3, [0, 1, 3, 4]), (4, [0, 2, 3, 5]), (5, [0, 3]), (9, [0, 3])])
def test_evaluations_count_items_from_zero_in_every_epoch(interval, expected):
    """Five items, two per update: updates 0, 1, 2 take items 0-1, 2-3, 4."""
    trainer = trained(train_dataset=rows(5), num_train_epochs=2, eval_interval=interval, eval_dataset=rows(2), num_generations=2)
    assert [row["update"] for row in trainer.history if row["kind"] == "eval"] == expected


def test_evaluations_with_several_updates_per_buffer():
    """A buffer of four nodes in minibatches of one: the items of the buffer count once."""
    trainer = trained(train_dataset=rows(4), rollout_buffer_size=4, train_batch_size=1, eval_interval=4, num_train_epochs=2, eval_dataset=rows(1), num_generations=2)
    assert [row["update"] for row in trainer.history if row["kind"] == "eval"] == [0, 4]


class Stream:
    """Rows without a length."""

    def __init__(self, count):
        self.count, self.walks = count, 0

    def __iter__(self):
        self.walks += 1
        return iter(rows(self.count))


def test_streams_have_no_length_and_train_all_the_same():
    listed, streamed = (trained(train_dataset=data, num_train_epochs=2) for data in (rows(5), Stream(5)))
    assert same(weights(listed), weights(streamed)) and listed.run.update == streamed.run.update == 6
    assert listed.plan().items == 5 and streamed.plan().items is None
    assert "an item" in str(streamed.plan()) and "epochs" not in str(streamed.plan())


def test_shuffled_items():
    def order(shuffle, seed=0):
        trees = Trees()
        trained(shuffle=shuffle, seed=seed, train_dataset=rows(8), num_generations=2, max_new_tokens=1, num_train_epochs=2, callbacks=[trees])
        return [node.item["answer"] for node in trees.of("policy")]

    assert order(False) == [*range(8), *range(8)]
    found = order(True)
    assert found == order(True) and sorted(found[:8]) == sorted(found[8:]) == list(range(8))
    assert found[:8] != list(range(8)) and found[:8] != found[8:] and order(True, 1) != found
