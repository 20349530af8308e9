"""The REINFORCE family end to end on micro models: gradient, clocks, turns, verbs, determinism, interruptions, and a script for comlrl."""
import copy
import functools
import linecache
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
from comlrl_nb import fresh_batches
from comlrl_nb.callbacks import Callback
from comlrl_nb.toy import micro_model
from comlrl_nb.trainers import reinforce
from comlrl_nb.trainers.reinforce import MAGRPOTrainer, magrpo
from comlrl_nb.utils.reward_utils import batched_reward
from reinforce_runs import (FAMILY, TOKENIZER, Halves, Trees, assert_step_follows, config, distance, forwards, generate_calls, gradients, letters, make,
                            naive_advantages, naive_credit, naive_gradient, naive_kl, naive_returns, onward, rows, same, scripted, team, unclocked, value_of, walked, weights)

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


# turns and the transition

def heard_by(trainer_fields=None, **more):
    """What the transition was called with during one training run, and the trees."""
    calls, trees = [], Trees()

    def transition(**given):
        calls.append(copy.deepcopy(given))
        return onward(**given)

    trainer = make(external_transition=transition, callbacks=[trees], train_dataset=rows(1), **{"num_turns": 2, "num_generations": 2, **more})
    trainer.train()
    return calls, trees.of("policy")


@pytest.mark.parametrize("turns", [2, 3])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_what_the_transition_is_told(joint_mode, turns):
    calls, (tree,) = heard_by(joint_mode=joint_mode, num_turns=turns)
    assert all(call.keys() == {"prompt", "agent_completions", "num_agents", "prompt_history_per_agent", "response_history_per_agent"} for call in calls)
    expected = []

    def path(node, prompts, responses):
        prompts = [[*own, generation.prompt.text] for own, generation in zip(prompts, node.generations)]
        for joint, child in zip(node.joints, node.children, strict=True):
            written = [[*own, text] for own, text in zip(responses, joint.texts)]
            expected.append(dict(prompt=rows()[0]["prompt"], agent_completions=list(joint.texts), num_agents=2, prompt_history_per_agent=prompts,
                                 response_history_per_agent=written))
            assert [p.text for p in child.prompts] == onward(**expected[-1])
            if child.children:
                path(child, prompts, written)

    path(tree, [[], []], [[], []])
    joints = 4 if joint_mode == "cross" else 2
    assert len(calls) == len(expected) == sum(joints**turn for turn in range(1, turns))
    assert sorted(calls, key=repr) == sorted(expected, key=repr)
    assert {len(call["prompt_history_per_agent"][0]) for call in calls} == set(range(1, turns))


def test_histories_hold_the_prompts_really_used():
    calls, (tree,) = None, (None,)
    with pytest.warns(UserWarning, match="max_prompt_length=5"):
        calls, (tree,) = heard_by(max_prompt_length=5, num_turns=3, formatters=[lambda item, external_prompts=None: "to agent 0: " + (external_prompts or item["prompt"]),
                                                                              lambda item, external_prompts=None: "x"])
    used = TOKENIZER("to agent 0: say ab")["input_ids"]
    assert tree.prompts[0].token_ids == (1, *used[-4:])
    first = TOKENIZER.decode(used[-4:])
    assert all(call["prompt_history_per_agent"][0][0] == first and set(call["prompt_history_per_agent"][1]) == {"x"} for call in calls)
    later = {child.prompts[0].text for child in tree.children}
    assert {call["prompt_history_per_agent"][0][1] for call in calls if len(call["prompt_history_per_agent"][0]) == 2} == later


def test_the_reward_is_told_the_prompts_of_its_turn():
    told, trees = [], Trees()

    def reward(first, second, prompts):
        told.append(list(prompts))
        return letters(first, second)

    make(reward_func=reward, callbacks=[trees], train_dataset=rows(1), **TWO_TURNS).train()
    tree, = trees.of("policy")
    by_turn = [node for turn in (0, 1) for node in tree.walk() if node.turn == turn]
    assert told == [[p.text for p in node.prompts] for node in by_turn for _ in node.joints]


def test_the_formatter_gets_the_environments_text_unless_it_passes_through():
    def formatter(item, external_prompts=None):
        return f"[{item['answer']}] {external_prompts or item['prompt']}"

    for passthrough, start in ((False, "[0] 1 0 "), (True, "1 0 ")):
        _, (tree,) = heard_by(formatters=formatter, external_prompt_passthrough=passthrough)
        assert tree.prompts[0].text == "[0] say ab" and all(child.prompts[0].text.startswith(start) for child in tree.children)


def test_a_formatter_with_the_text_at_later_turns_only():
    """`external_prompts` is passed from the second turn on; whoever names it without a default has it at turn 1 too or fails there."""
    seen = []

    def formatter(item, external_prompts="nothing yet"):
        seen.append(external_prompts)
        return f"{external_prompts}"

    heard_by(formatters=[formatter, lambda item, external_prompts=None: "b"])
    assert seen[0] == "nothing yet" and len(seen) == 3 and all(text.startswith("1 0 ") for text in seen[1:])


