"""Iterative training: what is compared, kept, replayed and learned in each round, who scores, what is written, and runs that are interrupted."""
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from comlrl_nb.callbacks import Callback
from comlrl_nb.evaluation import Evaluation
from comlrl_nb.preferences import from_record, to_record
from comlrl_nb.toy import micro_model
from comlrl_nb.trainers.rounds import Side, compared
from comlrl_nb.types import Completion, Generation, JointResponse, Node, Prompt
from comlrl_nb.utils.reward_utils import set_reward_range
from iterative_runs import (ROUND_KEYS, TOKENIZER, Halves, asked, assert_same_run, entering_weights, files, in_ids, iter_rows, judge, letters, make, rows, same, stored, team,
                            trained, unclocked, weights, writers_weights)

BOTH = pytest.mark.parametrize("kind", ["MADPO", "MARLHF"])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# one item: which candidates meet, who wins, what is kept and recorded

def said(token, end=(2,)):
    return Completion(chr(token), (token, *end), True)


def item_of(ours, theirs, *, raw=lambda reward: 10 * reward, tokens=None):
    """A node of one actor with the rewards `ours`, and a comparator with the rewards `theirs` (None: no answer)."""
    mine = [said(70 + k) for k in range(len(ours))]
    others = [None if value is None else (said((tokens or {}).get(k, 170 + k)),) for k, value in enumerate(theirs)]
    generation = Generation(0, Prompt("?", (1, 66)), tuple(mine))
    joints = tuple(JointResponse((k,), (mine[k],), ("x",), (reward,), (raw(reward),)) for k, reward in enumerate(ours))
    known = {k: value for k, value in enumerate(theirs) if value is not None}
    return Node({}, 0, (generation,), joints), Side(others, known, {k: raw(value) for k, value in known.items()})


def won(pairs):
    """(winner, loser) as first tokens; the comparator's begin at 170."""
    return [(pair.winner[0].token_ids[0], pair.loser[0].token_ids[0]) for pair in pairs]


def test_the_same_index_meets_and_either_side_may_win():
    pairs, stats = compared(*item_of([1.0, 0.0, 0.5], [0.0, 1.0, 0.5]), "all", None, None)
    assert won(pairs) == [(70, 170), (171, 71)]
    assert stats == {"pairs": 2, "tied_pairs": 1, "identical_pairs": 0, "win_rate": 0.5}


@pytest.mark.parametrize("ours, theirs", [([1.0, 0.0, 0.5, 0.9], [0.0, 0.2]), ([1.0, 0.0], [0.0, 0.2, 0.7, 0.4]), ([1.0, 0.0, 0.3], [0.0, 0.2, None])])
def test_only_common_indices_count_and_all_candidates_are_averaged(ours, theirs):
    pairs, stats = compared(*item_of(ours, theirs), "all", None, None)
    everything = [*ours, *(value for value in theirs if value is not None)]
    assert won(pairs) == [(70, 170), (171, 71)] and stats["pairs"] == 2
    assert all(pair.candidate_reward_mean == pytest.approx(sum(everything) / len(everything)) for pair in pairs)


def test_identical_sides_are_dropped_and_counted():
    """The same tokens with different scores: the oracle is noisy, and there is nothing to learn."""
    pairs, stats = compared(*item_of([1.0, 0.0], [0.0, 1.0], tokens={1: 71}), "all", None, None)
    assert won(pairs) == [(70, 170)] and stats["identical_pairs"] == 1 and stats["tied_pairs"] == 0 and stats["win_rate"] == 0.5


OURS, THEIRS = [0.1, 0.9, 0.5, 0.3], [0.7, 0.2, 0.7, 0.0]  # comparator first: 0.7 (gap 0.6), 0.7 (gap 0.2), 0.2, 0.0


@pytest.mark.parametrize("mode, limit, expected", [
    ("comparator_reward", None, [(170, 70), (172, 72), (71, 171), (73, 173)]), ("comparator_reward", 2, [(170, 70), (172, 72)]), ("comparator_reward", 1, [(170, 70)]),
    ("reward_gap", None, [(71, 171), (170, 70), (73, 173), (172, 72)]), ("reward_gap", 2, [(71, 171), (170, 70)]),
    ("all", None, [(170, 70), (71, 171), (172, 72), (73, 173)])])
def test_pair_selection(mode, limit, expected):
    assert won(compared(*item_of(OURS, THEIRS), mode, limit, random.Random(0))[0]) == expected


def test_a_random_selection_takes_every_pair_equally_often():
    seen = Counter(pair for seed in range(400) for pair in won(compared(*item_of(OURS, THEIRS), "random", 2, random.Random(seed))[0]))
    assert set(seen) == {(170, 70), (172, 72), (71, 171), (73, 173)} and all(abs(count - 200) < 60 for count in seen.values())


def test_a_record_tells_who_won_before_and_after_the_processor():
    trainer = trained(num_iterations=1, reward_processor=lambda value: -2.0 * value, pair_selection="all", preference_pairs_per_sample=None, preference_num_candidates=3,
                      comparator_num_candidates=2)
    content, = stored(trainer)
    per_item = {}
    for pair in content["pairs"]:
        assert pair["winner_reward"] > pair["loser_reward"] and pair["raw_rewards"] == [pair["winner_reward"] / -2, pair["loser_reward"] / -2]
        assert sorted([pair["target_raw_reward"], pair["comparator_raw_reward"]]) == pair["raw_rewards"]
        for side in ("winner", "loser"):
            assert letters(*[[text] for text in pair[f"{side}_completions"]])[0] * -2.0 == pair[f"{side}_reward"]
        per_item.setdefault(tuple(pair["prompts"]), set()).add(pair["candidate_reward_mean"])
    assert all(len(means) == 1 for means in per_item.values())


