"""KL estimates against numpy, exact sums over small distributions, and the direction that each penalty pulls in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.train.objectives import kl

LOGPROBS = st.floats(-18, 0)
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=20)
ESTIMATES = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def two_distributions(seed: int = 5, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[n] logits of pi, with gradient, and log-probabilities of the reference."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(), torch.log_softmax(other, 0)


def expected_gradient(estimator: str, *, raw: bool = False) -> torch.Tensor:
    """Sum over all tokens of pi(token) * d penalty(token) / d logits: what infinitely many samples would average to."""
    logits, reference = two_distributions()
    logprobs = torch.log_softmax(logits, 0)
    terms = ESTIMATES[estimator](logprobs, reference) if raw else kl.penalty(estimator, logprobs, reference)
    (logprobs.exp().detach() * terms).sum().backward()
    assert logits.grad is not None
    return logits.grad


def gradient_of_the_exact(direction: str) -> torch.Tensor:
    logits, reference = two_distributions()
    logprobs = torch.log_softmax(logits, 0)
    if direction == "pi || reference":
        (logprobs.exp() * (logprobs - reference)).sum().backward()
    else:
        (reference.exp() * (reference - logprobs)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_estimates_equal_an_independent_numpy_implementation() -> None:
    ours, theirs = -np.random.default_rng(1).exponential(1.5, (2, 300))
    for name, expected in {
        "k1": ours - theirs,
        "k2": (ours - theirs) ** 2 / 2,
        "k3": np.exp(theirs - ours) - 1 - (theirs - ours),
    }.items():
        found = ESTIMATES[name](torch.tensor(ours), torch.tensor(theirs))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
        penalty = kl.penalty(name, torch.tensor(ours), torch.tensor(theirs))
        np.testing.assert_allclose(penalty.numpy(), found.numpy(), rtol=1e-12, atol=1e-12)


@given(PAIRS)
def test_t_kl_1_k2_and_k3_are_never_negative_and_all_are_zero_for_equal_policies(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert bool((kl.k2(ours, theirs) >= 0).all())
    assert bool((kl.k3(ours, theirs) >= 0).all())
    assert all(bool((estimate(ours, ours) == 0).all()) for estimate in ESTIMATES.values())


def test_t_kl_1_k1_of_a_batch_can_be_negative() -> None:
    assert float(kl.k1(torch.tensor([-3.0, -2.0]), torch.tensor([-1.0, -2.5])).mean()) == -0.75


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_t_kl_1_mean_of_k1_and_k3_over_samples_is_the_exact_kl(estimator: str) -> None:
    logits, reference = two_distributions()
    logprobs = torch.log_softmax(logits.detach(), 0)
    samples = torch.multinomial(logprobs.exp(), 100_000, True, generator=torch.Generator().manual_seed(6))
    estimate = ESTIMATES[estimator](logprobs[samples], reference[samples])
    exact = float((logprobs.exp() * (logprobs - reference)).sum())
    standard_error = float(estimate.std()) / math.sqrt(len(samples))
    assert abs(float(estimate.mean()) - exact) < 4 * standard_error
    # A flipped sign in the exponent or in the linear part would be far outside.
    wrong = kl.k3(reference[samples], logprobs[samples]) if estimator == "k3" else -estimate
    assert abs(float(wrong.mean()) - exact) > 20 * standard_error


# Parent and new policy over three tokens, one of which the new one has all but given up: KL(parent || new) by hand.
GIVEN_UP = [
    ([0.5, 0.3, 0.2], [0.6, 0.39, 0.01]),
    ([0.5, 0.45, 0.05], [0.52, 0.4785, 0.0015]),
    ([0.3, 0.4, 0.3], [0.45, 0.5, 0.05]),
]


@pytest.mark.parametrize(("parent", "new"), GIVEN_UP)
def test_t_kl_1_over_what_the_parent_sampled_k3_is_the_distance_of_the_parent_from_the_new_policy(
    parent: list[float], new: list[float]
) -> None:
    p, q = np.array(parent), np.array(new)
    exact = float((p * np.log(p / q)).sum())
    d = np.log(q / p)
    assert float((p * (np.exp(d) - 1 - d)).sum()) == pytest.approx(exact, rel=1e-12)  # Schulman's r - 1 - log r
    found = kl.k3(torch.tensor(np.log(p)), torch.tensor(np.log(q)))
    assert float((p * found.numpy()).sum()) == pytest.approx(exact, rel=1e-12)
    swapped = kl.k3(torch.tensor(np.log(q)), torch.tensor(np.log(p)))
    assert float((p * swapped.numpy()).sum()) > 1.7 * exact, "no divergence: the token that was given up outweighs all"


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_t_kl_3_penalties_k1_and_k2_have_the_gradient_of_the_kl_in_expectation(estimator: str) -> None:
    torch.testing.assert_close(expected_gradient(estimator), gradient_of_the_exact("pi || reference"))


def test_t_kl_3_penalty_k3_has_the_gradient_of_the_reversed_kl_in_expectation() -> None:
    torch.testing.assert_close(expected_gradient("k3"), gradient_of_the_exact("reference || pi"))
    assert not torch.allclose(expected_gradient("k3"), gradient_of_the_exact("pi || reference"), rtol=0.05)


def test_t_kl_3_k1_itself_has_no_gradient_in_expectation() -> None:
    torch.testing.assert_close(expected_gradient("k1", raw=True), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_descending_a_penalty_moves_every_token_towards_the_reference(estimator: str) -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    kl.penalty(estimator, logprobs, torch.tensor([-2.0, -2.0])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] > 0  # likelier than under the reference: descending makes it less likely
    assert logprobs.grad[1] < 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradients_are_those_of_the_values(estimator: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, reference = (-3 * torch.rand(8, generator=generator, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: kl.penalty(estimator, x, reference), logprobs.requires_grad_())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_t_lp_6_extreme_log_ratios_stay_finite(estimator: str) -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    total = kl.penalty(estimator, logprobs, torch.tensor([-1e4, 0.0])).sum()
    total.backward()
    assert logprobs.grad is not None
    assert bool(torch.isfinite(total))
    assert bool(torch.isfinite(logprobs.grad).all())


# ------------------------------------------------------------------------------------------------- the controller


def test_the_controller_moves_by_a_tenth_of_the_error_for_a_batch_of_the_horizons_tenth() -> None:
    assert kl.adapt(0.05, measured=0.022, target=0.02, n_answers=16) == pytest.approx(0.05 * (1 + 0.1 * 0.1))
    assert kl.adapt(0.05, measured=0.019, target=0.02, n_answers=16) == pytest.approx(0.05 * (1 - 0.1 * 0.05))


def test_the_controller_holds_the_error_within_a_fifth() -> None:
    assert kl.adapt(0.05, measured=5.0, target=0.02, n_answers=16) == pytest.approx(0.05 * 1.02)
    assert kl.adapt(0.05, measured=-5.0, target=0.02, n_answers=16) == pytest.approx(0.05 * 0.98)


@given(
    coef=st.floats(0, 10), measured=st.floats(-10, 10), target=st.floats(1e-3, 10), n_answers=st.integers(0, 100_000)
)
def test_the_controller_goes_the_right_way_and_never_below_zero(
    coef: float, measured: float, target: float, n_answers: int
) -> None:
    after = kl.adapt(coef, measured, target, n_answers)
    assert after >= 0.0
    assert (after - coef) * (measured - target) >= 0.0


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        kl.adapt(0.05, 0.01, 0.0, 16)
