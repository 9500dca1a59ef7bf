"""Causal attention within each of the sequences of a packed batch, over all earlier tokens or a window of them.

Short sequences on a CPU are computed as written in the textbook, in float32: torch's fused kernel takes five times as
long for the backward pass of an answer of a hundred tokens. Long ones, and all on a GPU, go through the fused kernel,
whose memory does not grow with the square of the length. Both are exact up to rounding; a test holds them equal.

Dimension letters: T tokens of all sequences, t of one, H heads, K key/value heads, G = H / K, d head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

SHORT_TOKENS = 384


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """[T, H, d]: each token's mean of the values up to it in its own sequence.

    Args:
        q: [T, H, d]. k, v: [T, K, d]. T is the sum of `lengths`.
        scale: factor of the products of queries and keys.
        window: how many tokens back attention reaches, the token itself included; None: to the first.
    """
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attend_one(*piece, scale=scale, window=window) for piece in pieces])


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None) -> torch.Tensor:
    t = q.shape[0]
    reach = None if window is None or window >= t else window
    if q.device.type == "cpu" and t <= SHORT_TOKENS:
        short: torch.Tensor = _ShortAttention.apply(q, k, v, scale, reach)  # type: ignore[no-untyped-call]
        return short
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, t, d]
    grouped = q.shape[1] != k.shape[1]
    # Only if need be: a mask takes a byte for each pair of tokens, and the kernel for it is slower.
    mask = None if reach is None else _visible(t, reach, q.device)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return attended[0].transpose(0, 1)


class _ShortAttention(torch.autograd.Function):
    """One sequence. Queries that share a key head lie behind one another, so that every product is a plain batch."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, reach: int | None
    ) -> torch.Tensor:
        t, n_kv_heads = k.shape[:2]
        q_rows, k_rows, v_rows = _by_kv_head(q, n_kv_heads), _by_kv_head(k, n_kv_heads), _by_kv_head(v, n_kv_heads)
        scores = torch.bmm(q_rows, k_rows.transpose(1, 2)).mul_(scale)  # [K, G t, t]
        scores.view(n_kv_heads, -1, t, t).add_(_short_mask(t, reach))
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q_rows, k_rows, v_rows, weights)
        ctx.dtype, ctx.scale = q.dtype, scale
        return _by_token(torch.bmm(weights, v_rows), t).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_rows, k_rows, v_rows, weights = ctx.saved_tensors
        n_kv_heads, t, _ = k_rows.shape
        rows = _by_kv_head(grad, n_kv_heads)  # [K, G t, d]
        grad_v = torch.bmm(weights.transpose(1, 2), rows)
        by_weight = torch.bmm(rows, v_rows.transpose(1, 2))  # [K, G t, t]
        along = torch.linalg.vecdot(by_weight, weights).unsqueeze(-1)
        by_score = by_weight.sub_(along).mul_(weights).mul_(ctx.scale)
        grad_q = torch.bmm(by_score, k_rows)
        grad_k = torch.bmm(by_score.transpose(1, 2), q_rows)
        return *(_by_token(g, t).to(ctx.dtype) for g in (grad_q, grad_k, grad_v)), None, None


def _by_kv_head(x: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """float32[K, G t, d] of x[t, K G, d]."""
    t, n_heads, width = x.shape
    return (
        x.float().view(t, n_kv_heads, n_heads // n_kv_heads, width).permute(1, 2, 0, 3).reshape(n_kv_heads, -1, width)
    )


def _by_token(rows: torch.Tensor, t: int) -> torch.Tensor:
    """[t, K G, d] of rows[K, G t, d]."""
    n_kv_heads, _, width = rows.shape
    return rows.view(n_kv_heads, -1, t, width).permute(2, 0, 1, 3).reshape(t, -1, width)


@functools.lru_cache(maxsize=SHORT_TOKENS)
def _short_mask(t: int, reach: int | None) -> torch.Tensor:
    """float32[t, t] to add to scores: nothing where a token sees another, minus infinity elsewhere."""
    visible = _visible(t, t if reach is None else reach, torch.device("cpu"))
    return torch.zeros(t, t).masked_fill_(~visible, float("-inf"))


def _visible(t: int, reach: int, device: torch.device) -> torch.Tensor:
    """bool[t, t]: True where the token of the row sees that of the column."""
    return torch.ones(t, t, dtype=torch.bool, device=device).tril_().triu_(1 - reach)
