"""Small inputs that break libraries of this kind, tried on the REINFORCE family; a test's name starts with its case."""
import copy
import decimal
import math
import random

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from comlrl_nb.losses import NonFiniteError, policy_gradient_loss
from comlrl_nb.reference_penalty import agent_kl
from comlrl_nb.toy import micro_model, micro_tokenizer
from comlrl_nb.utils.reward_utils import batched_reward
from reinforce_runs import (FAMILY, TOKENIZER, Trees, distance, forwards, gradients, letters, make, naive_advantages, naive_gradient, naive_loss, rows, same, scripted, team,
                            token_logprobs, unclocked, walked, weights)

PAD, BOS, EOS = 0, 1, 2
A, B, AB = TOKENIZER.convert_tokens_to_ids(["a", "b", "ab"])
X, Y, JUNK = TOKENIZER.convert_tokens_to_ids(["x", "y", "j"])
ONE = dict(train_dataset=[{"prompt": "say ab"}])
DOUBLE = dict(dtype=torch.float64)


def pad_is_eos():
    tokenizer = micro_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def numbered(*values):
    """A reward that pays these values in turn."""
    turn = iter(values * 1000)
    return lambda first, second: next(turn)


def trained(agents=None, **more):
    trainer = make(agents, **more)
    trainer.train()
    return trainer


def finite(history):
    return all(math.isfinite(value) for row in history for value in row.values() if not isinstance(value, str))


# C01: the end of a completion comes from the sampled ids, not from comparing with the padding id

