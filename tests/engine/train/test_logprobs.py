"""The chunked head against a full log-softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from engine.train import logprobs

N, D, V = 37, 16, 101


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(N, D, generator=generator), torch.randn(V, D, generator=generator)
    temperatures = torch.where(torch.arange(N) % 2 == 0, 1.0, 0.7)
    return hidden, head, torch.randint(0, V, (N,), generator=generator), temperatures


def full_logprobs(hidden: torch.Tensor, head: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden @ head.T / temperatures[:, None], 1)


def test_t_lp_5_chunked_equals_full(inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens, temperatures = inputs
    expected = full_logprobs(hidden, head, temperatures).gather(1, tokens[:, None])[:, 0]
    for rows, columns in ((1, 1), (32, 50), (64, 101), (1000, 1000)):
        monkeypatch.setattr(logprobs, "CHUNK_ROWS", rows)
        monkeypatch.setattr(logprobs, "BLOCK_COLUMNS", columns)
        torch.testing.assert_close(
            logprobs.token_logprobs(hidden, head, tokens, temperatures), expected, rtol=1e-5, atol=1e-5
        )


def test_gradient_equals_that_of_the_full_log_softmax(
    inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, tokens, temperatures = inputs
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 32)
    monkeypatch.setattr(logprobs, "BLOCK_COLUMNS", 30)
    slope = torch.randn(N, generator=torch.Generator().manual_seed(1))
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (logprobs.token_logprobs(mine, head, tokens, temperatures) * slope).sum().backward()
    (full_logprobs(theirs, head, temperatures).gather(1, tokens[:, None])[:, 0] * slope).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_measures_are_logprobs_at_both_temperatures_and_the_entropy(
    inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, tokens, temperatures = inputs
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 32)
    monkeypatch.setattr(logprobs, "BLOCK_COLUMNS", 30)
    found = logprobs.measure_tokens(hidden, head, tokens, temperatures)
    scaled, raw = (full_logprobs(hidden, head, t) for t in (temperatures, torch.ones(N)))
    torch.testing.assert_close(found.scaled, scaled.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.raw, raw.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, -(scaled.exp() * scaled).sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [30, 1000])
def test_divergences_are_those_of_the_whole_distributions(
    columns: int, inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 32)
    monkeypatch.setattr(logprobs, "BLOCK_COLUMNS", columns)
    hidden, head, _, temperatures = inputs
    other = hidden + 0.3 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))
    p, q = (full_logprobs(one, head, temperatures).double() for one in (hidden, other))
    found = logprobs.divergences(hidden, other, head, temperatures)
    torch.testing.assert_close(found, (p.exp() * (p - q)).sum(1).float(), rtol=1e-4, atol=1e-5)
    assert float(logprobs.divergences(hidden, hidden, head, temperatures).abs().max()) == 0.0


def test_t_lp_1_each_token_is_scored_by_the_state_it_is_given() -> None:
    head = torch.eye(3)  # the state's channels are the logits
    hidden = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    right = logprobs.token_logprobs(hidden, head, torch.tensor([0, 1]), torch.ones(2))
    shifted = logprobs.token_logprobs(hidden, head, torch.tensor([1, 0]), torch.ones(2))
    assert bool((right > -0.001).all())
    assert bool((shifted < -8.9).all())


def test_very_unlikely_tokens_stay_finite() -> None:
    head = torch.eye(2)
    found = logprobs.token_logprobs(torch.tensor([[200.0, -200.0]]), head, torch.tensor([1]), torch.ones(1))
    assert float(found) == pytest.approx(-400.0)


def test_no_tokens_give_no_logprobs() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert logprobs.token_logprobs(torch.empty(0, D), torch.randn(V, D), empty, torch.empty(0)).shape == (0,)
    assert logprobs.measure_tokens(torch.empty(0, D), torch.randn(V, D), empty, torch.empty(0)).raw.shape == (0,)


@pytest.mark.parametrize("columns", [7, 1000])
def test_entropy_and_logprob_have_the_gradients_of_the_plain_formulas(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_COLUMNS", columns)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(7, 16, generator=generator, dtype=torch.float32)
    head = torch.randn(50, 16, generator=generator)
    tokens, temperatures = torch.randint(0, 50, (7,), generator=generator), torch.linspace(0.5, 1.5, 7)
    up = torch.randn(2, 7, generator=generator)
    one, other = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    logps, entropy = logprobs.token_scores(one, head, tokens, temperatures)
    logs = torch.log_softmax(other @ head.double().t() / temperatures.double()[:, None], 1)
    plain = logs.gather(1, tokens[:, None])[:, 0], -(logs.exp() * logs).sum(1)
    torch.testing.assert_close(logps, plain[0].float())
    torch.testing.assert_close(entropy, plain[1].float())
    (logps * up[0] + entropy * up[1]).sum().backward()
    (plain[0] * up[0] + plain[1] * up[1]).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)
