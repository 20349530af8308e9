"""Small inputs that break libraries of this kind, tried on MADPO; a test's name starts with its case."""
import copy
import decimal
import random

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_nb.losses import NonFiniteError, bradley_terry_loss, k3_kl, madpo_loss, policy_gradient_loss, value_loss
from comlrl_nb.prompts import chat_formatter
from comlrl_nb.toy import fast_tokenizer, micro_model, micro_tokenizer
from madpo_runs import TOKENIZER, closed_form, forwards, gradients, letters, logprob, make, margin, rows, same, scripted, team, weights

PAD, BOS, EOS = 0, 1, 2
A, B, AB = TOKENIZER.convert_tokens_to_ids(["a", "b", "ab"])
X, Y, JUNK = TOKENIZER.convert_tokens_to_ids(["x", "y", "j"])
ONE = dict(train_dataset=[{"prompt": "say ab"}], preference_num_candidates=2, preference_pairs_per_sample=1)


def pad_is_eos():
    tokenizer = micro_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def numbered(*values):
    """A reward that pays these values in turn."""
    turn = iter(values * 100)
    return lambda first, second: next(turn)


def metrics(agents, batch, **more):
    """What an update on `batch` reports, without moving anything."""
    trainer = make(agents, agent_learning_rate=0.0, train_batch_size=len(batch), **more)
    return trainer.train_on(batch)


def close(taken, wanted, tolerance=1e-4):
    keys = list(taken)
    used, right = (torch.cat([side[p].flatten() for p in keys]) for side in (taken, wanted))
    return bool(right.norm() > 0) and bool((used - right).norm() < tolerance * right.norm())


# C01: the end of a completion comes from the sampled ids, not from comparing with the padding id