def test_the_records_are_what_was_sampled_and_scored():
    """Every score, in the order in which the reward function was asked, against the round file: both sides, raw and processed, and their mean."""
    heard = []

    def reward(first, second, answer):
        heard.append((answer[0], first[0], second[0], letters(first, second)[0]))
        return heard[-1][-1]

    trainer = trained(num_iterations=1, reward_func=reward, preference_num_candidates=3, comparator_num_candidates=4, pair_selection="all", preference_pairs_per_sample=None)
    content, = stored(trainer)
    assert len(heard) == 3 * (3 + 4)
    for item in range(3):
        of_item = [one for one in heard if one[0] == item]
        ours, theirs = of_item[:3], of_item[3:]
        mean = sum(one[-1] for one in of_item) / 7
        expected = []
        for mine, other in zip(ours, theirs):
            if mine[-1] != other[-1]:
                winner, loser = sorted([mine, other], key=lambda one: -one[-1])
                expected.append((list(winner[1:3]), list(loser[1:3]), [winner[-1], loser[-1]], mine[-1], other[-1]))
        found = [pair for pair in content["pairs"] if pair["prompts"][0] == rows()[item]["prompt"]]
        assert [(pair["winner_completions"], pair["loser_completions"], pair["raw_rewards"], pair["target_raw_reward"], pair["comparator_raw_reward"]) for pair in found] == expected
        assert all(pair["candidate_reward_mean"] == pytest.approx(mean) for pair in found)


# round files

SEED_KEYS = {"prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean", "raw_rewards", "target_raw_reward",
             "comparator_raw_reward"}


@BOTH
def test_round_files_hold_what_the_format_says(kind):
    trainer = trained(kind, preference_replay_dir="rounds")
    assert sorted(path.name for path in Path("rounds").iterdir()) == ["iteration_0001.json", "iteration_0002.json"]
    for number, path in enumerate(sorted(Path("rounds").iterdir()), 1):
        content = json.loads(path.read_text("utf-8"))
        assert set(content) == ROUND_KEYS | {"run"} and content["iteration"] == number and content["num_pairs"] == len(content["pairs"]) > 0
        for record in content["pairs"]:
            assert set(record) == SEED_KEYS | {"prompt_token_ids", "winner_tokens", "loser_tokens"}
            assert all(len(record[key]) == 2 for key in ("prompts", "winner_completions", "loser_completions", "raw_rewards"))
            assert from_record(record).raw_rewards == tuple(record["raw_rewards"])
    assert [row["current_preference_pairs"] for row in iter_rows(trainer)] == [content["num_pairs"] for content in stored(trainer)]


@BOTH
def test_a_second_run_into_a_folder_with_rounds_is_an_error(kind):
    trained(kind, preference_replay_dir="rounds", num_iterations=1)
    before = {path: path.read_bytes() for path in Path("rounds").iterdir()}
    trainer = make(kind, preference_replay_dir="rounds", preference_replay_mode="all_history")
    initial = weights(trainer)
    with pytest.raises(FileExistsError, match="iteration_0001.json.*another run.*preference_replay_dir"):
        trainer.train()
    assert before == {path: path.read_bytes() for path in Path("rounds").iterdir()} and same(weights(trainer), initial)


def only_in(iterations, kind="MADPO", **more):
    """A trainer whose reward tells answers apart only in these rounds."""
    trainer = make(kind, reward_func=lambda first, second: letters(first, second) if box[0].rounds.iteration in iterations else 0.5, **more)
    box = [trainer]
    return trainer


@BOTH
def test_rounds_without_pairs_write_a_file_and_train_nothing(kind):
    trainer = only_in({2}, kind, num_iterations=3)
    entered = entering_weights(trainer)
    trainer.train()
    assert [content["num_pairs"] > 0 for content in stored(trainer)] == [False, True, False] and stored(trainer)[0] == {"iteration": 1, "num_pairs": 0, "pairs": []}
    assert same(entered[0], entered[1]) and not same(entered[1], entered[2]) and same(entered[2], weights(trainer))
    assert [row["train_preference_pairs"] > 0 for row in iter_rows(trainer)] == [False, True, False]
    assert iter_rows(trainer)[0]["tied_pairs"] == 12 and "replay_age" not in iter_rows(trainer)[0]
    assert (trainer.reward_model is not None) if kind == "MARLHF" else True


def test_an_empty_round_draws_from_earlier_ones_and_is_never_eligible():
    trainer = only_in({1, 3}, num_iterations=4, preference_replay_mode="nearest_k", preference_replay_k=2)
    drawn, real = [], trainer.rounds.store.select

    def select():
        pairs = real()
        drawn.append((trainer.rounds.store.last.rounds, len(pairs)))
        return pairs

    trainer.rounds.store.select = select
    trainer.train()
    sizes = [content["num_pairs"] for content in stored(trainer)]
    assert [size > 0 for size in sizes] == [True, False, True, False]
    assert drawn == [((1,), sizes[0]), ((1,), sizes[0]), ((3, 1), sizes[2]), ((3, 1), sizes[2])]


def test_no_round_with_pairs_leaves_the_policies():
    trainer = make(reward_func=lambda first, second: 0.5, preference_replay_mode="all_history", num_iterations=2)
    before = weights(trainer)
    history = trainer.train()
    assert same(weights(trainer), before) and [row["kind"] for row in history] == ["iter", "iter"] and trainer.env_step == 0


# replay