def test_a_formatter_that_takes_no_environment_text_finds_it_as_the_items_prompt():
    _, (tree,) = heard_by(formatters=lambda item: "Q: " + item["prompt"])
    assert all(child.prompts[0].text.startswith("Q: 1 0 ") for child in tree.children)


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_a_transition_may_spoil_its_arguments_and_return_a_tuple(joint_mode):
    def spoil(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        texts = tuple(onward(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent))
        for part in (agent_completions, prompt_history_per_agent, response_history_per_agent, *prompt_history_per_agent, *response_history_per_agent):
            part.clear()
        return texts

    plain, spoilt = (trained(external_transition=each, joint_mode=joint_mode, num_turns=3, num_generations=2, max_new_tokens=2, train_dataset=rows(2)) for each in (onward, spoil))
    assert same(weights(plain), weights(spoilt))


def test_an_item_without_a_prompt_column():
    prompts = []

    def transition(prompt, **more):
        prompts.append(prompt)
        return onward(prompt, **more)

    make(train_dataset=[{"question": "why"}], formatters=lambda item, external_prompts=None: external_prompts or item["question"], external_transition=transition, **TWO_TURNS).train()
    assert prompts == ["", ""]


def test_three_turns_of_one_and_of_three_agents():
    for count in (1, 3):
        trees = Trees()
        trained(team(("gpt2",) * count), num_turns=3, num_generations=2, max_new_tokens=2, callbacks=[trees], train_dataset=rows(1))
        tree, = trees.of("policy")
        assert [node.turn for node in tree.walk()] == [0, 1, 2, 2, 1, 2, 2] and all(len(node.prompts) == count for node in tree.walk())


# early termination

@pytest.mark.parametrize("paid, expanded", [(0.5, True), (0.5 + 1e-9, False), (0.4, True), (0.6, False)])
def test_a_branch_ends_strictly_above_the_threshold(paid, expanded):
    trainer = make(reward_func=lambda a, b: paid, early_termination_threshold=0.5, eval_dataset=rows(1), **TWO_TURNS)
    assert bool(trainer.rollout(rows()[0]).children) == expanded
    stats = trainer.evaluate()
    assert ("eval/turn_2/reward_mean" in stats) == expanded
    assert stats["eval/turn_1/expected_return"] == pytest.approx(paid * (2 if expanded else 1))
    trainer.train()
    assert trainer.env_step == 3 * (6 if expanded else 2)


def test_the_threshold_meets_the_mean_of_processed_rewards():
    order = iter([1.0, 0.0] * 100)
    for processor, expanded in ((None, True), (lambda value: value + 0.25, False)):
        trainer = make(reward_func=lambda a, b: next(order), reward_processor=processor, early_termination_threshold=0.5, **TWO_TURNS)
        assert bool(trainer.rollout(rows()[0]).children) == expanded


def test_the_threshold_counts_at_every_turn_and_for_every_branch():
    def reward(first, second, prompts):
        return 1.0 if prompts[0].endswith("!") else 0.0

    def transition(agent_completions, num_agents, response_history_per_agent, **more):
        end = "!" if len(response_history_per_agent[0]) == 1 and next(odd) else "."
        return [f"{len(response_history_per_agent[0])}{end}"] * num_agents

    odd = iter([True, False] * 10)
    tree = make(reward_func=reward, external_transition=transition, early_termination_threshold=0.5, num_turns=3, num_generations=2).rollout(rows()[0])
    assert [len(child.children) for child in tree.children] == [0, 2]
    assert tree.returns == (1.0, 0.0)


def test_fewer_nodes_than_planned_still_fill_the_buffer():
    def reward(first, second, answer):
        return 1.0 if answer[0] % 2 else value_of([first[0], second[0]]) / 2

    trainer = make(reward_func=reward, early_termination_threshold=0.9, train_dataset=rows(6), rollout_buffer_size=4, **TWO_TURNS)
    found = updates_of(trainer)
    flat = sorted((node.item["answer"], node.turn) for nodes in found for node in nodes)
    assert flat == sorted([(i, 0) for i in range(6)] + [(i, 1) for i in (0, 2, 4) for _ in range(2)])
    assert trainer.env_step == 6 * 2 + 3 * 4


# plan

@pytest.mark.parametrize("count, num, turns, joint_mode", [(1, 4, 1, "cross"), (2, 3, 1, "aligned"), (2, 3, 1, "cross"), (3, 2, 2, "cross"), (2, 2, 3, "aligned"), (2, 2, 2, "cross")])
def test_the_plan_is_what_a_run_does(count, num, turns, joint_mode):
    rewards, trees = [], Trees()
    trainer = make(team(("gpt2",) * count), num_generations=num, num_turns=turns, joint_mode=joint_mode, max_new_tokens=1, num_train_epochs=2, train_dataset=rows(2), callbacks=[trees],
                   reward_func=lambda *texts: rewards.append(1) or letters(*texts))
    calls, plan = generate_calls(trainer.agents[-1]), trainer.plan()
    assert not rewards and not calls  # asking costs nothing
    trainer.train()
    played = trees.of("policy")
    assert len(rewards) == plan.joint_responses_per_item * 2 * 2 == trainer.env_step
    assert sum(calls) == plan.completions_per_item * 2 * 2
    assert {len(list(tree.walk())) for tree in played} == {plan.nodes_per_item} and {len(node.joints) for node in walked(played)} == {plan.joint_responses_per_node}
    assert plan.joint_responses_per_node == num ** (count if joint_mode == "cross" else 1)
    for number in (plan.nodes_per_item, plan.completions_per_item, plan.joint_responses_per_item):
        assert f"{number:,}" in str(plan) and f"{number:,}" in plan._repr_markdown_()


def test_the_plan_of_a_central_actor():
    plan = make(name="CentralizedMAGRPO", centralized_adapter=Halves(), joint_mode="cross").plan()
    assert (plan.num_agents, plan.joint_responses_per_node, plan.items, plan.epochs) == (1, 3, 3, 1)


# verbs

def test_rollout_is_a_look():
    looked, plain = make(num_turns=2, reference_kl_enabled=True), make(num_turns=2, reference_kl_enabled=True)
    before = weights(looked)
    node = looked.rollout(rows()[0])
    assert len(node.joints) == len(node.children) == 3 and [g.agent_idx for g in node.generations] == [0, 1]
    assert len(looked.rollout({"prompt": "say ab"}, 5).joints) == 5 and len(node.returns) == 3 and [len(own) for own in node.advantages] == [3, 3] == [len(own) for own in node.kl]
    assert same(before, weights(looked)) and looked.env_step == looked.run.update == len(looked.history) == 0
    plain.train(), looked.train()
    looked.rollout(rows()[0])
    assert same(weights(looked), weights(plain)) and unclocked(looked.history) == unclocked(plain.history)


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_rollout_credits_as_training_does(joint_mode):
    """On the same texts: a stub writes the same completions in both."""
    trees = Trees()
    agents = team(("gpt2", "gpt2"))
    for model in agents:
        scripted(model, [10, 11, 2], [12, 2], [13, 14, 15])
    trainer = make(agents, joint_mode=joint_mode, callbacks=[trees], train_dataset=rows(1), num_turns=2, discount=0.5, reference_kl_enabled=True)
    looked = trainer.rollout(rows()[0])
    trainer.train()
    assert trees.of("policy") == [looked]


def test_a_node_draws_itself_as_a_tree():
    node = make(num_turns=2, num_generations=2).rollout(rows()[0])
    text, table = str(node), node._repr_markdown_()
    for part in ("agent 0 read", "agent 1 wrote", "reward", "return", "advantage 0", "advantage 1"):
        assert part in table and part in text
    assert table.count("\n| ") >= 1 + 2 + 4  # every joint response of either turn


@pytest.mark.parametrize("num", [0, 1, -1, True, 1.5, "3"])
def test_rollout_refuses_a_wrong_number(num):
    with pytest.raises(ValueError, match="num.*at least 2"):
        make().rollout(rows()[0], num)


def test_step_is_one_update_on_all_nodes_of_its_items():
    trainer = make(eval_dataset=rows(1), eval_interval=1, **TWO_TURNS)
    before = weights(trainer)
    stats = trainer.step(rows(2))
    assert (trainer.run.update, trainer.env_step) == (1, 2 * 6) and not same(before, weights(trainer))
    assert {"loss", "turn_1/reward_mean", "turn_2/reward_mean", "turn_1/expected_return", "agent_1/grad_norm"} <= stats.keys()
    assert [row["kind"] for row in trainer.history] == ["train"] and trainer.source is None


def test_step_on_nothing_does_nothing():
    trainer = make()
    assert trainer.step([]) == {} and trainer.step(iter([])) == {} and trainer.run.update == 0 and len(trainer.history) == 0


def test_step_takes_any_iterable_of_rows():
    first, second = make(), make()
    first.step(rows(2)), second.step(row for row in rows(2))
    assert same(weights(first), weights(second))


def test_train_returns_the_history_and_can_be_called_again():
    trainer = make()
    history = trainer.train()
    updates, steps = trainer.run.update, trainer.env_step
    assert history is trainer.history and trainer.train() is history and (trainer.run.update, trainer.env_step) == (2 * updates, 2 * steps)


def test_further_keywords_for_generate():
    seen, trainer = [], make(num_turns=2, num_generations=2)
    for model in trainer.agents:
        real = model.generate
        model.generate = lambda real=real, **keywords: seen.append(keywords.get("repetition_penalty")) or real(**keywords)
    trainer.train(repetition_penalty=1.5)
    trainer.rollout(rows()[0])
    assert seen[0] == 1.5 and set(seen[:-4]) == {1.5} and set(seen[-4:]) == {None}
    for reserved in ("top_k", "max_new_tokens", "num_return_sequences"):
        with pytest.raises(ValueError, match=f"{reserved}.*config"):
            make().train(**{reserved: 3})


# evaluation

@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_evaluation_plays_one_path_for_each_of_the_first_rows(joint_mode):
    seen, trees = [], Trees()

    def reward(first, second, answer):
        seen.append(answer[0])
        return 0.5

    trainer = make(reward_func=reward, eval_dataset=rows(6), eval_num_samples=4, eval_batch_size=3, callbacks=[trees], joint_mode=joint_mode, num_turns=2)
    calls = generate_calls(trainer.agents[1])
    stats = trainer.evaluate()
    assert seen == [0, 1, 2, 0, 1, 2, 3, 3] and calls == [3, 3, 1, 1]
    assert [[node.turn for node in tree.walk()] for tree in trees.of("eval")] == [[0, 1]] * 4
    assert stats["eval/turn_1/reward_mean"] == stats["eval/turn_2/reward_mean"] == stats["eval/turn_2/expected_return"] == 0.5 and stats["eval/turn_1/expected_return"] == 1.0
    assert trainer.env_step == 0 and trainer.history.rows[0]["kind"] == "eval"
    assert trainer.evaluate(0) == {} and len(trainer.evaluate(9)) > 0


def test_evaluation_without_a_dataset_warns_and_is_empty():
    with pytest.warns(UserWarning, match="eval_dataset"):
        assert make().evaluate() == {}
    make(eval_interval=1).train()


def test_eval_logger_and_aggregator():
    got = {}

    def logger(agent_completions_turns, batch_items, prompts):
        got.update(turns=agent_completions_turns, items=batch_items, prompts=prompts)
        return [len(turns) for turns in agent_completions_turns[0]]

    trainer = make(eval_dataset=rows(3), eval_num_samples=3, eval_logger=logger, eval_aggregator=lambda details, num_turns: {"own": sum(details) / num_turns},
                   reward_func=lambda a, b, answer: float(answer[0] == 1), early_termination_threshold=0.5, num_turns=2)
    stats = trainer.evaluate()
    assert [len(turns) for turns in got["turns"][1]] == [2, 1, 2] and len(got["turns"]) == 2 and stats["eval/own"] == 2.5
    assert [item["answer"] for item in got["items"]] == [0, 1, 2] and got["prompts"] == [row["prompt"] for row in rows()]


def test_evaluation_changes_nothing():
    held_out, found = [{"prompt": "say c", "answer": 9}] * 3, []
    for more in ({}, dict(eval_dataset=held_out), dict(eval_dataset=held_out, eval_interval=1), dict(eval_dataset=held_out, eval_interval=2, eval_num_samples=1)):
        trainer = trained(train_dataset=rows(4), shuffle=True, max_new_tokens=2, **more, **TWO_TURNS)
        found.append((weights(trainer), trainer.env_step, [row.get("loss") for row in trainer.history if row["kind"] == "train"]))
    assert all(same(found[0][0], other[0]) and found[0][1:] == other[1:] for other in found[1:])


# determinism

def test_same_seed_same_run():
    first, second, other = trained(seed=5), trained(seed=5), trained(seed=6)
    assert same(weights(first), weights(second)) and unclocked(first.history) == unclocked(second.history) and not same(weights(first), weights(other))


def test_the_global_seed_matters_only_without_a_seed():
    found = []
    for seed, own in ((1, 0), (2, 0), (1, None), (1, None), (2, None)):
        torch.manual_seed(seed)
        found.append(weights(trained(seed=own)))
    assert same(found[0], found[1]) and same(found[2], found[3]) and not same(found[2], found[4])


# several devices

MP = dict(parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("more", [dict(), dict(num_turns=2, num_generations=2, joint_mode="cross"), dict(reference_kl_enabled=True, num_turns=2, num_generations=2)], ids=["plain", "cross", "penalty"])
def test_mp_on_two_devices_equals_one(more):
    more = dict(eval_interval=2, eval_dataset=rows(2), max_new_tokens=3, **more)
    one, two = trained(**more), trained(**MP, **more)
    assert two.team.workers.parallel and list(map(str, two.agent_devices)) == ["cpu:0", "cpu:1"]
    assert same(weights(one), weights(two)) and unclocked(one.history) == unclocked(two.history)


def test_mp_with_references_on_devices_of_their_own():
    more = dict(reference_kl_enabled=True, reference_kl_coef=0.5, num_train_epochs=2)
    one, two = trained(**more), trained(**MP, reference_devices=["cpu:2", "cpu:3"], **more)
    assert same(weights(one), weights(two)) and list(map(str, two.setup.placement.references)) == ["cpu:2", "cpu:3"]
    assert trained(reference_devices="cpu:1", **more).setup.placement.references == (torch.device("cpu:1"),) * 2


def test_mp_rewards_transitions_and_processors_run_on_the_main_thread():
    threads = {}

    def watched(name, function):
        @functools.wraps(function)
        def call(*args, **more):
            threads.setdefault(name, set()).add(threading.current_thread())
            return function(*args, **more)
        return call

    agents = team()
    for index, model in enumerate(agents):
        model.generate = watched(f"agent {index}", model.generate)
    make(agents, reward_func=watched("reward", lambda *texts: letters(*texts)), external_transition=watched("transition", onward), reward_processor=watched("processor", lambda value: value),
         formatters=watched("formatter", lambda item, external_prompts=None: external_prompts or item["prompt"]), **MP, **TWO_TURNS).train()
    assert {threads[name].pop() for name in ("reward", "transition", "processor", "formatter")} == {threading.main_thread()}
    assert [thread.name for index in (0, 1) for thread in threads[f"agent {index}"]] == ["agent-0", "agent-1"]
    assert not any(threads[name] for name in ("reward", "transition", "processor", "formatter"))


def test_mp_the_reward_works_under_an_alarm():
    rang = []

    def reward(first, second):
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while len(rang) == len(judged):
            pass
        judged.append(1)
        return letters(first, second)

    judged, before = [], signal.signal(signal.SIGALRM, lambda *args: rang.append(1))
    try:
        make(reward_func=reward, train_dataset=rows(1), num_generations=2, **MP).train()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(rang) == len(judged) == 2


def in_time(function, seconds=60):
    """`function()` in a thread of its own, so that a hang fails the test; its error is raised here."""
    outcome = []

    def call():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@pytest.mark.parametrize("where", ["generate", "update", "reference"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_mp_the_first_error_wins_and_nothing_hangs(who, where):
    trainer = make(reference_kl_enabled=True, **MP)
    models = trainer.reference_models if where == "reference" else trainer.agents
    errors = {index: RuntimeError(f"agent {index}") for index in who}

    def failing(index):
        def fail(*args, **more):
            if where != "update" or torch.is_grad_enabled():
                raise errors[index]
        return fail

    before = weights(trainer)
    handles = []
    for index in who:
        if where == "generate":
            models[index].generate = failing(index)
        else:
            handles.append(models[index].register_forward_pre_hook(failing(index)))
    for _ in range(2):  # the workers live on after an error
        with pytest.raises(RuntimeError) as caught:
            in_time(trainer.train)
        assert caught.value is errors[who[0]]
    assert same(before, weights(trainer)) and trainer.env_step == 0
    for handle in handles:
        handle.remove()
    for index in who:
        vars(models[index]).pop("generate", None)
    in_time(trainer.train)
    whole = trained(reference_kl_enabled=True, **MP)
    assert same(weights(trainer), weights(whole)) and unclocked(trainer.history) == unclocked(whole.history)


def test_mp_the_other_agents_finish_before_the_error_is_raised():
    agents, finished = team(), threading.Event()
    real = agents[1].generate

    def slow(*args, **more):
        out = real(*args, **more)
        finished.set()
        return out

    agents[0].generate = lambda **more: (_ for _ in ()).throw(RuntimeError("first"))
    agents[1].generate = slow
    with pytest.raises(RuntimeError, match="first"):
        in_time(make(agents, **MP).train)
    assert finished.is_set()


# references

def test_penalty_of_a_model_with_itself_is_zero():
    trainer = make(reference_kl_enabled=True, num_turns=2, max_new_tokens=8)
    assert {value for row in rows() for node in trainer.rollout(row).walk() for own in node.kl for value in own} == {0.0}
    plain, penalised = make(max_new_tokens=8), make(reference_kl_enabled=True, reference_kl_coef=9.0, max_new_tokens=8)
    plain.step(rows(3)), penalised.step(rows(3))
    assert same(weights(plain), weights(penalised))  # the first step: nobody has left yet


def test_tied_rewards_and_a_penalty_leave_a_policy_at_its_reference():
    trainer = make(reward_func=lambda a, b: 0.5, reference_kl_enabled=True, max_new_tokens=8, num_turns=2)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))
    assert {value for row in trainer.history for name, value in row.items() if name.endswith("reference_kl_mean")} == {0.0}


def test_penalty_of_a_model_with_itself_is_zero_but_for_rounding():
    for kinds in (("gpt2", "gpt2"), ("llama", "llama")):
        node = make(team(kinds), reference_kl_enabled=True, num_turns=2, num_generations=2).rollout(rows()[0])
        assert max(value for each in node.walk() for own in each.kl for value in own) < 1e-10


def test_a_penalty_changes_training_and_a_coefficient_of_zero_does_not():
    plain, free, costly = (trained(num_train_epochs=3, **more) for more in ({}, dict(reference_kl_enabled=True, reference_kl_coef=0.0), dict(reference_kl_enabled=True, reference_kl_coef=2.0)))
    assert same(weights(plain), weights(free)) and not same(weights(plain), weights(costly))
    assert free.history.rows[-1]["turn_1/reference_kl_mean"] > 0 and free.history.rows[-1]["turn_1/reference_kl_penalty_mean"] == 0


def test_references_are_frozen_copies_that_never_move():
    trainer = make(reference_kl_enabled=True, num_train_epochs=2)
    before, start = weights(trainer.reference_models), weights(trainer)
    assert same(before, start) and len(trainer.reference_models) == 2
    assert {p.data_ptr() for m in trainer.agents for p in m.parameters()}.isdisjoint(p.data_ptr() for m in trainer.reference_models for p in m.parameters())
    assert not any(p.requires_grad for m in trainer.reference_models for p in m.parameters()) and all(p.requires_grad for m in trainer.agents for p in m.parameters())
    trainer.train()
    assert same(before, weights(trainer.reference_models)) and not same(start, weights(trainer))
    assert make().reference_models == []


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_the_penalty_enters_the_signal_of_the_own_completion_only(joint_mode):
    """Rewards are all equal, so that an advantage is the own penalty and nothing else; returns stay free of it."""
    trainer = make(team(("gpt2", "gpt2"), **DOUBLE), name="MAREINFORCE", advantage_normalization=False, reward_func=lambda a, b: 0.0, joint_mode=joint_mode,
                   reference_kl_enabled=True, reference_kl_coef=0.5, num_turns=2, num_generations=2)
    with torch.no_grad():
        trainer.agents[1].get_output_embeddings().weight.mul_(1.3)  # only agent 1 has left its reference
    tree = trainer.rollout(rows()[0])
    for node in tree.walk():
        assert set(node.returns) == {0.0} and node.advantages[0] == pytest.approx((0.0, 0.0), abs=1e-20) and node.kl[0] == pytest.approx((0.0, 0.0), abs=1e-20)
        expected = [naive_kl(trainer.agents[1], trainer.reference_models[1], node.prompts[1].token_ids, one.token_ids) for one in node.generations[1].completions]
        assert node.kl[1] == pytest.approx(expected, rel=1e-9) and min(expected) > 0
        assert node.advantages[1] == pytest.approx([-0.5 * value for value in expected], rel=1e-9)


def test_rewards_and_early_stopping_know_no_penalty():
    found = []
    for more in ({}, dict(reference_kl_enabled=True, reference_kl_coef=100.0)):
        trainer = make(reward_func=lambda a, b: 0.6, early_termination_threshold=0.5, num_turns=2, **more)
        with torch.no_grad():
            trainer.agents[0].get_output_embeddings().weight.mul_(1.3)
        trainer.train()
        found.append((trainer.env_step, [(row["turn_1/reward_mean"], row["turn_1/expected_return"]) for row in trainer.history]))
    assert found[0] == found[1] and found[0][0] == 9 and found[0][1][0] == pytest.approx((0.6, 0.6))


def test_one_reference_for_agents_that_are_one_object():
    model = micro_model(0, "gpt2")
    trainer = make([model, model], reference_kl_enabled=True)
    assert trainer.reference_models[0] is trainer.reference_models[1] is not model


# shared parameters

@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_agents_that_are_one_object_take_one_step_with_the_summed_gradient(joint_mode):
    trees, model = Trees(), micro_model(0, "gpt2", torch.float64)
    twin = copy.deepcopy(model)
    trainer = make([model] * 3, callbacks=[trees], joint_mode=joint_mode, num_generations=2, rollout_buffer_size=2, train_dataset=rows(2))
    assert trainer.num_agents == 3 and len(set(map(id, trainer.optimizers))) == 1
    owned = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    seen = gradients(trainer)
    trainer.train()
    steps, = seen.values()
    nodes = trees.of("policy")
    parts = [naive_gradient(twin, nodes, agent, "mean") for agent in range(3)]
    assert len(steps) == trainer.run.update == 1
    assert distance({p: steps[0][p] for p in model.parameters()}, {q: sum(part[q] for part in parts) for q in twin.parameters()}) < 1e-10
    assert nodes[0].generations[0].completions != nodes[0].generations[1].completions  # they still write different texts


def test_a_shared_and_a_separate_agent():
    shared, alone = micro_model(0, "gpt2", torch.float64), micro_model(1, "gpt2", torch.float64)
    twins, trees = (copy.deepcopy(shared), copy.deepcopy(alone)), Trees()
    trainer = make([shared, alone, shared], callbacks=[trees], train_dataset=rows(1))
    assert trainer.optimizers[0] is trainer.optimizers[2] is not trainer.optimizers[1]
    seen = gradients(trainer)
    trainer.train()
    nodes = trees.of("policy")
    first, third = (naive_gradient(twins[0], nodes, agent, "mean") for agent in (0, 2))
    assert distance({p: seen[trainer.optimizers[0]][0][p] for p in shared.parameters()}, {q: first[q] + third[q] for q in twins[0].parameters()}) < 1e-10
    second = naive_gradient(twins[1], nodes, 1, "mean")
    assert distance({p: seen[trainer.optimizers[1]][0][p] for p in alone.parameters()}, second) < 1e-10


# what user code sees

def test_the_reward_sees_one_joint_response_at_a_time():
    seen = []

    def reward(first, second, prompts, batch_items, answer):
        seen.append((first, second, prompts, batch_items, answer))
        return letters(first, second)

    trees = Trees()
    make(reward_func=reward, joint_mode="cross", num_generations=2, formatters=[lambda item: f"A {item['prompt']}", lambda item: f"B {item['prompt']}"], callbacks=[trees]).train()
    joints = [(node, joint) for node in trees.of("policy") for joint in node.joints]
    assert len(seen) == len(joints) == 3 * 4
    for (first, second, prompts, items, answer), (node, joint) in zip(seen, joints):
        row = rows()[node.item["answer"]]
        assert ([*first, *second], prompts, items, answer) == (list(joint.texts), [f"A {row['prompt']}", f"B {row['prompt']}"], [row], [row["answer"]])


@pytest.mark.parametrize("joint_mode, count", [("aligned", 3), ("cross", 9)])
def test_a_batched_reward_is_called_once_per_node(joint_mode, count):
    seen = []

    @batched_reward
    def reward(first, second, batch_items):
        seen.append((len(first), len(second), batch_items))
        return [value_of(texts) for texts in zip(first, second)]

    many = trained(reward_func=reward, joint_mode=joint_mode, num_turns=2)
    assert {call[:2] for call in seen} == {(count, count)} and len(seen) == 3 * (1 + count) and all(call[2] == [call[2][0]] * count for call in seen)
    assert same(weights(trained(joint_mode=joint_mode, num_turns=2)), weights(many)) and many.env_step == 3 * (count + count**2)


def test_the_processor_maps_every_value_once():
    got = []
    plain = make().rollout(rows()[0])
    shaped = make(reward_processor=lambda value: got.append(value) or 2 * value + 1).rollout(rows()[0])
    assert got == [joint.reward for joint in plain.joints] == [joint.raw_reward for joint in shaped.joints]
    assert [joint.reward for joint in shaped.joints] == [2 * value + 1 for value in got]
    assert shaped.advantages[0] == pytest.approx(plain.advantages[0])


def test_rows_are_never_mutated():
    data, held_out = rows(), rows(2)
    originals = copy.deepcopy((data, held_out))

    def reward(first, second, batch_items):
        batch_items[0]["answer"] = "spoiled"
        batch_items[0].pop("prompt", None)
        return letters(first, second)

    trainer = make(train_dataset=data, eval_dataset=held_out, eval_interval=1, reward_func=reward)
    trainer.train(), trainer.rollout(data[0]), trainer.step(data)
    assert (data, held_out) == originals


# interruptions

class Once:
    """Ctrl-C at the n-th call; later calls pass. `signal` sends a real one, else the exception is raised on the spot."""

    def __init__(self, at, real_signal=False):
        self.left, self.real_signal = at, real_signal

    def __call__(self, *args, **more):
        self.left -= 1
        if self.left == 0:
            if not self.real_signal:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    def before(self, function):
        @functools.wraps(function)
        def call(*args, **more):
            self()
            return function(*args, **more)
        return call


WHOLE = dict(num_train_epochs=2, train_dataset=rows(2), rollout_buffer_size=3, train_batch_size=2, num_turns=2, num_generations=2, max_new_tokens=2, eval_interval=2, eval_dataset=rows(1),
             reference_kl_enabled=True, shuffle=True)


@pytest.fixture(scope="module")
def whole():
    """The uninterrupted run."""
    trainer = trained(**WHOLE)
    return weights(trainer), trainer.env_step, trainer.run.update, unclocked(trainer.history)


def assert_goes_on(trainer, whole):
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert same(weights(trainer), whole[0]) and (trainer.env_step, trainer.run.update) == whole[1:3] and unclocked(trainer.history) == whole[3]


def test_the_whole_run_has_many_updates(whole):
    assert whole[1:3] == (2 * 2 * 6, 8)  # an item fills the buffer with nodes of turns 1, 2, 2: two updates


@pytest.mark.parametrize("at", [1, 3, 9, 20])
def test_interrupted_in_the_reward(whole, at):
    assert_goes_on(make(reward_func=Once(at).before(lambda *texts: letters(*texts)), **WHOLE), whole)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_interrupted_in_the_transition(whole, at):
    assert_goes_on(make(external_transition=Once(at).before(onward), **WHOLE), whole)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("agent", [0, 1])
def test_interrupted_in_generate(whole, agent, at):
    trainer = make(**WHOLE)
    trainer.agents[agent].generate = Once(at).before(trainer.agents[agent].generate)
    assert_goes_on(trainer, whole)


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("agent", [0, 1])
def test_interrupted_in_an_update(whole, agent, at):
    trainer, stop = make(**WHOLE), Once(at)
    trainer.agents[agent].register_forward_pre_hook(lambda module, inputs: stop() if torch.is_grad_enabled() else None)
    assert_goes_on(trainer, whole)


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("agent", [0, 1])
def test_interrupted_in_a_reference(whole, agent, at):
    trainer, stop = make(**WHOLE), Once(at)
    trainer.reference_models[agent].register_forward_pre_hook(lambda module, inputs: stop())
    assert_goes_on(trainer, whole)


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("at", [1, 4])
def test_ctrl_c_between_the_agents_steps(whole, place, at):
    trainer = make(**WHOLE)
    getattr(trainer.optimizers[1], place)(Once(at, real_signal=True))
    assert_goes_on(trainer, whole)


class Ears(Callback):
    def __init__(self, event, stop):
        setattr(self, event, lambda *args: stop())


@pytest.mark.parametrize("event, at", [("on_advance", 1), ("on_advance", 4), ("on_phase", 1), ("on_phase", 2), ("on_nodes", 1), ("on_nodes", 2), ("on_nodes", 4),
                                       pytest.param("on_row", 1), ("on_row", 2), ("on_row", 3)])
def test_interrupted_in_a_callback(whole, event, at):
    assert_goes_on(make(callbacks=[Ears(event, Once(at))], **WHOLE), whole)


def test_interrupted_under_mp(whole):
    assert_goes_on(make(reward_func=Once(9).before(lambda *texts: letters(*texts)), **WHOLE, **MP), whole)


def test_an_error_in_the_reward_can_be_mended_and_training_goes_on(whole):
    trainer = make(**WHOLE)
    good, trainer.setup.reward.func = trainer.setup.reward.func, lambda *texts: float("nan")
    for _ in range(2):
        with pytest.raises(ValueError, match="nan"):
            trainer.train()
    trainer.setup.reward.func = good
    trainer.train()
    assert same(weights(trainer), whole[0])


def test_a_stream_of_rows_that_fails_is_read_on_from_where_it_stood():
    class Flaky:
        broken = True

        def __iter__(self):
            for index, row in enumerate(rows(5)):
                if index == 3 and self.broken:
                    self.broken = False
                    raise OSError("connection lost")
                yield row

    trainer = make(train_dataset=Flaky())
    with pytest.raises(OSError, match="connection lost"):
        trainer.train()
    trainer.train()
    assert same(weights(trainer), weights(trained(train_dataset=rows(5))))


HANDOVER = "played items are not kept when Ctrl-C comes just then, and are played anew from streams that have moved on"


@pytest.mark.parametrize("at", [1, 2])
def test_ctrl_c_between_playing_and_keeping(whole, at, monkeypatch):
    monkeypatch.setattr(fresh_batches, "interrupt_afterwards", Once(at).before(fresh_batches.interrupt_afterwards))
    assert_goes_on(make(**WHOLE), whole)


def ctrl_c_at_line(count, files):
    """A trace function that sends Ctrl-C before the n-th line that runs in one of these files.

    Not at a line with `with`: there it would also fall between the block and its exit, where Python takes no signals.
    """
    left = [count]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and left[0] > 0 and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace, left


TINY = dict(num_train_epochs=1, train_dataset=rows(3), rollout_buffer_size=2, train_batch_size=1, num_generations=2, max_new_tokens=1, eval_interval=2, eval_dataset=rows(1), logging_steps=1)
FILES = ("comlrl_nb/fresh_batches.py", "comlrl_nb/loop.py", "reinforce/magrpo.py", "trainers/playing.py", "trainers/base.py", "trainers/resumable.py")


def stopped_at(line, updates):
    """A run that Ctrl-C stopped before this line of its own code, and that was started again if it had not made its `updates`; None when it has fewer lines."""
    trainer = make(team(("gpt2", "gpt2")), **TINY)
    trace, left = ctrl_c_at_line(line, FILES)
    before = sys.gettrace()
    try:
        sys.settrace(trace)
        trainer.train()
        return None
    except KeyboardInterrupt:
        sys.settrace(before)
        if trainer.run.update < updates or trainer.source is not None:  # else only the way out was interrupted
            trainer.train()
    finally:
        sys.settrace(before)
    return trainer


def broken_lines(lines):
    plain = trained(team(("gpt2", "gpt2")), **TINY)
    wrong = []
    for line in lines:
        trainer = stopped_at(line, plain.run.update)
        if trainer is None:
            break
        if not same(weights(trainer), weights(plain)) or unclocked(trainer.history) != unclocked(plain.history) or trainer.env_step != plain.env_step:
            wrong.append(line)
    return wrong, line


@pytest.mark.slow
def test_ctrl_c_at_any_line():
    wrong, last = broken_lines(range(1, 5000, 7))
    assert last > 300 and wrong == []


# attributes, saving, loaders

@pytest.mark.parametrize("name", [*FAMILY, "CentralizedMAGRPO"])
def test_attributes(name):
    central = name == "CentralizedMAGRPO"
    agents = team(("gpt2",) if central else ("gpt2", "gpt2"))
    trainer = make(agents, name=name, reference_kl_enabled=True)
    assert all(a is b for a, b in zip(trainer.agents, agents, strict=True)) and trainer.num_agents == len(agents)
    assert len(trainer.optimizers) == len(agents) and trainer.agent_optimizers == trainer.optimizers
    assert trainer.tokenizers == [TOKENIZER] * len(agents) and trainer.tokenizer is TOKENIZER
    assert trainer.critics == [] and trainer.critic_optimizers == [] and trainer.critic_optimizer is None
    assert len(trainer.reference_models) == len(agents) and trainer.env_step == 0 and len(trainer.history) == 0
    assert type(trainer.args) is getattr(reinforce, f"{name}Config") and trainer.algorithm_name == name
    assert trainer.model_name is None and isinstance(trainer.verbose, bool) and trainer.wandb_config is None


@pytest.mark.parametrize("name", FAMILY)
def test_the_default_configuration_has_the_baseline_of_its_name(name):
    trainer = getattr(reinforce, f"{name}Trainer")(agents=team(("gpt2",) * 3), tokenizer=TOKENIZER, reward_func=letters, external_transition=onward, callbacks=[])
    assert trainer.args == getattr(reinforce, f"{name}Config")(num_agents=3) and trainer.args.advantage_mode == FAMILY[name] == trainer.rule.mode
    assert (trainer.args.num_turns, trainer.args.num_generations, trainer.args.rollout_buffer_size, trainer.args.train_batch_size) == (2, 4, 2, 2)


def test_modules_of_the_reference_layout():
    import importlib
    for name in [*FAMILY, "CentralizedMAGRPO"]:
        module = importlib.import_module("comlrl_nb.trainers.reinforce." + ("centralized_magrpo" if name.startswith("Central") else name.lower()))
        for kind in ("Config", "Trainer"):
            assert getattr(module, name + kind) is getattr(reinforce, name + kind)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_saved_models_come_back(tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    trainer = trained(team((kind, kind)))
    trainer.save_model(tmp_path)
    for index, model in enumerate(trainer.agents):
        assert same(weights([model]), weights([AutoModelForCausalLM.from_pretrained(tmp_path / f"agent_{index}")]))
        assert AutoTokenizer.from_pretrained(tmp_path / f"agent_{index}")("say ab")["input_ids"] == TOKENIZER("say ab")["input_ids"]
    again = MAGRPOTrainer(agents=[str(tmp_path / f"agent_{index}") for index in (0, 1)], reward_func=letters, train_dataset=rows(1), args=config(), callbacks=[])
    assert same(weights(trainer), weights(again))
    again.train()


def test_one_identifier_is_loaded_into_distinct_copies(tmp_path):
    micro_model().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    trainer = MAGRPOTrainer(agent_model=str(tmp_path), num_agents=3, reward_func=letters, train_dataset=rows(1), args=config(num_agents=3), callbacks=[])
    assert trainer.model_name == str(tmp_path) and len({model.get_input_embeddings().weight.data_ptr() for model in trainer.agents}) == 3
    trainer.train()
    assert not same(weights(trainer)[:1], weights(trainer)[1:2])  # each learned for itself


def test_number_of_agents_comes_from_any_place():
    agents = team(("gpt2",) * 3)
    common = dict(tokenizer=TOKENIZER, reward_func=letters, callbacks=[], external_transition=onward)
    assert MAGRPOTrainer(agents=agents, num_agents=3, args=config(num_agents=3), **common).num_agents == 3
    assert MAGRPOTrainer(agents=agents, **common).args.num_agents == 3
    assert MAGRPOTrainer(agents=agents[:1], **common).args.num_agents == 1


def test_dataloaders():
    trainer = make(eval_dataset=rows(3), eval_batch_size=2)
    assert list(trainer.get_train_dataloader()) == [[row] for row in rows()] and [len(batch) for batch in trainer.get_eval_dataloader()] == [2, 1]


def test_callbacks_hear_everything():
    heard = []

    class Ear(Callback):
        def on_phase(self, name, total):
            heard.append(("phase", name, total))

        def on_nodes(self, kind, nodes):
            heard.append(("nodes", kind, len(nodes)))

        def on_advance(self, count, metrics):
            heard.append(("advance", count))

        def on_row(self, row):
            heard.append(("row", row["kind"]))

        def on_end(self, history):
            heard.append(("end", len(history)))

    trainer = make(callbacks=[Ear()], eval_dataset=rows(2), eval_interval=8, eval_num_samples=2, train_batch_size=1, num_generations=2)
    trainer.train()
    row = ("row", "train")
    assert heard == [("nodes", "policy", 2), ("nodes", "eval", 2), ("row", "eval"), ("phase", "MAGRPO epoch 1", 3), row, ("advance", 2), row, ("advance", 0), ("nodes", "policy", 1), row,
                     ("advance", 1), ("end", 4)]


def test_a_shown_run_prints_and_a_silent_one_does_not(capsys):
    make(callbacks=None).train()
    assert "env_step" in capsys.readouterr().out
    silent = make(callbacks=None)
    silent.verbose = False
    silent.train()
    assert capsys.readouterr().out == ""


def test_modes_settings_and_the_world_come_back():
    agents = team(("gpt2", "gpt2"), resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    agents[0].train()
    agents[1].transformer.h[0].train()
    modes = [[module.training for module in model.modules()] for model in agents]
    settings, state = [model.generation_config for model in agents], torch.get_rng_state()
    trainer = make(agents, reference_kl_enabled=True, eval_dataset=rows(1), eval_interval=1, num_turns=2, num_generations=2)
    trainer.train(), trainer.rollout(rows()[0]), trainer.step(rows(1)), trainer.evaluate()
    assert modes == [[module.training for module in model.modules()] for model in agents] and torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()
    assert all(model.generation_config is one for model, one in zip(agents, settings)) and all(p.grad is None for model in agents for p in model.parameters())


# a script that was written for comlrl

SCRIPT = '''
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from comlrl.trainers.reinforce import (CentralizedMAGRPOConfig, CentralizedMAGRPOTrainer, MAGRPOConfig, MAGRPOTrainer, MAREINFORCEConfig, MAREINFORCETrainer,
    MARLOOConfig, MARLOOTrainer, MAReMaxConfig, MAReMaxTrainer)

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


def transition(prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None):
    return ["again " + prompt_history_per_agent[i][-1][-5:] for i in range(num_agents)]


def formatter(item, external_prompts=None):
    return "A: " + (external_prompts or item["prompt"])


def logger(agent_completions_turns, batch_items, prompts):
    return [len(turns[0]) for turns in agent_completions_turns[0]]


def aggregator(details, num_turns=1):
    return {"turn_1/length": sum(details) / len(details)}


class Halves:
    def build_prompt(self, batch_item, agent_prompts):
        return " and ".join(agent_prompts)

    def parse_completion(self, completion, batch_item, num_agents):
        return [completion[: len(completion) // 2], completion[len(completion) // 2:]]


fields = dict(num_train_epochs=2, agent_learning_rate=1e-3, num_agents=2, num_generations=2, max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=None,
    eval_interval=1, eval_num_samples=2, rollout_buffer_size=2, train_batch_size=2, early_termination_threshold=100.0)
data = [{"prompt": "first item"}, {"prompt": "second"}]
watching = dict(train_dataset=data, eval_dataset=data, eval_logger=logger, eval_aggregator=aggregator, wandb_config=None)
runs = [(MAGRPOTrainer, MAGRPOConfig, dict(num_turns=2, joint_mode="aligned", reference_kl_enabled=True, reference_kl_coef=0.05)), (MAREINFORCETrainer, MAREINFORCEConfig, dict(num_turns=1)),
    (MARLOOTrainer, MARLOOConfig, dict(num_turns=1, joint_mode="cross")), (MAReMaxTrainer, MAReMaxConfig, dict(num_turns=2, external_prompt_passthrough=True)),
    (CentralizedMAGRPOTrainer, CentralizedMAGRPOConfig, dict(num_turns=1))]
for trainer_class, config_class, more in runs:
    args = config_class(**fields, **more)
    if trainer_class is CentralizedMAGRPOTrainer:
        trainer = trainer_class(centralized_adapter=Halves(), num_agents=2, agents=[model()], tokenizer=tokenizer, reward_func=reward, formatters=formatter, args=args, **watching)
    else:
        trainer = trainer_class(agents=[model(), model()], num_agents=2, tokenizer=tokenizer, reward_func=reward, formatters=[formatter, formatter],
            external_transition=transition if args.num_turns > 1 else None, args=args, **watching)
    trainer.verbose = False
    before = [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]
    trainer.train()
    after = [p.detach() for agent in trainer.agents for p in agent.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after))
    metrics = trainer.evaluate(num_eval_samples=2)
    assert {"eval/turn_1/reward_mean", "eval/turn_1/expected_return"} <= set(metrics), sorted(metrics)
    per_node = 4 if args.joint_mode == "cross" else 2
    assert trainer.env_step == 2 * 2 * (per_node + per_node * 2 * (args.num_turns - 1)), (trainer_class.__name__, trainer.env_step)
    assert len(trainer.agents) == len(trainer.optimizers)
import tempfile, os
with tempfile.TemporaryDirectory() as folder:
    trainer.save_model(folder)
    assert os.listdir(folder), os.listdir(folder)
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
