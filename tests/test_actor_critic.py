"""MAAC and IAC end to end on micro models: gradient, targets, what critics read, buffers, metrics, determinism, interruptions, saving, a script for comlrl."""
import copy
import functools
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

from comlrl_nb.callbacks import Callback
from comlrl_nb.losses import NonFiniteError
from comlrl_nb.models.actor_critic import CausalLMWithValueHead
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer, RolloutSample
from comlrl_nb.trainers.actor_critic import ac_base, judged_play
from comlrl_nb.utils.reward_utils import batched_reward
from actor_critic_runs import (DOUBLE, KINDS, TOKENIZER, TWO_TURNS, Trees, all_optimizers, assert_every_update_follows, assert_step_follows, batches_of, config, const_values, critic,
                               critic_ids, critic_of, distance, everything, forwards, generate_calls, gradients, joint, letters, louder, make, naive_kl, naive_steps, naive_value, onward,
                               other_tokenizer, rows, same, scripted, taken_by, team, token_logprobs, trained, unclocked, value_of, walked, weights)

PLAYS = {"one sample": dict(num_generations=1), "four samples": dict(num_generations=4), "two turns": dict(num_turns=2)}


# the gradient

@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_the_naive_step(kind, play):
    trees = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], **PLAYS[play], discount=0.5, callbacks=[trees]))
    steps = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(3)))
    assert len(steps[0]) == 3 * {"one sample": 1, "four samples": 4, "two turns": 2}[play]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_with_a_penalty_is_the_naive_step(kind):
    trees = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_turns=2, discount=0.5, callbacks=[trees], reference_kl_enabled=True, reference_kl_coef=0.3))
    trainer.step(rows(2))  # leave the references, so that the penalty counts
    trees.heard.clear()
    steps = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(3)))
    assert all(step.kl > 0 for own in steps for step in own)


@pytest.mark.parametrize("clip", [None, 1e-3, 0.2, 50.0])
@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_clipped_updates_follow(critic_type, clip):
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), name="IAC", use_separate_critic=False, value_clip_range=clip, critic_type=critic_type, num_generations=4, rollout_buffer_size=8, train_batch_size=4, agent_learning_rate=3e-2, train_dataset=rows(2)))
    done = assert_every_update_follows(trainer, trainer.train)
    assert [len(samples) for samples in done] == [4, 4]


def test_no_normalisation_and_other_teams():
    for kinds, kind in ((("gpt2", "gpt2", "gpt2"), "MAAC-V"), (("gpt2",), "MAAC-Q"), (("gpt2", "gpt2", "gpt2"), "IAC-Q"), (("gpt2",), "heads-V"), (("gpt2",), "IAC-V")):
        trees = Trees()
        trainer = louder(make(team(kinds, **DOUBLE), **KINDS[kind], num_turns=2, discount=0.9, advantage_normalization=False, callbacks=[trees]))
        assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)))


def test_another_architecture():
    trees = Trees()
    trainer = louder(make(team(("llama", "gpt2"), **DOUBLE), name="IAC", critics=[critic(50, "llama", **DOUBLE), critic(51, **DOUBLE)], callbacks=[trees]))
    assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)), tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_per_agent_are_learned_separately(kind):
    trees = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_turns=2, discount=0.5, callbacks=[trees], reward_func=lambda a, b: [value_of(a), value_of(b) - 1.0]))
    first, second = assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(3)))
    assert [step.target for step in first] != [step.target for step in second]


@pytest.mark.parametrize("kind", KINDS)
def test_minibatches_follow_one_another(kind):
    """Values, targets and advantages stay those of collection while actors and critics move."""
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_turns=2, rollout_buffer_size=6, train_batch_size=2, max_new_tokens=2))
    done = assert_every_update_follows(trainer, trainer.train)
    assert [(samples[0].turn, len(samples)) for samples in done] == [(0, 2), (0, 1), (1, 2), (1, 1)]


def test_gradient_in_pieces_is_the_same(monkeypatch):
    import comlrl_nb.policy_update
    for kind in ("MAAC-Q", "IAC-V", "heads-Q"):
        found = []
        for budget in (2**20, 30):
            monkeypatch.setitem(comlrl_nb.policy_update.POLICY_TOKENS, "cpu", budget)
            trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_generations=4))
            seen = gradients(trainer)
            stats = trainer.step(rows(3))
            found.append(([steps[0] for steps in seen.values()], stats))
        (whole, stats), (split, split_stats) = found
        for a, b in zip(whole, split, strict=True):
            assert distance(list(b.values()), list(a.values())) < 1e-9
        assert stats["critic_loss"] == pytest.approx(split_stats["critic_loss"], rel=1e-9) and stats["agent_1/loss"] == pytest.approx(split_stats["agent_1/loss"], rel=1e-9)


def test_the_gradient_test_notices_a_wrong_target(monkeypatch):
    import comlrl_nb.experience as module
    monkeypatch.setattr(module, "td_targets", lambda rewards, values, discount: rewards + discount * torch.cat([values[1:], values[-1:]]))
    trees = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), num_turns=2, callbacks=[trees]))
    with pytest.raises(AssertionError):
        assert_step_follows(trainer, lambda: trees.of("policy"), lambda: trainer.step(rows(2)))


def test_the_coefficient_weighs_the_critics_loss():
    for kind in ("MAAC-V", "IAC-V", "heads-V"):
        found = {}
        for coef in (0.0, 0.5, 1.0):
            trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], value_loss_coef=coef))
            seen = gradients(trainer)
            stats = trainer.step(rows(2))
            model, optimizer = (trainer.agents[0], trainer.optimizers[0]) if kind == "heads-V" else (trainer.critics[0], trainer.critic_optimizers[0])
            found[coef] = [seen[optimizer][0][p] for p in model.value_head.parameters()] if optimizer in seen and model.value_head.out.weight in seen[optimizer][0] else None, stats["critic_loss"]
        assert found[0.0][0] is None or not any(g.any() for g in found[0.0][0])
        for half, whole in zip(found[0.5][0], found[1.0][0]):
            torch.testing.assert_close(2 * half, whole)
        if kind != "MAAC-V":  # the metric is the loss without its weight
            assert found[0.5][1] == pytest.approx(found[1.0][1], rel=1e-9)


def test_separate_critics_are_never_clipped():
    more = dict(name="IAC", num_generations=4, train_batch_size=2, max_new_tokens=2, train_dataset=rows(2))
    assert same(everything(trained(value_clip_range=1e-6, **more)), everything(trained(value_clip_range=None, **more)))
    more["use_separate_critic"] = False
    assert not same(everything(trained(value_clip_range=1e-6, **more)), everything(trained(value_clip_range=None, **more)))


def test_one_optimizer_for_an_actor_and_its_head():
    trainer = make(name="IAC", use_separate_critic=False, agent_learning_rate=3e-4, critic_learning_rate=7e-4)
    assert trainer.critics == [] and trainer.critic_optimizers == [] and trainer.critic_optimizer is None
    for model, optimizer in zip(trainer.agents, trainer.optimizers, strict=True):
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        assert set(owned) == set(model.parameters()) and set(model.value_head.parameters()) < set(owned) and optimizer.defaults["lr"] == 3e-4


@pytest.mark.parametrize("name, count", [("MAAC", 1), ("IAC", 2)])
def test_learning_rates_of_actors_and_critics(name, count):
    trainer = make(name=name, agent_learning_rate=3e-4, critic_learning_rate=7e-4)
    assert [type(o) for o in all_optimizers(trainer)] == [torch.optim.AdamW] * (2 + count)
    assert [o.defaults["lr"] for o in trainer.critic_optimizers] == [7e-4] * count and trainer.critic_optimizer is trainer.critic_optimizers[0]
    owned = [{p for group in o.param_groups for p in group["params"]} for o in all_optimizers(trainer)]
    assert all(not owned[i] & owned[j] for i in range(len(owned)) for j in range(i))
    assert [o.defaults["lr"] for o in make(name=name, agent_learning_rate=3e-4, critic_learning_rate=None).critic_optimizers] == [3e-4] * count


def test_critics_with_a_rate_of_zero_stay_as_they_are():
    for name in ("MAAC", "IAC"):
        trainer = make(name=name, critic_learning_rate=0.0)
        before = weights(trainer.critics)
        trainer.train()
        assert same(before, weights(trainer.critics)) and not same(weights(team()), weights([model.model for model in trainer.agents]))


# targets and TD errors

def paid(*values):
    order = iter(values * 100)
    return lambda *texts: next(order)


@pytest.mark.parametrize("kind", KINDS)
def test_two_turns_by_hand(kind):
    """r = (1, 2), discount 0.5, V = (0, 4): targets (3, 2), TD errors (3, -2)."""
    trainer = const_values(make(**KINDS[kind], num_turns=2, discount=0.5, reward_func=paid(1.0, 2.0), train_dataset=rows(1), advantage_normalization=False), 0.0, 4.0)
    (first,), (second,) = batches_of(trainer.train)
    for one in first.experiences:
        assert (one.reward, one.value, one.target, one.td_error, one.advantage, one.ret) == (1.0, 0.0, 3.0, 3.0, 3.0, 3.0)
    for one in second.experiences:
        assert (one.reward, one.value, one.target, one.td_error, one.advantage, one.ret) == (2.0, 4.0, 2.0, -2.0, -2.0, 2.0)


@pytest.mark.parametrize("turns, rewards, values, discount, targets", [
    (1, (5.0,), (1e6,), 0.9, (5.0,)), (3, (1.0, 2.0, 3.0), (7.0, 8.0, 9.0), 1.0, (9.0, 11.0, 3.0)), (3, (1.0, 2.0, 3.0), (7.0, 8.0, 9.0), 0.0, (1.0, 2.0, 3.0)),
    (2, (-1.0, 0.25), (0.5, -2.0), 0.9, (-2.8, 0.25))])
def test_targets_of_a_path(turns, rewards, values, discount, targets):
    trainer = const_values(make(num_turns=turns, discount=discount, reward_func=paid(*rewards), train_dataset=rows(1)), *values)
    found = [samples[0].experiences[1] for samples in batches_of(trainer.train)]
    assert [one.target for one in found] == pytest.approx(targets) and [one.td_error for one in found] == pytest.approx([t - v for t, v in zip(targets, values)])
    assert [one.ret for one in found] == pytest.approx([sum(rewards[t:]) for t in range(turns)])


