"""Causal attention within each of the sequences of a packed batch, over all earlier tokens or a window of them.

Short sequences on a CPU are computed as written in the textbook, in float32: torch's fused kernel takes five times as
long for the backward pass of an answer of a hundred tokens. Long ones, and all on a GPU, go through the fused kernel,
whose memory does not grow with the square of the length. Both are exact up to rounding; a test holds them equal.

Sequences may have a first part in common, which is then computed once: its keys and values stand before those of each.

Dimension letters: T tokens of all sequences, S of the part they share, t of one's own, n = S + t, H heads, K key/value
heads, G = H / K, d head width.
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
    shared: int = 0,
) -> torch.Tensor:
    """[T, H, d]: each token's mean of the values up to it in its own sequence.

    Args:
        q: [T, H, d]. k, v: [T, K, d]. T is `shared` and the sum of `lengths`.
        lengths: own tokens of each sequence.
        scale: factor of the products of queries and keys.
        window: how many tokens back attention reaches, the token itself included; None: to the first.
        shared: S, tokens at the front that every sequence begins with.
    """
    pieces = list(zip(*(x.split((shared, *lengths)) for x in (q, k, v)), strict=True))
    (_, k_shared, v_shared), own = pieces[0], pieces[1:]
    attended = [_attend_one(*pieces[0], scale=scale, window=window)] if shared else []
    for q_own, k_own, v_own in own:
        if shared:
            k_own, v_own = torch.cat((k_shared, k_own)), torch.cat((v_shared, v_own))
        attended.append(_attend_one(q_own, k_own, v_own, scale=scale, window=window))
    return torch.cat(attended)


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None) -> torch.Tensor:
    """[t, H, d] of q[t, H, d] and k, v[n, K, d]: the queries are those of the last t of n tokens."""
    t, n = q.shape[0], k.shape[0]
    reach = None if window is None or window >= n else window
    if q.device.type == "cpu" and n <= SHORT_TOKENS:
        short: torch.Tensor = _ShortAttention.apply(q, k, v, scale, reach)  # type: ignore[no-untyped-call]
        return short
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, t or n, d]
    grouped = q.shape[1] != k.shape[1]
    # A mask takes a byte for each pair of tokens, and the kernel for it is slower: only where causality is not enough.
    mask = None if reach is None and t == n else _mask(t, n, reach, q.device)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return attended[0].transpose(0, 1)


def _mask(t: int, n: int, reach: int | None, device: torch.device) -> Any:
    """What a query sees, for the fused kernel; on a GPU in a form that needs no memory where there is no window."""
    if reach is not None or device.type != "cuda":
        return _visible(t, n, n if reach is None else reach, device)
    # Imports torch's compiler: 70 MB and a second of start that a trainer on a CPU does without.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(t, n)


class _ShortAttention(torch.autograd.Function):
    """One sequence. Queries that share a key head lie behind one another, so that every product is a plain batch."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, reach: int | None
    ) -> torch.Tensor:
        t, n, n_kv_heads = q.shape[0], *k.shape[:2]
        q_rows, k_rows, v_rows = _by_kv_head(q, n_kv_heads), _by_kv_head(k, n_kv_heads), _by_kv_head(v, n_kv_heads)
        scores = torch.bmm(q_rows, k_rows.transpose(1, 2)).mul_(scale)  # [K, G t, n]
        scores.view(n_kv_heads, -1, t, n).add_(_short_mask(t, n, reach))
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q_rows, k_rows, v_rows, weights)
        ctx.dtype, ctx.scale = q.dtype, scale
        return _by_token(torch.bmm(weights, v_rows), t).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_rows, k_rows, v_rows, weights = ctx.saved_tensors
        t, n, n_kv_heads = grad.shape[0], k_rows.shape[1], k_rows.shape[0]
        rows = _by_kv_head(grad, n_kv_heads)  # [K, G t, d]
        grad_v = torch.bmm(weights.transpose(1, 2), rows)
        by_weight = torch.bmm(rows, v_rows.transpose(1, 2))  # [K, G t, n]
        along = torch.linalg.vecdot(by_weight, weights).unsqueeze(-1)
        by_score = by_weight.sub_(along).mul_(weights).mul_(ctx.scale)
        grad_q = torch.bmm(by_score, k_rows)
        grad_k = torch.bmm(by_score.transpose(1, 2), q_rows)
        grads = _by_token(grad_q, t), _by_token(grad_k, n), _by_token(grad_v, n)
        return *(one.to(ctx.dtype) for one in grads), None, None


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


@functools.lru_cache(maxsize=2 * SHORT_TOKENS)
def _short_mask(t: int, n: int, reach: int | None) -> torch.Tensor:
    """float32[t, n] to add to scores: nothing where a token sees another, minus infinity elsewhere."""
    visible = _visible(t, n, n if reach is None else reach, torch.device("cpu"))
    return torch.zeros(t, n).masked_fill_(~visible, float("-inf"))


def _visible(t: int, n: int, reach: int, device: torch.device) -> torch.Tensor:
    """bool[t, n]: True where the token of the row, one of the last t, sees that of the column."""
    return torch.ones(t, n, dtype=torch.bool, device=device).tril_(n - t).triu_(n - t + 1 - reach)