@pytest.mark.parametrize("tokenizer", [TOKENIZER, pad_is_eos()], ids=["own pad", "pad is eos"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c01_first_end_token_counts_and_nothing_after_it(tokenizer, kind):
    tail, trees = tokenizer.pad_token_id, Trees()
    agents = team((kind, kind), **DOUBLE)
    for model in agents:
        scripted(model, [A, B, EOS, tail, tail], [X, Y, X, Y, X], [EOS, tail, tail, tail, tail])
    trainer = make(agents, tokenizer=tokenizer, reward_func=numbered(3.0, 2.0, 1.0), callbacks=[trees])
    twins, seen = copy.deepcopy(agents), gradients(trainer)
    trainer.step(rows(1))
    node, = trees.of("policy")
    assert [(one.token_ids, one.finished) for one in node.generations[0].completions] == [((A, B, EOS), True), ((X, Y, X, Y, X), False), ((EOS,), True)]
    for i, optimizer in enumerate(trainer.optimizers):
        taken = {p: seen[optimizer][0][p] for p in agents[i].parameters()}
        assert distance(taken, naive_gradient(twins[i], [node], i, "mean")) < (1e-10 if kind == "gpt2" else 1e-5)


def test_c01_the_end_token_has_a_gradient():
    """Two samples that differ in their end only: one ends, one is cut off."""
    agents, trees = team(**DOUBLE), Trees()
    for model in agents:
        scripted(model, [A, EOS], [A])
    trainer = make(agents, reward_func=numbered(1.0, 0.0), num_generations=2, callbacks=[trees])
    twins, before = copy.deepcopy(agents), weights(agents)
    trainer.step(rows(1))
    node, = trees.of("policy")
    ids = node.prompts[0].token_ids
    gains = [token_logprobs(new, ids, (A, EOS))[-1].item() - token_logprobs(old, ids, (A, EOS))[-1].item() for new, old in zip(agents, twins)]
    assert not same(before, weights(agents)) and min(gains) > 0  # ending was paid: it became likelier


def test_c01_prompt_tokens_equal_to_pad_stay_attended():
    tokenizer, agents, trees = pad_is_eos(), team(**DOUBLE), Trees()
    seen = [scripted(model, [A, EOS], [B, X]) for model in agents]
    trainer = make(agents, tokenizer=tokenizer, reward_func=numbered(1.0, 0.0, 0.2, 0.9), num_generations=2, callbacks=[trees])
    twins, taken = copy.deepcopy(agents), gradients(trainer)
    trainer.step([{"prompt": "a<eos>b"}, {"prompt": "a much longer prompt"}])
    nodes = trees.of("policy")
    assert nodes[0].prompts[0].token_ids == (BOS, A, EOS, B) and seen[0][0] == [BOS, A, EOS, B]
    for i, optimizer in enumerate(trainer.optimizers):
        assert distance({p: taken[optimizer][0][p] for p in agents[i].parameters()}, naive_gradient(twins[i], nodes, i, "mean")) < 1e-5


# C02: left padding does not shift positions

RAGGED = [{"prompt": text} for text in ("s", "say abab", "say it once more and then again")]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c02_a_ragged_batch_is_the_sum_of_its_items(kind):
    agents, trees = team((kind, kind)), Trees()
    trainer = make(agents, callbacks=[trees])
    twins, seen = copy.deepcopy(agents), gradients(trainer)
    trainer.step(RAGGED)
    nodes = trees.of("policy")
    assert len({len(node.prompts[0].token_ids) for node in nodes}) == 3
    for i, optimizer in enumerate(trainer.optimizers):
        taken = {p: seen[optimizer][0][p] for p in agents[i].parameters()}
        assert distance(taken, naive_gradient(twins[i], nodes, i, "mean")) < 1e-4


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c02_penalties_of_a_ragged_batch(kind):
    trees = Trees()
    trainer = make(team((kind, kind)), reference_kl_enabled=True, callbacks=[trees])
    with torch.no_grad():
        for model in trainer.agents:
            model.get_output_embeddings().weight.mul_(1.2)
    trainer.step(RAGGED)
    moved, alone = trees.of("policy"), []
    for node in moved:  # the same texts, each item scored on its own
        again = make(team((kind, kind)), reference_kl_enabled=True)
        with torch.no_grad():
            for model in again.agents:
                model.get_output_embeddings().weight.mul_(1.2)
        alone.append(agent_kl(again.team, 0, again.reference_models[0], [node])[0])
    assert [node.kl[0] for node in moved] == [pytest.approx(own, abs=1e-4) for own in alone]


# C09: ids are used as they were sampled

@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c09_trained_ids_are_the_sampled_ones_in_every_turn(kind):
    agents, trees = team((kind, kind), **DOUBLE), Trees()
    for model in agents:
        scripted(model, [A, B, A, B], [X, A, B, EOS])
    assert TOKENIZER("abab", add_special_tokens=False)["input_ids"] == [AB, AB]
    trainer = make(agents, reward_func=numbered(1.0, 0.3, 0.2), num_turns=2, num_generations=2, callbacks=[trees])
    twins, seen, scored = copy.deepcopy(agents), gradients(trainer), forwards(agents[0])
    trainer.step(rows(1))
    nodes = walked(trees.of("policy"))
    assert {one.token_ids for node in nodes for one in node.generations[0].completions} == {(A, B, A, B), (X, A, B, EOS)}
    assert {one.text for node in nodes for one in node.generations[0].completions} == {"abab", "xab"}
    longer = {tuple(row[:3]) for call in scored for row in call if len(row) == 3}
    assert longer == {(A, B, A), (X, A, B)}
    for i, optimizer in enumerate(trainer.optimizers):
        assert distance({p: seen[optimizer][0][p] for p in agents[i].parameters()}, naive_gradient(twins[i], nodes, i, "mean")) < (1e-10 if kind == "gpt2" else 1e-5)


def test_c09_the_next_prompt_is_encoded_from_what_the_transition_returned():
    agents, trees = team(), Trees()
    for model in agents:
        scripted(model, [A, B, EOS], [X, EOS])
    make(agents, external_transition=lambda agent_completions, **more: [text + "?" for text in agent_completions], num_turns=2, num_generations=2, callbacks=[trees], **ONE).train()
    tree, = trees.of("policy")
    assert [child.prompts[0].token_ids for child in tree.children] == [tuple(TOKENIZER(text)["input_ids"]) for text in ("ab?", "x?")]


# C13: text after the end token

@pytest.mark.parametrize("ends", [[EOS], [EOS, PAD]])
def test_c13_nothing_after_the_end_is_read(ends):
    agents, read, told = team(), [], []
    for model in agents:
        scripted(model, [A, *ends, JUNK, JUNK], [B, EOS, JUNK, JUNK, JUNK])

    def reward(first, second):
        read.extend([*first, *second])
        return float("a" in first[0]) - "".join(first + second).count("j")

    def transition(agent_completions, response_history_per_agent, **more):
        told.extend([*agent_completions, *(text for own in response_history_per_agent for text in own)])
        return ["next", "next"]

    make(agents, reward_func=reward, external_transition=transition, num_turns=2, num_generations=2, **ONE).train()
    assert set(read) == set(told) == {"a", "b"}


def test_c13_any_end_token_of_the_model_ends_the_text():
    agents, trees = team(eos_token_id=[EOS, X]), Trees()
    for model in agents:
        scripted(model, [A, X, JUNK, JUNK], [B, Y, EOS, JUNK])
    make(agents, callbacks=[trees], num_generations=2, **ONE).train()
    node, = trees.of("policy")
    assert [(one.text, one.token_ids, one.finished) for one in node.generations[1].completions] == [("a", (A, X), True), ("by", (B, Y, EOS), True)]


# C17: log-probabilities are at temperature 1, whatever the sampling

def test_c17_the_loss_does_not_depend_on_the_sampling_settings():
    found = []
    for more in (dict(temperature=1.0), dict(temperature=0.5), dict(temperature=3.0, top_k=2, top_p=0.1)):
        agents = team()
        for model in agents:
            scripted(model, [A, B, EOS], [X, Y], [B, EOS])
        trainer = make(agents, reward_func=numbered(1.0, 0.2, 0.5), **more)
        found.append((trainer.step(rows(2))["loss"], weights(trainer)))
    assert len({loss for loss, _ in found}) == 1 and same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_c17_the_loss_is_at_temperature_one(temperature):
    trees, agents = Trees(), team(**DOUBLE)
    trainer = make(agents, temperature=temperature, callbacks=[trees])
    twins = copy.deepcopy(agents)
    stats = trainer.step(rows(2))
    for i in range(2):
        assert stats[f"agent_{i}/loss"] == pytest.approx(naive_loss(twins[i], trees.of("policy"), i, "mean").item(), rel=1e-5)


def test_c17_references_are_scored_at_the_same_temperature():
    for temperature in (0.5, 1.0):
        node = make(team(("llama", "llama")), temperature=temperature, reference_kl_enabled=True).rollout(rows()[0])
        assert max(value for own in node.kl for value in own) < 1e-10


# C19: the model's own generation settings play no part

def test_c19_generation_config_is_neither_used_nor_changed():
    greedy = dict(temperature=1e-4, top_k=1, top_p=0.05, repetition_penalty=1.3, min_new_tokens=3, num_beams=2)
    plain, other = team(("gpt2", "llama")), team(("gpt2", "llama"))
    for model in other:
        model.generation_config.update(**greedy)
    kept = [(model.generation_config, model.generation_config.to_dict()) for model in other]
    nodes = [make(agents).rollout(rows()[0], 64) for agents in (plain, other)]
    assert nodes[0].joints == nodes[1].joints and len({joint.texts for joint in nodes[1].joints}) > 20
    assert same(*[weights(trained(agents, num_turns=2, num_generations=2)) for agents in (plain, other)])
    assert all(model.generation_config is config and config.to_dict() == as_it_was for model, (config, as_it_was) in zip(other, kept))


@pytest.mark.parametrize("more", [dict(top_k=1), dict(temperature=1e-4), dict(top_p=1e-4)])
def test_c19_the_configs_settings_are_effective(more):
    assert len({joint.texts for joint in make(**more).rollout(rows()[0], 8).joints}) == 1
    assert len({joint.texts for joint in make().rollout(rows()[0], 8).joints}) == 8


# C20: the scorer says what the sampler did

@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c20_scores_are_the_log_probs_at_sampling_time(kind):
    agents, told = team((kind, kind)), {}
    original = type(agents[0]).generate

    def spy(index):
        def generate(*args, **kwargs):
            out = original(agents[index], *args, output_logits=True, **kwargs)
            width = kwargs["input_ids"].shape[1]
            for row, ids in enumerate(out.sequences[:, width:].tolist()):
                told[index, tuple(kwargs["input_ids"][row].tolist()) if len(kwargs["input_ids"]) == len(out.sequences) else row, tuple(ids)] = [
                    torch.log_softmax(step[row].float(), -1)[token].item() for step, token in zip(out.logits, ids)]
            return out
        return generate

    for index, model in enumerate(agents):
        model.generate = spy(index)
    trees = Trees()
    trainer = make(agents, callbacks=[trees], name="MAREINFORCE", advantage_normalization=False, reward_func=lambda a, b: 1.0)
    losses = trainer.step(RAGGED)
    nodes = trees.of("policy")
    for i in range(2):
        wanted = []
        for node in nodes:
            for one in node.generations[i].completions:
                steps = [values for (index, _, ids), values in told.items() if index == i and ids[:len(one.token_ids)] == one.token_ids]
                wanted.append([sum(values[:len(one.token_ids)]) for values in steps])
        assert all(wanted)
        least, most = (sum(pick(each) for each in wanted) / len(wanted) for pick in (min, max))
        assert least - 1e-4 <= -losses[f"agent_{i}/loss"] <= most + 1e-4  # a completion that two prompts share has two candidates


def test_c20_dropout_plays_no_part():
    found = []
    for rate in (0.0, 0.5):
        agents = team(resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
        for model in agents:
            model.train()
        found.append(weights(trained(agents, num_train_epochs=2, num_turns=2, num_generations=2)))
    assert same(*found)


def test_c20_shuffled_minibatches_score_each_completion_with_its_own_prompt():
    trees, agents = Trees(), team(**DOUBLE)
    trainer = make(agents, callbacks=[trees], agent_learning_rate=0.0, rollout_buffer_size=6, train_batch_size=2, train_dataset=[*RAGGED, *rows(3)], logging_steps=1)
    twins = copy.deepcopy(agents)
    trainer.train()
    losses = [row["agent_0/loss"] for row in trainer.history]
    assert len(losses) == 3
    assert sum(losses) / 3 == pytest.approx(naive_loss(twins[0], trees.of("policy"), 0, "mean").item(), rel=1e-9)


# C24: groups of one

@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("count", [1, 0, -1, 1.5, None, True])
def test_c24_a_group_of_one_is_refused(name, count):
    with pytest.raises(ValueError, match=f"{name}Config.*num_generations.*at least [12].*{count}"):
        make(name=name, num_generations=count)


@pytest.mark.parametrize("name", FAMILY)
def test_c24_groups_of_two_are_finite(name):
    trainer = trained(name=name, num_generations=2)
    assert finite(trainer.history) and all(torch.isfinite(value).all() for model in weights(trainer) for value in model.values())


# C25, C37: nothing to learn from

@pytest.mark.parametrize("value", [0.0, -1.0, 1e30, 0.1])
def test_c25_tied_rewards_of_any_size(value):
    trainer = make(reward_func=lambda a, b: value, num_train_epochs=2, num_turns=2)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer)) and finite(trainer.history) and all(not optimizer.state for optimizer in trainer.optimizers)
    assert all(row["tied_group_fraction"] == 1.0 and row["loss"] == 0.0 and row["grad_norm"] == 0.0 for row in trainer.history)
    assert trainer.run.update == 2 * 3 * 3 and trainer.env_step == 2 * 3 * 12  # nodes of turns 1, 2, 2, 2 for each item: two buffers, three updates


def test_c25_ties_of_returns_over_two_turns():
    """Different rewards, equal returns: r_0 + r_1 is the same for every first answer."""
    def reward(first, second, prompts):
        return 0.25 if prompts[0].startswith("first") else float(prompts[0])

    def transition(agent_completions, **more):
        return ["0.5", "x"]

    node = make(reward_func=reward, external_transition=transition, num_turns=2, train_dataset=[{"prompt": "first"}]).rollout({"prompt": "first"})
    assert set(node.returns) == {0.75} and set(node.advantages[0]) == {0.0}


def test_c25_almost_tied_groups_stay_bounded():
    node = make(reward_func=numbered(0.5, 0.5 + 1e-12, 0.5)).rollout(rows()[0])
    assert max(map(abs, node.advantages[0])) < 1e-5


def test_c25_raw_without_normalisation_learns_from_equal_rewards():
    """REINFORCE without a baseline: equal rewards are a signal all the same."""
    trainer = make(name="MAREINFORCE", advantage_normalization=False, reward_func=lambda a, b: 1.0)
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer)) and trainer.history.rows[0]["tied_group_fraction"] == 1.0