def batches_seen(trainer):
    """A list that gets the training set of every round."""
    seen, name = [], "learn"
    real = getattr(trainer, name)
    setattr(trainer, name, lambda pairs, **more: seen.append(list(pairs)) or real(pairs, **more))
    return seen


def of_rounds(trainer):
    return [[from_record(record) for record in content["pairs"]] for content in stored(trainer)]


MODES = [("current", {}), ("nearest_k", dict(preference_replay_k=2)), ("all_history", {}), ("lambda_decay", dict(preference_replay_lambda=0.5)),
         ("lambda_decay", dict(preference_replay_lambda=0.0))]


@pytest.mark.parametrize("mode, more, size", [(*each, size) for each in MODES for size in (None, 40) if each[0] != "current" or size is None])
def test_replay_modes_through_the_trainer(mode, more, size):
    trainer = make(num_iterations=3, preference_replay_mode=mode, preference_replay_sample_size=size, train_dataset=rows(2), train_batch_size=50, **more)
    seen = batches_seen(trainer)
    trainer.train()
    rounds = of_rounds(trainer)
    assert len(seen) == 3 and [len(batch) for batch in seen] == [size or len(pairs) for pairs in rounds]
    for number, batch in enumerate(seen, 1):
        reachable = {"current": 1, "nearest_k": 2}.get(mode, number) if more.get("preference_replay_lambda") != 0.0 else 1
        allowed = [pair for pairs in rounds[max(0, number - reachable):number] for pair in pairs]
        assert all(pair in allowed for pair in batch)
        if mode == "current":
            assert batch == rounds[number - 1]
        if size and reachable > 1:
            assert all(any(pair in pairs for pair in batch) for pairs in rounds[max(0, number - reachable):number])
    assert [row["replay_pairs"] for row in iter_rows(trainer)] == [len(batch) for batch in seen]
    if mode in ("current", "lambda_decay") and not more.get("preference_replay_lambda"):
        assert all(row["replay_age"] == 0 and row["replay_rounds"] == 1 for row in iter_rows(trainer))


def test_weights_by_age_are_those_of_the_formula():
    trainer = trained(num_iterations=3, preference_replay_mode="lambda_decay", preference_replay_lambda=0.8, train_dataset=rows(2))
    found = trainer.rounds.store.weights()
    assert list(found) == [3, 2, 1] and list(found.values()) == pytest.approx([0.8 ** age / (1 + 0.8 + 0.64) for age in range(3)])


def test_a_replayed_pair_is_the_pair_that_was_collected(monkeypatch):  # C50
    """Texts that do not survive another encoding come back with the sampled ids, and score bit for bit as they did."""
    trainer = make(num_iterations=2, preference_replay_mode="all_history", preference_replay_sample_size=30, num_train_epochs=1)
    collected, real = [], trainer.rounds.store.store

    def store(iteration, pairs):
        collected.append(list(pairs))
        return real(iteration, pairs)

    trainer.rounds.store.store = store
    seen = batches_seen(trainer)
    trainer.train()
    replayed = [pair for pair in seen[1] if pair in collected[0]]
    assert replayed and all(pair in collected[0] + collected[1] for pair in seen[1])
    assert any(in_ids(part.text).token_ids != part.token_ids for pair in replayed for part in (*pair.winner, *pair.loser))
    for pair in replayed[:3]:
        twin = next(one for one in collected[0] if one == pair)
        scores = [score_of(trainer, one) for one in (twin, pair)]
        assert scores[0] == scores[1] and not any(torch.is_tensor(value) for value in vars(pair).values())


def score_of(trainer, pair):
    from comlrl_nb.update import reference_margins
    return reference_margins(trainer.team, trainer.agents, [pair], True).tolist()


def test_memory_holds_only_the_training_set_of_a_round():
    trainer = trained(num_iterations=3, preference_replay_mode="all_history", train_dataset=rows(2))
    assert trainer.rounds.batch is None and trainer.source is None and trainer.rounds.found is None
    assert all(type(value) in (int, str) for each in trainer.rounds.store.index.rounds for value in vars(each).values())


# what a round learns

def test_each_madpo_round_makes_its_epochs_over_its_training_set():
    trainer = trained(num_iterations=2, num_train_epochs=3, train_batch_size=2)
    updates = [math.ceil(row["train_preference_pairs"] / 2) * 3 for row in iter_rows(trainer)]
    assert [row["update"] for row in iter_rows(trainer)] == [0, updates[0]] and trainer.run.update == sum(updates)
    assert trainer.env_step == 2 * 3 * sum(row["train_preference_pairs"] for row in iter_rows(trainer))


def test_each_marlhf_round_fits_a_newly_initialised_reward_model():
    trainer = make("MARLHF", num_iterations=3)
    fresh, fitted, real = [], [], trainer.phase.source.fresh

    def initial(*given):
        made = real(*given)
        fresh.append(weights([made[0]]))
        return made

    trainer.phase.source = SimpleNamespace(fresh=initial)
    seen, learn = [], trainer.learn
    trainer.learn = lambda pairs, **more: (learn(pairs, **more), fitted.append(trainer.reward_model), seen.append(weights([trainer.reward_model])))
    trainer.train()
    assert len(fresh) == len(seen) == 3 and len({id(model) for model in fitted}) == 3
    backbone = {f"backbone.{name}": value for name, value in judge().state_dict().items()}
    for start, end in zip(fresh, seen):
        assert all(torch.equal(start[0][name], value) for name, value in backbone.items()) and not same(start, end)
    heads = [start[0]["reward_head.weight"] for start in fresh]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])
    assert not any(p.requires_grad for p in fitted[-1].parameters())
    assert [row["kind"] for row in trainer.history if row["kind"] in ("iter", "reward_model")] == ["iter", "reward_model"] * 3