@pytest.mark.parametrize("tokenizer", [TOKENIZER, pad_is_eos()], ids=["own pad", "pad is eos"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c01_first_end_token_counts_and_nothing_after_it(tokenizer, kind):
    tail = tokenizer.pad_token_id
    agents = team((kind, kind))
    for model in agents:
        scripted(model, [A, B, EOS, tail, tail], [X, Y, X, Y, X], [EOS, tail, tail, tail, tail])
    trainer = make(agents, tokenizer=tokenizer, reward_func=numbered(3.0, 2.0, 1.0), preference_num_candidates=3, pair_selection="all",
                   preference_pairs_per_sample=None, train_dataset=rows(1), score_last_token=True, train_batch_size=8)
    batch = trainer.collect()
    assert {side[0].token_ids for one in batch for side in (one.winner, one.loser)} == {(A, B, EOS), (X, Y, X, Y, X), (EOS,)}
    assert {side[0].token_ids: side[0].finished for one in batch for side in (one.winner, one.loser)} == {(A, B, EOS): True, (X, Y, X, Y, X): False, (EOS,): True}
    wanted, seen = closed_form(trainer.agents, batch, 0.1, last=True), gradients(trainer)
    trainer.train_on(batch)
    assert all(close(seen[optimizer][0], wanted[i]) for i, optimizer in enumerate(trainer.optimizers))


def test_c01_end_token_has_a_gradient_when_scored():
    found = {}
    for last in (False, True):
        trainer = make(team(), score_last_token=last, train_batch_size=8)
        for model in trainer.agents:
            scripted(model, [A, EOS], [B, EOS])
        trainer.setup.reward.func = numbered(1.0, 0.0)
        batch, seen = trainer.collect(rows(1)), gradients(trainer)
        head = trainer.agents[1].get_output_embeddings().weight
        twin = copy.deepcopy(trainer.agents[1])
        trainer.train_on(batch)
        found[last] = (seen[trainer.optimizers[1]][0][head], closed_form([trainer.agents[0], twin], batch, 0.1, last))
    assert not torch.allclose(found[False][0], found[True][0], rtol=1e-3)


def test_c01_prompt_tokens_equal_to_pad_stay_attended():
    tokenizer, agents = pad_is_eos(), team()
    seen = [scripted(model, [A, EOS], [B, X]) for model in agents]
    trainer = make(agents, tokenizer=tokenizer, reward_func=numbered(1.0, 0.0), train_dataset=[{"prompt": "a<eos>b"}, {"prompt": "a much longer prompt"}],
                   preference_num_candidates=2, preference_pairs_per_sample=1, score_last_token=True)
    batch = trainer.collect()
    assert batch[0].prompts[0].token_ids == (BOS, A, EOS, B) and seen[0][0] == [BOS, A, EOS, B]  # what the attention mask keeps
    stats = metrics(agents, batch, tokenizer=tokenizer, score_last_token=True)
    for i, model in enumerate(agents):
        assert stats[f"agent_{i}/margin"] == pytest.approx(sum(margin(model, one, i).item() for one in batch) / 2, abs=1e-4)


# C02: left padding does not shift positions

@pytest.mark.parametrize("kinds", [("gpt2", "gpt2"), ("llama", "llama"), ("gpt2", "llama")])
@pytest.mark.parametrize("last", [False, True])
def test_c02_margins_are_the_same_batched_and_alone(kinds, last):
    agents = team(kinds)
    data = [{"prompt": text} for text in ("s", "say abab", "say it once more and then again")]
    batch = make(agents, train_dataset=data, score_last_token=last, preference_pairs_per_sample=2).collect()
    assert len({len(one.prompts[0].token_ids) for one in batch}) == 3
    together = metrics(agents, batch, score_last_token=last)
    for i, model in enumerate(agents):
        alone = [metrics(agents, [one], score_last_token=last)[f"agent_{i}/margin"] for one in batch]
        naive = [margin(model, one, i, last).item() for one in batch]
        assert alone == pytest.approx(naive, abs=1e-4)
        assert together[f"agent_{i}/margin"] == pytest.approx(sum(naive) / len(naive), abs=1e-4)


def test_c02_gradient_of_a_ragged_batch():
    agents = team()
    data = [{"prompt": text} for text in ("s", "say abab", "say it once more and then again")]
    trainer = make(agents, train_dataset=data, train_batch_size=9)
    batch = trainer.collect()
    wanted, seen = closed_form(agents, batch, 0.1), gradients(trainer)
    trainer.train_on(batch)
    assert all(close(seen[optimizer][0], wanted[i]) for i, optimizer in enumerate(trainer.optimizers))


def test_c02_samples_are_the_same_batched_and_alone():
    """A model that always takes its likeliest token writes the same whether or not longer prompts stand beside it."""
    data = [{"prompt": text} for text in ("s", "say abab", "say it once more and then again")]
    greedy = dict(temperature=1e-4, preference_num_candidates=2)
    for kinds in (("gpt2", "gpt2"), ("llama", "llama")):
        nodes = [make(team(kinds), **greedy).rollout(item).generations[0].completions[0].token_ids for item in data]
        trainer = make(team(kinds), train_dataset=data, **greedy)
        together = [row[0].completions[0].token_ids for row in trainer.team.sample([[item["prompt"]] * 2 for item in data], 1)]
        assert nodes == together


# C06: one start token

@pytest.mark.parametrize("template", ["{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}",
                                      "{% for message in messages %}{{ message['content'] }} {% endfor %}"], ids=["template with bos", "template without"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c06_one_start_token_in_sampling_and_scoring(template, kind):
    tokenizer = micro_tokenizer()
    tokenizer.chat_template = template
    trainer = make(team((kind, kind)), tokenizer=tokenizer, formatters=chat_formatter(tokenizer, system="be brief"), dpo_reference=True)
    sampled = forwards(trainer.agents[0])
    batch = trainer.collect()
    prefills = [row for call in sampled for row in call if len(row) > 1]
    assert prefills and all(row.count(BOS) == 1 for row in prefills)
    assert all(one.prompts[0].token_ids[0] == BOS and one.prompts[0].token_ids.count(BOS) == 1 for one in batch)
    scored, reference = forwards(trainer.agents[1]), forwards(trainer.reference_models[1])
    trainer.train_on(batch)
    for calls in (scored, reference):
        prompts = [tuple(token for token in row if token != PAD) for row in calls[0]]
        assert set(prompts) <= {one.prompts[1].token_ids for one in batch} and all(row.count(BOS) == 1 for row in prompts)


# C07, C09: ids are used as they were sampled

def test_c07_prompt_ids_do_not_depend_on_the_completion():
    colon, space = TOKENIZER.convert_tokens_to_ids([":", "Ġ"])
    agents = team()
    for model in agents:
        scripted(model, [space, A, EOS], [X, Y])
    trainer = make(agents, reward_func=numbered(1.0, 0.0), score_last_token=True, **{**ONE, "train_dataset": [{"prompt": "say:"}]})
    one, = trainer.collect()
    text = one.prompts[0].text + one.winner[0].text
    assert TOKENIZER(text)["input_ids"] != [*one.prompts[0].token_ids, *one.winner[0].token_ids[:-1]]  # a merge spans the boundary
    assert one.prompts[0].token_ids == tuple(TOKENIZER("say:")["input_ids"]) and one.winner[0].token_ids == (space, A, EOS)
    stats = metrics(agents, [one], score_last_token=True)
    assert stats["agent_0/margin"] == pytest.approx(margin(agents[0], one, 0).item(), abs=1e-4)


def test_c07_nothing_is_lost_when_the_prompt_fits():
    length = len(TOKENIZER("say ab")["input_ids"])
    fits = make(max_prompt_length=length, max_new_tokens=6).rollout({"prompt": "say ab"})
    assert fits.prompts[0].token_ids == tuple(TOKENIZER("say ab")["input_ids"])
    assert all(len(completion.token_ids) <= 6 for generation in fits.generations for completion in generation.completions)
    assert any(len(completion.token_ids) == 6 for generation in fits.generations for completion in generation.completions)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c09_stored_and_trained_ids_are_the_sampled_ones(kind):
    agents = team((kind, kind))
    for model in agents:
        scripted(model, [A, B, A, B], [X, A, B, EOS])
    assert TOKENIZER("abab", add_special_tokens=False)["input_ids"] == [AB, AB]
    trainer = make(agents, reward_func=numbered(1.0, 0.0), score_last_token=True, **ONE)
    one, = trainer.collect()
    assert one.winner[0].token_ids == (A, B, A, B) and one.winner[0].text == "abab" and one.loser[0].token_ids == (X, A, B, EOS)
    seen = forwards(agents[0])
    trainer.train_on([one])
    assert sorted(row[:3] for call in seen[1:] for row in call) == sorted([[A, B, A], [X, A, B]])  # all but the last token of each


def test_c09_random_ids_survive():
    trainer = make(max_new_tokens=12)
    changed = 0
    for one in trainer.collect():
        for side in (*one.winner, *one.loser):
            body = side.token_ids[:-1] if side.finished else side.token_ids
            assert TOKENIZER.decode(body, skip_special_tokens=True) == side.text
            changed += tuple(TOKENIZER(side.text, add_special_tokens=False)["input_ids"]) != body
    assert changed > 0  # re-encoding would have trained other tokens


# C11: a tokenizer without some special token

def without(*names):
    tokenizer = micro_tokenizer()
    tokenizer = fast_tokenizer(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    for name in names:
        setattr(tokenizer, name, None)
    return tokenizer


@pytest.mark.parametrize("missing", [("pad_token",), ("bos_token",), ("pad_token", "bos_token"), ("eos_token",), ("eos_token", "bos_token")])
def test_c11_missing_tokens_never_become_none_ids(missing):
    tokenizer, agents = without(*missing), team()
    seen = [forwards(model) for model in agents]
    trainer = make(agents, tokenizer=tokenizer, num_train_epochs=2)
    before = weights(trainer)
    trainer.train()
    assert [getattr(tokenizer, name) for name in missing] == [None] * len(missing)  # the caller's object is as it was
    assert all(isinstance(token, int) for calls in seen for call in calls for row in call for token in row)
    assert not same(before, weights(trainer))


def test_c11_neither_pad_nor_eos_is_an_error():
    with pytest.raises(ValueError, match="pad_token"):
        make(tokenizer=without("pad_token", "eos_token"))


def test_c11_no_end_token_anywhere_is_an_error():
    agents = team(eos_token_id=None)
    with pytest.raises(ValueError, match="eos_token"):
        make(agents, tokenizer=without("eos_token"))


# C13: text after the end token

@pytest.mark.parametrize("ends", [[EOS], [EOS, PAD]])
def test_c13_nothing_after_the_end_is_read(ends):
    agents, read = team(), []
    for model in agents:
        scripted(model, [A, *ends, JUNK, JUNK], [B, EOS, JUNK, JUNK, JUNK])

    def reward(first, second):
        read.extend([*first, *second])
        return float("a" in first[0])

    trainer = make(agents, reward_func=reward, **ONE)
    one, = trainer.collect()
    assert set(read) == {"a", "b"} and one.winner[0].text == "a" and one.winner[0].token_ids == (A, EOS)


def test_c13_any_end_token_of_the_model_ends_the_text():
    agents, read = team(eos_token_id=[EOS, X]), []
    for model in agents:
        scripted(model, [A, X, JUNK, JUNK], [B, Y, EOS, JUNK])
    trainer = make(agents, reward_func=lambda first, second: read.append(first[0]) or float(len(read)), **ONE)
    one, = trainer.collect()
    assert read == ["a", "by"] and one.loser[0].token_ids == (A, X) and one.loser[0].finished


# C14: the limit on prompts

def test_c14_the_same_shortened_prompt_is_sampled_and_scored():
    agents = team()
    text = "a long introduction that nobody needs, and then the question: ab"
    full = TOKENIZER(text)["input_ids"]
    trainer = make(agents, train_dataset=[{"prompt": text}], max_prompt_length=8)
    seen = scripted(agents[1], [A, B, EOS], [X, Y, EOS])
    with pytest.warns(UserWarning, match="max_prompt_length=8"):
        batch = trainer.collect()
    ids = batch[0].prompts[1].token_ids
    assert len(ids) == 8 and ids[0] == BOS and list(ids[1:]) == full[-7:] and seen == [list(ids)]
    scored = forwards(agents[1])
    trainer.train_on(batch)
    assert scored[0] == [list(ids)]


def test_c14_chat_keeps_the_assistants_header():
    tokenizer = micro_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}bot>{% endif %}"
    trainer = make(tokenizer=tokenizer, formatters=chat_formatter(tokenizer), max_prompt_length=10)
    with pytest.warns(UserWarning):
        node = trainer.rollout({"prompt": "thirty letters of a chat prompt"})
    assert tokenizer.decode(node.prompts[0].token_ids[1:]).endswith("bot>") and node.prompts[0].token_ids[0] == BOS


# C17: log-probabilities are at temperature 1, whatever the sampling

def test_c17_margins_do_not_depend_on_the_sampling_settings():
    agents = team()
    batch = make(agents).collect()
    found = [metrics(agents, batch, **more) for more in (dict(temperature=1.0), dict(temperature=0.5), dict(temperature=3.0, top_k=2, top_p=0.1))]
    naive = sum(margin(agents[0], one, 0, last=False).item() for one in batch) / len(batch)
    assert len({one["agent_0/margin"] for one in found}) == 1 and found[0]["agent_0/margin"] == pytest.approx(naive, abs=1e-4)


def test_c17_references_use_the_same_temperature():
    agents = team()
    batch = make(agents).collect()
    for temperature in (0.5, 1.0):  # a reference that is the policy itself: relative margins are zero
        stats = metrics(agents, batch, temperature=temperature, dpo_reference=True, score_last_token=True)
        assert stats["loss"] == pytest.approx(np.log(2), abs=1e-5) and stats["weight"] == pytest.approx(0.5, abs=1e-5)


# C19: the model's own generation settings play no part

def test_c19_generation_config_is_neither_used_nor_changed():
    greedy = dict(temperature=1e-4, top_k=1, top_p=0.05, repetition_penalty=1.3, min_new_tokens=3, num_beams=2)
    plain, other = team(), team()
    for model in other:
        model.generation_config.update(**greedy)
    kept = [(model.generation_config, model.generation_config.to_dict()) for model in other]
    nodes = [make(agents, preference_num_candidates=32).rollout({"prompt": "say ab"}) for agents in (plain, other)]
    assert nodes[0].joints == nodes[1].joints
    assert len({joint.texts for joint in nodes[1].joints}) > 20
    assert all(model.generation_config is config and config.to_dict() == as_it_was for model, (config, as_it_was) in zip(other, kept))


@pytest.mark.parametrize("wrapped", [False, True])
def test_c19_config_settings_are_effective(wrapped):
    agents = team()
    if wrapped:
        for model in agents:
            model.generate = model.generate
    single = make(agents, top_k=1, preference_num_candidates=8).rollout({"prompt": "say ab"})
    cold = make(agents, temperature=1e-4, preference_num_candidates=8).rollout({"prompt": "say ab"})
    nucleus = make(agents, top_p=1e-4, preference_num_candidates=8).rollout({"prompt": "say ab"})
    assert {joint.texts for joint in single.joints} == {joint.texts for joint in cold.joints} == {joint.texts for joint in nucleus.joints}
    assert len({joint.texts for joint in single.joints}) == 1
    assert len({joint.texts for joint in make(agents, preference_num_candidates=8).rollout({"prompt": "say ab"}).joints}) == 8


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
                steps = [torch.log_softmax(step[row].float(), -1)[token].item() for step, token in zip(out.logits, ids)]
                told[index, tuple(ids)] = steps
            return out
        return generate

    for index, model in enumerate(agents):
        model.generate = spy(index)
    batch = make(agents, temperature=1.0).collect()
    stats = metrics(agents, batch, score_last_token=True)

    def at_sampling(index, completion):
        return next(sum(steps[:len(completion.token_ids)]) for (i, ids), steps in told.items() if i == index and ids[:len(completion.token_ids)] == completion.token_ids)

    for i in range(2):
        wanted = sum(at_sampling(i, one.winner[i]) - at_sampling(i, one.loser[i]) for one in batch) / len(batch)
        assert stats[f"agent_{i}/margin"] == pytest.approx(wanted, abs=1e-5)


def test_c20_dropout_plays_no_part_and_modes_come_back():
    found = []
    for rate in (0.0, 0.5):
        agents = team(("gpt2", "gpt2"), resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
        agents[0].train()
        agents[1].transformer.h[0].train()
        modes = [[module.training for module in model.modules()] for model in agents]
        trainer = make(agents, num_train_epochs=2, eval_dataset=rows(1), eval_interval=1, dpo_reference=True)
        trainer.train()
        assert modes == [[module.training for module in model.modules()] for model in agents]
        found.append(weights(trainer))
    assert same(*found)


# C25, C37: nothing to prefer

@pytest.mark.parametrize("value", [0.3, 0.0, -1.0])
def test_c25_all_tied_leaves_the_weights_bit_for_bit(value):
    trainer = make(reward_func=lambda first, second: [value], num_train_epochs=3, eval_dataset=rows(1), eval_interval=1)
    assert all(optimizer.defaults["weight_decay"] > 0 for optimizer in trainer.optimizers)
    before = weights(trainer)
    trainer.train(), trainer.train_on([]), trainer.step(rows())
    assert same(before, weights(trainer)) and all(not optimizer.state for optimizer in trainer.optimizers)
    row = trainer.history.rows[0]
    assert row["kind"] == "collect" and row["pairs"] == 0 and row["tied_pairs"] == 3 * 6 and row["tied_group_fraction"] == 1.0
    assert row["turn_1/reward_mean"] == pytest.approx(value)
    assert all(np.isfinite(v) for row in trainer.history for v in row.values() if not isinstance(v, str))


def test_c25_ties_inside_an_item_are_no_pairs():
    trainer = make(reward_func=numbered(1.0, 1.0, 0.0, 0.0), pair_selection="all", preference_pairs_per_sample=None)
    batch = trainer.collect()
    assert len(batch) == 3 * 4 and all(one.reward_gap == 1.0 for one in batch)
    assert trainer.history.rows[0]["tied_pairs"] == 3 * 2


def test_c37_no_pairs_and_the_trainer_goes_on():
    trainer = make(reward_func=lambda first, second: 0.0)
    before = weights(trainer)
    history = trainer.train()
    assert same(before, weights(trainer)) and [row["kind"] for row in history] == ["collect"] and trainer.env_step == trainer.run.update == 0
    trainer.setup.reward.func = letters
    trainer.train()
    assert not same(before, weights(trainer))


def test_c37_items_without_pairs_among_others():
    def reward(first, second, answer):
        return 0.0 if answer[0] == 1 else letters(first, second)

    trainer = make(reward_func=reward)
    batch = trainer.collect()
    assert {one.prompts[0].text for one in batch} == {rows()[0]["prompt"], rows()[2]["prompt"]}


# C30: no tokens to train

def test_c30_all_completions_empty():
    agents = team()
    for model in agents:
        scripted(model, [EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.0, 0.5, 0.25))
    before = weights(trainer)
    trainer.train()
    row = trainer.history.rows[0]
    assert row["pairs"] == 0 and row["identical_pairs"] == 3 * 6 and same(before, weights(trainer))
    assert row["completion_length"] == 1.0 and row["finished_fraction"] == 1.0


@pytest.mark.parametrize("last", [False, True])
def test_c30_an_agent_without_trainable_tokens_stays_as_it_is(last):
    agents = team()
    scripted(agents[0], [EOS])
    trainer = make(agents, score_last_token=last)
    before = weights(trainer)
    trainer.train()
    assert not same(before[1:], weights(trainer)[1:])
    assert all(np.isfinite(v) for row in trainer.history for v in row.values() if not isinstance(v, str))
    assert same(before[:1], weights(trainer)[:1])


def test_c30_both_agents_write_one_token_that_is_not_scored():
    agents = team()
    for model in agents:
        scripted(model, [EOS], [A])
    trainer = make(agents, reward_func=numbered(1.0, 0.0), preference_num_candidates=2, preference_pairs_per_sample=1, score_last_token=False)
    before = weights(trainer)
    trainer.train()
    assert trainer.history.rows[-1]["agent_0/margin"] == 0.0 and trainer.history.rows[-1]["loss"] == pytest.approx(np.log(2))
    assert same(before, weights(trainer))


@pytest.mark.parametrize("last", [False, True])
def test_c30_empty_completions_leave_the_others_alone(last):
    agents = team()
    scripted(agents[0], [EOS], [A, B, EOS], [X, Y, A], [EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.7, 0.4, 0.0), score_last_token=last, train_batch_size=32, pair_selection="all", preference_pairs_per_sample=None)
    batch = trainer.collect()
    wanted, seen = closed_form(agents, batch, 0.1, last), gradients(trainer)
    stats = trainer.train_on(batch)
    assert all(close(seen[optimizer][0], wanted[i]) for i, optimizer in enumerate(trainer.optimizers))
    assert all(np.isfinite(value) for value in stats.values())


def test_c30_generate_may_return_no_tokens_at_all():
    agents = team()
    scripted(agents[0], [])
    trainer = make(agents)
    batch = trainer.collect()
    assert all(one.winner[0].token_ids == () and one.winner[0].text == "" and not one.winner[0].finished for one in batch)
    stats = trainer.train_on(batch)
    assert stats["agent_0/margin"] == 0.0 and stats["agent_0/grad_norm"] == 0.0 and stats["agent_1/grad_norm"] > 0


# C31: what stands at masked places does not matter; what stands elsewhere is reported

@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e4])
def test_c31_losses_ignore_masked_places(junk):
    mask = torch.tensor([True, False, True])
    values = torch.tensor([0.2, 0.0, -0.4], dtype=torch.float64)
    spoiled = torch.where(mask, values, torch.tensor(junk, dtype=torch.float64))
    targets = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    for loss in (lambda v, t: policy_gradient_loss(v, t, mask), lambda v, t: value_loss(v, t, mask=mask),
                 lambda v, t: value_loss(v, t, old_values=spoiled, clip_range=0.2, mask=mask)):
        outcomes = []
        for v, t in ((values, targets), (spoiled, torch.where(mask, targets, torch.tensor(junk, dtype=torch.float64)))):
            v = v.clone().requires_grad_(True)
            result = loss(v, t)
            outcomes.append((result.item(), torch.autograd.grad(result, v)[0]))
        assert outcomes[0][0] == outcomes[1][0] and torch.equal(*(grad for _, grad in outcomes)) and np.isfinite(outcomes[0][0])
    row = mask[None]
    assert torch.equal(k3_kl(values[None], targets[None], row), k3_kl(spoiled[None], targets[None], row))


def test_c31_a_nan_that_counts_is_not_hidden():
    bad = torch.tensor([0.1, float("nan")])
    assert torch.isnan(bradley_terry_loss(bad, torch.zeros(2))) and torch.isnan(madpo_loss(bad[None], 0.1)[0])
    assert torch.isnan(policy_gradient_loss(bad, torch.ones(2)))


def test_c31_logits_at_padding_do_not_reach_the_update():
    """The logits after the last scored token of a shorter completion are NaN; nothing changes."""
    agents, twins = team(("gpt2", "gpt2")), team(("gpt2", "gpt2"))
    batch = make(agents).collect()
    batch = [one for one in batch if len({len(one.winner[0].token_ids), len(one.loser[0].token_ids)}) == 2] or None
    if batch is None:
        for model in (*agents, *twins):
            scripted(model, [A, B, EOS], [X, Y, A, B, X])
        batch = make(agents, reward_func=numbered(1.0, 0.0), **ONE).collect()

    def spoil(module, inputs, output):
        ids = inputs_seen[0]
        if torch.is_grad_enabled() and output.shape[:2] == ids.shape:
            return torch.where((ids == PAD)[..., None], float("nan"), output)

    inputs_seen = [None]
    for model in twins:
        model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: inputs_seen.__setitem__(0, inputs[0]))
        model.get_output_embeddings().register_forward_hook(spoil)
    trainers = [make(side, score_last_token=True) for side in (agents, twins)]
    for trainer in trainers:
        trainer.train_on(batch)
    assert same(weights(agents), weights(twins))


@pytest.mark.parametrize("agent", [0, 1])
def test_c31_a_broken_weight_is_reported_by_agent_and_nobody_moves(agent):
    trainer = make()
    batch = trainer.collect()
    with torch.no_grad():
        trainer.agents[agent].get_input_embeddings().weight[batch[0].winner[agent].token_ids[0]] = float("nan")
    before = weights(trainer.agents[1 - agent:2 - agent])
    with pytest.raises(NonFiniteError, match=f"agent {agent}"):
        trainer.train_on(batch)
    assert same(before, weights(trainer.agents[1 - agent:2 - agent])) and not trainer.optimizers[0].state


# C33, C36: what a reward function may return

def stream():
    yield 1.0


WRONG = {"empty": [], "two": [1.0, 2.0], "four": [0.1, 0.2, 0.3, 0.4], "column": np.ones((4, 1)), "generator": stream(), "dict": {"reward": 1.0},
         "text": "0.5", "none": None, "none in list": [None], "nan": float("nan"), "inf": [float("inf")], "text in list": ["1"], "object": object(),
         "nan tensor": torch.tensor(float("nan")), "set": {1.0}, "complex": 1j, "nested": [[1.0, 2.0]]}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG.keys())
def test_c33_wrong_returns_name_function_item_and_sample(value):
    calls = []

    def judge(first, second):
        calls.append(first)
        return value if len(calls) == 6 else 0.01 * len(calls)

    trainer = make(reward_func=judge)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"judge.*item 1.*sample 1.*expected") as caught:
        trainer.train()
    assert len(calls) <= 8 and "got" in str(caught.value)  # the item is judged, no further one
    assert same(before, weights(trainer)) and trainer.env_step == 0 and all(not optimizer.state for optimizer in trainer.optimizers)