def test_the_last_collected_turn_is_paid_by_its_reward_alone():
    """Item 0 stops after its first turn, item 1 after its second, item 2 plays all three. Huge values of others reach nobody."""
    def reward(first, second, prompts, answer):
        turn = 0 if prompts[0].startswith("say") else int(prompts[0][0])
        return 1.0 if turn == answer[0] else 0.25

    trainer = make(num_turns=3, early_termination_threshold=0.5, reward_func=reward, discount=0.5, advantage_normalization=False, rollout_buffer_size=9)
    const_values(trainer, 1e6, 10.0, 2e6, 20.0, 30.0, 3e6)
    found = {(sample.item["answer"], sample.turn): sample.experiences[0] for samples in batches_of(trainer.train) for sample in samples}
    assert {key: one.target for key, one in found.items()} == {(0, 0): 1.0, (1, 0): 0.25 + 1e6, (1, 1): 1.0, (2, 0): 15.25, (2, 1): 0.25 + 1.5e6, (2, 2): 1.0}


@pytest.mark.parametrize("paid_now, goes_on", [(0.5, True), (0.5 + 1e-9, False), (0.4, True)])
def test_an_episode_ends_strictly_above_the_threshold(paid_now, goes_on):
    trainer = make(reward_func=lambda a, b: paid_now, early_termination_threshold=0.5, num_turns=2, eval_dataset=rows(1))
    assert bool(trainer.rollout(rows()[0]).children) == goes_on
    assert ("eval/turn_2/reward_mean" in trainer.evaluate()) == goes_on
    trainer.train()
    assert trainer.env_step == 3 * (2 if goes_on else 1)


def test_the_threshold_meets_the_mean_over_agents_of_processed_rewards():
    for processor, goes_on in ((None, True), (lambda value: value + 0.25, False)):
        trainer = make(reward_func=lambda a, b: [1.0, 0.0], reward_processor=processor, early_termination_threshold=0.5, num_turns=2)
        assert bool(trainer.rollout(rows()[0]).children) == goes_on


def test_the_penalty_shapes_rewards_and_reaches_earlier_turns():
    """Agent 1 has left its reference: its own r loses coef times its KL, its first target through the return; agent 0's stay, reward and stop do not know it."""
    trainer = const_values(make(team(("gpt2", "gpt2"), **DOUBLE), name="MAAC", num_turns=2, reward_func=lambda a, b: 0.5, reference_kl_enabled=True, reference_kl_coef=0.7, discount=0.5,
                                train_dataset=rows(1), advantage_normalization=False), 3.0)
    with torch.no_grad():
        trainer.agents[1].model.get_output_embeddings().weight.mul_(1.3)
    batches = batches_of(trainer.train)
    for agent in (0, 1):
        first, second = (samples[0].experiences[agent] for samples in batches)
        kl = [one.kl for one in (first, second)]
        assert all(value > 1e-4 for value in kl) if agent else kl == pytest.approx([0.0, 0.0], abs=1e-12)
        assert first.reward == second.reward == 0.5
        assert first.signal == pytest.approx(0.5 - 0.7 * kl[0]) and second.target == second.signal == pytest.approx(0.5 - 0.7 * kl[1])
        assert first.target == pytest.approx(first.signal + 0.5 * 3.0)


def test_rewards_and_early_stopping_know_no_penalty():
    found = []
    for more in ({}, dict(reference_kl_enabled=True, reference_kl_coef=100.0)):
        trainer = make(reward_func=lambda a, b: 0.6, early_termination_threshold=0.5, num_turns=2, **more)
        with torch.no_grad():
            trainer.agents[0].model.get_output_embeddings().weight.mul_(1.3)
        trainer.train()
        found.append((trainer.env_step, [row["turn_1/reward_mean"] for row in trainer.history]))
    assert found[0] == found[1] and found[0][0] == 3


# normalisation

def test_errors_are_scored_per_agent_and_turn_over_the_whole_buffer():
    trainer = louder(make(name="IAC", num_turns=2, rollout_buffer_size=8, train_batch_size=3, train_dataset=rows(4)))
    flat = [sample for samples in batches_of(trainer.train) for sample in samples]
    for agent in (0, 1):
        for turn in (0, 1):
            own = [sample.experiences[agent] for sample in flat if sample.turn == turn]
            errors = [one.td_error for one in own]
            assert len(own) == 4
            assert [one.advantage for one in own] == pytest.approx([(error - fmean(errors)) / pstdev(errors) for error in errors])


def test_a_group_of_one_is_not_normalised():
    trainer = const_values(make(num_turns=2, train_dataset=rows(1), rollout_buffer_size=2, reward_func=paid(1.0, 2.0), discount=0.5), 0.0, 4.0)
    assert [samples[0].experiences[0].advantage for samples in batches_of(trainer.train)] == [3.0, -2.0]


def test_equal_errors_move_no_actor():
    """C25: everybody is paid the same and judged the same: no policy moves, the critics still learn."""
    for kind in ("MAAC-V", "IAC-V"):
        trainer = const_values(make(**KINDS[kind], reward_func=lambda a, b: 0.3, num_train_epochs=2, rollout_buffer_size=3), 0.0)
        before, critics = weights(trainer.agents), weights(trainer.critics)
        trainer.train()
        assert same(before, weights(trainer.agents)) and not same(critics, weights(trainer.critics)) and all(not optimizer.state for optimizer in trainer.optimizers)
        assert {row["agent_0/loss"] for row in trainer.history} == {0.0}


# what the critics read

def read_by(trainer, run):
    """The texts that each critic (or actor with a head) runs over as values, as ids without padding, during `run()`."""
    seen, real = [], ac_base.Critics._known

    def spy(self, index, texts):
        seen.append((index, list(texts)))
        return real(self, index, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ac_base.Critics, "_known", spy)
        run()
    return seen


@pytest.mark.parametrize("kind", ["IAC-V", "IAC-Q", "heads-V", "heads-Q"])
def test_an_own_critic_reads_exactly_its_agents_tokens(kind):
    node, heard = None, Trees()
    trainer = make(**KINDS[kind], num_generations=3, callbacks=[heard], train_dataset=rows(1))
    seen = dict(read_by(trainer, trainer.train))
    node, = heard.of("policy")
    for agent in (0, 1):
        own = node.generations[agent]
        wanted = [own.prompt.token_ids + (one.token_ids if kind.endswith("Q") else ()) for one in own.completions]
        assert seen[agent] == wanted and (wanted[0][-1] == own.prompt.token_ids[-1] if kind.endswith("V") else wanted[0][-1] == own.completions[0].token_ids[-1])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["MAAC-V", "MAAC-Q"])
def test_the_joint_text_has_one_heading_per_agent(kind, count):
    heard = Trees()
    trainer = make(team(("gpt2",) * count), **KINDS[kind], num_generations=2, callbacks=[heard], train_dataset=rows(1), formatters=[lambda item, i=i: f"to {i}: {item['prompt']}" for i in range(count)])
    (index, texts), = read_by(trainer, trainer.train)
    node, = heard.of("policy")
    assert index == 0 and len(texts) == 2 * count  # every agent asks for every sample
    for k in range(2):
        text = TOKENIZER.decode(texts[k][1:])
        assert texts[k][0] == TOKENIZER.bos_token_id and TOKENIZER.bos_token_id not in texts[k][1:] and all(texts[agent * 2 + k] == texts[k] for agent in range(count))
        for agent in range(count):
            assert text.count(f"Agent {agent} reads:") == 1 and text.count(f"to {agent}: say ab") == 1 and text.count(f"Agent {agent} writes:") == (kind == "MAAC-Q")
        written = [generation.completions[k].text for generation in node.generations]
        assert text == joint([prompt.text for prompt in node.prompts], written if kind == "MAAC-Q" else ())


def test_the_joint_text_is_read_in_the_first_agents_tokens():
    first, second = micro_tokenizer(), other_tokenizer()
    for pair in ([first, second], [second, first]):
        heard = Trees()
        trainer = make(tokenizer=pair, critic_type="q", callbacks=[heard], train_dataset=rows(1))
        (_, texts), = read_by(trainer, trainer.train)
        node, = heard.of("policy")
        assert node.prompts[0].text == node.prompts[1].text == "say ab" and node.prompts[0].token_ids != node.prompts[1].token_ids
        assert set(texts) == {tuple(pair[0](joint(["say ab"] * 2, [generation.completions[0].text for generation in node.generations]))["input_ids"])}


def test_own_critics_of_agents_with_different_tokenizers():
    heard = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), name="IAC", critic_type="q", tokenizer=[micro_tokenizer(), other_tokenizer()], callbacks=[heard]))
    assert_step_follows(trainer, lambda: heard.of("policy"), lambda: trainer.step(rows(2)))


def test_the_prompt_really_used_is_what_the_critics_read():
    for name in ("MAAC", "IAC"):
        heard = Trees()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make(name=name, max_prompt_length=4, callbacks=[heard], train_dataset=rows(1))
            seen = read_by(trainer, trainer.train)
        node, = heard.of("policy")
        assert len(node.prompts[0].token_ids) == 4
        wanted = node.prompts[0].token_ids if name == "IAC" else tuple(TOKENIZER(joint([prompt.text for prompt in node.prompts]))["input_ids"])
        assert seen[0][1][0] == wanted


def test_another_completion_leaves_v_and_moves_q():
    for kind in KINDS:
        found = []
        for written in ([10, 11, 2], [12, 13, 14]):
            agents = team()
            for model in agents:
                scripted(model, written)
            trainer = louder(make(agents, **KINDS[kind], train_dataset=rows(1)))
            (sample,), = batches_of(trainer.train)
            found.append([one.value for one in sample.experiences])
        assert (found[0] == found[1]) == kind.endswith("V"), kind


@pytest.mark.parametrize("kind", KINDS)
def test_padding_side_and_padding_token_change_nothing(kind):
    """C43: the padding token is the end token, which also stands inside a prompt; prompts differ in length."""
    found = []
    for side, same_token in (("left", False), ("right", False), ("left", True), ("right", True)):
        tokenizer = micro_tokenizer()
        tokenizer.padding_side = side
        if same_token:
            tokenizer.pad_token = tokenizer.eos_token
        data = [{"prompt": "say <eos> ab", "answer": 0}, {"prompt": "a<eos>", "answer": 1}, {"prompt": "say abababababab", "answer": 2}]
        trainer = louder(make(**KINDS[kind], tokenizer=tokenizer, num_turns=2, train_dataset=data, rollout_buffer_size=6))
        samples = [sample for batch in batches_of(trainer.train) for sample in batch]
        found.append(([[(one.value, one.target) for one in sample.experiences] for sample in samples], everything(trainer)))
        assert TOKENIZER.eos_token_id in samples[0].experiences[0].prompt.token_ids + samples[1].experiences[0].prompt.token_ids
    assert all(found[0][0] == other[0] and same(found[0][1], other[1]) for other in found[1:])


