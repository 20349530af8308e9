"""Round files and the replay store: every sentence about them, faults while writing, files that changed, statistics with exact bounds."""
import builtins
import copy
import gc
import json
import math
import os
import pickle
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch

from comlrl_nb.preferences import from_record, to_record
from comlrl_nb.replay import ReplayStore
from comlrl_nb.round_files import read_round, round_files, round_path, write_round
from comlrl_nb.streams import RandomStream
from comlrl_nb.toy import load_tokenizer, micro_tokenizer
from comlrl_nb.types import Completion, PreferencePair, Prompt
from madpo_runs import config, make, margin, rows

SEED_KEYS = {"prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean"}


def said(text, finished=True):
    return Completion(text, (*text.encode(), 2) if finished else tuple(text.encode()), finished)


def pair(iteration, number, actors=2, **more):
    """A pair that says which one it is: round and number in the winner's text."""
    prompts = tuple(Prompt(f"read {i}", (1, 7 + i)) for i in range(actors))
    winner = tuple(said(f"{iteration}.{number}", finished=number % 2 == 0) for _ in range(actors))
    return PreferencePair(prompts, winner, (said("lost"),) * actors, 1.0 + number, 0.5, 0.75, **more)


def made(iteration, size, **more):
    return [pair(iteration, number, **more) for number in range(size)]


def which(each):
    iteration, number = each.winner[0].text.split(".")
    return int(iteration), int(number)


def stream(seed=0):
    return RandomStream(seed, "replay")


def open_store(folder, mode="lambda_decay", k=None, lam=None, size=None, seed=0):
    return ReplayStore(folder, mode, k, 0.5 if mode == "lambda_decay" and lam is None else lam, size, stream(seed))


def filled(folder, sizes, *args, **kwargs):
    store = open_store(folder, *args, **kwargs)
    for iteration, size in enumerate(sizes, 1):
        store.store(iteration, made(iteration, size))
    return store