def test_c33_the_processor_is_held_to_the_same():
    for broken in (lambda value: float("nan"), lambda value: None, lambda value: [value, value]):
        with pytest.raises(ValueError, match="reward_processor.*item 0.*sample 0"):
            make(reward_processor=broken).collect()


@pytest.mark.parametrize("error", [TypeError("missing 1 required positional argument"), ValueError("mine"), KeyError("x")])
def test_c33_errors_of_the_function_surface_unchanged_after_one_call(error):
    calls = []

    def reward(first, second):
        calls.append(first)
        raise error

    trainer = make(reward_func=reward)
    before = weights(trainer)
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and len(calls) == 1 and same(before, weights(trainer))


FORMS = {"number": float, "list": lambda v: [v], "tuple": lambda v: (v,), "numpy float64": np.float64, "numpy float32 list": lambda v: [np.float32(v)],
         "numpy array": lambda v: np.array([v]), "array (1,1)": lambda v: np.array([[v]]), "tensor": lambda v: torch.tensor(v, dtype=torch.float64),
         "tensor with gradient": lambda v: torch.tensor([v], dtype=torch.float64, requires_grad=True), "decimal": lambda v: decimal.Decimal(str(v)),
         "list of tensors": lambda v: [torch.tensor(v)]}


def test_c36_all_forms_are_the_same():
    found = {}
    for name, form in FORMS.items():
        turn = iter([0.25, 0.5, 0.75, 1.0] * 3)
        trainer = make(reward_func=lambda first, second: form(next(turn)))
        trainer.train()
        found[name] = weights(trainer)
        assert all(type(value) in (float, int, str) for row in trainer.history for value in row.values()), name
    first = found.pop("number")
    assert all(same(first, other) for other in found.values())


