"""The toy language, the micro models, the embedded model and its tasks."""

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_nb import toy
from comlrl_nb.toy_language import GRAMMAR, derivations, parse, well_formed, write_sentence
from comlrl_nb.trainers.preference import TaggedCentralizedComparatorAdapter
from comlrl_nb.utils.reward_utils import RewardFunction

ROOT = Path(__file__).resolve().parents[1]
TASKS = list(toy.TASKS.values())
by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@pytest.fixture(scope="module")
def tokenizer():
    return toy.load_tokenizer()


@pytest.fixture(scope="module")
def model():
    return toy.load_model()


def generate(model, tokenizer, prompts, num, max_new_tokens=12):
    """Completion ids, cut after the first end token."""
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        ids = model.generate(**batch, do_sample=True, top_k=0, num_return_sequences=num, max_new_tokens=max_new_tokens)
    rows = ids[:, batch.input_ids.shape[1]:].tolist()
    return [row[:row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in rows]


# --- the language

def every(symbol):
    """All word rows of a symbol: the language is finite."""
    if symbol not in GRAMMAR:
        return [(symbol,)]
    return [sum(parts, ()) for alternative in GRAMMAR[symbol] for parts in product(*(every(part) for part in alternative.split()))]


LANGUAGE = every("SENTENCE")


def test_the_language_is_read_as_it_is_written():
    assert 2000 < len(LANGUAGE) == len(set(LANGUAGE))
    for words in random.Random(0).sample(LANGUAGE, 400):
        complete = [parts for rest, parts in derivations("SENTENCE", words) if not rest]
        assert len(complete) == 1 and complete[0]["SENTENCE"] == " ".join(words)


def test_each_symbol_stands_at_most_once_in_a_sentence():
    def symbols(symbol):
        for alternative in GRAMMAR.get(symbol, ()):
            parts = [part for part in alternative.split() if part in GRAMMAR]
            for rows in product(*([(part, *row) for row in symbols(part)] for part in parts)):
                yield sum(rows, ())
        if symbol not in GRAMMAR:
            yield ()
    assert all(len(row) == len(set(row)) for row in symbols("SENTENCE"))


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_sentence_is_well_formed_only_if_the_language_has_it(seed):
    rng, known, accepted = random.Random(seed), set(LANGUAGE), 0
    vocabulary = sorted({word for words in LANGUAGE for word in words})
    for _ in range(300):
        words = list(rng.choice(LANGUAGE))
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        change = rng.randrange(4)
        if change == 0:
            del words[i]
        elif change == 1:
            words.insert(i, words[j])
        elif change == 2:
            words[i], words[j] = words[j], words[i]
        else:
            words[i] = rng.choice(vocabulary)
        accepted += well_formed(" ".join(words))
        assert well_formed(" ".join(words)) == (tuple(words) in known), words
    assert 0 < accepted < 200


@pytest.mark.parametrize("text", ["the boat leaves at noon .", " the  boat\nleaves at noon. "])
def test_white_space_does_not_matter(text):
    assert parse(text)["HOUR"] == "noon"


@pytest.mark.parametrize("text", ["theboat leaves at noon.", "the boat leaves at noon!", "the boat leaves at noon.<eos>", "the boat leaves at no on.",
                                  "the boat leaves at noön.", "the <unk> leaves at noon.", ". the boat leaves at noon", "SENTENCE", "CARRY ."])
def test_near_sentences_are_none(text):
    assert not well_formed(text)


def test_writing_uses_only_the_stream_it_is_given():
    state, ours = random.getstate(), [write_sentence(random.Random(5)) for _ in range(2)]
    assert random.getstate() == state and ours[0] == ours[1]


# --- micro models

@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_models_generate_from_padded_prompts(kind, dtype):
    model, tokenizer = toy.micro_model(kind=kind, dtype=dtype), toy.micro_tokenizer()
    assert model.dtype == dtype and model.config._attn_implementation == "sdpa" and not model.training
    assert len(set(map(tuple, generate(model, tokenizer, ["hi", "hello there"], 3, 5)))) > 1
    batch = tokenizer(["hi", "hello there"], padding=True, return_tensors="pt")
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    alone = model(**tokenizer("hi", return_tensors="pt")).logits[0, -1]
    torch.testing.assert_close(model(**batch, position_ids=positions).logits[0, -1], alone, atol=1e-5, rtol=0)


def test_micro_overrides_and_unknown_kinds():
    assert toy.micro_model(hidden_size=32, num_hidden_layers=1).config.hidden_size == 32
    assert toy.micro_model(kind="gpt2", attn_pdrop=0.1).config.attn_pdrop == 0.1
    with pytest.raises(ValueError, match="kind='bert'.*'llama' or 'gpt2'"):
        toy.micro_model(kind="bert")


@pytest.mark.parametrize("make", [toy.micro_tokenizer, toy.load_tokenizer])
def test_special_tokens(make):
    tokenizer = make()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2) and tokenizer.padding_side == "left"
    assert tokenizer("ann").input_ids[0] == 1 and 1 not in tokenizer("ann", add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the cat is far away."}], tokenize=True, add_generation_prompt=True)
    assert list(chat["input_ids"]).count(1) == 1 and chat["input_ids"][0] == 1


# --- the embedded model

def test_size_and_loading_time():
    assert sum(path.stat().st_size for path in toy.data_dir().iterdir()) < 1_200_000
    started = time.process_time()
    model = toy.load_model()
    assert time.process_time() - started < 1.0
    assert 400_000 < model.num_parameters() < 460_000 and not model.training


def test_both_ways_of_loading_give_the_same_float32_weights(model):
    other = AutoModelForCausalLM.from_pretrained(str(toy.data_dir()))
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys() and all(value.dtype == torch.float32 and torch.equal(value, theirs[name]) for name, value in ours.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight and toy.load_model(torch.float64).dtype == torch.float64


def test_each_load_is_a_copy_of_its_own_and_leaves_random_states_alone(model):
    states = torch.get_rng_state(), random.getstate()
    other = toy.load_model()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0 and toy.load_model().lm_head.weight.abs().sum() > 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_model_and_tokenizer_agree(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer) == len(AutoTokenizer.from_pretrained(str(toy.data_dir())))
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (2, 0, 1)


def test_sentences_survive_the_tokenizer(tokenizer):
    for words in random.Random(1).sample(LANGUAGE, 200):
        text = " ".join(words).replace(" .", ".")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(words) < 12 and tokenizer.decode([*ids, 2], skip_special_tokens=True) == text


def test_unknown_words_stay_visible(tokenizer):
    ids = tokenizer("the zeppelin leaves at noon.", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the <unk> leaves at noon."


@by_task
def test_sampled_text_encodes_to_the_sampled_ids(task, model, tokenizer):
    for formatter in task.formatters:
        for ids in generate(model, tokenizer, [formatter(row) for row in task.eval[:5]], 10):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if well_formed(text):
                assert [*tokenizer(text, add_special_tokens=False).input_ids, 2] == ids


@by_task
def test_one_model_can_answer_for_all_agents(task, model, tokenizer):
    adapter = TaggedCentralizedComparatorAdapter()
    prompts = [adapter.build_prompt(row, task.prompts(row)) for row in task.eval]
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in generate(model, tokenizer, prompts, 4, 48)]
    split = [(row, adapter.parse_completion(answer, row, task.num_agents))
             for row, answer in zip([row for row in task.eval for _ in range(4)], answers) if "</agent_0>" in answer]
    rows, texts = zip(*split)
    flat = [well_formed(text) for joint in texts for text in joint]
    assert len(texts) >= 0.95 * len(answers) and sum(flat) / len(flat) > 0.9
    rewards = task.reward_func(*zip(*texts), batch_items=rows)
    assert sum(rewards) / len(rewards) > 0.08


# --- the tasks

@by_task
def test_shape_of_a_task(task, tokenizer):
    assert len(task.formatters) == task.num_agents and (len(task.train), len(task.eval)) == (60, 20)
    rows = [*task.train, *task.eval]
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == 80
    adapter, unknown = TaggedCentralizedComparatorAdapter(), tokenizer.convert_tokens_to_ids("<unk>")
    for row in rows:
        prompts = task.prompts(row)
        assert len(set(prompts)) == task.num_agents
        for text in (*prompts, adapter.build_prompt(row, prompts)):
            assert unknown not in tokenizer(text).input_ids
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.name = "other"


def test_there_are_tasks_for_two_and_three_agents():
    assert {task.num_agents for task in TASKS} == {2, 3} and len(TASKS) >= 3


EVAL_DIGESTS = {"delivery": "772f0d01", "meeting": "b9a35446", "search": "41ca889c"}


def test_rows_are_the_ones_the_model_was_kept_away_from():
    """The stored model never read a held-out row: another split needs another pre-training."""
    digest = {task.name: hashlib.sha256(json.dumps(task.eval, sort_keys=True).encode()).hexdigest()[:8] for task in TASKS}
    assert digest == EVAL_DIGESTS


@by_task
def test_held_out_values_are_known_from_training(task):
    def values(rows):
        return set(json.dumps(rows).replace("[", " ").replace("]", " ").replace(",", " ").split())
    assert values(task.eval) <= values(task.train)


@by_task
def test_random_text_earns_between_0_and_1_and_only_for_sentences(task):
    rng = random.Random(0)
    for _ in range(300):
        texts, row = [write_sentence(rng) for _ in range(task.num_agents)], rng.choice(task.train)
        [reward] = task.reward_func(*([text] for text in texts), batch_items=[row])
        assert isinstance(reward, float) and 0.0 <= reward <= 1.0
        assert task.reward_func(*([texts[0]] for _ in texts), batch_items=[row]) == [0.0]


def own_answers(task, row):
    """For each agent, every sentence with its facts right and any choice it cannot make alone."""
    if task.name == "delivery":
        return [[f"the {v} takes the {row['thing']}." for v in toy.REACH[row["place"]]], [f"the {v} leaves at {row['hour']}." for v in toy.REACH[row["place"]]]]
    if task.name == "meeting":
        return [[f"we meet on {d} in the {row['room']}." for d in row["days"][0]], [f"we meet on {d} at {row['hour']}." for d in row["days"][1]]]
    return [[f"{name} looks in the {room}." for room in row["rooms"]] for name in GRAMMAR["NAME"]]


@by_task
def test_perfect_agents_that_do_not_agree_stay_below_cooperation(task):
    expected = {"delivery": 1 / 2, "meeting": 1 / 3, "search": (6 * 1 + 18 * 0.25) / 27}[task.name]
    for row in task.eval:
        rewards = [task.reward_func(*([text] for text in joint), batch_items=[row])[0] for joint in product(*own_answers(task, row))]
        assert max(rewards) == 1.0 and sum(rewards) / len(rewards) == pytest.approx(expected)


@by_task
def test_anything_added_to_any_good_answer_earns_nothing(task):
    rng = random.Random(0)
    for row in task.eval:
        good = next(joint for joint in product(*own_answers(task, row)) if task.reward_func(*([text] for text in joint), batch_items=[row]) == [1.0])
        for agent in range(task.num_agents):
            for spoil in ("", " ", good[agent][:-1], good[agent] * 2, f"{good[agent]} {write_sentence(rng)}", f"{write_sentence(rng)} {good[agent]}",
                          good[agent][:-1] + " and more.", f"{good[agent]} {rng.choice(LANGUAGE)[0]}", good[(agent + 1) % task.num_agents]):
                joint = [*good[:agent], spoil, *good[agent + 1:]]
                assert task.reward_func(*([text] for text in joint), batch_items=[row]) == [0.0], joint


@by_task
def test_rewards_take_many_rows_and_refuse_uneven_ones(task):
    rows = task.eval[:3]
    joints = [[answers[0] for answers in own_answers(task, row)] for row in rows]
    one_by_one = [task.reward_func(*([text] for text in joint), batch_items=[row])[0] for joint, row in zip(joints, rows)]
    assert task.reward_func(*zip(*joints), batch_items=rows) == one_by_one
    with pytest.raises(ValueError):
        task.reward_func(*zip(*joints), batch_items=rows[:2])


@by_task
def test_the_reward_function_binds_as_every_trainer_binds_it(task):
    reward = RewardFunction(task.reward_func, task.num_agents, columns=task.train[0])
    row = task.eval[0]
    texts = [tuple(answers[0] for answers in own_answers(task, row))]
    [result] = reward.score(task.prompts(row), texts, row)
    assert result[0] == tuple(task.reward_func(*([text] for text in texts[0]), batch_items=[row]))


@by_task
def test_a_task_shows_itself(task):
    shown = task._repr_markdown_()
    assert task.description in shown and all(prompt in shown for prompt in task.prompts(task.eval[0]))


@pytest.mark.slow
def test_pretraining_gives_a_model_that_behaves_like_the_stored_one():
    run = subprocess.run([sys.executable, ROOT / "scripts" / "pretrain_toy.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