def test_values_are_those_of_texts_read_alone():
    for kind in KINDS:
        trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_turns=2, train_dataset=[{"prompt": "a" * n} for n in (1, 9, 30)], rollout_buffer_size=6))
        with torch.no_grad():
            twins = copy.deepcopy([critic_of(trainer, agent) for agent in (0, 1)])
            for batch in batches_of(trainer.train):
                for sample in batch:
                    for agent, one in enumerate(sample.experiences):
                        assert one.value == pytest.approx(naive_value(twins[agent], one.critic_ids).item(), rel=1e-9)


@pytest.mark.parametrize("kind, passes", [("MAAC-V", 3), ("MAAC-Q", 3), ("IAC-V", 2), ("IAC-Q", 2)])
def test_every_distinct_text_is_run_once(kind, passes):
    """One item, four different samples: a V critic runs once over its prompt to collect and once per step; a Q critic at most over four texts."""
    agents = team()
    for model in agents:
        scripted(model, [10, 11, 2], [12, 13, 2], [14, 15, 2], [16, 17, 2])
    trainer = make(agents, **KINDS[kind], num_generations=4, train_dataset=rows(1), rollout_buffer_size=4)
    calls = forwards(trainer.critics[0].model)
    texts = set(read_by(trainer, trainer.train)[0][1])
    tokens = sum(len(row) for call in calls for row in call)
    assert len(texts) == (1 if kind.endswith("V") else 4)
    assert tokens == passes * len(*texts) if kind.endswith("V") else tokens <= passes * sum(map(len, texts))


def test_the_same_item_twice_is_judged_once():
    trainer = make(train_dataset=[{"prompt": "same"}] * 3, rollout_buffer_size=3)
    calls = forwards(trainer.critics[0].model)
    trainer.train()
    assert [len(call) for call in calls] == [1, 1, 1]


def test_nothing_is_computed_that_nobody_reads(monkeypatch):
    """No log-probability at collection without a callback, no logits of a critic but after a shared beginning, no critic in an evaluation without a callback."""
    trainer = make(team(("gpt2", "gpt2")), eval_dataset=rows(2))
    heads = []
    trainer.critics[0].model.get_output_embeddings().register_forward_hook(lambda module, given, out: heads.append(given[0].shape[:2]))
    calls = forwards(trainer.critics[0].model)
    trainer.evaluate()
    assert calls == []
    graded = []
    monkeypatch.setattr(judged_play, "completion_logprobs", lambda *args, **more: graded.append(1))
    trainer.train()
    assert all(tuple(shape) == (1, 1) for shape in heads) and graded == []


# the buffer

@pytest.mark.parametrize("count, num, turns, capacity, size, expected", [
    (5, 1, 1, 2, None, [2, 2, 1]), (5, 1, 1, 8, 2, [2, 2, 1]), (3, 1, 1, 2, 8, [2, 1]), (3, 4, 1, 8, None, [8, 4]), (2, 3, 1, 4, 4, [4, 2]), (2, 3, 1, 2, None, [2, 1] * 2),
    (3, 1, 2, 4, None, [2, 2, 1, 1]), (2, 1, 3, 3, 3, [1] * 6), (3, 1, 2, 8, 2, [2, 1, 2, 1])])
def test_sizes_of_the_updates(count, num, turns, capacity, size, expected):
    """Whole items until there are at least `rollout_buffer_size` samples; then minibatches of one turn each; leftovers at the end of an epoch."""
    trainer = make(train_dataset=rows(count), rollout_buffer_size=capacity, train_batch_size=size, num_train_epochs=2, num_generations=num, num_turns=turns, max_new_tokens=1)
    found = batches_of(trainer.train)
    assert [len(samples) for samples in found] == expected * 2
    assert all(len({sample.turn for sample in samples}) == 1 for samples in found) and trainer.run.update == len(found)
    half = len(expected)
    for epoch in (found[:half], found[half:]):
        assert sorted((s.item["answer"], s.turn, s.sample) for samples in epoch for s in samples) == sorted((i, t, k) for i in range(count) for t in range(turns) for k in range(num))
    assert trainer.env_step == 2 * count * num * turns == 2 * count * trainer.plan().joint_responses_per_item


def test_train_batch_size_follows_the_buffer():
    for name in ("MAAC", "IAC"):
        assert config(name, rollout_buffer_size=5).train_batch_size == 5 and config(name, rollout_buffer_size=5, train_batch_size=3).train_batch_size == 3


def test_early_stops_fill_the_buffer_with_fewer_turns():
    def reward(first, second, answer):
        return 1.0 if answer[0] % 2 else 0.1

    trainer = make(reward_func=reward, early_termination_threshold=0.9, train_dataset=rows(6), rollout_buffer_size=4, num_turns=2)
    found = batches_of(trainer.train)
    assert sorted((s.item["answer"], s.turn) for samples in found for s in samples) == sorted([(i, 0) for i in range(6)] + [(i, 1) for i in (0, 2, 4)])
    assert trainer.env_step == 9
    assert [(samples[0].turn, len(samples)) for samples in found] == [(0, 3), (1, 2), (0, 3), (1, 1)]  # 3 + 1 items give 3 samples, one item more makes 5


def test_env_step_counts_the_calls_of_the_reward_in_training():
    for kind, more in (("MAAC-V", dict()), ("heads-Q", dict(num_generations=3)), ("IAC-V", dict(num_turns=3))):
        calls = []
        trainer = make(**KINDS[kind], reward_func=lambda a, b: calls.append(1) or letters(a, b), max_new_tokens=1, eval_dataset=rows(1), **more)
        trainer.train()
        assert trainer.env_step == len(calls)


@pytest.mark.parametrize("interval, expected", [(0, []), (1, [0, 1, 2, 3, 4, 5]), (3, [0, 1, 3, 4]), (4, [0, 2, 3, 5])])
def test_evaluations_count_items_from_zero_in_every_epoch(interval, expected):
    """Five items, two per update: updates 0, 1, 2 take items 0-1, 2-3, 4."""
    trainer = trained(train_dataset=rows(5), num_train_epochs=2, eval_interval=interval, eval_dataset=rows(1), max_new_tokens=1)
    assert [row["update"] for row in trainer.history if row["kind"] == "eval"] == expected


@pytest.mark.parametrize("steps, expected", [(1, [2, 4, 6, 8]), (3, [2, 6, 8]), (1000, [2, 8])])
def test_logging_steps_are_the_least_distance_of_rows(steps, expected):
    trainer = trained(logging_steps=steps, train_dataset=rows(8), max_new_tokens=2)
    assert [row["env_step"] for row in trainer.history if row["kind"] == "train"] == expected


@pytest.mark.parametrize("capacity, num, turns, expected", [(2, 1, 1, [2, 2, 1]), (100, 1, 1, [5]), (4, 2, 1, [4, 4, 2]), (4, 1, 2, [2, 2, 2, 2, 1, 1])])
def test_items_that_fill_a_buffer_are_generated_together(capacity, num, turns, expected):
    trainer = make(train_dataset=rows(5), rollout_buffer_size=capacity, num_turns=turns, num_generations=num, max_new_tokens=2)
    calls, other = generate_calls(trainer.agents[0].model), generate_calls(trainer.agents[1].model)
    trainer.train()
    assert calls == other == expected


def test_minibatches_are_shuffled_by_the_seed():
    def order(seed):
        return [s.item["answer"] for samples in batches_of(make(train_dataset=rows(8), rollout_buffer_size=8, train_batch_size=4, seed=seed, max_new_tokens=1).train) for s in samples]

    assert order(0) == order(0) != list(range(8)) and order(1) != order(0) and sorted(order(1)) == list(range(8))


def test_items_come_in_order_unless_shuffled():
    def order(shuffle):
        heard = Trees()
        trained(shuffle=shuffle, train_dataset=rows(8), max_new_tokens=1, num_train_epochs=2, rollout_buffer_size=8, callbacks=[heard])
        return [node.item["answer"] for node in heard.of("policy")]

    assert order(False) == [*range(8), *range(8)] != order(True) and sorted(order(True)[:8]) == list(range(8))


def test_the_data_loader_gives_one_row_at_a_time():
    trainer = make(eval_dataset=rows(3), eval_batch_size=2)
    assert [len(batch) for batch in trainer.get_train_dataloader()] == [1, 1, 1] and [len(batch) for batch in trainer.get_eval_dataloader()] == [2, 1]


class Stream:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


def test_streams_have_no_length_and_train_all_the_same():
    listed, streamed = (trained(train_dataset=data, num_train_epochs=2, max_new_tokens=1) for data in (rows(5), Stream(5)))
    assert same(everything(listed), everything(streamed)) and listed.run.update == streamed.run.update == 6


# numbers of a row