def contents(folder):
    """Name → bytes of everything in a folder."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())} if Path(folder).exists() else {}


def draws_per_round(pairs):
    return Counter(which(each)[0] for each in pairs)


def assert_binomial(count, trials, chance, risk=1e-9):
    """`count` successes are not in the outer `risk` of the binomial distribution, whose tails are summed exactly."""
    log = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * math.log(chance) + (trials - k) * math.log1p(-chance)
           for k in range(trials + 1)]
    lower, upper = math.fsum(map(math.exp, log[:count + 1])), math.fsum(map(math.exp, log[count:]))
    assert lower > risk / 2 and upper > risk / 2, f"{count} of {trials} at {chance}"


# round files

def test_a_round_file_has_the_keys_and_the_records_of_the_source(tmp_path):
    more = dict(raw_rewards=(2.0, 1.0), target_raw_reward=1.0, comparator_raw_reward=2.0)
    store = open_store(tmp_path / "deep" / "er")
    path = store.store(7, made(7, 3, **more), scored_by="task")
    assert path == tmp_path / "deep/er/iteration_0007.json" and [*contents(path.parent)] == ["iteration_0007.json"]
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["iteration"], content["num_pairs"], len(content["pairs"]), content["scored_by"]) == (7, 3, 3, "task")
    for record in content["pairs"]:
        assert SEED_KEYS | {"raw_rewards", "target_raw_reward", "comparator_raw_reward"} <= record.keys()
        assert all(len(record[key]) == 2 for key in ("prompts", "winner_completions", "loser_completions"))
    assert content["pairs"] == [json.loads(json.dumps(to_record(each))) for each in made(7, 3, **more)]


def test_an_empty_round_is_a_file_too(tmp_path):
    content = json.loads(open_store(tmp_path).store(1, []).read_text(encoding="utf-8"))
    assert (content["iteration"], content["num_pairs"], content["pairs"]) == (1, 0, [])


def test_file_names_of_many_rounds_keep_their_order(tmp_path):
    for iteration in (2, 10000, 1, 12):
        write_round(round_path(tmp_path, iteration), iteration, made(iteration, 1))
    (tmp_path / "iteration_0003.json.bak").write_text("x")
    (tmp_path / "notes.json").write_text("x")
    assert [path.name for path in round_files(tmp_path)] == ["iteration_0001.json", "iteration_0002.json", "iteration_0012.json", "iteration_10000.json"]


STRANGE = ["", " ", "é 한국어 🙂", "a\nb\r\n\tc", "\u2028\u2029\x00\x7f\ufeff", '"\\/', "\ud83d alone", "</script>", "NaN"]


@pytest.mark.parametrize("text", STRANGE)
def test_every_text_survives_bit_for_bit(tmp_path, text):
    each = PreferencePair((Prompt(text, (1, 2)),), (Completion(text, (5,), False),), (Completion(text + "x", (6, 2), True),), 1.0, 0.0, 0.5)
    path = open_store(tmp_path).store(1, [each])
    assert read_round(path).pairs == (each,)
    if "\ud83d" not in text:
        assert json.dumps(text, ensure_ascii=False).encode() in path.read_bytes()


def test_every_number_survives_bit_for_bit(tmp_path):
    numbers = [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, 1 / 3, 3, numpy.float64(0.1)]
    pairs = [PreferencePair((Prompt("p", (1,)),), (said("a"),), (said("b"),), value, value, value, (value, value), value, value) for value in numbers]
    back = read_round(open_store(tmp_path).store(1, pairs)).pairs
    for value, each in zip(numbers, back):
        for got in (each.winner_reward, each.loser_reward, each.candidate_reward_mean, *each.raw_rewards, each.target_raw_reward, each.comparator_raw_reward):
            assert float(got).hex() == float(value).hex()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_written(tmp_path, value):
    store = open_store(tmp_path / "run")
    bad = PreferencePair((Prompt("p", (1,)),), (said("a"),), (said("b"),), 1.0, value, 0.5)
    good = pair(1, 0, actors=1)
    with pytest.raises(ValueError, match=r"iteration_0001\.json: pair 2 cannot be written as JSON"):
        store.store(1, [good, good, bad])
    with pytest.raises(ValueError, match=r"iteration_0001\.json: the key note cannot be written as JSON"):
        store.store(1, [good], note=value)
    assert contents(tmp_path / "run") == {} and store.weights() == {}
    assert store.store(1, [good]).exists()


@pytest.mark.parametrize("key", ["num_pairs", "run"])
def test_keys_of_the_file_itself_cannot_be_given(tmp_path, key):
    with pytest.raises(ValueError, match=key):
        open_store(tmp_path).store(1, made(1, 1), **{key: 3})
    assert contents(tmp_path) == {}


def test_a_big_round(tmp_path):
    store = open_store(tmp_path)
    store.store(1, made(1, 5000))
    assert sorted(map(which, store.select())) == [(1, number) for number in range(5000)]


# atomic writing

class Boom(Exception):
    pass


def failing(name, error, monkeypatch):
    """The next write breaks at `name`."""
    def fail(*args, **kwargs):
        raise error
    if name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, fail)
        return
    real = builtins.open

    class Half:
        def __init__(self, file):
            self.file, self.calls = file, 0

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.file.close()

        def __getattr__(self, attribute):
            return getattr(self.file, attribute)

        def write(self, data):
            self.calls += 1
            if self.calls == 3:
                self.file.write(data[:len(data) // 2])
                raise error
            return self.file.write(data)

    monkeypatch.setattr(builtins, "open", lambda path, mode="r", *args, **kwargs: Half(real(path, mode, *args, **kwargs)) if "w" in mode else real(path, mode, *args, **kwargs))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), Boom()])
@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_a_fault_while_writing_leaves_folder_index_and_stream(tmp_path, monkeypatch, name, error):
    store = filled(tmp_path, [3, 4])
    before, state = contents(tmp_path), store.state_dict()
    with monkeypatch.context() as patch:
        failing(name, error, patch)
        with pytest.raises(type(error)):
            store.store(3, made(3, 5))
    assert contents(tmp_path) == before and store.state_dict()["index"] == state["index"]
    assert store.state_dict()["stream"]["python"] == state["stream"]["python"]
    store.store(3, made(3, 5))
    assert [*store.weights()] == [3, 2, 1] and len(store.select()) == 5


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_a_fault_while_replacing_keeps_the_file_that_was_there(tmp_path, monkeypatch, name):
    store = filled(tmp_path, [3])
    state = store.state_dict()
    store.store(2, made(2, 4))
    before = contents(tmp_path)
    store.load_state_dict(state)
    with monkeypatch.context() as patch:
        failing(name, Boom(), patch)
        with pytest.raises(Boom):
            store.store(2, made(2, 6))
    assert contents(tmp_path) == before


def test_the_bytes_are_on_disk_before_the_file_takes_its_name(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append(("fsync", os.fstat(handle).st_size)), fsync(handle))[1])

    def renamed(source, target):
        order.append(("replace", os.stat(source).st_size))
        assert Path(source).parent == Path(target).parent and not Path(target).exists()
        return replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    path = open_store(tmp_path).store(1, made(1, 50))
    size = path.stat().st_size
    assert order == [("fsync", size), ("replace", size)]


# reading

def test_a_file_cut_anywhere_is_refused_and_left(tmp_path):
    path = filled(tmp_path, [3]).index.folder / "iteration_0001.json"
    whole = path.read_bytes()
    for end in [*range(0, len(whole) - 1, 37), len(whole) - 2]:
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"iteration_0001\.json: damaged"):
            read_round(path)
        assert path.read_bytes() == whole[:end]


GOOD = json.dumps(to_record(pair(1, 0)))


def broken(**changes):
    record = {**json.loads(GOOD), **changes}
    return json.dumps({"iteration": 1, "num_pairs": 1, "pairs": [{key: value for key, value in record.items() if value is not ...}]})


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "not a round file"), ("{}", "not a round file"), ("3", "not a round file"), ('{"iteration": 1, "num_pairs": 0}', "not a round file"),
    ('{"iteration": "1", "num_pairs": 0, "pairs": []}', "not a round file"), ('{"iteration": true, "num_pairs": 0, "pairs": []}', "not a round file"),
    ('{"iteration": 1, "num_pairs": 2, "pairs": [%s]}' % GOOD, "num_pairs=2, but there are 1 pairs"), ('{"iteration": 1, "pairs": []}', "num_pairs=None"),
    ('{"iteration": 1, "num_pairs": 1, "pairs": [3]}', "pair 0: preference record: expected a mapping"),
    ('{"iteration": 1, "num_pairs": 1, "pairs": [{}]}', "pair 0: preference record: the keys"),
    ('{"iteration": 1, "num_pairs": 0, "pairs": [], "note": NaN}', "damaged.*NaN is not JSON"),
    (broken(winner_reward="much"), "pair 0: .*winner_reward must be a number"), (broken(loser_reward=True), "loser_reward"),
    (broken(candidate_reward_mean=None), "candidate_reward_mean"), (broken(prompts=[]), "prompts must be a list of texts"),
    (broken(winner_completions=["one"]), "winner_completions must be a list of texts, one per actor"), (broken(loser_completions="ab"), "loser_completions"),
    (broken(prompts=...), r"the keys \['prompts'\] are missing"), (broken(prompt_token_ids=[[1], ["2"]]), "prompt_token_ids must hold lists of integers"),
    (broken(prompt_token_ids=[[1]]), "prompt_token_ids must hold one list of ids per actor"), (broken(winner_tokens={"ids": 3, "finished": [True, True]}), "winner_tokens"),
    (broken(loser_tokens={"ids": [[1], [1]], "finished": [1, 0]}), "loser_tokens must hold one true or false per actor"),
    (broken(loser_tokens=...), r"\['loser_tokens'\] are missing, and without token ids the texts must be encoded: give tokenizers"),
    (broken(raw_rewards=[1.0]), "raw_rewards must be two numbers"),
])
def test_a_foreign_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "iteration_0001.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"iteration_0001\.json: .*{message}"):
        read_round(path)
    assert path.read_text(encoding="utf-8") == text


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path):
    path = tmp_path / "iteration_0001.json"
    path.write_bytes(b"\xff\xfe\x00PK")
    with pytest.raises(ValueError, match=r"iteration_0001\.json: damaged"):
        read_round(path)
    with pytest.raises(FileNotFoundError, match=r"iteration_0002\.json: the round file is not there"):
        read_round(tmp_path / "iteration_0002.json")


# other runs

@pytest.mark.parametrize("there", ["iteration_0001.json", "iteration_0009.json", "imported_0001.json"])
@pytest.mark.parametrize("damaged", [False, True])
def test_round_files_of_another_run_are_never_touched(tmp_path, there, damaged):
    write_round(tmp_path / there, 1, made(1, 3), run="another")
    if damaged:
        (tmp_path / there).write_bytes(b'{"iteration": 1, "num')
    before, store = contents(tmp_path), open_store(tmp_path)
    for _ in range(2):
        with pytest.raises(FileExistsError, match=rf"{there}: this round file belongs to another run .*preference_replay_dir"):
            store.store(1, made(1, 2))
    with pytest.raises(FileExistsError, match=there):
        store.import_rounds(tmp_path)
    assert contents(tmp_path) == before and store.weights() == {} and store.select() == []


def test_files_without_a_run_are_another_runs(tmp_path):
    write_round(round_path(tmp_path, 2), 2, [])
    with pytest.raises(FileExistsError, match="iteration_0002"):
        open_store(tmp_path).store(1, [])


def test_two_runs_with_one_seed_do_not_take_each_other_for_themselves(tmp_path):
    filled(tmp_path, [2], seed=4)
    with pytest.raises(FileExistsError):
        filled(tmp_path, [2], seed=4)


def test_other_files_in_the_folder_do_not_matter(tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / ".iteration_0001.json.1.tmp").write_text("half")
    filled(tmp_path, [2])
    assert (tmp_path / "notes.json").read_text() == "{}" and (tmp_path / ".iteration_0001.json.1.tmp").read_text() == "half"


def test_an_earlier_runs_folder_is_not_imported_by_itself(tmp_path):
    filled(tmp_path / "old", [3, 3])
    store = filled(tmp_path / "new", [2], "all_history")
    assert [*store.weights()] == [1] and draws_per_round(store.select()) == {1: 2}


# the rules of a selection

def test_building_a_store_writes_nothing_and_draws_nothing(tmp_path):
    store = open_store(tmp_path / "run")
    assert not (tmp_path / "run").exists() and store.select() == [] and store.weights() == {} and store.state_dict()["stream"]["python"] == stream().state_dict()["python"]


@pytest.mark.parametrize(("given", "message"), [
    (("nearest_k", None, None, None), "preference_replay_k"), (("lambda_decay", None, None, None), "preference_replay_lambda"),
    (("lambda_decay", None, 1.5, None), "preference_replay_lambda"), (("current", 2, None, None), "preference_replay_k"),
    (("current", None, 0.5, None), "preference_replay_lambda"), (("current", None, None, 4), "preference_replay_sample_size"),
    (("all_history", 3, None, None), "preference_replay_k"), (("nearest_k", 3, 0.5, None), "preference_replay_lambda"),
    (("nearest_k", 0, None, None), "preference_replay_k"), (("all_history", None, None, 0), "preference_replay_sample_size"), (("newest", None, None, None), "preference_replay_mode"),
])
def test_the_store_has_the_rules_of_the_config(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        ReplayStore(tmp_path, *given, stream())


def test_current_takes_all_current_pairs_as_they_are(tmp_path):
    for k in (None, 1):
        store = filled(tmp_path / str(k), [3, 0, 5], "current", k)
        before = store.state_dict()["stream"]["python"]
        assert store.select() == made(3, 5) == store.select() and store.weights() == {3: 1.0}
        assert store.state_dict()["stream"]["python"] == before
        store.store(4, [])
        assert store.select() == [] and store.weights() == {} and store.last.stats() == {"replay_pairs": 0, "replay_rounds": 0}


def test_the_current_round_is_stored_first_and_eligible(tmp_path):
    for mode, k in (("nearest_k", 3), ("all_history", None), ("lambda_decay", None)):
        store = filled(tmp_path / mode, [4], mode, k)
        assert sorted(map(which, store.select())) == [(1, number) for number in range(4)] and store.weights() == {1: 1.0}


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_nearest_k_is_the_latest_rounds_with_pairs(tmp_path, k):
    store = filled(tmp_path, [2, 0, 7, 3, 0, 0, 4], "nearest_k", k, size=200)
    wanted = [7, 4, 3, 1][:k]
    assert [number for number, weight in store.weights().items() if weight] == wanted
    assert all(math.isclose(store.weights()[number], 1 / len(wanted)) for number in wanted)
    assert set(draws_per_round(store.select())) == set(wanted)


def test_nearest_k_with_an_empty_current_round(tmp_path):
    store = filled(tmp_path, [2, 5, 0], "nearest_k", 1)
    assert sorted(map(which, store.select())) == [(2, number) for number in range(5)]


def test_ages_count_rounds_with_pairs_only(tmp_path):
    store = filled(tmp_path, [3, 0, 0, 3, 0, 3], "lambda_decay", lam=0.5)
    assert list(store.weights()) == [6, 4, 1]
    assert all(math.isclose(weight, right) for weight, right in zip(store.weights().values(), (4 / 7, 2 / 7, 1 / 7)))


@pytest.mark.parametrize(("mode", "k", "lam", "chances"), [
    ("nearest_k", 2, None, (0, 1 / 2, 1 / 2)), ("all_history", None, None, (1 / 3, 1 / 3, 1 / 3)), ("lambda_decay", None, 1.0, (1 / 3, 1 / 3, 1 / 3)),
    ("lambda_decay", None, 0.5, (1 / 7, 2 / 7, 4 / 7)), ("lambda_decay", None, 0.8, (0.64 / 2.44, 0.8 / 2.44, 1 / 2.44)), ("lambda_decay", None, 0.0, (0, 0, 1)),
])
def test_rounds_are_drawn_by_weight_whatever_their_size(tmp_path, mode, k, lam, chances):
    store = filled(tmp_path, [40, 1, 7], mode, k, lam, size=50)
    drawn = Counter()
    for _ in range(80):
        drawn += draws_per_round(store.select())
    assert sum(drawn.values()) == 4000
    for number, chance in zip((1, 2, 3), chances):
        if chance in (0, 1):
            assert drawn[number] == 4000 * chance
        else:
            assert_binomial(drawn[number], 4000, chance)


def test_each_draw_picks_its_round_independently(tmp_path):
    store = filled(tmp_path, [9, 9], "all_history", size=2)
    same = sum(len(draws_per_round(store.select())) == 1 for _ in range(1500))
    assert_binomial(same, 1500, 1 / 2)


def test_the_default_size_is_the_current_rounds_or_the_newest_ones(tmp_path):
    store = filled(tmp_path, [9, 4], "all_history")
    assert len(store.select()) == 4
    store.store(3, [])
    assert len(store.select()) == 4
    store.store(4, made(4, 6))
    assert len(store.select()) == 6


@pytest.mark.parametrize(("mode", "k"), [("nearest_k", 2), ("all_history", None), ("lambda_decay", None)])
def test_a_sample_size_is_kept(tmp_path, mode, k):
    for size in (1, 5, 64):
        store = filled(tmp_path / str(size), [3, 2, 0], mode, k, size=size)
        assert len(store.select()) == size
    assert filled(tmp_path / "empty", [0, 0], mode, k, size=5).select() == []


def test_inside_a_round_nothing_repeats_before_all_have_come(tmp_path):
    for seed in range(60):
        store = filled(tmp_path / str(seed), [5, 3], "all_history", size=1 + seed % 23, seed=seed)
        counts = Counter(map(which, store.select()))
        for number, size in ((1, 5), (2, 3)):
            drawn = sum(count for (iteration, _), count in counts.items() if iteration == number)
            times = [counts[number, place] for place in range(size)]
            assert sum(times) == drawn and set(times) <= {drawn // size, -(-drawn // size)}


def test_inside_a_round_every_pair_is_as_likely(tmp_path):
    store = filled(tmp_path, [4], "all_history", size=1)
    drawn = Counter(which(store.select()[0])[1] for _ in range(1200))
    for place in range(4):
        assert_binomial(drawn[place], 1200, 1 / 4)


def test_the_copies_of_a_round_are_shuffled_anew(tmp_path):
    store = filled(tmp_path, [4], "all_history", size=6)
    twice = Counter(frozenset(place for place, count in Counter(map(which, store.select())).items() if count == 2) for _ in range(600))
    assert len(twice) == 6
    for count in twice.values():
        assert_binomial(count, 600, 1 / 6)


def test_the_whole_selection_is_shuffled(tmp_path):
    store = filled(tmp_path, [6, 6], "all_history", size=12)
    first = last = trials = 0
    for _ in range(900):
        chosen = [which(each)[0] for each in store.select()]
        newest = store.last.draws[0]
        if newest == 6:
            first, last, trials = first + (chosen[0] == 2), last + (chosen[-1] == 2), trials + 1
    assert trials > 100
    assert_binomial(first, trials, 1 / 2)
    assert_binomial(last, trials, 1 / 2)


def test_lambda_zero_shuffles_the_newest_round(tmp_path):
    store = filled(tmp_path, [9, 5], "lambda_decay", lam=0.0)
    assert sorted(map(which, store.select())) == [(2, number) for number in range(5)]
    assert len({tuple(map(which, store.select())) for _ in range(20)}) > 5


def test_the_last_selection_is_told(tmp_path):
    store = filled(tmp_path, [3, 0, 4, 2], "lambda_decay", lam=0.8, size=40)
    assert store.last is None
    for _ in range(20):
        counts = draws_per_round(store.select())
        assert store.last.rounds == (4, 3, 1) and dict(zip(store.last.rounds, store.last.draws)) == {number: counts[number] for number in (4, 3, 1)}
        assert math.isclose(store.last.effective_age, (counts[3] + 2 * counts[1]) / 40)
        assert store.last.stats() == {"replay_pairs": 40, "replay_rounds": len(counts), "replay_age": store.last.effective_age}


def test_random_numbers_come_from_the_stream_alone(tmp_path):
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    outside = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    chosen = [filled(tmp_path / str(i), [5, 5, 5], seed=3).select() for i in range(2)]
    assert chosen[0] == chosen[1] != filled(tmp_path / "other", [5, 5, 5], seed=4).select()
    assert random.getstate() == outside[0] and numpy.random.get_state()[1].tolist() == outside[1] and torch.equal(torch.get_rng_state(), outside[2])
    given = stream(3)
    store = ReplayStore(tmp_path / "own", "all_history", None, None, None, given)
    store.store(1, made(1, 4))
    before = given.python.getstate()
    store.select()
    assert given.python.getstate() != before and given.state_dict()["torch"] == {}


@pytest.mark.parametrize("iteration", [0, -1, 2, 1, 1.5, True, "3", None])
def test_rounds_are_numbered_upwards(tmp_path, iteration):
    store = filled(tmp_path, [1, 1])
    with pytest.raises(ValueError, match="iteration=.*the next round of this run is 3 or later"):
        store.store(iteration, [])
    store.store(5, made(5, 1))
    assert [*store.weights()] == [5, 2, 1]


def test_pairs_of_other_teams_are_refused(tmp_path):
    store = filled(tmp_path, [2])
    for pairs in (made(2, 1, actors=3), [*made(2, 1), *made(2, 1, actors=1)]):
        with pytest.raises(ValueError, match="iteration_0002.json: pairs of .* actors"):
            store.store(2, pairs)
    assert [*contents(tmp_path)] == ["iteration_0001.json"]


def test_a_store_shows_its_rounds(tmp_path):
    store = filled(tmp_path / "run", [3, 0, 4], size=10)
    store.select()
    for shown in (str(store), store._repr_markdown_()):
        assert "lambda_decay" in shown and "0.667" in shown and "0.333" in shown
        assert len(shown.splitlines()) == 4 + ("**" in shown) * 2
    assert [line.split()[:4] for line in str(store).splitlines()[2:]] == [["3", "0", "4", "0.667"], ["1", "1", "3", "0.333"]]
    many = filled(tmp_path / "many", [1] * 30)
    assert "18 older" in str(many) and len(str(many).splitlines()) == 15
    assert "replay: current" in str(open_store(tmp_path / "none", "current"))


# memory and files

def test_memory_stays_flat(tmp_path):
    store, sizes, peaks = open_store(tmp_path, "all_history", size=50), [], []
    long = ["word " * 100 + str(number) for number in range(40)]
    for iteration in range(1, 41):
        pairs = [PreferencePair((Prompt("p", (1,)),), (said(text),), (said("b"),), 1.0, 0.0, 0.5) for text in long]
        store.store(iteration, pairs)
        del pairs
        if iteration in (10, 40):
            store.select()
            gc.collect()
            sizes.append(len(pickle.dumps(store.index)))
            tracemalloc.start()
            store.select()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    on_disk = sum(map(len, contents(tmp_path).values()))
    assert sizes[1] < 40 * 200 and peaks[1] < 1.3 * peaks[0] and peaks[1] < on_disk / 3


def test_only_drawn_rounds_are_read(tmp_path, monkeypatch):
    store = filled(tmp_path, [5, 5, 5], "lambda_decay", lam=0.0)
    for number in (1, 2):
        (tmp_path / f"iteration_000{number}.json").unlink()
    assert draws_per_round(store.select()) == {3: 5}


@pytest.mark.parametrize("fault", ["gone", "changed", "shortened"])
def test_a_file_that_is_not_what_it_was(tmp_path, fault):
    store = filled(tmp_path, [3, 3], "all_history", size=40)
    state, path = store.state_dict(), tmp_path / "iteration_0001.json"
    text = path.read_text(encoding="utf-8")
    path.unlink() if fault == "gone" else path.write_text(text.replace("lost", "tool") if fault == "changed" else text[:200], encoding="utf-8")
    error, message = (FileNotFoundError, "iteration_0001.json: the round file is not there") if fault == "gone" else (ValueError, "iteration_0001.json: the round file has changed")
    with pytest.raises(error, match=message):
        store.select()
    assert store.last is None and store.state_dict()["stream"]["python"] == state["stream"]["python"]
    other = open_store(tmp_path, "all_history", size=40, seed=9)
    with pytest.raises(error, match="iteration_0001.json"):
        other.load_state_dict(state)
    assert other.weights() == {} and other.state_dict()["stream"]["python"] == stream(9).state_dict()["python"]
    path.write_text(text, encoding="utf-8")
    other.load_state_dict(state)
    assert other.select() == store.select()


# state

@pytest.mark.parametrize(("mode", "k"), [("current", None), ("nearest_k", 2), ("all_history", None), ("lambda_decay", None)])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, mode, k):
    def go_on(store, first):
        chosen = []
        for iteration, size in list(enumerate((4, 0, 6, 3, 5), 1))[first:]:
            store.store(iteration, made(iteration, size))
            chosen.append(store.select())
        return chosen

    whole = go_on(open_store(tmp_path / "whole", mode, k), 0)
    store = open_store(tmp_path / "cut", mode, k)
    head = []
    for iteration, size in ((1, 4), (2, 0)):
        store.store(iteration, made(iteration, size))
        head.append(store.select())
    torch.save(store.state_dict(), tmp_path / "state.pt")
    go_on(store, 2)
    fresh = open_store(tmp_path / "cut", mode, k, seed=77)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert head + go_on(fresh, 2) == whole


def test_a_state_is_small_and_plain(tmp_path):
    index = filled(tmp_path, [50] * 20).state_dict()["index"]
    assert json.loads(json.dumps(index)) == index and len(json.dumps(index)) < 20 * 250


def test_a_resumed_run_gets_its_files_into_a_new_folder(tmp_path):
    old = filled(tmp_path / "old", [4, 0, 3], "all_history")
    new = open_store(tmp_path / "new", "all_history", seed=5)
    new.load_state_dict(old.state_dict())
    assert contents(tmp_path / "new") == contents(tmp_path / "old") and new.select() == old.select()
    new.store(4, made(4, 2))
    assert "iteration_0004.json" in contents(tmp_path / "new") and "iteration_0004.json" not in contents(tmp_path / "old")


def test_a_folder_may_move_and_a_checkpoint_may_bring_the_files(tmp_path):
    old = filled(tmp_path / "old", [4, 3], "all_history")
    state, wanted = old.state_dict(), old.select()
    (tmp_path / "old").rename(tmp_path / "moved")
    here = open_store(tmp_path / "moved", "all_history")
    here.load_state_dict(state)
    assert here.select() == wanted
    brought = open_store(tmp_path / "fresh", "all_history")
    with pytest.raises(FileNotFoundError, match="iteration_0001.json.*nor in"):
        brought.load_state_dict(state)
    assert not (tmp_path / "fresh").exists()
    brought.load_state_dict(state, data=tmp_path / "moved")
    assert brought.select() == wanted and contents(tmp_path / "fresh") == contents(tmp_path / "moved")


def test_restoring_never_replaces_another_runs_file(tmp_path):
    old = filled(tmp_path / "old", [4])
    other = filled(tmp_path / "other", [2])
    before, state = contents(tmp_path / "other"), other.state_dict()["index"]
    with pytest.raises(FileExistsError, match="iteration_0001"):
        other.load_state_dict(old.state_dict())
    assert contents(tmp_path / "other") == before and other.state_dict()["index"] == state


def test_a_state_of_another_stream_changes_nothing(tmp_path):
    state = filled(tmp_path / "a", [4]).state_dict()
    store = ReplayStore(tmp_path / "b", "all_history", None, None, None, RandomStream(0, "other"))
    with pytest.raises(ValueError, match="'replay'"):
        store.load_state_dict(state)
    assert store.weights() == {} and not (tmp_path / "b").exists()


# import

def test_imported_rounds_are_older_than_the_runs_own(tmp_path):
    filled(tmp_path / "a", [3, 0, 2])
    filled(tmp_path / "b", [5])
    store = filled(tmp_path / "new", [4], "lambda_decay", lam=0.5)
    assert [(each.number, each.num_pairs) for each in store.import_rounds(tmp_path / "a")] == [(-1, 3), (0, 2)]
    assert [(each.number, each.num_pairs) for each in store.import_rounds(str(tmp_path / "b"))] == [(0, 5)]
    store.store(2, made(2, 6))
    assert [(each.number, each.num_pairs) for each in store.sources] == [(2, 6), (1, 4), (0, 5), (-1, 2), (-2, 3)]
    assert all(math.isclose(weight, 0.5 ** age / 1.9375) for age, weight in enumerate(store.weights().values()))
    assert "-2 (imported)" in str(store)
    kept = contents(tmp_path / "new")
    assert sorted(kept) == ["imported_0001.json", "imported_0002.json", "imported_0003.json", "iteration_0001.json", "iteration_0002.json"]
    assert read_round(tmp_path / "new/imported_0002.json").pairs == tuple(made(3, 2))


def test_imported_rounds_survive_their_folder_and_a_checkpoint(tmp_path):
    old = filled(tmp_path / "old", [3, 2])
    store = open_store(tmp_path / "new", "all_history", size=30)
    store.import_rounds(tmp_path / "old")
    for path in old.index.folder.iterdir():
        path.unlink()
    assert len(store.select()) == 30 and set(store.select()) <= {*made(1, 3), *made(2, 2)}
    twin = open_store(tmp_path / "twin", "all_history", size=30)
    twin.load_state_dict(store.state_dict())
    assert twin.select() == store.select()
    assert twin.store(1, made(9, 1)).name == "iteration_0001.json" and [*twin.weights()] == [1, 0, -1]


def test_without_a_current_round_the_newest_imported_one_gives_the_size(tmp_path):
    filled(tmp_path / "old", [3, 7])
    store = open_store(tmp_path / "new", "all_history")
    store.import_rounds(tmp_path / "old")
    assert len(store.select()) == 7
    store.store(1, [])
    assert len(store.select()) == 7


def test_an_import_is_all_or_nothing(tmp_path, monkeypatch):
    filled(tmp_path / "old", [3, 2, 4])
    store = filled(tmp_path / "new", [2])
    before, state = contents(tmp_path / "new"), store.state_dict()["index"]
    path = tmp_path / "old/iteration_0003.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"iteration_0003\.json: damaged"):
        store.import_rounds(tmp_path / "old")
    path.write_bytes(whole.replace(b'"iteration": 3', b'"iteration": 9'))
    with pytest.raises(ValueError, match=r"iteration_0003\.json: this file holds round 9"):
        store.import_rounds(tmp_path / "old")
    assert contents(tmp_path / "new") == before
    path.write_bytes(whole)
    with monkeypatch.context() as patch:
        failing("replace", Boom(), patch)
        with pytest.raises(Boom):
            store.import_rounds(tmp_path / "old")
    assert store.state_dict()["index"] == state
    assert len(store.import_rounds(tmp_path / "old")) == 3 and len(store.weights()) == 4


def test_what_cannot_be_imported(tmp_path):
    filled(tmp_path / "old", [3])
    store = filled(tmp_path / "new", [2])
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match="there are no round files"):
            store.import_rounds(folder)
    with pytest.raises(ValueError, match="iteration_0001.json: this round is in the store already"):
        store.import_rounds(tmp_path / "new")
    store.import_rounds(tmp_path / "old")
    with pytest.raises(ValueError, match="iteration_0001.json: this round is in the store already"):
        store.import_rounds(tmp_path / "old")
    write_round(round_path(tmp_path / "old", 2), 2, made(2, 1, actors=3))
    other = open_store(tmp_path / "other")
    with pytest.raises(ValueError, match=r"iteration_0002\.json: pairs of \[3\] actors beside rounds with pairs of \[2\]"):
        other.import_rounds(tmp_path / "old")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="preference_replay_mode='current' never draws"):
        open_store(tmp_path / "c", "current").import_rounds(tmp_path / "old")


def foreign_file(folder, texts=("ab", "c"), **more):
    """What a program that knows nothing of tokens writes."""
    record = {"prompts": ["the one", "the other"], "winner_completions": [texts[0]] * 2, "loser_completions": [texts[1]] * 2, "winner_reward": 0.92, "loser_reward": 0.41,
              "candidate_reward_mean": 0.63, "raw_rewards": [0.92, 0.41], "target_raw_reward": 0.92, "comparator_raw_reward": 0.41, **more}
    folder.mkdir(exist_ok=True)
    (folder / "iteration_0001.json").write_text(json.dumps({"iteration": 1, "num_pairs": 1, "pairs": [record]}), encoding="utf-8")


def test_records_without_ids_need_tokenizers(tmp_path):
    foreign_file(tmp_path / "old")
    store = open_store(tmp_path / "new", "all_history")
    with pytest.raises(ValueError, match=r"iteration_0001\.json: pair 0: .*prompt_token_ids.*give tokenizers, one per actor"):
        store.import_rounds(tmp_path / "old")
    tokenizer = micro_tokenizer()
    with pytest.raises(ValueError, match="tokenizers: 1 given for a preference record of 2 actors"):
        store.import_rounds(tmp_path / "old", [tokenizer])
    assert not (tmp_path / "new").exists()
    store.import_rounds(tmp_path / "old", [tokenizer, tokenizer])
    each, = store.select()
    for prompt, text in zip(each.prompts, ("the one", "the other"), strict=True):
        assert prompt == Prompt(text, (1, *tokenizer(text, add_special_tokens=False)["input_ids"]))
    for completion, text in zip((*each.winner, *each.loser), ("ab", "ab", "c", "c"), strict=True):
        assert completion == Completion(text, (*tokenizer(text, add_special_tokens=False)["input_ids"], 2), True)
    assert each.raw_rewards == (0.92, 0.41) and (each.target_raw_reward, each.comparator_raw_reward) == (0.92, 0.41)


def test_a_text_known_to_be_cut_off_gets_no_end_token(tmp_path):
    foreign_file(tmp_path / "old", winner_tokens={"finished": [False, True]})
    store, tokenizer = open_store(tmp_path / "new", "all_history"), micro_tokenizer()
    store.import_rounds(tmp_path / "old", [tokenizer] * 2)
    first, second = store.select()[0].winner
    assert not first.finished and 2 not in first.token_ids and second.token_ids == (*first.token_ids, 2)


def test_ids_of_another_tokenizer_are_encoded_anew_and_own_ones_kept(tmp_path):
    micro, toy = micro_tokenizer(), load_tokenizer()
    apart = tuple(micro.convert_tokens_to_ids(["a", "b"])) + (2,)
    prompt = Prompt("the one", tuple(micro("the one")["input_ids"]))
    own = PreferencePair((prompt, prompt), (Completion("ab", apart, True),) * 2, (Completion("c", tuple(micro.convert_tokens_to_ids(["c"])), False),) * 2, 1.0, 0.0, 0.5)
    assert tuple(micro("ab", add_special_tokens=False)["input_ids"]) != apart[:2]
    record = json.loads(json.dumps(to_record(own)))
    assert from_record(record) == own == from_record(record, [micro, micro])
    other = from_record(record, [micro, toy])
    assert (other.prompts[0], other.winner[0], other.loser[0]) == (own.prompts[0], own.winner[0], own.loser[0])
    assert other.winner[1].token_ids == (*toy("ab", add_special_tokens=False)["input_ids"], toy.eos_token_id) and not other.loser[1].finished
    assert other.prompts[1].token_ids[0] == toy.bos_token_id


# with a trainer

def test_a_replayed_pair_scores_exactly_as_when_collected(tmp_path):
    """Three rounds of a real trainer: what is replayed is what was collected, whatever the weights became meanwhile."""
    trainer = make(args=config(preference_pairs_per_sample=3, max_new_tokens=4))
    store = open_store(tmp_path, "lambda_decay", lam=0.8, size=25)
    collected, frozen, compared = {}, {}, 0
    for iteration in (1, 2, 3):
        pairs = trainer.collect(rows(2 + iteration))
        frozen[iteration] = copy.deepcopy(trainer.agents)
        scores = [[margin(model, each, i).item() for i, model in enumerate(trainer.agents)] for each in pairs]
        collected |= {(iteration, place): (each, score) for place, (each, score) in enumerate(zip(pairs, scores))}
        store.store(iteration, pairs)
        batch = store.select()
        assert len(batch) == 25
        origin = {each: (iteration, score) for (iteration, _), (each, score) in collected.items()}
        for each in set(batch):
            number, score = origin[each]
            assert [margin(model, each, i).item() for i, model in enumerate(frozen[number])] == score
            compared += number < iteration
        assert store.last.rounds_used == len({origin[each][0] for each in batch})
        before = [parameter.detach().clone() for model in trainer.agents for parameter in model.parameters()]
        trainer.train_on(batch, epochs=1)
        assert any(not torch.equal(old, new) for old, new in zip(before, (p for model in trainer.agents for p in model.parameters())))
    assert compared > 10
    assert json.dumps(store.state_dict()["index"]) and store.state_dict()["stream"]["torch"] == {}


def test_a_cut_completion_comes_back_cut(tmp_path):
    trainer = make(args=config(max_new_tokens=1))
    pairs = trainer.collect(rows(3))
    assert any(not completion.finished for each in pairs for completion in each.winner)
    store = open_store(tmp_path, "current")
    store.store(1, pairs)
    assert store.select() == pairs
