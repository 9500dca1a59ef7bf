"""Forward pass through the decoder's blocks, over sequences packed one behind the other.

Sequences of any lengths lie in one [T, D] tensor, one behind the other: positions restart at each, and attention runs
sequence by sequence, so no token sees another sequence. What all of them begin with, such as the opening of a chat
template, can stand there once for all. Only the end is padded, by an eighth at most: the kernels of
bfloat16 products are compiled for every row count they meet, which costs milliseconds and memory for each new one. The
stream between blocks is float32, products are in the base's dtype. Frozen weights get no gradient and no copy; only the
adapter's matrices and, through them, the stream do.

The functions that save what backward needs are written out (norm, adapted linears, gated activation): for a frozen base
they keep a third of what autograd would keep, and need fewer passes over memory, which is what bounds a small model.

Not here: dropout (the sampled policy has none), caches of keys and values, the output head (`engine.train.logprobs`).

Dimension letters: T tokens of all sequences, D width of the stream, H heads, K key/value heads, d head width, r rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from engine.fusion import fusible
from engine.lora import Lora, Pair
from engine.models import Base, Block, Linear
from engine.placement.memory import round_up_rows
from engine.train.attention import attend

# A micro-batch above this keeps only the stream between blocks and computes each block again in backward.
RECOMPUTE_ABOVE_TOKENS = 4096

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences lie.

    Attributes:
        lengths: own tokens of each sequence. shared: tokens before them that every sequence begins with.
        n_rows: rows computed with, at least the tokens.
        rotations: of each of the base's sets of frequencies, cosine and sine [n_rows, 1, d] in the base's dtype.
    """

    lengths: tuple[int, ...]
    shared: int
    n_rows: int
    rotations: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def n_tokens(self) -> int:
        return self.shared + sum(self.lengths)


def pack(base: Base, lengths: Sequence[int], *, shared: int = 0) -> Packing:
    """The packing of sequences.

    Args:
        lengths: tokens of each, without what it shares with all others.
        shared: tokens that all begin with. They lie first, and positions go on behind them in each sequence.
    """
    n_tokens = shared + sum(lengths)
    n_rows = round_up_rows(n_tokens)
    ranges = [range(shared), *(range(shared, shared + n) for n in lengths), range(n_rows - n_tokens)]
    positions = torch.cat([torch.arange(one.start, one.stop, device=base.device) for one in ranges])
    rotations = []
    for frequencies in base.inverse_frequencies:
        angles = positions[:, None].float() * frequencies  # [T, d / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        rotations.append((angles.cos().to(base.dtype), angles.sin().to(base.dtype)))
    return Packing(tuple(lengths), shared, n_rows, tuple(rotations))


def embed(base: Base, ids: Sequence[int]) -> torch.Tensor:
    """float32[T, D]: the stream that enters block 0."""
    stream = base.embedding[torch.tensor(ids, dtype=torch.int64, device=base.device)].float()
    # In float32, as llama.cpp has it; transformers rounds the factor to the model's dtype.
    return stream * base.config.shape.n_embd**0.5 if base.config.family.scaled_embedding else stream


def run_blocks(
    base: Base, stream: torch.Tensor, packing: Packing, lora: Lora | None, first: int, last: int
) -> torch.Tensor:
    """float32[T, D]: the stream after blocks first..last-1 (after none if first == last).

    Args:
        stream: float32[T, D], the input of block `first`.
        lora: adapter on these blocks, or None for the base alone.
    """
    recompute = torch.is_grad_enabled() and packing.n_tokens > RECOMPUTE_ABOVE_TOKENS
    stream = F.pad(stream, (0, 0, 0, packing.n_rows - packing.n_tokens))
    for layer in range(first, last):
        if recompute:
            stream = checkpoint(_run_block, base, layer, stream, packing, lora, use_reentrant=False)
        else:
            stream = _run_block(base, layer, stream, packing, lora)
    return stream[: packing.n_tokens]


def final_norm(base: Base, stream: torch.Tensor) -> torch.Tensor:
    """[T, D] in the base's dtype: what the output head multiplies."""
    return _norm(stream, base.final_norm, base)


def _run_block(base: Base, layer: int, stream: torch.Tensor, packing: Packing, lora: Lora | None) -> torch.Tensor:
    block = base.blocks[layer]
    normed = _norm(stream, block.attention_norm, base)
    q, k, v = _linears(normed, block, _QKV, layer, lora)
    heads = _attention(base, block, q, k, v, packing)
    (attended,) = _linears(heads, block, ("self_attn.o_proj",), layer, lora)
    if block.post_norms is not None:
        attended = _norm(attended.float(), block.post_norms[0], base)
    stream = stream + attended
    normed = _norm(stream, block.mlp_norm, base)
    gate, up = _linears(normed, block, _GATE_UP, layer, lora)
    (mixed,) = _linears(_gated(gate, up, base), block, ("mlp.down_proj",), layer, lora)
    if block.post_norms is not None:
        mixed = _norm(mixed.float(), block.post_norms[1], base)
    return stream + mixed