def test_c37_every_episode_ends_at_its_first_turn():
    asked = []
    trainer = make(external_transition=lambda **given: asked.append(given), early_termination_threshold=-10.0, num_turns=2, train_dataset=rows(3))
    before = weights(trainer)
    trainer.train()
    assert not asked and trainer.env_step == 9 and not same(before, weights(trainer)) and trainer.run.update == 2
    assert not any("turn_2" in key for row in trainer.history for key in row)


@pytest.mark.parametrize("answer", [[], ["only one"], ["a", "b", "c"], None, "two", ["a", ""], ["a", None], ["", "b"], [b"a", "b"], ["a", 3], {"a": 1, "b": 2}, {0: "a"}, 5])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_c37_a_transition_with_a_wrong_answer_is_an_error_and_nobody_moves(answer, joint_mode):
    def hand_over(**given):
        return answer

    trainer = make(external_transition=hand_over, num_turns=2, num_generations=2, joint_mode=joint_mode)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"external_transition hand_over, item 0, turn 2.*(list of 2 prompts|prompt of agent [01])") as caught:
        trainer.train()
    assert "got" in str(caught.value) and same(before, weights(trainer)) and trainer.env_step == trainer.run.update == 0


# C30: no tokens to train

def test_c30_every_completion_is_an_end_token():
    agents = team()
    for model in agents:
        scripted(model, [EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.0, 0.5))
    trainer.train()
    assert finite(trainer.history) and trainer.run.update == 2 and trainer.history.rows[0]["completion_length"] == 1.0
    # equal completions with a mean baseline: their gradients cancel
    assert trainer.history.rows[0]["agent_0/grad_norm"] < 1e-5


