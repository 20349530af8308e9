"""From scores to pairs."""
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comlrl_nb.pairs import PAIR_SELECTIONS, comparator_pairs, decided_pairs, select_pairs

scores_lists = st.lists(st.integers(-3, 3).map(float), max_size=9)


@given(scores_lists)
def test_decided_pairs_are_exactly_the_comparisons_with_a_winner(scores):
    pairs = decided_pairs(scores)
    assert set(pairs) == {(i, j) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b}
    assert len(pairs) == len(set(pairs))


@given(scores_lists, scores_lists)
def test_comparator_pairs(current, comparator):
    joined, pairs = current + comparator, comparator_pairs(current, comparator)
    assert all(joined[w] > joined[l] and abs(w - l) == len(current) for w, l in pairs)
    assert len(pairs) == sum(a != b for a, b in zip(current, comparator))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("call", [lambda s: decided_pairs(s), lambda s: comparator_pairs(s, [0.0]), lambda s: comparator_pairs([0.0], s),
                                  lambda s: select_pairs([(0, 1)], s, "random", None, random.Random(0))])
def test_broken_scores_are_refused(bad, call):
    with pytest.raises(ValueError, match=r"\[1\]=(nan|-?inf): expected a finite number"):
        call([1.0, bad])


@given(scores_lists, st.integers(1, 12) | st.none(), st.integers(0, 99))
def test_largest_gaps_first_and_stable(scores, limit, seed):
    pairs = decided_pairs(scores)
    random.Random(seed).shuffle(pairs)
    kept = select_pairs(pairs, scores, "reward_gap", limit, random.Random(0))
    keys = [(scores[l] - scores[w], pairs.index((w, l))) for w, l in kept]
    assert keys == sorted(keys) and len(kept) == min(len(pairs), limit or len(pairs))
    rest = [scores[w] - scores[l] for w, l in set(pairs) - set(kept)]
    assert not rest or max(rest) <= min(scores[w] - scores[l] for w, l in kept)


@given(scores_lists, scores_lists)
def test_comparator_reward_order(current, comparator):
    joined = current + comparator
    kept = select_pairs(comparator_pairs(current, comparator), joined, "comparator_reward", None, random.Random(0))
    keys = [(-joined[max(pair)], joined[pair[1]] - joined[pair[0]], max(pair)) for pair in kept]
    assert keys == sorted(keys)


def test_random_is_seeded_and_without_repetition():
    scores = [float(i) for i in range(10)]
    pairs = decided_pairs(scores)
    draw = lambda seed: select_pairs(pairs, scores, "random", 20, random.Random(seed))
    assert draw(1) == draw(1) != draw(2) and len(set(draw(1))) == 20
    seen = {pair for seed in range(40) for pair in draw(seed)}
    assert seen == set(pairs)


def test_all_keeps_everything_in_order():
    pairs = decided_pairs([2.0, 0.0, 1.0])
    assert select_pairs(pairs, [2.0, 0.0, 1.0], "all", None, random.Random(0)) == pairs


@pytest.mark.parametrize("mode", PAIR_SELECTIONS)
def test_no_pair_and_untouched_input(mode):
    assert select_pairs([], [1.0], mode, None, random.Random(0)) == []
    pairs, scores = [(1, 0), (2, 0)], [0.0, 1.0, 2.0]
    select_pairs(pairs, scores, mode, None, random.Random(0))
    assert pairs == [(1, 0), (2, 0)] and scores == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("mode, limit, word", [("gap", None, "pair_selection='gap'"), ("all", 3, "preference_pairs_per_sample=None"),
                                               ("random", 0, "preference_pairs_per_sample=0"), ("reward_gap", -1, "=-1")])
def test_wrong_rules_are_refused(mode, limit, word):
    with pytest.raises(ValueError, match=word):
        select_pairs([(0, 1)], [1.0, 0.0], mode, limit, random.Random(0))


def test_tensors_are_scores_too():
    scores = torch.tensor([0.5, 0.25, 0.5])
    assert decided_pairs(scores) == [(0, 1), (2, 1)]
    assert select_pairs(decided_pairs(scores), scores, "reward_gap", 1, random.Random(0)) == [(0, 1)]


def test_eighty_candidates_are_quick():
    scores = [random.Random(i).random() for i in range(80)]
    start = time.process_time()
    pairs = decided_pairs(scores)
    for mode in ("reward_gap", "random", "comparator_reward"):
        assert len(select_pairs(pairs, scores, mode, 100, random.Random(0))) == 100
    assert len(pairs) == 3160 and time.process_time() - start < 0.5