def row_of(stats, samples, coef=0.0):
    """What the samples of one update say, by hand."""
    found = {}
    for turn in sorted({sample.turn for sample in samples}):
        group = [sample for sample in samples if sample.turn == turn]
        for agent in range(len(group[0].experiences)):
            own = [sample.experiences[agent] for sample in group]
            errors, targets = [one.target - one.value for one in own], [one.target for one in own]
            name = f"agent_{agent}/turn_{turn + 1}/"
            found |= {f"{name}td_error_mean": fmean(errors), f"{name}td_error_std": pstdev(errors), f"{name}td_error_median": float(np.quantile(errors, 0.5)),
                      f"{name}td_error_q05": float(np.quantile(errors, 0.05)), f"{name}td_error_q25": float(np.quantile(errors, 0.25)), f"{name}td_error_q75": float(np.quantile(errors, 0.75)),
                      f"{name}td_error_q95": float(np.quantile(errors, 0.95)), f"{name}advantage_mean": fmean(one.advantage for one in own), f"{name}advantage_std": pstdev([one.advantage for one in own]),
                      f"{name}advantage_median": float(np.quantile([one.advantage for one in own], 0.5)), f"{name}value_mean": fmean(one.value for one in own), f"{name}target_mean": fmean(targets),
                      f"{name}return_mean": fmean(one.ret for one in own)}
            if pstdev(targets):
                found[f"{name}explained_variance"] = 1 - pstdev(errors)**2 / pstdev(targets)**2
        everyone = [one for sample in group for one in sample.experiences]
        found |= {f"turn_{turn + 1}/reward_mean": fmean(one.reward for one in everyone), f"turn_{turn + 1}/expected_return": fmean(one.ret for one in everyone)}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_row(kind):
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], num_turns=2, discount=0.5, reference_kl_enabled=True, reference_kl_coef=0.3, reward_func=lambda a, b: [value_of(a), value_of(b)]))
    trainer.step(rows(1))
    twins, seen, found = copy.deepcopy((trainer.agents, trainer.critics)), gradients(trainer), {}
    samples, = batches_of(lambda: found.update(trainer.step(rows(3))))
    for name, value in row_of(found, samples).items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for turn in (0, 1):
        own = [one for sample in samples if sample.turn == turn for one in sample.experiences]
        assert found[f"turn_{turn + 1}/reference_kl_mean"] == pytest.approx(fmean(one.kl for one in own)) and found[f"turn_{turn + 1}/reference_kl_penalty_mean"] == pytest.approx(0.3 * fmean(one.kl for one in own))
        for name in ("td_error_mean", "td_error_std", "td_error_q95", "advantage_mean", "value_mean", "return_mean", "explained_variance"):
            assert found[f"turn_{turn + 1}/{name}"] == pytest.approx(fmean(found[f"agent_{i}/turn_{turn + 1}/{name}"] for i in (0, 1)))
    ghosts = twins[1] or twins[0]
    for agent in (0, 1):
        own = [sample.experiences[agent] for sample in samples]
        assert found[f"agent_{agent}/loss"] == pytest.approx(-fmean(one.advantage * token_logprobs(twins[0][agent].model, one.prompt.token_ids, one.completion.token_ids).sum().item() for one in own))
        norm = torch.stack([g.square().sum() for g in seen[trainer.optimizers[agent]][0].values()]).sum().sqrt().item()
        assert found[f"agent_{agent}/grad_norm"] == pytest.approx(norm, rel=1e-9)
        if not (kind.startswith("MAAC") and agent):  # a shared critic has moved before the second agent's loss
            critic = ghosts[0 if kind.startswith("MAAC") else agent]
            assert found[f"agent_{agent}/critic_loss"] == pytest.approx(fmean((naive_value(critic, one.critic_ids).item() - one.target)**2 for one in own), rel=1e-9)
        if trainer.critics:
            used = seen[trainer.critic_optimizers[0]][agent] if kind.startswith("MAAC") else seen[trainer.critic_optimizers[agent]][0]
            norm = torch.stack([g.square().sum() for g in used.values()]).sum().sqrt().item()
            assert found[f"agent_{agent}/critic_grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert found[f"agent_{agent}/completion_length"] == pytest.approx(fmean(len(one.completion.token_ids) for one in own))
    for name in ("loss", "critic_loss", "grad_norm", *(["critic_grad_norm"] if trainer.critics else [])):
        assert found[name] == pytest.approx(fmean(found[f"agent_{i}/{name}"] for i in (0, 1)))
    row = trainer.history.rows[-1]
    assert (row["kind"], row["update"], row["env_step"]) == ("train", 2, 2 + 6) and row["critic_loss"] == found["critic_loss"]
    assert all(math.isfinite(value) for value in found.values())


def test_a_hand_example_of_the_metrics():
    """Two items, V = 0 and 1, r = 2 and 1: errors 2 and 0, targets 2 and 1."""
    trainer = const_values(make(reward_func=paid(2.0, 1.0), train_dataset=rows(2)), 0.0, 1.0)
    row = trainer.train().rows[0]
    hand = {"td_error_mean": 1.0, "td_error_std": 1.0, "td_error_median": 1.0, "td_error_q05": 0.1, "td_error_q25": 0.5, "td_error_q75": 1.5, "td_error_q95": 1.9, "value_mean": 0.5, "target_mean": 1.5,
            "return_mean": 1.5, "advantage_mean": 0.0, "advantage_std": 1.0, "explained_variance": 1 - 1.0 / 0.25}
    for name, value in hand.items():
        for prefix in ("turn_1/", "agent_0/turn_1/", "agent_1/turn_1/"):
            assert row[prefix + name] == pytest.approx(value, abs=1e-12), prefix + name
    assert row["turn_1/reward_mean"] == row["turn_1/expected_return"] == 1.5


def test_the_expected_return_is_not_discounted():
    for discount in (0.0, 0.5, 1.0):
        stats = const_values(make(num_turns=3, discount=discount, reward_func=lambda a, b: 1.0), 5.0).step(rows(2))
        assert [stats[f"turn_{turn}/expected_return"] for turn in (1, 2, 3)] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_metric_keys(kind):
    trainer = trained(**KINDS[kind], num_turns=2, eval_dataset=rows(1), eval_interval=2, reference_kl_enabled=True, max_new_tokens=1)
    found = {key for row in trainer.history for key in row}
    for turn in (1, 2):
        assert {f"{prefix}turn_{turn}/{key}" for prefix in ("", "eval/") for key in ("reward_mean", "expected_return")} <= found
        assert {f"{prefix}turn_{turn}/{key}" for prefix in ("", "agent_0/", "agent_1/") for key in ("td_error_mean", "td_error_std", "td_error_q05", "value_mean", "return_mean", "target_mean", "advantage_std")} <= found
        assert {f"turn_{turn}/reference_kl_mean", f"turn_{turn}/reference_kl_penalty_mean"} <= found
    assert {"loss", "critic_loss", "grad_norm", "entropy", "completion_length", "finished_fraction", "tokens_per_second", "seconds/rollout", "seconds/update", "agent_0/loss", "agent_1/critic_loss",
            "agent_0/grad_norm", "agent_0/entropy", "agent_0/completion_length", "agent_1/finished_fraction", "eval/completion_length"} <= found
    assert ("critic_grad_norm" in found) == bool(trainer.critics)
    assert all(isinstance(value, str) or math.isfinite(value) for row in trainer.history for value in row.values())


def test_critic_losses_and_gradient_norms_per_turn():
    found = {name for row in make(num_turns=2).train().rows for name in row}
    assert {f"agent_{i}/turn_{t}/{name}" for i in (0, 1) for t in (1, 2) for name in ("critic_loss", "grad_norm", "critic_grad_norm")} <= found


def test_a_plain_run_has_no_key_of_a_penalty():
    assert not any("reference_kl" in key for row in trained().history for key in row)


# the metrics callback

def heard_samples(kind="MAAC-V", run=lambda trainer: trainer.train(), **more):
    calls = []
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), **KINDS[kind], metrics_callback=lambda samples: calls.append(samples) or {}, **{"rollout_buffer_size": 100, **more}))
    twins = copy.deepcopy((trainer.agents, trainer.critics))
    run(trainer)
    return trainer, twins, calls


@pytest.mark.parametrize("kind, play", [("MAAC-V", "two turns"), ("MAAC-Q", "four samples"), ("IAC-V", "four samples"), ("IAC-Q", "two turns"), ("heads-V", "two turns"), ("heads-Q", "one sample")])
def test_what_a_metrics_callback_gets(kind, play):
    trees = Trees()
    trainer, (agents, critics), calls = heard_samples(kind, train_dataset=rows(2), discount=0.5, callbacks=[trees], **PLAYS[play])
    nodes, turns, num = trees.of("policy"), trainer.args.num_turns, trainer.args.num_generations
    assert len(calls) == 2 and all(isinstance(samples, list) and {type(one) for one in samples} == {RolloutSample} and len(samples) == 2 * turns * num for samples in calls)
    for tree, samples in zip(nodes, calls):
        keys = [(one.metadata["turn_idx"], one.agent_idx, one.metadata["generation_idx"]) for one in samples]
        assert keys == [(t, agent, k) for t in range(turns) for agent in (0, 1) for k in range(num)]
        path = list(tree.walk())
        for one, (t, agent, k) in zip(samples, keys):
            node = path[t]
            prompt, completion = node.generations[agent].prompt, node.generations[agent].completions[k]
            assert (one.prompt, one.completion) == (prompt.text, completion.text) and tuple(one.full_input_ids.tolist()) == prompt.token_ids + completion.token_ids
            assert one.attention_mask.tolist() == [1] * len(one.full_input_ids) and (one.prompt_len, one.response_len) == (len(prompt.token_ids), len(completion.token_ids))
            assert one.metadata["batch_item"] == node.item and one.normalized_advantage is None
            value = naive_value(critic_of(trainer, agent, critics or agents), critic_ids(trainer, node, agent, k)).item()
            following = naive_value(critic_of(trainer, agent, critics or agents), critic_ids(trainer, path[t + 1], agent, k)).item() if t + 1 < turns else 0.0
            reward = node.joints[k].reward
            wanted = {"old_logprob": token_logprobs(agents[agent].model, prompt.token_ids, completion.token_ids).sum().item(), "old_value": value, "reward": reward,
                      "returns": sum(n.joints[k].reward for n in path[t:]), "advantage": reward + 0.5 * following - value}
            for name, number in wanted.items():
                tensor = getattr(one, name)
                assert tensor.shape == (1,) and not tensor.requires_grad and tensor.device.type == "cpu" and tensor.item() == pytest.approx(number, rel=1e-4, abs=1e-5), name
            assert one.metadata["value_target"].item() == pytest.approx(reward + 0.5 * following, rel=1e-5)
            assert "reference_kl" not in one.metadata


def test_a_penalty_is_told_to_the_callback():
    trainer, _, calls = heard_samples("IAC-V", run=lambda trainer: (trainer.step(rows(2)), trainer.step(rows(1))), reference_kl_enabled=True, reference_kl_coef=0.3, reward_func=lambda a, b: 1.0)
    one = calls[-1][0]
    assert one.metadata["reference_kl"] > 0 and one.metadata["reference_kl_penalty"] == pytest.approx(0.3 * one.metadata["reference_kl"])
    assert one.reward.item() == 1.0 and one.metadata["value_target"].item() == pytest.approx(1.0 - one.metadata["reference_kl_penalty"])


def test_the_callback_hears_the_penalty_in_an_evaluation_too():
    calls = []
    trainer = make(name="IAC", metrics_callback=lambda samples: calls.append(samples) or {}, reference_kl_enabled=True, reference_kl_coef=0.3, eval_dataset=rows(2))
    with torch.no_grad():
        for model in trainer.agents:
            model.model.get_output_embeddings().weight.mul_(1.3)
    trainer.evaluate()
    for one in calls[0]:
        kl = naive_kl(trainer.agents[one.agent_idx].model, trainer.reference_models[one.agent_idx], one.full_input_ids[:one.prompt_len].tolist(), one.full_input_ids[one.prompt_len:].tolist())
        assert one.metadata["reference_kl"] == pytest.approx(kl, rel=1e-4) and kl > 0