def test_a_reward_model_is_fitted_to_the_replayed_pairs():
    trainer = make("MARLHF", num_iterations=2, preference_replay_mode="all_history", preference_replay_sample_size=20)
    fitted, real = [], trainer.phase.fit
    trainer.phase.fit = lambda pairs, *more: fitted.append(list(pairs)) or real(pairs, *more)
    trainer.train()
    first, second = of_rounds(trainer)
    assert [len(pairs) for pairs in fitted] == [20, 20] and all(any(pair in fitted[1] for pair in pairs) for pairs in (first, second))


# who scores

def scorers(trainer):
    """Per round: how often the task's reward function was called while comparing, and whether the scores were learned ones."""
    calls, seen, real, draw = [0], [], trainer.setup.reward.score, trainer.rounds._draw

    def score(*given):
        calls[0] += 1
        return real(*given)

    def drawn(who, roles, reward):
        before = calls[0]
        draw(who, roles, reward)
        seen.append((calls[0] - before, reward is trainer.phase.learned))

    trainer.setup.reward.score, trainer.rounds._draw = score, drawn
    return seen


def test_a_reward_model_scores_new_comparisons_from_the_second_round_on():
    trainer = make("MARLHF", num_iterations=3, preference_scoring_reward="reward_model", reward_processor=lambda value: value + 100.0)
    seen, judges, learn = scorers(trainer), [], trainer.learn
    trainer.learn = lambda pairs, **more: (learn(pairs, **more), judges.append(trainer.reward_model))
    trainer.train()
    assert seen == [(6, False), (0, True), (0, True)]
    first, *later = stored(trainer)
    assert all(pair["winner_reward"] >= 100 and pair["raw_rewards"][0] + 100 == pair["winner_reward"] for pair in first["pairs"])
    reader = trainer.phase.learned.reader
    for content, model in zip(later, judges):
        assert content["pairs"] and all(pair["raw_rewards"] == [pair["winner_reward"], pair["loser_reward"]] for pair in content["pairs"])
        for pair in content["pairs"]:
            for side in ("winner", "loser"):
                with torch.no_grad():
                    value = model.scores([reader.ids(pair["prompts"], pair[f"{side}_completions"])], TOKENIZER.pad_token_id).item()
                assert value == pytest.approx(pair[f"{side}_reward"], abs=1e-5)


@pytest.mark.parametrize("name", ["task", "oracle", None])
def test_the_task_scores_every_round_by_default(name):
    trainer = make("MARLHF", num_iterations=2, preference_scoring_reward=name)
    seen = scorers(trainer)
    trainer.train()
    assert seen == [(6, False), (6, False)]
    for content in stored(trainer):
        assert all(letters(*[[text] for text in pair["winner_completions"]])[0] == pair["winner_reward"] for pair in content["pairs"])


def test_until_there_is_a_reward_model_the_task_scores():
    """Rounds without pairs fit nothing, so the task goes on scoring."""
    trainer = only_in({2}, "MARLHF", num_iterations=3, preference_scoring_reward="reward_model")
    seen = scorers(trainer)
    trainer.train()
    assert seen == [(6, False), (6, False), (0, True)]


def test_one_actor_for_all_roles_is_scored_by_the_reward_model_as_a_whole():
    trainer = make("MARLHF", collaboration_mode="centralized", centralized_comparator_adapter=Halves(), preference_scoring_reward="reward_model", num_iterations=2)
    seen = scorers(trainer)
    trainer.train()
    assert seen == [(6, False), (0, True)] and stored(trainer)[1]["pairs"]


@pytest.mark.parametrize("kind, scoring", [("MADPO", "task"), ("MARLHF", "task"), ("MARLHF", "reward_model")])
def test_evaluation_uses_the_current_policies_and_the_task_reward(kind, scoring, monkeypatch):
    held = [{"prompt": "say c", "answer": 9}] * 2
    more = dict(preference_scoring_reward=scoring) if kind == "MARLHF" else {}
    trainer = make(kind, eval_dataset=held, eval_interval=1, eval_num_samples=2, reward_processor=lambda value: value + 10.0, num_iterations=2, **more)
    found, real = [], Evaluation.run

    def run(evaluation, team, items, size):
        stats, nodes = real(evaluation, team, items, size)
        found.append((stats["eval/turn_1/reward_mean"], [joint for node in nodes for joint in node.joints], [a is b for a, b in zip(team.models, trainer.agents)]))
        return stats, nodes

    monkeypatch.setattr(Evaluation, "run", run)
    trainer.train()
    assert len(found) >= 4
    for mean, joints, models in found:
        values = [letters(*[[part.text] for part in joint.completions])[0] + 10.0 for joint in joints]
        assert mean == pytest.approx(sum(values) / len(values)) and all(models)
    assert len({mean for mean, *_ in found}) > 1


def test_evaluations_change_nothing():
    assert_training(trained(eval_dataset=rows(2), eval_interval=1, eval_num_samples=2), trained())


def assert_training(first, second):
    assert same(weights(first), weights(second)) and stored(first) == stored(second)


# metrics and distributions

ITER_KEYS = {"current_iteration", "current_preference_pairs", "total_preference_pairs", "train_preference_pairs", "replay_pairs", "replay_rounds", "replay_age", "pairs", "tied_pairs",
             "identical_pairs", "win_rate", "unanswered", "unsplit", "comparator_reward_mean", "turn_1/reward_mean", "tied_group_fraction", "unsplit_fraction", "completion_length",
             "finished_fraction", *(f"agent_{i}/{name}" for i in range(2) for name in ("completion_length", "finished_fraction"))}


