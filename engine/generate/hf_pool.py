"""Keys and values of all sequences in one pool of cells, and the attention of a step over them.

A cell holds the key and the value of one token in every block. A sequence is a row of cell numbers in the order of its
positions; one that copies a prefix has the same cells, so a common prompt is stored once, as the scheduler counts it
(`engine.generate.cells`). A step is the tokens of many sequences one behind the other: sequences with one new token
attend together, padded to the longest of them; those with more, one by one.

Dimension letters: T tokens of a step, S sequences with one token, n cells of a sequence, H heads, K key/value heads, d
head width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.generate.scheduler import Entry

ATTENTION = "edged_pool"  # the name under which transformers finds `attend`


class PoolFull(Exception):
    """Raised when there are not enough free cells: the scheduler counts so that this cannot be."""


class Chains:
    """Which cells each sequence holds. No tensors.

    Invariant: a cell is free exactly if no sequence holds it.
    """

    def __init__(self, n_sequences: int, n_cells: int) -> None:
        self._cells = np.zeros((n_sequences, n_cells), np.int64)
        self._holders = np.zeros(n_cells, np.int64)
        self.lengths = np.zeros(n_sequences, np.int64)
        self._free = list(range(n_cells - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, sequence: int, n: int) -> npt.NDArray[np.int64]:
        """`n` fresh cells at the end of a sequence. Raises PoolFull, and takes none then."""
        if n > len(self._free):
            raise PoolFull(f"{n} cells are needed, {len(self._free)} are free")
        taken = np.array(self._free[len(self._free) - n :], np.int64)
        del self._free[len(self._free) - n :]
        start = self.lengths[sequence]
        self._cells[sequence, start : start + n] = taken
        self.lengths[sequence] += n
        self._holders[taken] = 1
        return taken

    def share(self, source: int, target: int, n: int) -> None:
        """The first `n` cells of `source` for `target`, which holds none."""
        shared = self._cells[source, :n]
        self._cells[target, :n] = shared
        self._holders[shared] += 1
        self.lengths[target] = n

    def release(self, sequence: int) -> None:
        """A sequence holds nothing any more."""
        held = self._cells[sequence, : self.lengths[sequence]]
        self._holders[held] -= 1
        self._free += held[self._holders[held] == 0].tolist()
        self.lengths[sequence] = 0

    def release_all(self) -> None:
        for sequence in range(len(self.lengths)):
            self.release(sequence)

    def of(self, sequences: Sequence[int], n: int) -> npt.NDArray[np.int64]:
        """int64[S, n]: the first n places of each; those beyond its length mean nothing."""
        return self._cells[list(sequences), :n]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend in one call.

    rows: int64[S t], their tokens in the step. cells: int64[S, n]. lengths: int64[S], how many of the n are theirs.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    lengths: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One decode. written: int64[T], the cells of its tokens. positions: int64[T]."""

    pool: Pool
    written: torch.Tensor
    positions: torch.Tensor
    groups: tuple[Group, ...]


class Pool:
    """The tensors, and what each sequence holds of them."""

    def __init__(
        self,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        n_sequences: int,
        n_cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises torch.OutOfMemoryError or RuntimeError where the memory is not there."""
        size = (n_layers, n_cells, n_kv_heads, head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.chains = Chains(n_sequences, n_cells)

    def step(self, entries: Sequence[Entry]) -> Step:
        """Room for the tokens of `entries`, whose sequences lie one behind the other and go on where they stand."""
        runs = [(one, list(run)) for one, run in itertools.groupby(entries, key=lambda entry: entry.sequence)]
        written = np.concatenate([self.chains.take(sequence, len(run)) for sequence, run in runs])
        starts = np.cumsum([0, *(len(run) for _, run in runs)])
        single = [place for place, (_, run) in enumerate(runs) if len(run) == 1]
        groups = [] if not single else [self._group([runs[place][0] for place in single], starts[single])]
        for place, (sequence, run) in enumerate(runs):
            if len(run) > 1:
                groups.append(self._group([sequence], np.arange(starts[place], starts[place] + len(run))))
        positions = np.array([entry.position for entry in entries], np.int64)
        return Step(self, self._put(written), self._put(positions), tuple(groups))

    def _group(self, sequences: Sequence[int], rows: npt.NDArray[np.int64]) -> Group:
        lengths = self.chains.lengths[list(sequences)]
        return Group(self._put(rows), self._put(self.chains.of(sequences, int(lengths.max()))), self._put(lengths))

    def _put(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.keys.device)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: Step,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it, over the pool.

    Args:
        query: [1, H, T, d]. key, value: [1, K, T, d], of the step's own tokens; they are put into the pool first.
        attention_mask: not looked at; what a token sees follows from its sequence.
    Returns:
        [1, T, H, d].
    """
    keys, values = step.pool.keys[module.layer_idx], step.pool.values[module.layer_idx]  # [cells, K, d]
    keys[step.written] = key[0].transpose(0, 1)
    values[step.written] = value[0].transpose(0, 1)
    q = query[0].transpose(0, 1)  # [T, H, d]
    out = torch.empty_like(q)
    for group in step.groups:
        n_sequences, n = group.cells.shape
        t = len(group.rows) // n_sequences
        attended = F.scaled_dot_product_attention(
            q[group.rows].view(n_sequences, t, *q.shape[1:]).transpose(1, 2),  # [S, H, t, d]
            keys[group.cells].transpose(1, 2),  # [S, K, n, d]
            values[group.cells].transpose(1, 2),
            attn_mask=_visible(group.lengths, t, n, sliding_window),
            scale=scaling,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        out[group.rows] = attended.transpose(1, 2).reshape(-1, *q.shape[1:])
    return out.unsqueeze(0), None


def _visible(lengths: torch.Tensor, t: int, n: int, window: int | None) -> torch.Tensor:
    """bool[S, 1, t, n]: True where a token, one of the last t of its sequence, sees a cell."""
    places = torch.arange(n, device=lengths.device)
    own = lengths[:, None] - t + torch.arange(t, device=lengths.device)  # [S, t]
    seen = places <= own[..., None]
    if window is not None:
        seen &= places > own[..., None] - window
    return seen[:, None]
