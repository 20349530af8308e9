"""Losses: masked slots never matter, broken numbers always show, closed forms equal autograd."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl_nb.losses import (NonFiniteError, bradley_terry_loss, k3_kl, madpo_agent_loss, madpo_loss, madpo_weights, masked_mean,
                              policy_gradient_loss, require_finite, value_loss)

GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e4, 0.0]
MASK = torch.tensor([True, False, True, True, False])


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_garbage(tensor, garbage):
    return torch.where(MASK, tensor, torch.tensor(garbage, dtype=tensor.dtype)).requires_grad_(True)


LOSSES = {
    "policy": (lambda a, b: policy_gradient_loss(a, b, MASK), 2),
    "value": (lambda a, b: value_loss(a, b, mask=MASK), 2),
    "clipped value": (lambda a, b, c: value_loss(a, b, c, 0.2, mask=MASK), 3),
    "mean": (lambda a: masked_mean(a, MASK), 1),
}
SLOTS = [(name, slot) for name, (_, count) in LOSSES.items() for slot in range(count)]


@pytest.mark.parametrize("name, slot", SLOTS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_slots_do_not_matter(name, slot, garbage):  # C31
    loss_of, count = LOSSES[name]
    results = []
    for filling in (0.0, garbage):
        inputs = [with_garbage(numbers(i, 5), filling if i == slot else 0.0) for i in range(count)]
        loss = loss_of(*inputs)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in inputs if x.grad is not None)])
    assert len(results[0]) == len(results[1]) == 2
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty) and clean.isfinite().all()
    assert (results[1][1][~MASK] == 0).all() and results[1][1].abs().sum() > 0


@pytest.mark.parametrize("name, slot", SLOTS)
def test_unmasked_nan_is_not_hidden(name, slot):  # C31
    loss_of, count = LOSSES[name]
    inputs = [numbers(i, 5) for i in range(count)]
    inputs[slot][2] = float("nan")
    loss = loss_of(*inputs)
    assert not loss.isfinite()
    with pytest.raises(NonFiniteError, match="loss of agent 1 is nan"):
        require_finite(loss, "loss of agent 1")


@pytest.mark.parametrize("loss_of", [lambda x, m: masked_mean(x, m), lambda x, m: policy_gradient_loss(x, torch.ones(3), m),
                                     lambda x, m: value_loss(x, torch.ones(3), mask=m)])
def test_nothing_left_is_zero_with_zero_gradient(loss_of):  # C30
    x = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    loss = loss_of(x, torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and x.grad.tolist() == [0, 0, 0]


def test_no_sample_at_all_is_zero():
    assert policy_gradient_loss(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize("call", [
    lambda: policy_gradient_loss(torch.zeros(3), torch.zeros(3, 1)), lambda: value_loss(torch.zeros(3), torch.zeros(1, 3)),
    lambda: value_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), 0.2), lambda: bradley_terry_loss(torch.zeros(2), torch.zeros(2, 1)),
    lambda: k3_kl(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3)), lambda: madpo_loss(torch.zeros(2, 3), 0.1, torch.zeros(2)),
    lambda: madpo_agent_loss(torch.zeros(3), torch.zeros(1))])
def test_shapes_must_agree(call):
    with pytest.raises(ValueError, match="shapes differ"):
        call()


def test_advantages_and_targets_are_constants():
    advantages, targets = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = torch.zeros(2, requires_grad=True)
    (policy_gradient_loss(x, advantages) + value_loss(x, targets, targets, 0.2)).backward()
    assert advantages.grad is None and targets.grad is None


def test_clipping_needs_old_values():
    with pytest.raises(ValueError, match="clip_range=0.2 needs old_values"):
        value_loss(torch.zeros(2), torch.zeros(2), clip_range=0.2)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.01, 1))
def test_clipped_value_loss_is_never_smaller(value, target, old, epsilon):
    one = lambda x: torch.tensor([x], dtype=torch.float64)
    clipped, plain = value_loss(one(value), one(target), one(old), epsilon), value_loss(one(value), one(target))
    assert clipped >= plain
    assert plain == value_loss(one(value), one(target), one(old), None)
    if abs(value - old) <= epsilon:
        assert clipped.allclose(plain, atol=1e-12)


def test_extreme_scores_stay_finite():
    assert bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4])) == 2e4
    loss, stats = madpo_loss(torch.tensor([[1e6, -1e6]]), 0.1)
    assert loss == 5e4 and stats["weight"] == 0.5


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 5), st.floats(0.01, 3), st.booleans(), st.integers(0, 2**31))
def test_madpo_gradient_is_the_closed_form(agents, pairs, beta, with_reference, seed):
    margins = (numbers(seed, agents, pairs) * 4).requires_grad_(True)
    reference = numbers(seed + 1, agents, pairs) if with_reference else None
    loss, stats = madpo_loss(margins, beta, reference)
    gradient, = torch.autograd.grad(loss, margins)
    delta = (margins.detach() - (0 if reference is None else reference)).sum(0)
    assert gradient.allclose((-beta * torch.sigmoid(-beta * delta) / pairs).expand(agents, pairs), atol=1e-14)
    weights = madpo_weights(margins, beta, reference)
    for i in range(agents):
        own = margins.detach()[i].requires_grad_(True)
        assert torch.autograd.grad(madpo_agent_loss(own, weights), own)[0].allclose(gradient[i], atol=1e-14)
    assert stats["preference_accuracy"] == sum(d > 0 for d in delta.tolist()) / pairs
    assert math.isclose(stats["margin"], delta.mean().item(), abs_tol=1e-12)
    assert math.isclose(stats["weight"], torch.sigmoid(-beta * delta).mean().item(), abs_tol=1e-12)


def test_a_tied_margin_is_not_counted_as_right():
    assert madpo_loss(torch.zeros(2, 3), 0.1)[1]["preference_accuracy"] == 0


@pytest.mark.parametrize("shape", [(2, 0), (3,), ()])
def test_madpo_needs_pairs_and_agents(shape):
    for function in (madpo_loss, madpo_weights):
        with pytest.raises(ValueError, match="at least one pair"):
            function(torch.zeros(shape), 0.1)


def test_madpo_does_not_hide_a_broken_margin():
    margins = torch.zeros(2, 2)
    margins[1, 0] = float("nan")
    assert madpo_loss(margins, 0.1)[0].isnan()


@settings(max_examples=50)
@given(st.integers(0, 2**31))
def test_k3_is_unbiased_and_not_negative(seed):
    logits = numbers(seed, 2, 6) * 2
    policy, reference = logits.log_softmax(-1)
    per_token = k3_kl(policy[:, None], reference[:, None], torch.ones(6, 1, dtype=torch.bool))
    assert (per_token >= 0).all()
    assert (policy.exp() * per_token).sum().allclose((policy.exp() * (policy - reference)).sum(), atol=1e-10)


@given(st.floats(-1e-7, 1e-7), st.floats(-20, 0))
def test_k3_of_nearly_equal_policies_is_not_negative_in_float32(difference, logprob):
    one = torch.ones(1, 1, dtype=torch.bool)
    x = torch.tensor([[logprob]])
    assert 0 <= k3_kl(x, x + difference, one).item() < 1e-6 and k3_kl(x, x, one) == 0


@pytest.mark.parametrize("garbage", GARBAGE)
def test_k3_ignores_masked_slots_and_shows_the_others(garbage):
    x, mask = torch.tensor([[-1.0, garbage], [-2.0, -3.0]]), torch.tensor([[True, False], [True, True]])
    reference = torch.tensor([[-1.5, 0.0], [-2.0, -3.5]])
    assert torch.equal(k3_kl(x, reference, mask), k3_kl(torch.where(mask, x, 0.0), reference, mask))
    assert torch.equal(k3_kl(reference, x, mask), k3_kl(reference, torch.where(mask, x, 0.0), mask))
    assert k3_kl(x, reference, torch.zeros_like(mask)).tolist() == [0, 0]
    if not math.isfinite(garbage):
        assert not k3_kl(x, reference, torch.ones_like(mask))[0].isfinite()


def test_k3_has_no_gradient():
    x = torch.zeros(1, 1, requires_grad=True)
    assert not k3_kl(x, x - 1, torch.ones(1, 1)).requires_grad


def test_require_finite():
    x = torch.tensor([1.0, 2.0])
    assert require_finite(x, "x") is x
    with pytest.raises(NonFiniteError, match=r"returns is inf at \[1\]"):
        require_finite(torch.tensor([1.0, float("inf")]), "returns")
    assert issubclass(NonFiniteError, ValueError)