@BOTH
def test_iteration_metrics(kind):
    trainer = trained(kind, num_iterations=3, preference_replay_mode="all_history")
    found = iter_rows(trainer)
    assert all(set(row) == ITER_KEYS | {"kind", "update", "env_step", "seconds/compare"} for row in found)
    sizes = [content["num_pairs"] for content in stored(trainer)]
    assert [row["current_iteration"] for row in found] == [1.0, 2.0, 3.0] and [row["current_preference_pairs"] for row in found] == [row["pairs"] for row in found] == sizes
    assert [row["total_preference_pairs"] for row in found] == [sum(sizes[:n]) for n in (1, 2, 3)] and [row["train_preference_pairs"] for row in found] == sizes
    assert all(type(row[name]) is float for row in found for name in ITER_KEYS)


def test_rewards_of_both_sides_are_reported():
    trainer = make(num_iterations=1, preference_num_candidates=3, comparator_num_candidates=2)
    heard, real = [], trainer.setup.reward.score
    trainer.setup.reward.score = lambda *given: heard.append(real(*given)) or heard[-1]
    trainer.train()
    sides = [[score.rewards[0] for scores in heard for score in scores if len(scores) == size] for size in (3, 2)]
    row, = iter_rows(trainer)
    assert row["turn_1/reward_mean"] == pytest.approx(sum(sides[0]) / 9) and row["comparator_reward_mean"] == pytest.approx(sum(sides[1]) / 6)


def test_reward_distributions_of_a_round():
    reward = set_reward_range(lambda first, second: letters(first, second), -1.0, 1.0)
    trainer = make(num_iterations=2, reward_func=reward, reward_processor=lambda value: 5 * value, log_reward_distribution=True, comparator_num_candidates=2, preference_pairs_per_sample=1)
    heard, real = [], trainer.setup.reward.score
    trainer.setup.reward.score = lambda *given: heard.append(real(*given)) or heard[-1]
    trainer.train()
    paths = sorted((trainer.folder / "reward_distributions").iterdir())
    assert [path.name for path in paths] == ["iteration_0001.json", "iteration_0002.json"]
    content, first = json.loads(paths[0].read_text()), stored(trainer)[0]["pairs"]
    assert set(content) == {"iteration", "reward_min", "reward_max", "num_bins", "bin_edges", "bin_centers", "candidate", "selected"}
    assert (content["iteration"], content["reward_min"], content["reward_max"], content["num_bins"]) == (1, -1.0, 1.0, 16)
    assert content["bin_edges"] == pytest.approx([-1 + k / 8 for k in range(17)]) and content["bin_centers"] == pytest.approx([-1 + (k + 0.5) / 8 for k in range(16)])
    raw = {size: [score.raw[0] for scores in heard[:6] for score in scores if len(scores) == size] for size in (4, 2)}
    wanted = {("candidate", "target"): raw[4], ("candidate", "comparator"): raw[2],
              ("selected", "target"): [pair["target_raw_reward"] for pair in first], ("selected", "comparator"): [pair["comparator_raw_reward"] for pair in first]}
    for (group, side), values in wanted.items():
        found = content[group][side]
        assert found["raw_rewards"] == values and found["sample_count"] == len(values) == sum(found["counts"]) and found["mean"] == pytest.approx(sum(values) / len(values))
        for value in values:
            assert found["counts"][min(15, int((value + 1) * 8))] > 0


def test_distributions_are_not_written_unless_asked_for():
    reward = set_reward_range(lambda first, second: letters(first, second), 0.0, 1.0)
    assert not (trained(num_iterations=1, reward_func=reward).folder / "reward_distributions").exists()


# randomness, interruptions

@BOTH
def test_same_seed_same_run(kind):
    one, two, other = (trained(kind, seed=seed, preference_replay_mode="all_history", comparator_policy="history") for seed in (5, 5, 6))
    assert_same_run(one, two)
    assert not same(weights(one), weights(other))


def test_the_global_seed_does_not_matter():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed)
        found.append(trained(num_iterations=1, pair_selection="random"))
    assert_same_run(*found)


class Stop(Callback):
    """Ctrl-C when the run says something for the n-th time."""

    def __init__(self, at, what="on_advance", of=None):
        self.left, self.of = at, of
        setattr(self, what, self.hear)

    def hear(self, first, *more):
        if self.of is None or self.of in (first if isinstance(first, str) else first.get("kind", "") if isinstance(first, dict) else ""):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def run_again(trainer, error=KeyboardInterrupt):
    with pytest.raises(error):
        trainer.train()
    trainer.train()
    return trainer


