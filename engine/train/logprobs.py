"""Log-probabilities of given tokens under the output head, without a [T, V] tensor.

Rows are processed in chunks through one buffer of the head's dtype, and a chunk in blocks of columns that fit into a
core's cache, where the softmax is float32: passes over memory are what a small model spends its time on. For training
the derivative of each token's log-probability by its hidden state, `(W[token] - sum_v p_v W[v]) / temperature`, is
formed while the chunk's probabilities are at hand, so backward is one scaling and the head is multiplied twice instead
of three times.

Logits are divided by the sampling temperature: the policy that is trained is the one that sampled. Entropy is measured
for metrics and carries no gradient.

Dimension letters: N scored tokens, C rows of a chunk, V vocabulary, B columns of a block, D width of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

ROW_STEP = 32  # row counts are rounded up to it: see `engine.train.decoder`
CHUNK_ROWS = 512  # bounds the buffer of a lane: 512 * 49,152 * 2 B = 50 MB
BLOCK_COLUMNS = 1024  # float32 of 512 rows: 2 MB, the second-level cache of a core
CARD_BLOCK_COLUMNS = 32_768  # on a card, where a block is a handful of kernels: few of them; 67 MB


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
    for rows, products in _product_chunks(hidden, head):
        temperature = temperatures[rows, None]
        highest, chosen = _highest_and_chosen(products, tokens[rows])
        total_raw, total, weighed = (torch.zeros_like(highest) for _ in range(3))
        for _, logits in _blocks(products, highest):
            total_raw += logits.exp().sum(1, keepdim=True)
            powers = logits.div_(temperature).exp()
            total += powers.sum(1, keepdim=True)
            weighed += torch.linalg.vecdot(powers, logits)[:, None]
        above = chosen - highest
        measure.raw[rows] = (above - total_raw.log())[:, 0]
        measure.scaled[rows] = (above / temperature - total.log())[:, 0]
        measure.entropy[rows] = (total.log() - weighed / total)[:, 0]
    return measure


@torch.no_grad()
def divergences(
    hidden: torch.Tensor, other: torch.Tensor, head: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """float32[N]: KL(pi || pi_other) of the distributions behind each row, over the whole vocabulary.

    Needs no samples of either, so it holds on any text.

    Args:
        hidden, other: [N, D], after the final norm. head: [V, D]. temperatures: float32[N], positive.
    """
    found = torch.empty(hidden.shape[0], device=hidden.device)
    pairs = zip(_product_chunks(hidden, head), _product_chunks(other, head), strict=True)
    for (rows, products), (_, others) in pairs:
        temperature = temperatures[rows, None]
        highest, of_other = (one[: temperature.shape[0]].amax(1, keepdim=True).float() for one in (products, others))
        total, other_total, weighed = (torch.zeros_like(highest) for _ in range(3))
        for (_, logits), (_, other_logits) in zip(_blocks(products, highest), _blocks(others, of_other), strict=True):
            powers = logits.div_(temperature).exp()
            total += powers.sum(1, keepdim=True)
            other_total += other_logits.div_(temperature).exp().sum(1, keepdim=True)
            weighed += torch.linalg.vecdot(powers, logits - other_logits)[:, None]
        found[rows] = (weighed / total - total.log() + other_total.log())[:, 0]
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        logprobs = torch.empty(tokens.shape[0], device=hidden.device)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # d logprob / d hidden
        for rows, products in _product_chunks(hidden, head):
            temperature = temperatures[rows, None]
            highest, chosen = _highest_and_chosen(products, tokens[rows])
            total = torch.zeros_like(highest)
            for columns, logits in _blocks(products, highest):
                powers = logits.div_(temperature).exp_()  # probabilities up to their sum
                total += powers.sum(1, keepdim=True)
                columns.copy_(powers)
            logprobs[rows] = ((chosen - highest) / temperature - total.log())[:, 0]
            if slope is not None:
                mean_row = _weigh_rows(products, head)[: total.shape[0]] / total
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
        for rows, products in _product_chunks(hidden, head):
            temperature = temperatures[rows, None]
            highest, chosen = _highest_and_chosen(products, tokens[rows])
            total, weighed = torch.zeros_like(highest), torch.zeros_like(highest)
            times_logits = torch.zeros_like(products)
            for start, (columns, logits) in zip(
                range(0, head.shape[0], _n_columns(head)), _blocks(products, highest), strict=True
            ):
                powers = logits.div_(temperature).exp()
                total += powers.sum(1, keepdim=True)
                of_logits = powers * logits
                weighed += of_logits.sum(1, keepdim=True)
                times_logits[: total.shape[0], start : start + _n_columns(head)] = of_logits
                columns.copy_(powers)
            log_total = total.log()
            of_entropy = log_total - weighed / total
            logprobs[rows] = ((chosen - highest) / temperature - log_total)[:, 0]
            entropy[rows] = of_entropy[:, 0]
            mean_row = _weigh_rows(products, head)[: total.shape[0]] / total
            by_logprob = (head[tokens[rows]] - mean_row) / temperature
            mean_of_logits = _weigh_rows(times_logits, head)[: total.shape[0]] / total
            by_entropy = -(mean_of_logits + (of_entropy - log_total) * mean_row) / temperature
            for slope, value in zip(slopes, (by_logprob, by_entropy), strict=True):
                slope[rows] = value.to(slope.dtype)
        ctx.save_for_backward(*slopes)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        slopes = ctx.saved_tensors
        total = sum(grad[:, None] * slope for grad, slope in zip(grads, slopes, strict=True))
        return total.to(slopes[0].dtype), None, None, None


def _highest_and_chosen(products: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[C, 1] each: the largest logit of each row, and that of its token."""
    rows = products[: tokens.shape[0]]
    return rows.amax(1, keepdim=True).float(), rows.gather(1, tokens[:, None]).float()


def _blocks(products: torch.Tensor, highest: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each block of columns, the view [C, B] of `products`, and float32[C, B]: its logits, less the row's highest.

    The view may be written to once its logits have been used, which are the same memory in float32.
    """
    rows = products[: highest.shape[0]]
    for columns in rows.split(_n_columns(products), dim=1):
        yield columns, columns.float().sub_(highest)


def _n_columns(tensor: torch.Tensor) -> int:
    """Of a block, on the tensor's device."""
    return BLOCK_COLUMNS if tensor.device.type == "cpu" else CARD_BLOCK_COLUMNS


def _weigh_rows(weights: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """float32[rows, D] of weights[rows, V]: for each row the weighted sum of the head's rows."""
    return torch.mm(weights, head).float()


def _product_chunks(hidden: torch.Tensor, head: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their logits in the head's dtype) of each chunk. The logits are C rows and some of padding, zero, and lie
    in a buffer that the next chunk overwrites."""
    n, (vocabulary, _) = hidden.shape[0], head.shape
    n_buffer = _padded(min(n, CHUNK_ROWS))
    buffer = torch.empty(n_buffer, vocabulary, dtype=head.dtype, device=head.device)
    for start in range(0, n, CHUNK_ROWS):
        rows = slice(start, min(start + CHUNK_ROWS, n))
        n_rows = rows.stop - rows.start
        products = buffer[: _padded(n_rows)]
        torch.mm(F.pad(hidden[rows], (0, 0, 0, products.shape[0] - n_rows)), head.t(), out=products)
        yield rows, products


def _padded(n_rows: int) -> int:
    return -(-n_rows // ROW_STEP) * ROW_STEP