@pytest.mark.parametrize("name", FAMILY)
def test_c30_generate_returns_no_tokens_for_one_agent(name):
    agents = team()
    scripted(agents[0], [])
    trainer = make(agents, name=name, num_turns=2, num_generations=2)
    before = weights(trainer)
    trainer.train()
    assert same(before[:1], weights(trainer)[:1]) and not same(before[1:], weights(trainer)[1:]) and finite(trainer.history)
    assert not trainer.optimizers[0].state and trainer.history.rows[0]["agent_0/loss"] == 0.0 == trainer.history.rows[0]["agent_0/grad_norm"]


@pytest.mark.parametrize("penalty", [False, True])
def test_c30_generate_returns_no_tokens_for_anyone(penalty):
    agents = team()
    for model in agents:
        scripted(model, [])
    trainer = make(agents, reward_func=numbered(1.0, 0.0, 0.5), reference_kl_enabled=penalty)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer)) and finite(trainer.history) and trainer.run.update == 2 and trainer.env_step == 9


def test_c30_empty_completions_among_others():
    agents, trees = team(**DOUBLE), Trees()
    for model in agents:
        scripted(model, [], [A, B, EOS], [EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.4, 0.0), callbacks=[trees])
    twins, seen = copy.deepcopy(agents), gradients(trainer)
    stats = trainer.step(rows(2))
    assert all(math.isfinite(value) for value in stats.values())
    for i, optimizer in enumerate(trainer.optimizers):
        wanted = {p: 0.0 for p in twins[i].parameters()}
        for node in trees.of("policy"):
            advantages = naive_advantages([joint.reward for joint in node.joints], "mean")
            loss = -sum(a * token_logprobs(twins[i], node.prompts[i].token_ids, one.token_ids).sum()
                        for a, one in zip(advantages, node.generations[i].completions) if one.token_ids) / 3 / 2
            for p, g in zip(wanted, torch.autograd.grad(loss, list(wanted))):
                wanted[p] = wanted[p] + g
        assert distance({p: seen[optimizer][0][p] for p in agents[i].parameters()}, wanted) < 1e-6


