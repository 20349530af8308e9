"""λ-decay weights and the draws they govern."""
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl_nb.replay_weights import allocate, cycle_draw, effective_age, half_life, lambda_decay_weights


@given(st.integers(1, 200), st.floats(0, 1))
def test_weights(n, lam):
    weights = lambda_decay_weights(n, lam)
    assert len(weights) == n and math.isclose(math.fsum(weights), 1)
    assert weights == sorted(weights, reverse=True) and min(weights) >= 0
    for older, newer in zip(weights[1:], weights):
        assert math.isclose(older, lam * newer, abs_tol=1e-300)


def test_ends():
    assert lambda_decay_weights(5, 0.0) == [1, 0, 0, 0, 0] and lambda_decay_weights(5, 1.0) == [0.2] * 5
    assert lambda_decay_weights(1, 0.3) == [1]


@pytest.mark.parametrize("lam", [-0.01, 1.01, float("nan"), float("inf")])
def test_lambda_outside_is_refused(lam):
    for call in (lambda: lambda_decay_weights(3, lam), lambda: half_life(lam)):
        with pytest.raises(ValueError, match="preference_replay_lambda=.*expected a number from 0 to 1"):
            call()


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="n_rounds=0"):
        lambda_decay_weights(0, 0.5)


@given(st.floats(0.01, 0.99))
def test_half_life(lam):
    assert math.isclose(lam ** half_life(lam), 0.5)


@given(st.integers(1, 50), st.floats(0, 1))
def test_effective_age(n, lam):
    age = effective_age(lambda_decay_weights(n, lam))
    assert 0 <= age <= (n - 1) / 2 + 1e-9
    if lam < 0.6 and n == 50:
        assert math.isclose(age, lam / (1 - lam), abs_tol=1e-6)
    if lam == 1:
        assert math.isclose(age, (n - 1) / 2)


@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 50), st.integers(0, 99))
def test_allocation(n, lam, draws, seed):
    weights = lambda_decay_weights(n, lam)
    counts = allocate(weights, draws, random.Random(seed))
    assert sum(counts) == draws and len(counts) == n and counts == allocate(weights, draws, random.Random(seed))
    assert all(count == 0 for count, weight in zip(counts, weights) if weight == 0)


def test_allocation_frequencies():
    weights, draws = lambda_decay_weights(4, 0.7), 40000
    for count, weight in zip(allocate(weights, draws, random.Random(1)), weights):
        assert abs(count / draws - weight) < 5 * math.sqrt(weight * (1 - weight) / draws)


def test_draws_are_independent():
    """The count of one round has the binomial variance; a fixed quota would have none."""
    rng = random.Random(2)
    counts = [allocate([0.5, 0.5], 20, rng)[0] for _ in range(2000)]
    mean = sum(counts) / len(counts)
    assert abs(sum((c - mean) ** 2 for c in counts) / len(counts) - 5) < 0.6


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 99))
def test_decks(size, count, seed):
    drawn = cycle_draw(size, count, random.Random(seed))
    assert len(drawn) == count and all(0 <= index < size for index in drawn)
    for start in range(0, count - size + 1, size):
        assert sorted(drawn[start:start + size]) == list(range(size))
    repeats = Counter(drawn)
    assert all(repeats[index] in (count // size, -(-count // size)) for index in range(size))


def test_decks_are_shuffled_and_each_index_is_as_likely():
    first = Counter(cycle_draw(4, 1, random.Random(seed))[0] for seed in range(4000))
    assert all(abs(first[index] - 1000) < 150 for index in range(4))
    assert len({tuple(cycle_draw(4, 8, random.Random(0))[:4]), tuple(cycle_draw(4, 8, random.Random(0))[4:])}) == 2


def test_impossible_draws():
    assert cycle_draw(0, 0, random.Random(0)) == [] and allocate([], 0, random.Random(0)) == []
    with pytest.raises(ValueError, match="size=0: 2 draws"):
        cycle_draw(0, 2, random.Random(0))
    with pytest.raises(ValueError, match="draws=-1"):
        allocate([1.0], -1, random.Random(0))
