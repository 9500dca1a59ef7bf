"""Log-probabilities of given tokens under the output head, without a [T, V] tensor.

Rows are processed in chunks through one float32 buffer; log-softmax is float32. For training the derivative of each
token's log-probability by its hidden state, `(W[token] - sum_v p_v W[v]) / temperature`, is formed while the chunk's
probabilities are at hand, so backward is one scaling and the head is multiplied twice instead of three times.

Logits are divided by the sampling temperature: the policy that is trained is the one that sampled. Entropy is measured
for metrics and carries no gradient.

Dimension letters: N scored tokens, C rows of a chunk, V vocabulary, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

ROW_STEP = 32  # row counts are rounded up to it: see `engine.train.decoder`
CHUNK_ROWS = 256  # bounds the float32 buffer of a lane: 256 * 49,152 * 4 B = 50 MB


@dataclasses.dataclass(frozen=True, slots=True)
class TokenMeasure:
    """Of each token, float32[N]: log-probability at its temperature, at temperature 1, and the entropy at its
    temperature of the distribution that it is drawn from."""

    scaled: torch.Tensor
    raw: torch.Tensor
    entropy: torch.Tensor


def token_logprobs(
    hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """float32[N]: log pi(token) of each row, differentiable by `hidden`.

    Args:
        hidden: [N, D], after the final norm, of the position before each token.
        head: [V, D].
        tokens: int64[N].
        temperatures: float32[N], positive.
    """
    logprobs: torch.Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, tokens, temperatures
    )
    return logprobs


def token_scores(
    hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[N] each: log pi(token), and the entropy of the distribution; both differentiable by `hidden`.

    One product with the head more than `token_logprobs`. Arguments as there.
    """
    scores: tuple[torch.Tensor, torch.Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, head, tokens, temperatures
    )
    return scores


@torch.no_grad()
def measure_tokens(
    hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
) -> TokenMeasure:
    """The three figures of each token. Arguments as of `token_logprobs`."""
    measure = TokenMeasure(*(torch.empty(tokens.shape[0], device=hidden.device) for _ in range(3)))
    exponentials: torch.Tensor | None = None
    for rows, logits in _logit_chunks(hidden, head):
        chosen = logits.gather(1, tokens[rows, None])[:, 0]
        highest = logits.amax(1)
        if exponentials is None:
            exponentials = torch.empty_like(logits)
        powers = exponentials[: logits.shape[0]]
        torch.exp(logits.sub_(highest[:, None]), out=powers)
        measure.raw[rows] = chosen - highest - powers.sum(1).log()
        temperature = temperatures[rows]
        torch.exp(logits.div_(temperature[:, None]), out=powers)
        total = powers.sum(1)
        measure.scaled[rows] = (chosen - highest) / temperature - total.log()
        measure.entropy[rows] = total.log() - torch.linalg.vecdot(powers, logits) / total
    return measure


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        logprobs = torch.empty(tokens.shape[0], device=hidden.device)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # d logprob / d hidden
        for rows, logits in _logit_chunks(hidden, head):
            temperature = temperatures[rows, None]
            logits.div_(temperature)
            chosen = logits.gather(1, tokens[rows, None])
            highest = logits.amax(1, keepdim=True)
            powers = logits.sub_(highest).exp_()  # [C, V], probabilities up to their sum
            total = powers.sum(1, keepdim=True)
            logprobs[rows] = (chosen - highest - total.log())[:, 0]
            if slope is not None:
                mean_row = _weigh_rows(powers, head) / total
                slope[rows] = ((head[tokens[rows]] - mean_row) / temperature).to(slope.dtype)
        ctx.save_for_backward(slope)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (grad[:, None] * slope).to(slope.dtype), None, None, None


class _TokenScores(torch.autograd.Function):
    """With p the probabilities: dH / d logits = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = (torch.empty(tokens.shape[0], device=hidden.device) for _ in range(2))
        slopes = torch.empty_like(hidden), torch.empty_like(hidden)
        for rows, logits in _logit_chunks(hidden, head):
            temperature = temperatures[rows, None]
            logs = torch.log_softmax(logits.div_(temperature), dim=1)
            chosen, p = tokens[rows], logs.exp()
            logprobs[rows] = logs.gather(1, chosen[:, None])[:, 0]
            entropy[rows] = -torch.linalg.vecdot(p, logs)
            by_logprob = (head[chosen] - _weigh_rows(p, head)) / temperature
            by_entropy = -_weigh_rows(p * (logs + entropy[rows, None]), head) / temperature
            for slope, value in zip(slopes, (by_logprob, by_entropy), strict=True):
                slope[rows] = value.to(slope.dtype)
        ctx.save_for_backward(*slopes)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        slopes = ctx.saved_tensors
        total = sum(grad[:, None] * slope for grad, slope in zip(grads, slopes, strict=True))
        return total.to(slopes[0].dtype), None, None, None


def _weigh_rows(weights: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[C, D] of weights[C, V]: for each row the weighted sum of the head's rows."""
    padding = -weights.shape[0] % ROW_STEP
    return torch.mm(F.pad(weights.to(head.dtype), (0, 0, 0, padding)), head)[: weights.shape[0]]


def _logit_chunks(hidden: torch.Tensor, head: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, float32[C, V] logits) of each chunk; the logits lie in a buffer that the next chunk overwrites."""
    n, (vocabulary, _) = hidden.shape[0], head.shape
    products = torch.empty(CHUNK_ROWS, vocabulary, dtype=head.dtype, device=head.device)
    logits = products if head.dtype == torch.float32 else torch.empty_like(products, dtype=torch.float32)
    for start in range(0, n, CHUNK_ROWS):
        rows = slice(start, min(start + CHUNK_ROWS, n))
        n_rows = rows.stop - rows.start
        n_padded = min(-(-n_rows // ROW_STEP) * ROW_STEP, products.shape[0])
        chunk = F.pad(hidden[rows], (0, 0, 0, n_padded - n_rows))
        torch.mm(chunk, head.t(), out=products[:n_padded])
        if logits is not products:
            logits[:n_rows].copy_(products[:n_rows])
        yield rows, logits[:n_rows]