# C31: what stands at masked places does not matter; what stands elsewhere is reported

@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_c31_the_loss_ignores_masked_places(junk):
    mask = torch.tensor([True, False, True])
    clean = torch.tensor([0.2, 0.0, -0.4], dtype=torch.float64)
    outcomes = []
    for filling in (0.0, junk):
        values = torch.where(mask, clean, torch.tensor(filling, dtype=torch.float64)).requires_grad_(True)
        loss = policy_gradient_loss(values, torch.where(mask, clean, torch.tensor(filling, dtype=torch.float64)), mask)
        outcomes.append((loss.item(), torch.autograd.grad(loss, values)[0].tolist()))
    assert outcomes[0] == outcomes[1] and math.isfinite(outcomes[0][0])


def test_c31_logits_at_padding_do_not_reach_the_update():
    """Where a shorter completion is padded the logits are NaN; nothing changes."""
    found = []
    for spoilt in (False, True):
        agents, inputs_seen = team(), [None]
        for model in agents:
            scripted(model, [A, B, EOS], [X, Y, A, B, X], [B, EOS])

        def spoil(module, inputs, output):
            if torch.is_grad_enabled() and output.shape[:2] == inputs_seen[0].shape:
                return torch.where((inputs_seen[0] == PAD)[..., None], float("nan"), output)

        for model in agents if spoilt else ():
            model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: inputs_seen.__setitem__(0, inputs[0]))
            model.get_output_embeddings().register_forward_hook(spoil)
        found.append(weights(trained(agents, reward_func=numbered(1.0, 0.2, 0.5))))
    assert same(*found)


@pytest.mark.parametrize("agent", [0, 1])
def test_c31_a_broken_weight_is_reported_by_agent_and_nobody_moves(agent):
    trainer = make()
    for model in trainer.agents:
        scripted(model, [A, EOS], [B, EOS], [X, Y])
    with torch.no_grad():
        trainer.agents[agent].get_input_embeddings().weight[A] = float("nan")
    other = trainer.agents[1 - agent:2 - agent]
    before = weights(other)
    with pytest.raises(NonFiniteError, match=f"agent {agent}, turn 1.*sample"):
        trainer.train()
    assert same(before, weights(other)) and not trainer.optimizers[1 - agent].state and trainer.env_step == 0


def broken_in_updates(trainer, agent=1, times=10**6):
    """The agent's logits are NaN in the next `times` passes with gradients."""
    left = [times]

    def hook(module, inputs, output):
        if torch.is_grad_enabled() and left[0] > 0:
            left[0] -= 1
            return output * float("nan")

    trainer.agents[agent].get_output_embeddings().register_forward_hook(hook)


def test_c31_nonfinite_raises_or_is_skipped_and_counted():
    raising, skipping = make(), make(on_nonfinite="skip")
    for trainer in (raising, skipping):
        broken_in_updates(trainer)
    before = weights(raising)
    with pytest.raises(NonFiniteError, match="agent 1, turn 1"):
        raising.train()
    assert same(before, weights(raising)) and raising.env_step == 0
    skipping.train()
    assert same(before, weights(skipping)) and skipping.run.update == 2 and skipping.history.rows[-1]["nonfinite_skipped"] == 1.0
    healed = make(on_nonfinite="skip")
    broken_in_updates(healed, times=1)
    healed.train()
    assert not same(before, weights(healed)) and all(torch.isfinite(v).all() for model in weights(healed) for v in model.values())


def test_c31_a_nonfinite_gradient_moves_nobody():
    trainer = make()
    before = weights(trainer)
    next(trainer.agents[1].parameters()).register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError, match="agent 1"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.run.update == 0


def test_c31_a_broken_reference_is_reported():
    trainer = make(reference_kl_enabled=True)
    for model in trainer.agents:
        scripted(model, [A, EOS], [B, EOS], [X, Y])
    with torch.no_grad():
        trainer.reference_models[1].get_input_embeddings().weight[A] = float("nan")
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match="agent 1.*reference"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0


# C33, C36: what a reward function may return

def stream():
    yield 1.0