@pytest.mark.parametrize("form", [bool, np.bool_, int, lambda v: np.array(int(v)), lambda v: torch.tensor(bool(v))])
def test_c36_flags_and_whole_numbers(form):
    turn = iter([0, 1, 1, 0] * 3)
    batch = make(reward_func=lambda first, second: form(next(turn))).collect()
    assert batch and all((one.winner_reward, one.loser_reward) == (1.0, 0.0) and type(one.winner_reward) is float for one in batch)


# C45: the same tokens on both sides

def test_c45_identical_pairs_are_dropped_and_counted():
    agents = team()
    for model in agents:
        scripted(model, [A, B, EOS], [A, B, EOS], [X, Y, EOS], [X, Y, EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.75, 0.5, 0.25), pair_selection="all", preference_pairs_per_sample=None)
    batch = trainer.collect()
    assert len(batch) == 3 * 4 and not any(one.same_tokens for one in batch)
    row = trainer.history.rows[0]
    assert (row["pairs"], row["identical_pairs"], row["tied_pairs"]) == (12, 6, 0)


def test_c45_one_agent_may_repeat_itself():
    agents = team()
    scripted(agents[0], [A, B, EOS])
    batch = make(agents).collect()
    assert batch and all(one.winner[0] == one.loser[0] and one.winner[1] != one.loser[1] for one in batch)


