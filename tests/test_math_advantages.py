"""Returns, credit, baselines, TD errors."""
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl_nb.advantages import (ADVANTAGES, credit, discounted_returns, explained_variance, group_advantages, is_tied, normalize_errors,
                                  td_errors, td_targets)

groups = st.lists(st.floats(-5, 5), min_size=2, max_size=8).map(lambda xs: torch.tensor(xs, dtype=torch.float64))
BASELINED = ("mean", "rloo", "max")


def by_definition(returns, mode):
    xs, K = returns.tolist(), len(returns)
    baselines = {"mean": [sum(xs) / K] * K, "raw": [0] * K, "max": [max(xs)] * K, "rloo": [(sum(xs) - x) / (K - 1) for x in xs]}
    return torch.tensor([x - b for x, b in zip(xs, baselines[mode])], dtype=returns.dtype)


# --- groups


@given(groups)
def test_the_four_definitions(returns):
    for mode in ADVANTAGES:
        assert group_advantages(returns, mode, False).allclose(by_definition(returns, mode), atol=1e-9)


@given(groups, st.floats(-100, 100), st.floats(0.1, 10))
def test_shift_and_scale(returns, shift, scale):
    if returns.std(correction=0) < 1e-3:
        return
    for mode in BASELINED:
        assert group_advantages(returns + shift, mode, False).allclose(group_advantages(returns, mode, False), atol=1e-9)
    for mode in ADVANTAGES:
        assert group_advantages(returns * scale, mode, True).allclose(group_advantages(returns, mode, True), atol=1e-6)


@given(groups)
def test_z_scoring_erases_the_baseline_and_scaling_does_not_recentre(returns):
    std = returns.std(correction=0)
    if std < 1e-3:
        return
    z = (returns - returns.mean()) / std
    for mode in ADVANTAGES:
        plain = group_advantages(returns, mode, False)
        assert ((plain - plain.mean()) / plain.std(correction=0)).allclose(z, atol=1e-6)
        assert group_advantages(returns, mode, True).allclose(plain / std, atol=1e-9)
    assert group_advantages(returns, "mean", True).allclose(z, atol=1e-9)


@given(st.floats(-10, 10, width=32), st.integers(2, 40))
def test_ties_are_exact_zeros(value, count):  # C25
    tied = torch.full((count,), value)
    assert is_tied(tied)
    for mode in ADVANTAGES:
        assert (group_advantages(tied, mode, True) == 0).all()
    for mode in BASELINED:
        assert (group_advantages(tied, mode, False) == 0).all()
    assert torch.equal(group_advantages(tied, "raw", False), tied)
    assert (normalize_errors(tied) == 0).all()


def test_one_sample():  # C24
    one = torch.tensor([3.0])
    assert group_advantages(one, "mean", True).tolist() == group_advantages(one, "mean", False).tolist() == [0]
    assert group_advantages(one, "raw", True).tolist() == [0] and group_advantages(one, "raw", False).tolist() == [3]
    with pytest.raises(ValueError, match="group of 1: expected at least 2"):
        group_advantages(one, "rloo", False)


def test_nearly_tied_groups_use_the_floor():
    returns = torch.tensor([0.0, 1e-9], dtype=torch.float64)
    assert group_advantages(returns, "max", True).allclose(torch.tensor([-1e-3, 0], dtype=torch.float64))
    assert group_advantages(returns, "max", True, floor=1e-3).allclose(torch.tensor([-1e-6, 0], dtype=torch.float64))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", ADVANTAGES)
def test_a_broken_return_is_not_hidden(mode, normalize):
    assert not group_advantages(torch.tensor([1.0, float("nan"), 1.0]), mode, normalize).isfinite().all()


def test_unknown_mode():
    with pytest.raises(ValueError, match="advantage_mode='z': expected one of mean, raw, rloo, max"):
        group_advantages(torch.zeros(2), "z", False)


# --- trees


def test_three_turns_by_hand():
    last = discounted_returns(torch.tensor([4.0, 0.0]), [], 0.5)
    middle = discounted_returns(torch.tensor([1.0, 3.0]), [last, None], 0.5)
    first = discounted_returns(torch.tensor([0.0, 1.0]), [None, middle], 0.5)
    assert last.tolist() == [4, 0] and middle.tolist() == [2, 3] and first.tolist() == [0, 2.25]