def test_scalars_are_kept_and_the_rest_is_dropped():
    given = {"float": 1.5, "int": 2, "flag": True, "numpy": np.float32(0.25), "tensor": torch.tensor(3.0), "one": torch.tensor([4.0]), "text": "5.0", "list": [1.0], "none": None,
             "many": torch.tensor([1.0, 2.0]), "array": np.ones(2), "dict": {}, "complex": 1j, 7: 8}
    kept = {"float": 1.5, "int": 2.0, "flag": 1.0, "numpy": 0.25, "tensor": 3.0, "one": 4.0, "7": 8.0}
    trainer = make(metrics_callback=lambda samples: given, eval_dataset=rows(1), train_dataset=rows(2))
    row, stats = trainer.train().rows[-1], trainer.evaluate()
    for prefix, found in (("", row), ("eval/", stats)):
        assert {name: found[prefix + name] for name in kept} == kept
        assert not any(prefix + name in found for name in ("text", "list", "none", "many", "array", "dict", "complex"))


def test_callback_metrics_are_means_over_the_items_of_a_row():
    trainer = make(metrics_callback=lambda samples: {"own": samples[0].metadata["batch_item"]["answer"], "odd": 1.0} if samples[0].metadata["batch_item"]["answer"] else {"own": 0.0},
                   train_dataset=rows(4), eval_dataset=rows(3), eval_num_samples=3)
    assert [row["own"] for row in trainer.train().rows] == [0.5, 2.5] and trainer.evaluate()["eval/own"] == 1.0


@pytest.mark.parametrize("wrong", [None, 3.0, [("a", 1)], "text"])
def test_a_callback_that_returns_no_mapping(wrong):
    trainer = make(metrics_callback=lambda samples: wrong, eval_dataset=rows(1))
    before = everything(trainer)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="metrics_callback must return a dictionary"):
            run()
    assert same(before, everything(trainer)) and trainer.env_step == 0


def test_an_error_in_the_callback_surfaces_and_training_can_go_on():
    broken = [True]

    def callback(samples):
        if broken[0] and samples[0].metadata["batch_item"]["answer"] == 2:
            raise KeyError("mine")
        return {"own": samples[0].reward.item()}

    trainer = make(metrics_callback=callback)
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    broken[0] = False
    trainer.train()
    whole = trained(metrics_callback=callback)
    assert same(everything(trainer), everything(whole)) and unclocked(trainer.history) == unclocked(whole.history)


def test_a_callback_changes_nothing():
    for kind in ("MAAC-Q", "heads-V"):
        with_one, without = (trained(**KINDS[kind], metrics_callback=each, num_turns=2, max_new_tokens=1, rollout_buffer_size=6) for each in (lambda samples: {"x": 1.0}, None))
        assert same(everything(with_one), everything(without))


# evaluation

@pytest.mark.parametrize("kind", ["MAAC-V", "IAC-Q", "heads-V"])
def test_evaluation_changes_nothing(kind):
    held_out, found = [{"prompt": "say c", "answer": 9}] * 3, []
    for more in ({}, dict(eval_dataset=held_out, eval_interval=1, metrics_callback=lambda samples: {"own": 1.0}), dict(eval_dataset=held_out, eval_interval=2, eval_num_samples=1)):
        trainer = trained(**KINDS[kind], shuffle=True, max_new_tokens=1, num_turns=2, rollout_buffer_size=4, **more)
        found.append((everything(trainer), trainer.env_step, [row.get("loss") for row in trainer.history if row["kind"] == "train"]))
    assert all(same(found[0][0], other[0]) and found[0][1:] == other[1:] for other in found[1:])


def test_evaluation_leaves_modes_gradients_and_clocks_alone():
    trainer = make(name="IAC", metrics_callback=lambda samples: {}, eval_dataset=rows(2))
    for model in (*trainer.agents, *trainer.critics):
        model.train()
    before = everything(trainer)
    trainer.evaluate()
    assert all(model.training and model.model.training and model.value_head is not False for model in (*trainer.agents, *trainer.critics)) and torch.is_grad_enabled()
    assert same(before, everything(trainer)) and all(p.grad is None for model in (*trainer.agents, *trainer.critics) for p in model.parameters()) and trainer.env_step == trainer.run.update == 0
    trainer.train()
    assert all(model.training for model in (*trainer.agents, *trainer.critics))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_never_touches_values_or_updates(kind):
    """C20: in eval mode everywhere, whatever the models' modes and dropout rates are."""
    found = []
    for drop in (0.0, 0.5):
        agents = [micro_model(i, "gpt2", resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop) for i in (0, 1)]
        own = {} if kind.startswith("heads") else dict(critics=[micro_model(50 + i, "gpt2", resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop) for i in range(1 if kind.startswith("MAAC") else 2)])
        trainer = make(agents, **KINDS[kind], **own)
        for model in (*trainer.agents, *trainer.critics):
            model.train()
        trainer.train()
        found.append(everything(trainer))
    assert same(*found)


def test_evaluation_plays_one_path_for_each_of_the_first_rows():
    seen, trees = [], Trees()
    trainer = make(reward_func=lambda a, b, answer: seen.append(answer[0]) or 0.5, eval_dataset=rows(6), eval_num_samples=4, eval_batch_size=3, callbacks=[trees], num_turns=2)
    stats = trainer.evaluate()
    assert seen == [0, 1, 2, 0, 1, 2, 3, 3] and [[node.turn for node in tree.walk()] for tree in trees.of("eval")] == [[0, 1]] * 4
    assert stats["eval/turn_1/expected_return"] == 1.0 and stats["eval/turn_2/reward_mean"] == 0.5
    assert trainer.evaluate(0) == {} and trainer.env_step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_evaluation_of_no_items_with_a_callback(dtype):
    for kind in ("MAAC-V", "IAC-V", "heads-V"):
        assert make(team(("gpt2", "gpt2"), dtype), **KINDS[kind], metrics_callback=lambda samples: {"x": 1.0}, eval_dataset=rows(2)).evaluate(0) == {}


# verbs

@pytest.mark.parametrize("kind", ["MAAC-Q", "IAC-V", "heads-Q"])
def test_rollout_is_a_look(kind):
    looked, plain = (make(**KINDS[kind], num_turns=2, reference_kl_enabled=True) for _ in range(2))
    before = everything(looked)
    tree = looked.rollout(rows()[0])
    nodes = list(tree.walk())
    assert [node.turn for node in nodes] == [0, 1] and all(len(node.returns) == 1 and [len(own) for own in node.advantages] == [1, 1] == [len(own) for own in node.kl] for node in nodes)
    assert same(before, everything(looked)) and looked.env_step == looked.run.update == len(looked.history) == 0
    plain.train(), looked.train()
    looked.rollout(rows()[0])
    assert same(everything(looked), everything(plain)) and unclocked(looked.history) == unclocked(plain.history)


def test_rollout_shows_td_errors_and_returns():
    trainer = const_values(make(num_turns=2, discount=0.5, reward_func=paid(1.0, 2.0)), 0.0, 4.0)
    tree = trainer.rollout(rows()[0])
    assert tree.returns == (3.0,) and tree.advantages == ((3.0,), (3.0,)) and tree.children[0].returns == (2.0,) and tree.children[0].advantages == ((-2.0,), (-2.0,))
    assert len(make().rollout(rows()[0], 5).joints) == 5


@pytest.mark.parametrize("num", [0, -1, True, 1.5, "3"])
def test_rollout_refuses_a_wrong_number(num):
    with pytest.raises(ValueError, match="num.*at least 1"):
        make().rollout(rows()[0], num)


def test_several_samples_of_several_turns_are_refused():
    with pytest.raises(ValueError, match="num: 1 is needed with num_turns=2"):
        make(num_turns=2).rollout(rows()[0], 2)


def test_step_on_nothing_does_nothing():
    trainer = make()
    assert trainer.step([]) == {} and trainer.step(iter([])) == {} and trainer.run.update == 0
    first, second = make(), make()
    first.step(rows(2)), second.step(row for row in rows(2))
    assert same(everything(first), everything(second)) and first.source is None


def test_train_can_be_called_again():
    trainer = make(max_new_tokens=2)
    history = trainer.train()
    updates, steps = trainer.run.update, trainer.env_step
    assert history is trainer.history is trainer.train() and (trainer.run.update, trainer.env_step) == (2 * updates, 2 * steps)


def test_further_keywords_for_generate():
    seen, trainer = [], make(num_turns=2, max_new_tokens=2)
    for model in trainer.agents:
        real = model.model.generate
        model.model.generate = lambda real=real, **keywords: seen.append(keywords.get("repetition_penalty")) or real(**keywords)
    trainer.train(repetition_penalty=1.5)
    trainer.rollout(rows()[0])
    assert set(seen[:-4]) == {1.5} and set(seen[-4:]) == {None}


def test_a_generate_replaced_on_an_agent_is_seen():
    trainer, seen = make(), []
    real = trainer.agents[0].generate
    trainer.agents[0].generate = lambda *args, **more: seen.append(1) or real(*args, **more)
    trainer.rollout(rows()[0])
    assert seen


def test_the_plan_is_what_a_run_does():
    for num, turns in ((1, 1), (4, 1), (1, 3)):
        trainer = make(num_generations=num, num_turns=turns, max_new_tokens=1)
        plan, calls = trainer.plan(), generate_calls(trainer.agents[0].model)
        trainer.train()
        assert trainer.env_step == 3 * plan.joint_responses_per_item and sum(calls) == 3 * plan.completions_per_item and f"{plan.joint_responses_per_item}" in str(plan)


# determinism

@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_run(kind):
    """New value heads too: they are drawn from the run's seed, not from the global one."""
    found = []
    for seed, global_seed in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(global_seed)
        trainer = make(**KINDS[kind], seed=seed, max_new_tokens=2, train_dataset=rows(2))
        start = everything(trainer)
        trainer.train()
        found.append((start, everything(trainer), unclocked(trainer.history)))
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1]) and found[0][2] == found[1][2] and not same(found[0][0], found[2][0])


def test_the_global_seed_matters_only_without_a_seed_and_is_left_alone():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(everything(trained(seed=None, max_new_tokens=2)))
    assert same(found[0], found[1]) and not same(found[0], found[2])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trained(name="IAC", max_new_tokens=2)
    assert torch.equal(before, torch.get_rng_state())


# several devices

def on_two(kind, **more):
    where = dict(parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])
    if not kind.startswith("heads"):
        where["critic_devices"] = ["cpu:1"] if kind.startswith("MAAC") else ["cpu:0", "cpu:1"]
    return {**where, **more}