def test_c45_limit_applies_after_dropping():
    agents = team()
    for model in agents:
        scripted(model, [A, EOS], [A, EOS], [X, EOS], [Y, EOS])
    trainer = make(agents, reward_func=numbered(1.0, 0.0, 0.6, 0.5), preference_pairs_per_sample=1, train_dataset=rows(1))
    one, = trainer.collect()
    assert {one.winner[0].token_ids, one.loser[0].token_ids} != {(A, EOS)} and one.reward_gap == pytest.approx(0.6)


def test_c45_same_tokens_different_texts_of_the_same_length_are_kept():
    agents = team()
    scripted(agents[0], [A, B, EOS], [AB, EOS])  # both read "ab"
    scripted(agents[1], [X, EOS])
    batch = make(agents, reward_func=numbered(1.0, 0.0), **ONE).collect()
    assert len(batch) == 1 and batch[0].winner[0].text == batch[0].loser[0].text


# C47: one object in two roles

def test_c47_two_agents_that_are_one_object_share_one_step():
    model = micro_model(0, "gpt2", torch.float64)
    twin = copy.deepcopy(model)
    trainer = make([model, model], train_batch_size=8)
    assert trainer.optimizers[0] is trainer.optimizers[1]
    owned = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) == len(list(model.parameters()))
    batch, seen = trainer.collect(), gradients(trainer)
    first, second = closed_form([twin, twin], batch, 0.1)
    trainer.train_on(batch)
    steps, = seen.values()
    assert len(steps) == trainer.run.update == 1
    assert close({q: steps[0][p] for p, q in zip(model.parameters(), twin.parameters())}, {q: first[q] + second[q] for q in twin.parameters()}, 1e-9)