WRONG = {"empty": [], "two": [1.0, 2.0], "K": [0.1, 0.2, 0.3], "column": np.ones((3, 1)), "generator": stream(), "dict": {"reward": 1.0}, "text": "0.5", "none": None,
         "none in list": [None], "nan": float("nan"), "inf": [float("inf")], "minus inf": -math.inf, "text in list": ["1"], "object": object(),
         "nan tensor": torch.tensor(float("nan")), "set": {1.0}, "complex": 1j, "nested": [[1.0, 2.0]]}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG.keys())
def test_c33_wrong_returns_name_function_item_and_sample(value):
    calls = []

    def judge(first, second):
        calls.append(first)
        return value if len(calls) == 5 else 0.01 * len(calls)

    trainer = make(reward_func=judge)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"judge.*item 1.*sample 1.*expected.*got"):
        trainer.train()
    assert len(calls) <= 6 and same(before, weights(trainer)) and trainer.env_step == 0 and all(not optimizer.state for optimizer in trainer.optimizers)


@pytest.mark.parametrize("value", [float("nan"), None, [1.0, 2.0], RuntimeError("mine"), []], ids=repr)
@pytest.mark.parametrize("at, item", [(4, 0), (11, 0), (25, 1)], ids=["cross", "cross, second turn", "second item"])
def test_c33_under_cross_and_in_the_second_turn(value, at, item):
    """Two items with K=2: four joint responses in turn 1, sixteen in turn 2, turn by turn."""
    calls = []

    def judge(first, second):
        calls.append(1)
        if len(calls) - 1 == at:
            if isinstance(value, Exception):
                raise value
            return value
        return 0.01 * len(calls)

    trainer = make(reward_func=judge, joint_mode="cross", num_turns=2, num_generations=2, rollout_buffer_size=10, train_dataset=rows(2))
    before = weights(trainer)
    place = {4: "item 1, sample 0", 11: "item 0, sample 3", 25: "item 1, sample 1"}[at]
    with pytest.raises(type(value) if isinstance(value, Exception) else ValueError, match="mine" if isinstance(value, Exception) else f"judge.*{place}"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0 and all(not optimizer.state for optimizer in trainer.optimizers)


@pytest.mark.parametrize("value", [[0.1], [0.1] * 4, 0.5, None, [0.1, float("nan"), 0.2], {"a": 1}], ids=repr)
def test_c33_a_batched_reward_returns_one_value_per_joint_response(value):
    @batched_reward
    def judge(first, second):
        return value

    trainer = make(reward_func=judge)
    before = weights(trainer)
    with pytest.raises(ValueError, match="judge.*item 0"):
        trainer.train()
    assert same(before, weights(trainer))


def test_c33_the_processor_is_held_to_the_same():
    for broken in (lambda value: float("nan"), lambda value: None, lambda value: [value, value]):
        with pytest.raises(ValueError, match="reward_processor.*item 0.*sample 0"):
            make(reward_processor=broken).train()


@pytest.mark.parametrize("error", [TypeError("missing 1 required positional argument"), ValueError("mine"), KeyError("x")])
@pytest.mark.parametrize("where", ["reward", "transition", "formatter"])
def test_c33_errors_of_user_code_surface_unchanged_after_one_call(where, error):
    calls = []

    def fail(*args, **more):
        calls.append(1)
        raise error

    given = {"reward": dict(reward_func=lambda a, b: fail()), "transition": dict(external_transition=fail), "formatter": dict(formatters=lambda item: fail())}[where]
    trainer = make(num_turns=2, num_generations=2, **given)
    before = weights(trainer)
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and len(calls) == 1 and same(before, weights(trainer)) and trainer.env_step == 0


FORMS = {"number": float, "list": lambda v: [v], "tuple": lambda v: (v,), "numpy float64": np.float64, "numpy float32 list": lambda v: [np.float32(v)], "numpy array": lambda v: np.array([v]),
         "array (1,1)": lambda v: np.array([[v]]), "tensor": lambda v: torch.tensor(v, dtype=torch.float64), "tensor with gradient": lambda v: torch.tensor([v], requires_grad=True),
         "decimal": lambda v: decimal.Decimal(str(v)), "list of tensors": lambda v: [torch.tensor(v)]}


def test_c36_all_forms_are_the_same():
    found = {}
    for name, form in FORMS.items():
        pay = numbered(0.25, 0.5, 1.0)
        trainer = trained(reward_func=lambda first, second: form(pay(first, second)))
        found[name] = weights(trainer)
        assert all(type(value) in (float, int, str) for row in trainer.history for value in row.values()), name
    first = found.pop("number")
    assert all(same(first, other) for other in found.values())


@pytest.mark.parametrize("form", [bool, np.bool_, int, lambda v: np.array(int(v)), lambda v: torch.tensor(bool(v))])
def test_c36_flags_and_whole_numbers(form):
    pay = numbered(0, 1, 1)
    node = make(reward_func=lambda a, b: form(pay(a, b))).rollout(rows()[0])
    assert [joint.rewards for joint in node.joints] == [(0.0,), (1.0,), (1.0,)] and all(type(joint.reward) is float for joint in node.joints)


# C47: one object in two roles

def test_c47_each_parameter_is_in_one_optimizer_and_stepped_once():
    model = micro_model(0, "gpt2")
    trainer = make([model, model], num_train_epochs=2)
    owned = [p for optimizer in dict.fromkeys(trainer.optimizers) for group in optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    trainer.train()
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {trainer.run.update}


def test_c47_agents_that_share_some_parameters():
    agents, trees = team(**DOUBLE), Trees()
    agents[1].set_input_embeddings(agents[0].get_input_embeddings())
    agents[1].get_output_embeddings().weight = agents[0].get_output_embeddings().weight
    shared, twins = agents[0].get_input_embeddings().weight, copy.deepcopy(agents)
    trainer = make(agents, callbacks=[trees])
    owned = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) and set(owned) == {p for model in agents for p in model.parameters()}
    seen = gradients(trainer)
    trainer.step(rows(2))
    key = twins[0].get_input_embeddings().weight
    wanted = sum(naive_gradient(twins[i], trees.of("policy"), i, "mean")[key] for i in range(2))
    assert distance({shared: seen[trainer.optimizers[0]][0][shared]}, {key: wanted}) < 1e-6


def test_c47_references_of_shared_agents_do_not_move():
    model = micro_model(0, "gpt2")
    trainer = make([model, model], reference_kl_enabled=True, num_train_epochs=2)
    before, start = weights(trainer.reference_models), weights([model])
    trainer.train()
    assert same(before, weights(trainer.reference_models)) and not same(start, weights([model])) and all(p.requires_grad for p in model.parameters())


def test_c47_one_object_cannot_live_on_two_devices():
    model = micro_model(0, "gpt2")
    with pytest.raises(ValueError, match="agent_devices.*same object"):
        make([model, model], parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])