@pytest.mark.parametrize("kind", KINDS)
def test_mp_on_two_devices_equals_one(kind):
    more = dict(**KINDS[kind], num_turns=2, eval_interval=2, eval_dataset=rows(1), reference_kl_enabled=True, metrics_callback=lambda samples: {"x": samples[-1].advantage}, max_new_tokens=1)
    one, two = trained(**more), trained(**more, **on_two(kind))
    assert two.team.workers.parallel and list(map(str, two.agent_devices)) == ["cpu:0", "cpu:1"]
    assert same(everything(one), everything(two)) and unclocked(one.history) == unclocked(two.history)


def test_mp_one_critic_object_for_all_equals_one_device():
    one, two = (trained(name="IAC", critic_model=critic(), critics=None, num_generations=2, max_new_tokens=2, **where) for where in ({}, on_two("IAC-V", critic_devices="cpu:0")))
    assert same(everything(one), everything(two))


def test_one_critic_object_cannot_live_on_two_devices():
    with pytest.raises(ValueError, match="critic_devices.*cpu:0 and cpu:1"):
        make(name="IAC", critic_model=critic(), critics=None, **on_two("IAC-V"))


def test_mp_errors_of_a_critic_surface_and_training_goes_on():
    for kind in ("MAAC-V", "IAC-V"):
        trainer = make(**KINDS[kind], **on_two(kind), max_new_tokens=2)
        before, broken = everything(trainer), [True]
        trainer.critics[-1].model.base_model.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("mine")) if broken[0] else None)
        with pytest.raises(RuntimeError, match="mine"):
            trainer.train()
        assert same(before, everything(trainer)) and trainer.env_step == 0
        broken[0] = False
        trainer.train()
        assert same(everything(trainer), everything(trained(**KINDS[kind], max_new_tokens=2)))


# which parameters belong together

def test_an_identifier_is_loaded_once_per_critic(tmp_path):
    critic(7).save_pretrained(tmp_path)
    trainer = make(name="IAC", critic_model=str(tmp_path))
    first, second = trainer.critics
    assert first is not second and same(weights([first.model]), weights([second.model])) and not same(weights([first.value_head]), weights([second.value_head]))
    assert {p.data_ptr() for p in first.parameters()}.isdisjoint(p.data_ptr() for p in second.parameters()) and trainer.critic_optimizers[0] is not trainer.critic_optimizers[1]
    trainer.train()
    assert not same(weights([first.model]), weights([second.model]))
    shared, = make(critic_model=Path(tmp_path)).critics
    assert same(weights([shared.model]), weights([critic(7)]))


@pytest.mark.parametrize("given", [lambda one: dict(critic_model=one, critics=None), lambda one: dict(critics=[one, one])])
def test_an_object_for_all_takes_one_step_with_the_summed_gradient(given):
    trees = Trees()
    trainer = louder(make(team(("gpt2", "gpt2"), **DOUBLE), name="IAC", callbacks=[trees], **given(critic(**DOUBLE))))
    assert trainer.critics[0] is trainer.critics[1] and len(set(map(id, trainer.critic_optimizers))) == 1
    owned = [p for group in trainer.critic_optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(trainer.critics[0].parameters()))
    ghost, seen = copy.copy(trainer), gradients(trainer)
    twin = copy.deepcopy(trainer.critics[0])
    trainer.step(rows(3))
    ghost.critics = [twin, twin]
    parts = [torch.autograd.grad(0.6 * sum((naive_value(twin, s.ids) - s.target)**2 for s in naive_steps(ghost, trees.of("policy"), agent)) / 3, list(twin.parameters())) for agent in (0, 1)]
    used, = seen[trainer.critic_optimizer]
    assert distance(taken_by(trainer.critics[0], used), [a + b for a, b in zip(*parts)]) < 1e-9


@pytest.mark.parametrize("kind", ["MAAC-V", "IAC-V", "heads-V"])
def test_agents_that_are_one_object(kind):
    """C47: one wrapper, one head, one optimizer, one step of the summed gradient."""
    model, trees = micro_model(0, "gpt2", torch.float64), Trees()
    trainer = louder(make([model, model], **KINDS[kind], callbacks=[trees], reference_kl_enabled=True))
    assert trainer.agents[0] is trainer.agents[1] and trainer.optimizers[0] is trainer.optimizers[1] and trainer.reference_models[0] is trainer.reference_models[1]
    owned = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(trainer.agents[0].parameters()))
    ghost, seen, twin, own = copy.copy(trainer), gradients(trainer), copy.deepcopy(trainer.agents[0]), copy.deepcopy(trainer.critics)
    trainer.step(rows(3))
    ghost.team, ghost.critics = type("Team", (), {"modules": [twin, twin], "actors": trainer.team.actors, "__len__": lambda self: 2})(), own
    loss = 0.0
    for agent in (0, 1):
        steps = naive_steps(ghost, trees.of("policy"), agent)
        loss = loss - sum(s.advantage * token_logprobs(twin.model, s.prompt, s.completion).sum() for s in steps) / 3
        if kind == "heads-V":
            loss = loss + 0.6 * sum((naive_value(twin, s.ids) - s.target)**2 for s in steps) / 3
    used, = seen[trainer.optimizers[0]]
    assert distance(taken_by(trainer.agents[0], used), torch.autograd.grad(loss, [p for p in twin.parameters()])) < 1e-9


def test_a_critic_may_be_a_copy_of_an_agent():
    agents = team(("gpt2", "gpt2"))
    trainer = make(agents, name="IAC", critics=[copy.deepcopy(model) for model in agents])
    trainer.train()
    owned = [{p for group in o.param_groups for p in group["params"]} for o in all_optimizers(trainer)]
    assert all(not owned[i] & owned[j] for i in range(4) for j in range(i))


def test_head_sizes_come_from_the_configuration():
    size = lambda model: None if model.value_head.hidden is None else model.value_head.hidden.out_features
    assert [size(c) for c in make(model_config={"critic_value_head_hidden_dim": 5}).critics] == [5] and [size(c) for c in make().critics] == [None]
    assert [size(c) for c in make(name="IAC", critic_value_head_hidden_dim=6, value_head_hidden_dim=9).critics] == [6, 6]
    shared = make(name="IAC", use_separate_critic=False, value_head_hidden_dim=7, critic_value_head_hidden_dim=9)
    assert [size(a) for a in shared.agents] == [7, 7] and all(a.value_head is None for a in make(name="IAC").agents)
    own = CausalLMWithValueHead(critic(), 3)
    assert make(critics=[own]).critics[0] is own


@pytest.mark.parametrize("kind", KINDS)
def test_agents_given_with_value_heads(kind):
    """Their heads serve where heads are wanted and rest where they are not."""
    agents = [CausalLMWithValueHead(model, 3) for model in team(("gpt2", "gpt2"))]
    trainer = make(agents, **KINDS[kind])
    before = weights([model.value_head for model in trainer.agents])
    assert all(a is b for a, b in zip(trainer.agents, agents))
    trainer.train()
    assert same(before, weights([model.value_head for model in trainer.agents])) != kind.startswith("heads")
    assert not same(weights(team(("gpt2", "gpt2"))), weights([model.model for model in agents]))


@pytest.mark.parametrize("kind, count", [(kind, count) for kind in KINDS for count in (1, 3)])
def test_any_number_of_agents_trains(kind, count):
    trainer = make(team(("gpt2",) * count), **KINDS[kind], max_new_tokens=1, num_turns=2, train_dataset=rows(2), rollout_buffer_size=4)
    before = everything(trainer)
    trainer.train()
    assert trainer.num_agents == count and len(trainer.critics) == (0 if kind.startswith("heads") else 1 if kind.startswith("MAAC") else count) and trainer.env_step == 4
    assert all(not same([a], [b]) for a, b in zip(before, everything(trainer)))


def test_agents_by_name(tmp_path):
    micro_model(3, "gpt2").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    common = dict(reward_func=letters, train_dataset=rows(1), callbacks=[])
    maac = MAACTrainer(str(tmp_path), str(tmp_path), args=config(), **common)
    iac = IACTrainer(str(tmp_path), args=config("IAC", use_separate_critic=False), **common)
    for trainer in (maac, iac):
        trainer.train()
        assert trainer.model_name == str(tmp_path) and trainer.agents[0] is not trainer.agents[1] and len(trainer.tokenizers) == 2
    assert not same(weights([iac.agents[0].value_head]), weights([iac.agents[1].value_head]))


# what user code sees, and what it returns

FORMS = {"float": lambda v: v, "list": lambda v: [v], "tuple": lambda v: (v,), "numpy scalar": np.float64, "numpy list": lambda v: [np.float32(v)], "array": lambda v: np.array([v]), "column": lambda v: np.array([[v]]),
         "tensor": lambda v: torch.tensor([v]), "with a gradient": lambda v: torch.tensor(v, dtype=torch.float64, requires_grad=True) * 1.0, "bool": bool, "numpy bool": np.bool_, "integers": lambda v: np.array([int(v)]),
         "decimal": lambda v: __import__("decimal").Decimal(int(v)), "one per agent": lambda v: [v, v], "an array per agent": lambda v: np.array([v, v]), "a tensor per agent": lambda v: torch.tensor([v, v], requires_grad=True)}


def test_c36_all_forms_of_a_reward_are_one():
    ones = lambda a, b: float(value_of([a[0], b[0]]) > 0.5)
    found = {form: everything(trained(team(("gpt2", "gpt2"), n_layer=1), reward_func=lambda a, b, turn=turn: turn(ones(a, b)), name="IAC", max_new_tokens=1, rollout_buffer_size=3)) for form, turn in FORMS.items()}
    assert all(same(found["float"], other) for other in found.values()) and not same(found["float"], everything(make(team(("gpt2", "gpt2"), n_layer=1), name="IAC")))


@pytest.mark.parametrize("returned, said", [([1.0, 2.0, 3.0], "expected 1 value or 2 .*got 3"), ([], "expected 1 value or 2 .*got 0"), (None, "finite number.*None"), ([1.0, float("nan")], "agent 1.*nan"),
                                            (float("inf"), "finite number.*inf"), ({"a": 1}, "finite number"), ("0.5", "finite number"), (iter([1.0]), "finite number"), ([1.0, None], "agent 1.*None")])
def test_c33_wrong_rewards_change_nothing(returned, said):
    def reward(first, second, answer):
        return returned if answer[0] == 2 else letters(first, second)

    for kind in ("MAAC-V", "heads-V"):
        trainer = make(team(("gpt2", "gpt2")), **KINDS[kind], reward_func=reward, rollout_buffer_size=3, max_new_tokens=2)
        before = everything(trainer)
        with pytest.raises(ValueError, match=f"(?s)reward.*item 2.*sample 0.*{said}"):
            trainer.train()
        assert same(before, everything(trainer)) and trainer.env_step == 0


