"""A frozen base of which every rank holds a part: a matrix is put together where it is used, and let go of again.

A cut matrix is a tensor to everyone else. An operation on it, forward or backward, first asks the other ranks for their
parts; what is saved for the backward pass is the own part only. Ranks need not be at the same place: whoever wants a
matrix says which, whoever has finished its share of the work says so, and all of them give their parts of everything
that is wanted, until nobody wants anything. Ranks in step, as they usually are, want the same matrix, and then a round
costs what the all-gather of FSDP costs.

Norms and biases stay whole. Not here: fetching the next matrix while this one is used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from engine.models import Base, Block, Linear
from engine.train.ranks.group import Group

FINISHED = -1


class Shards:
    """The parts that this rank holds, and the way to the others'. One thread at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parts: list[torch.Tensor] = []
        self._shapes: list[torch.Size] = []
        self._latest: tuple[int, torch.Tensor] | None = None  # chunks of the head use one matrix several times

    def cut(self, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`whole`, of which this rank keeps its part on `device`. Every rank cuts the same matrices in the same
        order."""
        flat = whole.reshape(-1)
        n_each = -(-flat.shape[0] // self._group.n_ranks)
        start = self._group.rank * n_each
        part = torch.zeros(n_each, dtype=flat.dtype, device=device)
        own = flat[start : start + n_each]
        part[: own.shape[0]].copy_(own)
        self._parts.append(part)
        self._shapes.append(whole.shape)
        return CutTensor(self, len(self._parts) - 1, whole.shape, whole.dtype, device)

    def whole(self, number: int) -> torch.Tensor:
        """The matrix of this number, for now."""
        if self._latest is None or self._latest[0] != number:
            self._latest = None  # before room is made for the next
            self._latest = number, self._round(number)
        return self._latest[1]

    def serve_others(self) -> None:
        """Give parts for as long as another rank wants some; returns when all ranks are here."""
        self._latest = None
        while self._exchange(FINISHED) is not None:
            continue

    def _round(self, number: int) -> torch.Tensor:
        found = self._exchange(number)
        assert found is not None
        return found[: self._shapes[number].numel()].view(self._shapes[number])

    def _exchange(self, wanted: int) -> torch.Tensor | None:
        """One round. The matrix that this rank wants, flat; any other if it wants none; None if nobody does."""
        found: torch.Tensor | None = None
        for number in sorted(set(self._group.numbers(wanted)) - {FINISHED}):
            gathered = self._group.gather(self._parts[number]).reshape(-1)
            if number == wanted or wanted == FINISHED:
                found = gathered
        return found


class CutTensor(torch.Tensor):
    """A matrix of a base that is cut over the ranks; every operation on it puts it together first."""

    @staticmethod
    def __new__(
        cls: type[CutTensor], shards: Shards, number: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> CutTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        assert isinstance(made, CutTensor)
        return made

    def __init__(
        self, shards: Shards, number: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shards = shards
        self._number = number

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CutTensor({self._number}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # what saving for backward does
            (own,) = args
            return CutTensor(own._shards, own._number, own.shape, own.dtype, own.device)
        options = {key: _whole(value) for key, value in (kwargs or {}).items()}
        return func(*(_whole(value) for value in args), **options)


def cut_base(base: Base, shards: Shards, device: torch.device) -> Base:
    """`base` cut over the ranks, this one's parts on `device`. `base` is read once and may be dropped; it lies best on
    the CPU, mapped from its file."""
    embedding = shards.cut(base.embedding, device)
    return dataclasses.replace(
        base,
        embedding=embedding,
        head=embedding if base.head is base.embedding else shards.cut(base.head, device),
        final_norm=_copied(base.final_norm, device),
        blocks=tuple(_cut_block(block, shards, device) for block in base.blocks),
        inverse_frequencies=tuple(_copied(one, device) for one in base.inverse_frequencies),
    )


def _cut_block(block: Block, shards: Shards, device: torch.device) -> Block:
    linears = {
        kind: Linear(shards.cut(linear.weight, device), None if linear.bias is None else _copied(linear.bias, device))
        for kind, linear in block.linears.items()
    }
    head_norms, post_norms = (
        None if pair is None else (_copied(pair[0], device), _copied(pair[1], device))
        for pair in (block.head_norms, block.post_norms)
    )
    return dataclasses.replace(
        block,
        attention_norm=_copied(block.attention_norm, device),
        mlp_norm=_copied(block.mlp_norm, device),
        linears=linears,
        head_norms=head_norms,
        post_norms=post_norms,
    )


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy, which does not keep the file or the matrix that it lay in."""
    return torch.empty_like(tensor, device=device).copy_(tensor)


def _whole(value: Any) -> Any:
    if isinstance(value, CutTensor):
        return value._shards.whole(value._number)
    if isinstance(value, list | tuple):
        return type(value)(_whole(one) for one in value)
    return value
