"""Causal attention within each of the sequences of a packed batch.

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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """[T, H, d]: each token's mean of the values up to it in its own sequence.

    Args:
        q: [T, H, d]. k, v: [T, K, d]. T is the sum of `lengths`.
    """
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([_attend_one(*piece) for piece in pieces])


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.device.type == "cpu" and q.shape[0] <= SHORT_TOKENS:
        short: torch.Tensor = _ShortAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        return short
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, t, d]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)


class _ShortAttention(torch.autograd.Function):
    """One sequence. Queries that share a key head lie behind one another, so that every product is a plain batch."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        t, n_kv_heads = k.shape[:2]
        q_rows, k_rows, v_rows = _by_kv_head(q, n_kv_heads), _by_kv_head(k, n_kv_heads), _by_kv_head(v, n_kv_heads)
        scores = torch.bmm(q_rows, k_rows.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)  # [K, G t, t]
        scores.view(n_kv_heads, -1, t, t).add_(_causal_mask(t))
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q_rows, k_rows, v_rows, weights)
        ctx.dtype = q.dtype
        return _by_token(torch.bmm(weights, v_rows), t).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_rows, k_rows, v_rows, weights = ctx.saved_tensors
        n_kv_heads, t, width = k_rows.shape
        rows = _by_kv_head(grad, n_kv_heads)  # [K, G t, d]
        grad_v = torch.bmm(weights.transpose(1, 2), rows)
        by_weight = torch.bmm(rows, v_rows.transpose(1, 2))  # [K, G t, t]
        along = torch.linalg.vecdot(by_weight, weights).unsqueeze(-1)
        by_score = by_weight.sub_(along).mul_(weights).mul_(width**-0.5)
        grad_q = torch.bmm(by_score, k_rows)
        grad_k = torch.bmm(by_score.transpose(1, 2), q_rows)
        return tuple(_by_token(g, t).to(ctx.dtype) for g in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


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
def _causal_mask(t: int) -> torch.Tensor:
    """float32[t, t] to add to scores: nothing up to the token itself, minus infinity behind it."""
    return torch.full((t, t), float("-inf")).triu(1)