def test_c47_agents_of_one_object_still_write_different_texts():
    model = micro_model()
    node = make([model, model]).rollout({"prompt": "say ab"})
    assert node.generations[0].completions != node.generations[1].completions


def test_c47_agents_that_share_some_parameters():
    agents = team(("gpt2", "gpt2"), torch.float64)
    agents[1].set_input_embeddings(agents[0].get_input_embeddings())
    agents[1].get_output_embeddings().weight = agents[0].get_output_embeddings().weight
    shared = agents[0].get_input_embeddings().weight
    twins = copy.deepcopy(agents)
    trainer = make(agents, train_batch_size=8)
    owned = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(set(owned)) and set(owned) == {p for model in agents for p in model.parameters()}
    batch, seen = trainer.collect(), gradients(trainer)
    first, second = closed_form(twins, batch, 0.1)
    trainer.train_on(batch)
    key = twins[0].get_input_embeddings().weight
    assert close({key: seen[trainer.optimizers[0]][0][shared]}, {key: first[key] + second[key]}, 1e-9)


def test_c47_snapshots_do_not_move():
    model = micro_model(0, "gpt2")
    trainer = make([model, model], dpo_reference=True, num_train_epochs=3)
    before, start = weights(trainer.reference_models), weights([model])
    assert all(reference is not model for reference in trainer.reference_models)
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(p.data_ptr() for p in trainer.reference_models[0].parameters())
    assert not any(p.requires_grad for reference in trainer.reference_models for p in reference.parameters())
    trainer.train()
    assert same(before, weights(trainer.reference_models)) and not same(start, weights([model]))
    assert all(p.requires_grad for p in model.parameters())


