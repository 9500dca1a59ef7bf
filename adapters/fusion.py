"""Modules that a model stores as one matrix: an adapter on the seven, in files for what is stored.

Phi-3 keeps Q, K and V of a block in one matrix and gate and up in another, in Hugging Face folders and in GGUF files.
Trained, compared and merged is an adapter on the seven linear maps as for every other model; PEFT and llama.cpp can
only apply one to the matrix that is there. What a file holds for it is exact, because LoRA on the whole can be LoRA on
each part:

    A = | A_1 |      B = | B_1       |      with m parts of rank r, and zeros up to rank w r,
        | A_2 |          |     B_2   |      w the power of two that is not below m
        |  0  |          |         0 |

The rank is rounded up so that the factor w, by which a format that divides alpha by each matrix's own rank needs B (or
alpha) multiplied, changes no digit: what is written is read back bit for bit.

Reading also takes LoRA that was trained on the fused matrix itself: every part then gets all of A and its rows of B.

Dimension letters: r rank, I input width of a module, O its output width.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from adapters.errors import MismatchedAdapter, UnsupportedAdapter
from adapters.shape import BaseShape, split_module
from adapters.weights import F32, AdapterWeights


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """LoRA on one matrix of a file: a float32[w r, I], b float32[O, w r]; its effect is alpha / r * b @ a."""

    a: F32
    b: F32
    width: int


def stored_matrices(weights: AdapterWeights) -> dict[str, Stored]:
    """What a file holds: module as the model stores it -> its matrices, in order of depth.

    Raises:
        UnsupportedAdapter: it adapts some of the modules in a fused matrix and not the others.
    """
    whole_of = {part: whole for whole, parts in weights.base.fused.items() for part in parts}
    stored: dict[str, Stored] = {}
    for module, (a, b) in weights.matrices.items():
        layer, kind = split_module(module)
        if kind not in whole_of:
            stored[module] = Stored(a, b, 1)
            continue
        whole = f"model.layers.{layer}.{whole_of[kind]}"
        if whole not in stored:
            stored[whole] = _fuse(weights, layer, whole_of[kind])
    return stored


def stored_shape(base: BaseShape, module: str) -> tuple[int, int]:
    """(n_out, n_in) of a module as the model stores it.

    Raises:
        MismatchedAdapter: the model stores no such module, or it cannot be adapted.
    """
    for whole, kinds in base.fused.items():
        if module.endswith(tuple("." + kind for kind in kinds)):
            raise MismatchedAdapter(
                f"{module}: the base model stores it as part of {whole}; use an adapter that was trained on this base"
            )
    parts = _parts(base, module)
    if parts is None:
        return base.module_shape(module)
    shapes = [base.module_shape(part) for part in parts]
    return sum(n_out for n_out, _ in shapes), shapes[0][1]


def parts_of(base: BaseShape, module: str, a: F32, b: F32, rank: int | None) -> dict[str, tuple[F32, F32]]:
    """LoRA on a stored module as LoRA on the modules in it, of the same effect at the same scale.

    Args:
        module: as the model stores it, with matrices of `stored_shape`.
        rank: of the adapter as it was before `stored_matrices`, so that its own blocks come back at that rank; None if
            the file does not say.
    """
    parts = _parts(base, module)
    if parts is None:
        return {module: (a, b)}
    heights = [base.module_shape(part)[0] for part in parts]
    rows = np.split(b, np.cumsum(heights)[:-1])
    if rank is not None and a.shape[0] == rank * _width(len(parts)):
        columns = [slice(rank * i, rank * (i + 1)) for i in range(len(parts))]
        blocks = {part: (a[at], row[:, at]) for part, row, at in zip(parts, rows, columns, strict=True)}
        # Nothing outside the blocks: otherwise it is LoRA of that rank on the whole.
        if np.count_nonzero(b) == sum(np.count_nonzero(block) for _, block in blocks.values()):
            return blocks
    return {part: (a, row) for part, row in zip(parts, rows, strict=True)}


def _fuse(weights: AdapterWeights, layer: int, whole: str) -> Stored:
    parts = [f"model.layers.{layer}.{part}" for part in weights.base.fused[whole]]
    missing = [part for part in parts if part not in weights.matrices]
    if missing:
        raise UnsupportedAdapter(
            f"{missing[0]}: not adapted, but it shares the matrix {whole} with modules that are, and no file could "
            "say so; adapt all of them or none"
        )
    width, rank = _width(len(parts)), weights.rank
    n_out, n_in = stored_shape(weights.base, f"model.layers.{layer}.{whole}")
    a = np.zeros((width * rank, n_in), np.float32)
    b = np.zeros((n_out, width * rank), np.float32)
    row = 0
    for i, part in enumerate(parts):
        part_a, part_b = weights.matrices[part]
        columns = slice(rank * i, rank * (i + 1))
        a[columns] = part_a
        b[row : row + part_b.shape[0], columns] = part_b
        row += part_b.shape[0]
    return Stored(a, b, width)


def _parts(base: BaseShape, module: str) -> list[str] | None:
    for whole, parts in base.fused.items():
        if module.endswith("." + whole):
            prefix = module.removesuffix(whole)
            return [prefix + part for part in parts]
    return None


def _width(n_parts: int) -> int:
    """The smallest power of two that is at least `n_parts`."""
    return 1 << (n_parts - 1).bit_length()