def _attention(
    base: Base, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing
) -> torch.Tensor:
    shape = base.config.shape
    q = q.view(-1, shape.n_heads, shape.head_dim)  # [T, H, d]
    k = k.view(-1, shape.n_kv_heads, shape.head_dim)  # [T, K, d]
    v = v.view(-1, shape.n_kv_heads, shape.head_dim)
    if block.head_norms is not None:
        q, k = (_norm(x.float(), weight, base) for x, weight in zip((q, k), block.head_norms, strict=True))
    rotation = packing.rotations[block.rotary]
    q, k = _rotate(q, *rotation), _rotate(k, *rotation)
    n = packing.n_tokens
    attended = attend(
        q[:n],
        k[:n],
        v[:n],
        packing.lengths,
        scale=base.config.attention_scale,
        window=block.window,
        shared=packing.shared,
    )
    return F.pad(attended, (0, 0, 0, 0, 0, packing.n_rows - n)).reshape(-1, shape.n_heads * shape.head_dim)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _linears(
    x: torch.Tensor, block: Block, kinds: tuple[str, ...], layer: int, lora: Lora | None
) -> tuple[torch.Tensor, ...]:
    """The outputs of the block's maps `kinds` on one input x[T, I], each with its adapter."""
    linears = [block.linears[kind] for kind in kinds]
    if lora is None:
        return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)
    pairs = [lora.matrices.get(f"model.layers.{layer}.{kind}") for kind in kinds]
    if not any(pairs):
        return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)
    flat = [matrix for pair in pairs for matrix in (pair or (None, None))]
    outputs: tuple[torch.Tensor, ...] = _AdaptedLinears.apply(  # type: ignore[no-untyped-call]
        x, lora.scale, linears, *flat
    )
    return outputs


def _norm(x: torch.Tensor, weight: torch.Tensor, base: Base) -> torch.Tensor:
    normed: torch.Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, base.config.norm_eps, base.dtype
    )
    return normed


def _gated(gate: torch.Tensor, up: torch.Tensor, base: Base) -> torch.Tensor:
    product: torch.Tensor = _GATES[base.config.family.gate].apply(gate, up)
    return product


class _RmsNorm(torch.autograd.Function):
    """y = weight * x / rms(x), computed in the weight's dtype and given in `dtype`; the gradient goes to x only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        normed, unit, inverse_rms = _norm_forward(x, weight, eps, dtype)
        ctx.save_for_backward(unit, weight, inverse_rms)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _norm_backward(grad, *ctx.saved_tensors), None, None, None


@fusible
def _norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse_rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    unit = (x * inverse_rms).to(weight.dtype)
    return (unit * weight).to(dtype), unit, inverse_rms


@fusible
def _norm_backward(
    grad: torch.Tensor, unit: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor
) -> torch.Tensor:
    inner = (grad * weight).float()
    along = (inner * unit).mean(dim=-1, keepdim=True)
    return inner.sub_(unit * along).mul_(inverse_rms)


class _GatedSilu(torch.autograd.Function):
    """y = silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _silu_backward(grad, *ctx.saved_tensors)


@fusible
def _silu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).mul_(up)


@fusible
def _silu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _GatedGelu(torch.autograd.Function):
    """y = gelu(gate) * up, gelu in its tanh approximation."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _gelu_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _gelu_backward(grad, *ctx.saved_tensors)


@fusible
def _gelu_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh").mul_(up)


@fusible
def _gelu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return grad_gate, F.gelu(gate, approximate="tanh").mul_(grad)


_GATES = {"silu": _GatedSilu, "gelu": _GatedGelu}


class _AdaptedLinears(torch.autograd.Function):
    """Several frozen maps of one input, each with a LoRA pair: y_i = x W_i^T + bias_i + scale (x A_i^T) B_i^T.

    The pairs' A are applied in one product. Saved: x and x A^T; the frozen weights are referenced, not copied.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: float, linears: list[Linear], *flat: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        pairs = _paired(flat)
        present = [pair for pair in pairs if pair is not None]
        a_all = torch.cat([a for a, _ in present]).to(x.dtype)  # [n r, I]
        inner = F.linear(x, a_all).mul_(scale)  # [T, n r]
        outputs, start = [], 0
        for linear, pair in zip(linears, pairs, strict=True):
            y = F.linear(x, linear.weight, linear.bias)
            if pair is not None:
                b = pair[1]
                y.addmm_(inner[:, start : start + b.shape[1]], b.to(x.dtype).t())
                start += b.shape[1]
            outputs.append(y)
        ctx.save_for_backward(x, inner, *flat)
        ctx.scale, ctx.linears = scale, linears
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, *flat = ctx.saved_tensors
        pairs = _paired(flat)
        grad_x: torch.Tensor | None = None
        grad_inner = torch.empty_like(inner)
        grad_b: list[torch.Tensor | None] = []
        start = 0
        for grad, linear, pair in zip(grads, ctx.linears, pairs, strict=True):
            if ctx.needs_input_grad[0]:
                grad_x = grad @ linear.weight if grad_x is None else grad_x.addmm_(grad, linear.weight)
            if pair is None:
                grad_b.append(None)
                continue
            columns = slice(start, start + pair[1].shape[1])
            torch.mm(grad, pair[1].to(x.dtype), out=grad_inner[:, columns])
            grad_b.append((grad.t() @ inner[:, columns]).float())
            start = columns.stop
        grad_inner.mul_(ctx.scale)
        a_all = torch.cat([pair[0] for pair in pairs if pair is not None]).to(x.dtype)
        grad_a = (grad_inner.t() @ x).float()  # [n r, I]
        if grad_x is not None:
            grad_x.addmm_(grad_inner, a_all)
        flat_grads: list[torch.Tensor | None] = []
        start = 0
        for pair, one in zip(pairs, grad_b, strict=True):
            rank = 0 if pair is None else pair[0].shape[0]
            flat_grads += [None if pair is None else grad_a[start : start + rank], one]
            start += rank
        return grad_x, None, None, *flat_grads


def _paired(flat: Sequence[torch.Tensor | None]) -> list[Pair | None]:
    pairs: list[Pair | None] = []
    for a, b in zip(flat[0::2], flat[1::2], strict=True):
        pairs.append(None if a is None or b is None else (a, b))
    return pairs