STOPPED = dict(preference_replay_mode="lambda_decay", preference_replay_lambda=0.7, comparator_policy="history", train_batch_size=2, pair_selection="random")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted runs."""
    here = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("whole"))
    found = {kind: trained(kind, **STOPPED) for kind in ("MADPO", "MARLHF")}
    os.chdir(here)
    for trainer in found.values():
        trainer.kept = stored_at(trainer, Path(trainer.rounds.store.index.folder), tmp_path_factory)
    return found


def stored_at(trainer, folder, tmp_path_factory):
    base = folder if folder.is_absolute() else next(path for path in tmp_path_factory.getbasetemp().glob("whole*/" + str(folder)))
    return files(base)


def assert_as_if_whole(trainer, whole):
    assert same(weights(trainer), weights(whole)) and unclocked(trainer.history) == unclocked(whole.history) and stored(trainer) == whole.kept


SPOTS = [("MADPO", dict(at=1)), ("MADPO", dict(at=3)), ("MADPO", dict(at=5)), ("MADPO", dict(at=1, what="on_row", of="iter")), ("MADPO", dict(at=2, what="on_row", of="iter")),
         ("MADPO", dict(at=1, what="on_phase", of="compare round 2")), ("MADPO", dict(at=2, what="on_nodes")), ("MADPO", dict(at=2, what="on_row", of="train")),
         ("MARLHF", dict(at=1, what="on_row", of="iter")), ("MARLHF", dict(at=2)), ("MARLHF", dict(at=4)), ("MARLHF", dict(at=1, what="on_row", of="reward_model")),
         ("MARLHF", dict(at=1, what="on_row", of="train")), ("MARLHF", dict(at=2, what="on_row", of="train")), ("MARLHF", dict(at=2, what="on_row", of="reward_model")),
         ("MARLHF", dict(at=1, what="on_phase", of="compare round 2"))]


@pytest.mark.parametrize("kind, spot", SPOTS, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())))
def test_interrupted_and_continued_is_uninterrupted(kind, spot, whole):
    trainer = make(kind, callbacks=[Stop(**spot)], **STOPPED)
    run_again(trainer)
    assert trainer.callbacks[0].left <= 0
    assert_as_if_whole(trainer, whole[kind])


@pytest.mark.parametrize("at", [1, 5, 13, 40])
@BOTH
def test_interrupted_in_the_reward(kind, at, whole):
    left = [at]

    def reward(first, second):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return letters(first, second)

    trainer = run_again(make(kind, reward_func=reward, **STOPPED))
    assert left[0] < 0
    assert_as_if_whole(trainer, whole[kind])


@pytest.mark.parametrize("kind, at", [("MADPO", 2), ("MADPO", 7), ("MARLHF", 2), ("MARLHF", 5)])
def test_interrupted_in_an_update(kind, at, whole):
    trainer, left = make(kind, **STOPPED), [at]

    def hook(module, inputs):
        if torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    handle = trainer.agents[1].transformer.wte.register_forward_pre_hook(hook) if hasattr(trainer.agents[1], "transformer") else None
    run_again(trainer)
    handle.remove()
    assert left[0] < 0
    assert_as_if_whole(trainer, whole[kind])


@pytest.mark.parametrize("at", [1, 4])
def test_interrupted_while_fitting_the_reward_model(at, whole):
    trainer, left = make("MARLHF", **STOPPED), [at]
    real = trainer.phase.source.fresh

    def fresh(*given):
        model, *more = real(*given)

        def hook(module, inputs):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        model.reward_head.register_forward_pre_hook(hook)
        return model, *more

    trainer.phase.source = SimpleNamespace(fresh=fresh)
    run_again(trainer)
    assert left[0] < 0
    assert_as_if_whole(trainer, whole["MARLHF"])


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
def test_ctrl_c_between_the_agents_steps(place, whole):
    trainer, left = make(**STOPPED), [2]

    def hook(*args):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    getattr(trainer.optimizers[1], place)(hook)
    run_again(trainer)
    assert left[0] < 0
    assert_as_if_whole(trainer, whole["MADPO"])


FILES = ("trainers/rounds.py", "preference/iterative.py")


def tracing(hit):
    """A trace function that sends Ctrl-C before the line for which `hit(file and number)` is true."""
    def local(frame, event, arg):
        if event == "line" and hit((frame.f_code.co_filename, frame.f_lineno)):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return local

    return lambda frame, event, arg: local if frame.f_code.co_filename.endswith(FILES) else None


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 2])
@BOTH
def test_ctrl_c_before_any_line_of_a_round(kind, time):
    """Every line of the loop that runs in the second round, when it runs for the first and for the second time."""
    small = dict(STOPPED, preference_num_candidates=2, max_new_tokens=2, train_batch_size=4)
    plain, lines, wrong = trained(kind, **small), [], []

    def run(trainer, hit):
        before = sys.gettrace()
        try:
            sys.settrace(tracing(lambda line: trainer.rounds.iteration == 2 and hit(line)))
            trainer.train()
        except KeyboardInterrupt:
            sys.settrace(before)
            trainer.train()
        finally:
            sys.settrace(before)
        return trainer

    run(make(kind, **small), lambda line: lines.append(line))
    for wanted in dict.fromkeys(lines):
        seen = []
        trainer = run(make(kind, **small), lambda line: line == wanted and (seen.append(line) or len(seen) == time))
        if not (same(weights(trainer), weights(plain)) and unclocked(trainer.history) == unclocked(plain.history) and stored(trainer) == stored(plain)):
            wrong.append(wanted)
    assert len(set(lines)) > 60 and wrong == []


@pytest.mark.parametrize("step", ["enter", "store", "select"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_around_the_files_of_a_round(step, when, whole):
    """A failing disk, or Ctrl-C, before or after the weights are kept, the round is stored, the training set is drawn."""
    trainer, left = make(**STOPPED), [2]
    owner = trainer.rounds.past if step == "enter" else trainer.rounds.store
    real = getattr(owner, step)

    def broken(*given):
        left[0] -= 1
        if left[0] == 0 and when == "before":
            raise OSError("no space left on device")
        done = real(*given)
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return done

    setattr(owner, step, broken)
    run_again(trainer, OSError if when == "before" else KeyboardInterrupt)
    assert left[0] <= 0
    assert_as_if_whole(trainer, whole["MADPO"])


def test_a_round_file_that_is_missing_stops_the_run_until_it_is_back():
    trainer = make(num_iterations=3, preference_replay_mode="all_history", preference_replay_sample_size=30)
    other = trained(num_iterations=3, preference_replay_mode="all_history", preference_replay_sample_size=30)
    place, real = trainer.rounds.store.index.folder / "iteration_0001.json", trainer.rounds.store.store

    def store(iteration, pairs):
        path = real(iteration, pairs)
        if iteration == 2:
            place.rename("away.json")
        return path

    trainer.rounds.store.store = store
    with pytest.raises(FileNotFoundError, match="iteration_0001.json"):
        trainer.train()
    Path("away.json").rename(place)
    trainer.rounds.store.store = real
    trainer.train()
    assert_same_run(trainer, other)


def test_a_run_that_is_done_stays_done():
    trainer = trained(num_iterations=1)
    before = weights(trainer), len(trainer.history)
    assert trainer.train() is trainer.history
    assert same(weights(trainer), before[0]) and len(trainer.history) == before[1]


# the surface

@BOTH
def test_collecting_by_hand_compares_as_the_round_would(kind):
    by_hand, in_a_round = make(kind, num_iterations=1), trained(kind, num_iterations=1)
    pairs = by_hand.collect()
    assert [to_record(pair) for pair in pairs] == stored(in_a_round)[0]["pairs"]
    assert all({pair.target_raw_reward, pair.comparator_raw_reward} == set(pair.raw_rewards) for pair in pairs)
    row, = by_hand.history
    assert row["kind"] == "collect" and row["pairs"] == len(pairs) and row["win_rate"] == iter_rows(in_a_round)[0]["win_rate"]


@BOTH
@pytest.mark.parametrize("policy", ["current", "history"])
def test_collecting_by_hand_stores_and_learns_nothing(kind, policy):
    trainer = make(kind, comparator_policy=policy)
    before = weights(trainer)
    assert trainer.collect(rows()[:2]) and trainer.collect(iter(rows()[:1])) is not None and trainer.collect([]) == []
    assert same(weights(trainer), before) and not trainer.rounds.store.index.folder.exists()
    assert (trainer.rounds.iteration, trainer.rounds.batch, trainer.rounds.found, trainer.rounds.total_pairs) == (1, None, None, 0)
    trainer.train()
    assert len(stored(trainer)) == 2 and trainer.collect(rows()[:1]) is not None and len(stored(trainer)) == 2
    assert [row["kind"] for row in trainer.history].count("collect") == 3


def test_by_hand_history_is_the_policy_that_was_there_first():
    trainer = make(comparator_policy="history", agent_learning_rate=0.1)
    first, seen = weights(trainer), writers_weights(trainer)
    trainer.train_on(trainer.collect())
    trainer.collect()
    assert len(seen) == 2 and same(seen[0], first) and same(seen[1], first) and not same(weights(trainer), first)


def test_a_step_learns_from_comparisons_with_the_comparator():
    trainer = make(comparator_policy="model", comparator_agents=[micro_model(43, "gpt2", n_layer=1)] * 2)
    before, seen = weights(trainer), writers_weights(trainer)
    assert trainer.step(rows()[:2])["loss"] > 0 and len(seen) == 1
    assert not same(weights(trainer), before) and trainer.rounds.iteration == 1 and not trainer.rounds.store.index.folder.exists()


def test_collecting_by_hand_asks_whoever_scores_the_rounds():
    trainer = trained("MARLHF", num_iterations=1, preference_scoring_reward="reward_model")
    asked_for, real = [], trainer.phase.learned.score
    trainer.phase.learned.score = lambda *given: asked_for.append(1) or real(*given)
    trainer.collect(rows()[:1])
    assert asked_for


def test_stopped_while_collecting_by_hand_the_streams_are_as_before():
    trainer, whole = make(), make()
    real = trainer.setup.reward.score
    trainer.setup.reward.score = lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.collect()
    trainer.setup.reward.score = real
    assert [to_record(pair) for pair in trainer.collect()] == [to_record(pair) for pair in whole.collect()]


@pytest.mark.parametrize("items, says", [([3], r"items\[0\]"), ([rows()[0], None], r"items\[1\]")])
def test_items_that_are_no_rows_are_named(items, says):
    with pytest.raises(ValueError, match=says):
        make().collect(items)


def test_policies_of_another_run_are_not_compared_with():
    make(comparator_policy="history", policy_checkpoint_dir="kept").collect(rows()[:1])
    with pytest.raises(FileExistsError, match="another run"):
        make(comparator_policy="history", policy_checkpoint_dir="kept").collect(rows()[:1])


@BOTH
def test_further_keywords_reach_every_call_of_generate(kind):
    seen, compare_with = [], micro_model(43, "gpt2", n_layer=1)
    trainer = make(kind, num_iterations=1, comparator_policy="model", comparator_agents=[compare_with] * 2)
    for model in (*trainer.agents, compare_with):
        real = model.generate
        model.generate = lambda real=real, **keywords: seen.append(keywords.get("repetition_penalty")) or real(**keywords)
    trainer.train(repetition_penalty=1.5)
    assert set(seen) == {1.5} and len(seen) >= (4 if kind == "MADPO" else 6)
    seen.clear()
    trainer.rollout(rows()[0])
    assert set(seen) == {None}


@BOTH
def test_saved_models_can_be_read_back(kind):
    trainer = trained(kind, num_iterations=1)
    trainer.save_model("kept")
    assert sorted(path.name for path in Path("kept").iterdir()) == ["agent_0", "agent_1", *(["reward_model"] if kind == "MARLHF" else []), "team.json"]
    assert same(weights([AutoModelForCausalLM.from_pretrained(f"kept/agent_{i}") for i in range(2)]), weights(trainer))
    again = make(kind, comparator_policy="model", comparator_agents=["kept/agent_0", "kept/agent_1"], num_iterations=1)
    with asked(again):
        assert same(weights(again.rounds.comparator.source.open.models), weights(trainer))


def test_a_run_lives_in_its_own_folder():
    one, two = trained(num_iterations=1, comparator_policy="history"), trained(num_iterations=1)
    assert one.folder != two.folder and one.folder.parent.name == "runs" and one.folder.name.startswith("madpoiter-")
    assert sorted(path.name for path in one.folder.iterdir()) == ["policies", "replay"]
    assert {path.name for path in Path().iterdir()} == {"runs"}


@pytest.mark.parametrize("rl_algorithm", ["mareinforce", "marloo", "maremax", "maac", "iac"])
def test_other_back_ends_run_in_rounds(rl_algorithm):
    more = dict(critics=[micro_model(50 + i, "gpt2", n_layer=1) for i in range(1 if rl_algorithm == "maac" else 2)]) if rl_algorithm in ("maac", "iac") else {}
    more |= dict(use_separate_critic=True) if rl_algorithm == "iac" else {}
    trainer = make("MARLHF", rl_algorithm=rl_algorithm, num_iterations=2, train_dataset=rows(2), **more)
    entered = entering_weights(trainer)
    trainer.train()
    assert len(stored(trainer)) == 2 and not same(entered[0], entered[1]) and not same(entered[1], weights(trainer))


def test_two_devices_run_as_one():
    where = dict(parallel_training="mp", agent_devices=["cpu:0", "cpu:1"])
    assert_same_run(trained(num_iterations=2), trained(num_iterations=2, **where))


# a script that was written for comlrl

SCRIPT = '''
import glob, json, os, tempfile
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from comlrl.trainers.preference import MADPOIterConfig, MADPOIterTrainer, MARLHFIterConfig, MARLHFIterTrainer

torch.manual_seed(0)
vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>"] + sorted(pre_tokenizers.ByteLevel.alphabet()))}
core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
home = tempfile.mkdtemp()
os.chdir(home)


def model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def reward(first, second):
    return [(sum(map(ord, a)) * 31 + sum(map(ord, b))) % 101 / 100 for a, b in zip(first, second)]


reward.reward_range = (0.0, 1.0)
model().save_pretrained("judge"), tokenizer.save_pretrained("judge")
common = dict(num_iterations=2, num_train_epochs=1, agent_learning_rate=1e-3, num_agents=2, max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=None, eval_interval=1,
    eval_num_samples=2, rollout_buffer_size=2, train_batch_size=2, preference_num_candidates=4, preference_pairs_per_sample=2, preference_replay_mode="lambda_decay",
    preference_replay_lambda=0.8, preference_replay_sample_size=4, comparator_policy="history", comparator_history_k=1, log_reward_distribution=True)
data = [{"prompt": "first item"}, {"prompt": "second"}]
for name, Config, Trainer, more in (("madpo", MADPOIterConfig, MADPOIterTrainer, {}),
        ("marlhf", MARLHFIterConfig, MARLHFIterTrainer, dict(rl_algorithm="magrpo", num_generations=2, reward_model_name="judge", reward_model_device="cpu", preference_scoring_reward="reward_model"))):
    args = Config(preference_replay_dir=f"replay_{name}", **common, **more)
    trainer = Trainer(agents=[model(), model()], num_agents=2, tokenizer=tokenizer, reward_func=reward, formatters=[lambda item: "A: " + item["prompt"], lambda item: "B: " + item["prompt"]],
        train_dataset=data, eval_dataset=data, wandb_config=None, args=args)
    trainer.verbose = False
    before = [p.detach().clone() for agent in trainer.agents for p in agent.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b.detach()) for a, b in zip(before, [p for agent in trainer.agents for p in agent.parameters()]))
    paths = sorted(glob.glob(f"replay_{name}/iteration_*.json"))
    assert [os.path.basename(path) for path in paths] == ["iteration_0001.json", "iteration_0002.json"], paths
    for number, path in enumerate(paths, 1):
        with open(path) as file:
            content = json.load(file)
        assert content["iteration"] == number and content["num_pairs"] == len(content["pairs"])
        for pair in content["pairs"]:
            assert {"prompts", "winner_completions", "loser_completions", "winner_reward", "loser_reward", "candidate_reward_mean", "raw_rewards", "target_raw_reward",
                "comparator_raw_reward"} <= set(pair)
            assert pair["prompts"][0].startswith("A: ") and pair["prompts"][1].startswith("B: ")
    metrics = trainer.evaluate(num_eval_samples=2)
    assert "eval/turn_1/reward_mean" in metrics, sorted(metrics)
    trainer.save_model(f"saved_{name}")
    assert {"agent_0", "agent_1"} <= set(os.listdir(f"saved_{name}"))
print("finished")
'''


def test_a_script_for_comlrl_runs_with_the_import_replaced(capsys):
    exec(compile(SCRIPT.replace("comlrl.trainers", "comlrl_nb.trainers"), "script", "exec"), {"__name__": "script"})
    assert capsys.readouterr().out.endswith("finished\n")


@pytest.mark.slow
def test_the_same_script_finishes_with_comlrl(tmp_path):
    peer = Path(os.environ.get("COMLRL_PEER_PYTHON", "/opt/peer/venv/bin/python"))
    if not peer.exists():
        pytest.skip("COMLRL_PEER_PYTHON names no environment with comlrl")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([peer, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"})
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr[-2000:]