def test_the_reward_sees_one_joint_response_at_a_time_and_the_prompts_of_its_turn():
    told, trees = [], Trees()

    def reward(first, second, prompts, batch_items, answer):
        told.append((first, second, prompts, batch_items, answer))
        return letters(first, second)

    make(reward_func=reward, callbacks=[trees], num_turns=2, max_new_tokens=2, formatters=[lambda item, external_prompts=None: f"A {external_prompts or item['prompt']}", lambda item, external_prompts=None: f"B {external_prompts or item['prompt']}"]).train()
    nodes = {tuple(prompt.text for prompt in node.prompts): node for node in walked(trees.of("policy"))}
    assert len(told) == 6
    for first, second, prompts, items, answer in told:
        node = nodes[tuple(prompts)]
        assert ([*first, *second], items, answer) == (list(node.joints[0].texts), [node.item], [node.item["answer"]]) and prompts[0].startswith("A ") and prompts[1].startswith("B ")


def test_a_batched_reward_judges_a_node_at_once():
    @batched_reward
    def shared(first, second):
        calls.append(len(first))
        return [value_of([*pair]) for pair in zip(first, second)]

    @batched_reward
    def own(first, second):
        return [[value_of([*pair]) for pair in zip(first, second)]] * 2

    calls = []
    one_by_one = trained(num_generations=3, reward_func=lambda a, b: value_of([a[0], b[0]]))
    assert all(same(everything(one_by_one), everything(trained(num_generations=3, reward_func=each))) for each in (shared, own)) and calls == [3, 3, 3]


def test_the_processor_maps_every_value_once():
    got = []
    trainer = make(reward_func=lambda a, b: [1.0, 2.0], reward_processor=lambda value: got.append(value) or 10 * value, train_dataset=rows(1))
    sample, = batches_of(trainer.train)[0]
    assert got == [1.0, 2.0] and [one.reward for one in sample.experiences] == [10.0, 20.0] and trainer.history.rows[-1]["turn_1/reward_mean"] == 15.0


def test_what_the_transition_is_told():
    calls, trees = [], Trees()

    def transition(**given):
        calls.append(copy.deepcopy(given))
        return onward(**given)

    make(external_transition=transition, callbacks=[trees], train_dataset=rows(1), num_turns=3, max_new_tokens=2).train()
    path = list(trees.of("policy")[0].walk())
    for turn, call in enumerate(calls, start=1):
        assert call == dict(prompt="say ab", num_agents=2, agent_completions=[path[turn - 1].joints[0].texts[i] for i in (0, 1)],
                            prompt_history_per_agent=[[node.prompts[i].text for node in path[:turn]] for i in (0, 1)], response_history_per_agent=[[node.joints[0].texts[i] for node in path[:turn]] for i in (0, 1)])
    assert len(calls) == 2 and [prompt.text for prompt in path[2].prompts] == onward(**calls[1])


@pytest.mark.parametrize("passthrough, start", [(False, "[0] 1 0 "), (True, "1 0 ")])
def test_the_formatter_gets_the_environments_text_unless_it_passes_through(passthrough, start):
    trees = Trees()
    make(formatters=lambda item, external_prompts=None: f"[{item['answer']}] {external_prompts or item['prompt']}", external_prompt_passthrough=passthrough, num_turns=2, train_dataset=rows(1), callbacks=[trees]).train()
    tree, = trees.of("policy")
    assert tree.prompts[0].text == "[0] say ab" and tree.children[0].prompts[0].text.startswith(start)


@pytest.mark.parametrize("returned, said", [([], "list of 2 prompts.*got 0"), (["a"], "got 1"), (["a", ""], "agent 1.*non-empty"), (None, "None"), ("ab", "list of 2")])
def test_wrong_transitions_change_nothing(returned, said):
    trainer = make(external_transition=lambda **given: returned, num_turns=2, max_new_tokens=2)
    before = everything(trainer)
    with pytest.raises(ValueError, match=f"external_transition.*{said}"):
        trainer.train()
    assert same(before, everything(trainer)) and trainer.env_step == 0


def test_rows_are_never_mutated():
    data, held_out = rows(), rows(2)
    originals = copy.deepcopy((data, held_out))

    def spoil(samples):
        samples[0].metadata["batch_item"] = {}
        return {}

    trainer = make(train_dataset=data, eval_dataset=held_out, eval_interval=1, num_turns=2, max_new_tokens=2, metrics_callback=spoil)
    trainer.train(), trainer.rollout(data[0]), trainer.step(data)
    assert (data, held_out) == originals


# nothing to learn from

@pytest.mark.parametrize("kind", KINDS)
def test_c37_episodes_that_end_at_once(kind):
    trainer = trained(**KINDS[kind], num_turns=3, reward_func=lambda a, b: 1.0, early_termination_threshold=0.5, num_train_epochs=2, max_new_tokens=2)
    assert trainer.env_step == 6 and not any("turn_2" in key for row in trainer.history for key in row)
    assert all(math.isfinite(value) for row in trainer.history for value in row.values() if not isinstance(value, str))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", [(0,), (0, 1)])
def test_c30_agents_that_write_nothing(kind, empty):
    """No token: no gradient and no step of that policy; everybody else goes on, and nothing is NaN."""
    agents = team(("gpt2", "gpt2"))
    for i in empty:
        scripted(agents[i], [])
    trainer = make(agents, **KINDS[kind], reward_func=lambda a, b: value_of([str(len(b[0])), b[0]]), max_new_tokens=3, rollout_buffer_size=3)
    before = weights([model.model for model in trainer.agents])
    trainer.train()
    if not kind.startswith("heads"):
        assert all(same(before[i:i + 1], weights([trainer.agents[i].model])) for i in empty)
    row = trainer.history.rows[-1]
    assert row["agent_0/completion_length"] == 0.0 and all(math.isfinite(value) for value in row.values() if not isinstance(value, str)) and trainer.env_step == 3


def test_c13_text_after_the_first_end_token_is_neither_scored_nor_learned_nor_judged():
    found = []
    for tail in ([2, 0, 0], [2, 40, 41]):
        agents, texts = team(("gpt2", "gpt2")), []
        for model in agents:
            scripted(model, [10, 11, *tail])
        trainer = trained(agents, critic_type="q", reward_func=lambda a, b: texts.append((a, b)) or value_of([a[0], b[0]]))
        found.append((everything(trainer), texts))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_all_data_given_once_per_epoch_whatever_its_size():
    """C68: fewer items than the buffer, one item, none."""
    for count in (1, 3, 9):
        trainer = trained(train_dataset=rows(count), rollout_buffer_size=8, max_new_tokens=1)
        assert trainer.env_step == count and trainer.run.update == -(-count // 8)
    for nothing in ([], None):
        with pytest.raises(ValueError, match="train_dataset"):
            make(train_dataset=nothing).train()


# numbers that are not finite

def poison(model):
    with torch.no_grad():
        next(model.parameters())[:] = float("nan")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("agent", [0, 1])
def test_a_broken_actor_stops_before_any_step(kind, agent):
    agents = team(("gpt2", "gpt2"))
    for model in agents:
        scripted(model, [10, 11, 2], [12, 2])
    trainer = make(agents, **KINDS[kind], train_dataset=rows(2), reward_func=paid(1.0, 0.0))
    before = everything(trainer)
    trainer.agents[agent].model.get_output_embeddings().weight = torch.nn.Parameter(torch.full_like(agents[agent].get_output_embeddings().weight, float("nan")))  # the value survives, the policy does not
    optimizer_states = [len(optimizer.state) for optimizer in all_optimizers(trainer)]
    with pytest.raises(NonFiniteError, match=f"agent {agent}, turn 1, sample 0.*log-probability.*nan"):
        trainer.train()
    after = everything(trainer)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after) for name in a if "lm_head" not in name) and [len(o.state) for o in all_optimizers(trainer)] == optimizer_states
    assert trainer.env_step == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_critic_stops_before_any_step(kind):
    trainer = make(**KINDS[kind], num_turns=2)
    with torch.no_grad():
        (trainer.critics or trainer.agents)[-1].value_head.out.bias.fill_(float("inf"))
    before = everything(trainer)
    agent = 0 if kind.startswith("MAAC") else 1
    with pytest.raises(NonFiniteError, match=f"agent {agent}, turn 1, sample 0: its critic's value is inf"):
        trainer.train()
    assert same(before, everything(trainer)) and trainer.env_step == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_loss_that_overflows_stops_before_any_step(kind):
    trainer = make(**KINDS[kind], train_dataset=rows(2))
    with torch.no_grad():
        for model in trainer.critics or trainer.agents:
            model.value_head.out.bias.fill_(3e20)  # finite, its square is not
    before = everything(trainer)
    with pytest.raises(NonFiniteError, match=r"agent 0, turn 1, sample \d of the batch, after the prompt '.*': its critic's value is 3.*e\+20"):
        trainer.train()
    assert same(before, everything(trainer)) and trainer.env_step == 0


@pytest.mark.parametrize("kind", KINDS)
def test_broken_updates_can_be_skipped(kind):
    agents = team(("gpt2", "gpt2"))
    trainer = make(agents, **KINDS[kind], on_nonfinite="skip", train_dataset=rows(2), num_train_epochs=2)
    with torch.no_grad():
        for model in trainer.critics or trainer.agents:
            model.value_head.out.bias.fill_(3e20)
    before = everything(trainer)
    trainer.train()
    assert same(before, everything(trainer)) and [row["nonfinite_skipped"] for row in trainer.history] == [1.0, 1.0] and trainer.run.update == 2 and trainer.env_step == 4
    fine = trained(**KINDS[kind], on_nonfinite="skip")
    assert {row["nonfinite_skipped"] for row in fine.history} == {0.0} and same(everything(fine), everything(trained(**KINDS[kind])))


def test_a_broken_policy_names_its_agent_while_sampling():
    trainer = make()
    poison(trainer.agents[1].model)
    before = everything(trainer)
    with pytest.raises((NonFiniteError, RuntimeError)):
        trainer.train()
    assert trainer.env_step == 0 and all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for a, b in zip(before, everything(trainer)) for n in a)