# C49: tied embeddings

@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("resized", [False, True])
def test_c49_saved_models_come_back(tmp_path, kind, tied, resized):
    agents = team((kind, kind), tie_word_embeddings=tied)
    if resized:
        for model in agents:
            model.resize_token_embeddings(len(TOKENIZER) + 3, mean_resizing=False)
    trainer = make(agents, num_train_epochs=2)
    for model, optimizer in zip(trainer.agents, trainer.optimizers):
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        assert len(owned) == len({p.data_ptr() for p in owned}) == len(list(model.parameters()))
    trainer.train()
    trainer.save_model(tmp_path)
    for index, model in enumerate(trainer.agents):
        back = AutoModelForCausalLM.from_pretrained(tmp_path / f"agent_{index}")
        assert same(weights([model]), weights([back]))
        assert (back.get_input_embeddings().weight.data_ptr() == back.get_output_embeddings().weight.data_ptr()) == tied
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
        assert AutoTokenizer.from_pretrained(tmp_path / f"agent_{index}")("say ab")["input_ids"] == TOKENIZER("say ab")["input_ids"]


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
@pytest.mark.parametrize("count, size", [(3, 8), (9, 4), (1, 4)])
def test_c68_every_row_once_and_the_last_batch_too(data, count, size):
    seen = []

    def reward(first, second, answer):
        seen.append(answer[0])
        return letters(first, second)

    trainer = make(train_dataset=DATA[data](count), reward_func=reward, train_batch_size=size, preference_pairs_per_sample=1, num_train_epochs=2)
    before = weights(trainer)
    trainer.train()
    assert seen == [i for i in range(count) for _ in range(4)]
    assert trainer.run.update == 2 * -(-count // size) and trainer.env_step == 2 * 2 * count
    assert not same(before, weights(trainer))


@pytest.mark.parametrize("data", DATA)
def test_c68_no_rows_is_an_error_at_train(data):
    if data == "IterableDataset":
        empty = datasets.IterableDataset.from_generator(lambda: iter([]))
    else:
        empty = DATA[data](0) if data != "Dataset" else datasets.Dataset.from_dict({"prompt": []})
    trainer = make(train_dataset=empty)
    with pytest.raises(ValueError, match="train_dataset.*no rows"):
        trainer.train()
    assert trainer.env_step == 0 and len(trainer.history) == 0


def test_c68_a_generator_is_refused_or_read_whole():
    seen = []

    def reward(first, second, answer=None):
        seen.append(first)
        return letters(first, second)

    try:
        trainer = make(train_dataset=(row for row in rows(3)), reward_func=lambda first, second: seen.append(first) or letters(first, second))
    except ValueError as error:
        assert "train_dataset" in str(error)
        return
    trainer.train()
    assert len(seen) == 3 * 4


@pytest.mark.parametrize("data", DATA)
def test_c68_dataloader_and_evaluation_take_every_kind(data):
    trainer = make(train_dataset=DATA[data](3), eval_dataset=DATA[data](5), eval_num_samples=4, eval_batch_size=3)
    if data != "stream":
        assert [dict(batch[0]) for batch in trainer.get_train_dataloader()] == rows(3)
    assert "eval/turn_1/reward_mean" in trainer.evaluate()


def test_c68_dataloader_of_a_stream():
    assert [dict(batch[0]) for batch in make(train_dataset=Stream(3)).get_train_dataloader()] == rows(3)


# C77, C80: looking changes nothing

@pytest.mark.parametrize("kinds", [("gpt2", "llama"), ("gpt2", "gpt2")])
def test_c77_evaluation_does_not_change_training(kinds):
    held_out, found = [{"prompt": "say c", "answer": 9}] * 3, []
    for more in ({}, dict(eval_dataset=held_out), dict(eval_dataset=held_out, eval_interval=1), dict(eval_dataset=held_out, eval_interval=2, eval_num_samples=1)):
        trainer = make(team(kinds), num_train_epochs=2, train_batch_size=2, **more)
        trainer.train()
        found.append((weights(trainer), trainer.env_step, [row.get("loss") for row in trainer.history if row["kind"] == "train"]))
    assert all(same(found[0][0], other[0]) and found[0][1:] == other[1:] for other in found[1:])


def test_c77_an_evaluation_between_two_collections():
    found = []
    for looks in (0, 3):
        trainer = make(eval_dataset=rows(3), pair_selection="random")
        batches = [trainer.collect()]
        for _ in range(looks):
            trainer.evaluate()
        found.append([*batches, trainer.collect()])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def numbers(stream):
    """The whole state of a random stream."""
    state = stream.state_dict()
    return state["python"], {key: value.tolist() for key, value in state["torch"].items()}


def test_c77_evaluate_leaves_everything_as_it_was():
    trainer = make(eval_dataset=rows(3))
    trainer.agents[0].train()
    trainer.train_on(trainer.collect())
    before = (weights(trainer), trainer.env_step, trainer.run.update, [model.generation_config for model in trainer.agents], torch.get_rng_state())
    streams = {name: numbers(stream) for name, stream in trainer.setup.streams.items() if not name.startswith("evaluation")}
    trainer.evaluate()
    assert same(before[0], weights(trainer)) and before[1:3] == (trainer.env_step, trainer.run.update)
    assert all(model.generation_config is kept for model, kept in zip(trainer.agents, before[3])) and torch.equal(before[4], torch.get_rng_state())
    assert trainer.agents[0].training and not trainer.agents[1].training and torch.is_grad_enabled()
    assert streams == {name: numbers(stream) for name, stream in trainer.setup.streams.items() if not name.startswith("evaluation")}
    assert all(p.grad is None for model in trainer.agents for p in model.parameters())


def test_c80_nothing_global_is_left_behind():
    def world():
        return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.is_grad_enabled(), torch.get_default_dtype(),
                torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())

    agents = team()
    agents[0].train()
    configs = [(model.generation_config, model.generation_config.to_dict(), model.config.to_dict()) for model in agents]
    template, specials = TOKENIZER.chat_template, dict(TOKENIZER.special_tokens_map)
    before = world()
    trainer = make(agents, eval_dataset=rows(2), eval_interval=1, shuffle=True, dpo_reference=True, seed=3)
    trainer.train(), trainer.rollout(rows()[0]), trainer.step(rows()), trainer.evaluate()
    assert world() == before
    assert all(model.generation_config is kept and kept.to_dict() == said and model.config.to_dict() == config for model, (kept, said, config) in zip(agents, configs))
    assert agents[0].training and not agents[1].training and all(p.requires_grad for model in agents for p in model.parameters())
    assert TOKENIZER.padding_side == "left" and TOKENIZER.chat_template == template and dict(TOKENIZER.special_tokens_map) == specials


def test_c80_under_no_grad_a_trainer_still_trains():
    trainer = make()
    before = weights(trainer)
    with torch.no_grad():
        trainer.train()
        assert not torch.is_grad_enabled()
    assert not same(before, weights(trainer))


def test_c80_two_trainers_do_not_disturb_each_other():
    alone = [make(seed=seed) for seed in (1, 2)]
    for trainer in alone:
        trainer.train_on(trainer.collect())
    mixed = [make(seed=seed) for seed in (1, 2)]
    batches = [trainer.collect() for trainer in mixed]
    for trainer, batch in zip(mixed, batches):
        trainer.train_on(batch)
    assert all(same(weights(a), weights(b)) for a, b in zip(alone, mixed))