def test_c47_a_tied_model_is_saved_and_comes_back(tmp_path):
    agents = team(tie_word_embeddings=True)
    trainer = trained(agents)
    trainer.save_model(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "agent_0")
    assert same(weights(agents[:1]), weights([back])) and back.get_input_embeddings().weight.data_ptr() == back.get_output_embeddings().weight.data_ptr()


# C68: any number of rows

class Stream:
    """Rows without a length, as a streamed dataset gives them."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(rows(self.count))


DATA = {"list": rows, "tuple": lambda n: tuple(rows(n)), "Dataset": lambda n: datasets.Dataset.from_list(rows(n)), "stream": Stream,
        "IterableDataset": lambda n: datasets.IterableDataset.from_generator(lambda: iter(rows(n)))}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("count, capacity", [(3, 8), (9, 4), (1, 4)])
def test_c68_every_row_once_and_the_last_batch_too(data, count, capacity):
    seen = []

    def reward(first, second, answer):
        seen.append(answer[0])
        return letters(first, second)

    trainer = make(train_dataset=DATA[data](count), reward_func=reward, rollout_buffer_size=capacity, num_train_epochs=2, num_generations=2, max_new_tokens=1)
    before = weights(trainer)
    trainer.train()
    assert seen == [i for i in range(count) for _ in range(2)] * 2
    assert trainer.run.update == 2 * -(-count // capacity) and trainer.env_step == 2 * 2 * count and not same(before, weights(trainer))


@pytest.mark.parametrize("data", DATA)
def test_c68_no_rows_is_an_error_at_train(data):
    empty = {"IterableDataset": lambda: datasets.IterableDataset.from_generator(lambda: iter([])), "Dataset": lambda: datasets.Dataset.from_dict({"prompt": []})}.get(data, lambda: DATA[data](0))()
    trainer = make(train_dataset=empty)
    for _ in range(2):
        with pytest.raises(ValueError, match="train_dataset.*no rows"):
            trainer.train()
    assert trainer.env_step == 0 and len(trainer.history) == 0


def test_c68_a_generator_is_refused():
    with pytest.raises(ValueError, match="train_dataset.*only once"):
        make(train_dataset=(row for row in rows(3)))


# C77: looking changes nothing

def numbers(stream):
    """The whole state of a random stream."""
    state = stream.state_dict()
    return state["python"], {key: value.tolist() for key, value in state["torch"].items()}


def test_c77_evaluate_and_rollout_leave_everything_as_it_was():
    trainer = make(eval_dataset=rows(3), num_turns=2, num_generations=2, reference_kl_enabled=True)
    trainer.agents[0].train()
    trainer.step(rows(2))

    def state():
        return ({name: numbers(stream) for name, stream in trainer.setup.streams.items() if not name.startswith(("evaluation", "rollout"))}, trainer.env_step, trainer.run.update,
                torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), [id(model.generation_config) for model in trainer.agents],
                [module.training for model in trainer.agents for module in model.modules()], torch.is_grad_enabled(), trainer.source)

    before, kept = state(), weights(trainer)
    optimizers = copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers])
    trainer.evaluate(), trainer.rollout(rows()[0]), trainer.rollout(rows()[1], 5), trainer.plan()
    assert state() == before and same(kept, weights(trainer)) and all(p.grad is None for model in trainer.agents for p in model.parameters())
    assert repr(optimizers) == repr([optimizer.state_dict() for optimizer in trainer.optimizers])


def test_c77_an_evaluation_in_the_middle_of_a_buffer():
    found = []
    for interval in (0, 1):
        trainer = trained(train_dataset=rows(5), rollout_buffer_size=4, train_batch_size=1, num_turns=2, num_generations=2, max_new_tokens=2, eval_interval=interval, eval_dataset=rows(1), seed=3)
        found.append((weights(trainer), [row for row in unclocked(trainer.history) if row["kind"] == "train"]))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_c80_two_trainers_do_not_disturb_each_other():
    alone = [make(seed=seed) for seed in (1, 2)]
    for trainer in alone:
        trainer.step(rows(2)), trainer.step(rows(1))
    mixed = [make(seed=seed) for seed in (1, 2)]
    for items in (rows(2), rows(1)):
        for trainer in mixed:
            trainer.step(items)
    assert all(same(weights(a), weights(b)) for a, b in zip(alone, mixed))


def test_c80_under_no_grad_a_trainer_still_trains():
    trainer = make()
    before = weights(trainer)
    with torch.no_grad():
        trainer.train()
        assert not torch.is_grad_enabled()
    assert not same(before, weights(trainer))


# C82: one agent falls out of the many (the hand-written step is in test_magrpo.py)

@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
def test_c82_one_agent_knows_no_difference_between_aligned_and_cross(joint_mode):
    trainer = trained([micro_model(0, "gpt2")], joint_mode=joint_mode, num_turns=2, num_generations=2)
    plain = trained([micro_model(0, "gpt2")], num_turns=2, num_generations=2)
    assert same(weights(trainer), weights(plain)) and trainer.plan().joint_responses_per_node == 2


def test_c82_a_single_agents_reward_may_take_one_list():
    trainer = trained([micro_model(0, "gpt2")], reward_func=lambda completions: [float(len(text)) for text in completions])
    assert trainer.env_step == 9


# other models and numbers

@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_half_precision_trains(kind):
    agents = team((kind, kind), torch.bfloat16)
    before = weights(agents)
    trainer = trained(agents, reference_kl_enabled=True, num_turns=2, num_generations=2, agent_learning_rate=0.1)
    assert finite(trainer.history) and not same(before[:1], weights(trainer)[:1]) and not same(before[1:], weights(trainer)[1:])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_checkpointing_gives_the_same_step(kind):
    found = []
    for checkpointing in (False, True):
        agents, trees = team((kind, kind), **DOUBLE), Trees()
        twins = copy.deepcopy(agents)
        for model in agents if checkpointing else ():
            model.gradient_checkpointing_enable()
            model.train()
        trainer = make(agents, callbacks=[trees], reward_func=letters)
        seen = gradients(trainer)
        trainer.step(rows(2))
        for i, optimizer in enumerate(trainer.optimizers):
            taken = {p: seen[optimizer][0][p] for p in agents[i].parameters()}
            assert distance(taken, naive_gradient(twins[i], trees.of("policy"), i, "mean")) < 1e-5
        found.append(trees.of("policy"))
    assert found[0] == found[1]


def test_frozen_parts_of_an_agent_stay():
    agents = team()
    for model in agents:
        model.get_input_embeddings().requires_grad_(False)
    before = weights(agents)
    trainer = trained(agents)
    for old, model in zip(before, trainer.agents):
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, old[name])}
        assert frozen and moved and not frozen & moved


def test_rewards_beyond_all_bounds_are_reported_and_nobody_moves():
    trainer = make(reward_func=numbered(1.7e308, -1.7e308, 0.0))
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match="agent 0"):
        trainer.train()
    assert same(before, weights(trainer)) and trainer.env_step == 0


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_step_does_not_depend_on_the_scale_of_the_rewards_but_for_the_floor(scale):
    plain, scaled = (make(reward_func=lambda a, b, by=by: by * letters(a, b)[0]) for by in (1.0, scale))
    first, second = (each.rollout(rows()[0]) for each in (plain, scaled))
    if scale > 1:
        assert first.advantages[0] == pytest.approx(second.advantages[0], rel=1e-9)
    else:
        assert max(map(abs, second.advantages[0])) < 1e-20  # below the floor of 1e-6 they fade


def test_c47_agents_that_share_some_parameters_cannot_live_on_two_devices():
    agents = team()
    agents[1].set_input_embeddings(agents[0].get_input_embeddings())
    agents[1].get_output_embeddings().weight = agents[0].get_output_embeddings().weight
    with pytest.raises(ValueError, match=r"agent_devices: agents\[0\] and agents\[1\] have parameters in common but should live on cpu:0 and cpu:1; give them one device, or copies"):
        make(agents, parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])