def test_masked_and_foreign_values_never_count():
    """C38: the value of another sample, turn or agent reaches nobody's target; a NaN among them is not hidden either."""
    trainer = make(name="IAC", num_turns=2, discount=0.9, train_dataset=rows(2), rollout_buffer_size=4, reward_func=lambda a, b: [1.0, 2.0])
    table = {(0, 0): 1e9, (0, 1): 3.0, (1, 0): -1e9, (1, 1): 4.0}
    trainer.critic_group.values = lambda team, nodes: [((-7e8,), (table[node.item["answer"], node.turn],)) for node in nodes]
    found = {(s.item["answer"], s.turn): s.experiences[1].target for batch in batches_of(trainer.train) for s in batch}
    assert found == {(0, 0): pytest.approx(2.0 + 2.7), (0, 1): 2.0, (1, 0): pytest.approx(2.0 + 3.6), (1, 1): 2.0}
    with pytest.raises(NonFiniteError, match="agent 1, turn 2, sample 0"):
        from comlrl_nb.critics import require_finite_values
        tree = make(num_turns=2).rollout(rows()[0])
        require_finite_values(list(tree.walk()), [((0.0,), (0.0,)), ((0.0,), (float("nan"),))])


def test_a_text_that_is_too_long_for_its_critic():
    for name in ("MAAC", "IAC"):
        own = [critic(50 + i, n_positions=12) for i in range(1 if name == "MAAC" else 2)]
        trainer = make(name=name, critics=own, train_dataset=[{"prompt": "a" * 20}])
        before = everything(trainer)
        with pytest.raises(ValueError, match=r"critic 0: a text of \d+ tokens does not fit into its 12 positions"):
            trainer.train()
        assert same(before, everything(trainer))


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


WHOLE = dict(num_train_epochs=1, train_dataset=rows(3), rollout_buffer_size=4, train_batch_size=1, num_turns=2, max_new_tokens=2, eval_interval=2, eval_dataset=rows(1), reference_kl_enabled=True, shuffle=True,
             metrics_callback=lambda samples: {"own": samples[-1].advantage})
INTERRUPTED = ["MAAC-Q", "heads-V"]


@functools.cache
def whole(kind):
    """The uninterrupted run."""
    trainer = trained(team(("gpt2", "gpt2")), **KINDS[kind], **WHOLE)
    return everything(trainer), trainer.env_step, trainer.run.update, unclocked(trainer.history)


def assert_goes_on(trainer, kind):
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    one = whole(kind)
    assert same(everything(trainer), one[0]) and (trainer.env_step, trainer.run.update) == one[1:3] and unclocked(trainer.history) == one[3]


def interruptible(kind, **more):
    return make(team(("gpt2", "gpt2")), **KINDS[kind], **{**WHOLE, **more})


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_the_whole_run_has_many_updates(kind):
    assert whole(kind)[1:3] == (3 * 2, 6)


@pytest.mark.parametrize("kind", INTERRUPTED)
@pytest.mark.parametrize("at", [1, 4])
def test_interrupted_in_the_reward(kind, at):
    assert_goes_on(interruptible(kind, reward_func=Once(at).before(lambda *texts: letters(*texts))), kind)


@pytest.mark.parametrize("kind", INTERRUPTED)
@pytest.mark.parametrize("at", [1, 3])
def test_interrupted_in_the_metrics_callback(kind, at):
    assert_goes_on(interruptible(kind, metrics_callback=Once(at).before(WHOLE["metrics_callback"])), kind)


@pytest.mark.parametrize("kind", INTERRUPTED)
@pytest.mark.parametrize("at", [1, 3])
def test_interrupted_in_generate(kind, at):
    trainer = interruptible(kind)
    trainer.agents[1].model.generate = Once(at).before(trainer.agents[1].model.generate)
    assert_goes_on(trainer, kind)


HALF = pytest.mark.xfail(strict=True, reason="an error in a shared critic's second pass comes after the actors have moved: the update is half made, and made again")


@pytest.mark.parametrize("kind, at", [("MAAC-Q", 1), ("MAAC-Q", 3), ("heads-V", 1), ("heads-V", 6), pytest.param("MAAC-Q", 4, marks=HALF)])
def test_interrupted_while_a_critic_reads(kind, at):
    trainer = interruptible(kind)
    (trainer.critics or trainer.agents)[-1].model.base_model.register_forward_pre_hook(Once(at))
    assert_goes_on(trainer, kind)


@pytest.mark.parametrize("kind", ["MAAC-V", "IAC-V"])
@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
def test_ctrl_c_between_the_steps(kind, place):
    """Of the actors, of the critics, of a shared critic's first and second step: the update is finished first."""
    for at in (4,):
        trainer = interruptible(kind)
        getattr(trainer.critic_optimizers[0], place)(Once(at, real_signal=True))
        assert_goes_on(trainer, kind)


class Ears(Callback):
    def __init__(self, event, stop):
        setattr(self, event, lambda *args: stop())


@pytest.mark.parametrize("event, at", [("on_advance", 1), ("on_advance", 4), ("on_phase", 1), ("on_nodes", 1), ("on_nodes", 3), ("on_row", 2)])
def test_interrupted_in_a_callback(event, at):
    assert_goes_on(interruptible("MAAC-Q", callbacks=[Ears(event, Once(at))]), "MAAC-Q")


def ctrl_c_at_line(count, files):
    """A trace function that sends Ctrl-C before the n-th line that runs in one of these files."""
    left = [count]

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and left[0] > 0:
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    return trace


TINY = dict(train_dataset=rows(3), rollout_buffer_size=2, train_batch_size=1, max_new_tokens=1, metrics_callback=lambda samples: {"own": samples[-1].advantage})
FILES = ("comlrl_nb/fresh_batches.py", "comlrl_nb/loop.py", "actor_critic/ac_base.py", "actor_critic/judged_play.py", "trainers/playing.py", "trainers/base.py", "trainers/resumable.py", "comlrl_nb/streams.py", "comlrl_nb/actor_critic_update.py", "comlrl_nb/critics.py", "comlrl_nb/step.py")


@pytest.mark.slow
def test_ctrl_c_at_any_line():
    new = lambda: make(team(("gpt2", "gpt2"), n_layer=1), critics=[critic(n_layer=1)], **TINY)
    plain, wrong, line = new(), [], 0
    plain.train()
    for line in range(1, 5000, 11):
        trainer, before = new(), sys.gettrace()
        try:
            sys.settrace(ctrl_c_at_line(line, FILES))
            trainer.train()
            break
        except KeyboardInterrupt:
            sys.settrace(before)
            if trainer.source is not None or not trainer.run.update:  # else it had come to its end
                trainer.train()
        finally:
            sys.settrace(before)
        if not same(everything(trainer), everything(plain)) or unclocked(trainer.history) != unclocked(plain.history) or trainer.env_step != plain.env_step:
            wrong.append(line)
    assert line > 300 and wrong == []


def test_an_error_in_the_reward_can_be_mended_and_training_goes_on():
    trainer = interruptible("heads-V")
    good, trainer.setup.reward.func = trainer.setup.reward.func, lambda *texts: float("nan")
    for _ in range(2):
        with pytest.raises(ValueError, match="nan"):
            trainer.train()
    trainer.setup.reward.func = good
    trainer.train()
    assert same(everything(trainer), whole("heads-V")[0])


# a script that was written for comlrl

SCRIPT = '''
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from comlrl.models.actor_critic import CausalLMWithValueHead
from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer

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


def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent, **kwargs):
    return [f"{prompt} then {text}" for text in agent_completions]


def metrics(samples):
    turns = {sample.metadata.get("turn_idx", 0) for sample in samples}
    return {"mean_value": sum(float(sample.old_value) for sample in samples) / len(samples), "turns": len(turns)}


data = [{"prompt": "first item"}, {"prompt": "second"}]
common = dict(tokenizer=tokenizer, reward_func=reward, formatters=[lambda item, external_prompts=None: "A: " + (external_prompts or item["prompt"]),
    lambda item, external_prompts=None: "B: " + (external_prompts or item["prompt"])], train_dataset=data, eval_dataset=data,
    metrics_callback=metrics, external_transition=transition, wandb_config=None)
fields = dict(num_train_epochs=1, agent_learning_rate=1e-3, critic_learning_rate=1e-3, value_loss_coef=0.6, num_agents=2, num_turns=2, max_new_tokens=4, temperature=1.0, top_p=1.0,
    num_generations=1, eval_interval=1, eval_num_samples=2, rollout_buffer_size=4, train_batch_size=2, discount=0.9, early_termination_threshold=100.0, logging_steps=1)
runs = [lambda: MAACTrainer(agents=[model(), model()], critics=[model()], args=MAACConfig(critic_type="v", **fields), **common),
        lambda: MAACTrainer(agents=[model(), model()], critic_model=model(), args=MAACConfig(critic_type="q", **fields), model_config={"critic_value_head_hidden_dim": 4}, **common),
        lambda: IACTrainer(agents=[model(), model()], critics=[model(), model()], args=IACConfig(critic_type="v", critic_value_head_hidden_dim=4, **fields), **common),
        lambda: IACTrainer(agents=[model(), model()], args=IACConfig(use_separate_critic=False, value_clip_range=0.2, value_head_hidden_dim=4, **fields), **common)]
for run in runs:
    trainer = run()
    trainer.verbose = False
    before = [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]
    trainer.train()
    after = [p.detach() for agent in trainer.agents for p in agent.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after))
    assert trainer.env_step == 2 * 2, trainer.env_step
    assert len(trainer.agents) == len(trainer.agent_optimizers) == len(trainer.tokenizers) == trainer.args.num_agents == 2
    found = trainer.evaluate()
    assert {"eval/turn_1/reward_mean", "eval/turn_1/expected_return"} <= set(found or {}), found
    assert all(isinstance(agent, CausalLMWithValueHead) for agent in trainer.agents)
    import tempfile, os
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        assert {"agent_0", "agent_1"} <= set(os.listdir(folder)), os.listdir(folder)
print("finished")
'''


def test_a_script_for_comlrl_runs_with_the_import_replaced(capsys):
    exec(compile(SCRIPT.replace("from comlrl.", "from comlrl_nb."), "script", "exec"), {"__name__": "script"})
    assert capsys.readouterr().out == "finished\n"


@pytest.mark.slow
def test_the_same_script_finishes_with_comlrl_and_here(tmp_path):
    peer = Path(os.environ.get("COMLRL_PEER_PYTHON", "/opt/peer/venv/bin/python"))
    if not peer.exists():
        pytest.skip("COMLRL_PEER_PYTHON names no environment with comlrl")
    for python, script in ((peer, SCRIPT), (sys.executable, SCRIPT.replace("from comlrl.", "from comlrl_nb."))):
        (tmp_path / "script.py").write_text(script)
        done = subprocess.run([python, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=300, cwd=tmp_path,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"})
        assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr[-2000:]