def test_rewards_are_not_changed():
    rewards = torch.tensor([1.0])
    assert discounted_returns(rewards, [torch.tensor([1.0])], 1.0).tolist() == [2] and rewards.tolist() == [1]


def test_children_must_match():
    with pytest.raises(ValueError, match="children has 1 entries for 2 joint responses"):
        discounted_returns(torch.zeros(2), [None], 1.0)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_credit_is_the_mean_over_tuples(agents, K, seed):
    index = torch.tensor(list(itertools.product(range(K), repeat=agents)))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    returns = torch.randn(len(index), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for agent in range(agents):
        expected = [returns[index[:, agent] == m].mean() for m in range(K)]
        assert credit(returns, index, agent, K).allclose(torch.stack(expected), atol=1e-12)


def test_aligned_credit_is_the_return_itself():
    returns = torch.tensor([3.0, 1.0, 2.0])
    assert torch.equal(credit(returns, torch.tensor([(0, 0), (1, 1), (2, 2)]), 1, 3), returns)


def test_credit_of_ties_is_tied():
    index = torch.tensor(list(itertools.product(range(4), repeat=2)))
    assert is_tied(credit(torch.full((16,), 0.1), index, 0, 4))


@pytest.mark.parametrize("index", [[(0, 0), (0, 1)], [(0, 0), (2, 1)]])
def test_a_candidate_without_tuple_is_an_error(index):
    with pytest.raises(ValueError, match="agent 0: candidate"):
        credit(torch.zeros(2), torch.tensor(index), 0, 2)


# --- critics


@settings(max_examples=40)
@given(st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**31))
def test_td_by_definition(T, discount, seed):
    r, v = torch.randn(2, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    targets = td_targets(r, v, discount)
    for t in range(T):
        assert math.isclose(targets[t], r[t] + (discount * v[t + 1] if t + 1 < T else 0), abs_tol=1e-12)
    assert torch.equal(td_errors(r, v, discount), targets - v)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
def test_padded_turns_bootstrap_nothing(discount, garbage):  # C38
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    rewards = torch.where(mask, torch.tensor([0.0, 1.0, 2.0]), garbage)
    values = torch.where(mask, torch.tensor([0.5, 0.25, 4.0]), garbage)
    targets = td_targets(rewards, values, discount, mask)
    assert targets[0].allclose(torch.tensor([0.25 * discount, 1, 0])) and targets[2].tolist() == [0, 0, 0]
    assert targets[1].allclose(torch.tensor([0.25 * discount, 1 + 4 * discount, 2]))
    errors = td_errors(rewards, values, discount, mask)
    assert errors.isfinite().all() and (errors[~mask] == 0).all()


def test_a_broken_value_that_counts_is_not_hidden():
    mask = torch.tensor([True, True, False])
    for rewards, values in (([0.0, float("nan"), 0], [0.0, 0, 0]), ([0.0, 0, 0], [0.0, float("nan"), 0])):
        assert td_errors(torch.tensor(rewards), torch.tensor(values), 1.0, mask).isnan().any()


def test_targets_are_constants_and_shapes_must_agree():
    values = torch.zeros(2, requires_grad=True)
    assert not td_targets(torch.ones(2), values, 1.0).requires_grad and not td_errors(torch.ones(2), values, 1.0).requires_grad
    with pytest.raises(ValueError, match="same shape"):
        td_targets(torch.ones(2), torch.ones(1, 2), 1.0)
    with pytest.raises(ValueError, match="same shape"):
        td_targets(torch.ones(2), torch.ones(2), 1.0, torch.ones(3))


@given(groups)
def test_normalised_errors(errors):
    if errors.std(correction=0) < 1e-3:
        return
    normal = normalize_errors(errors)
    assert abs(normal.mean()) < 1e-9 and abs(normal.std(correction=0) - 1) < 1e-9
    assert normalize_errors(errors[:1]).equal(errors[:1]) and normalize_errors(errors[:0]).numel() == 0


def test_explained_variance():
    targets = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(targets, targets + 7) == 1  # a constant offset is not variance
    assert explained_variance(targets, -targets) == -3
    assert explained_variance(torch.full((8,), 0.1), targets.repeat(3)[:8]) is None
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None
