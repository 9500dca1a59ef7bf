"""A card that is pretended: tensors say that they are on `cuda:0` and compute on the CPU; every operation is checked.

Inside `pretended()`, whatever is created on a CUDA device or moved to one is an `OnCard`. An operation that meets an
`OnCard` and a plain tensor raises `MixedDevices`, as torch does where there is a card; so does numpy. So the whole
trainer can be run on a device that this machine does not have: what it computes is real, and what it forgot to move is
found. What it cannot find is what CUDA's kernels do: their rounding, their speed, an operation without a kernel.

Modes are a thread's own. `PretendLanes` enters it in its threads too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from engine.train.lanes import Lanes

CARD = torch.device("cuda:0")
CPU = torch.device("cpu")

T = TypeVar("T")
R = TypeVar("R")


class MixedDevices(RuntimeError):
    """Raised where torch would say that it expected all tensors to be on the same device."""


class OnCard(torch.Tensor):
    """Values in `values`, a CPU tensor. torch's own code sees a CPU tensor; Python sees one on the card."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="cpu",
        )
        return made

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    device = property(lambda self: CARD)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # Autograd fills up an empty part that nothing came from with one of its own, which it takes to be on the CPU.
        plain = [x for x in tensors if not isinstance(x, cls) and x.numel() > 0]
        # A scalar of the CPU may be multiplied with a tensor of a card, but not be joined to one.
        joins = func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.stack)
        if func is not torch.ops.aten.copy_.default and any(x.dim() > 0 or joins for x in plain):
            raise MixedDevices(f"{func}: a tensor on the card and one on the CPU, {[tuple(x.shape) for x in plain]}")
        inner_args, inner_kwargs = pytree.tree_map_only(cls, lambda x: x.values, (args, kwargs))
        found = pytree.tree_map_only(torch.Tensor, cls, func(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, found)


class _Card(TorchFunctionMode):
    """Creation on the card, and the ways to and from it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.tolist, torch.Tensor.__repr__) and isinstance(args[0], OnCard):
            return func(args[0].detach().values)
        if func is torch.Tensor.numpy and isinstance(args[0], OnCard):
            raise MixedDevices("a tensor on a card has no numpy array; move it to the CPU first")
        if func is F.scaled_dot_product_attention and isinstance(kwargs.get("attn_mask"), CausalBias):
            # It makes itself on the device of the queries, in code that no mode reaches.
            kwargs = kwargs | {"attn_mask": OnCard(kwargs["attn_mask"]._materialize(CPU))}
        if func is torch.Tensor.cpu:
            return _from_card(args[0])
        devices = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.device) or _is_device(x)]
        if func is torch.Tensor.to:
            like = [x for x in args[1:] if isinstance(x, torch.Tensor)]
            devices += [x.device for x in like]
            args = (args[0], *(x.dtype if isinstance(x, torch.Tensor) else x for x in args[1:]))
        if not devices or func is torch.device:
            return func(*args, **kwargs)
        to_card = torch.device(devices[-1]).type == "cuda"
        args, kwargs = pytree.tree_map(_without_card, (args, kwargs))
        kwargs.pop("pin_memory", None)  # only the driver of a card has such memory
        if func is torch.Tensor.to and not to_card:
            args = (_from_card(args[0]), *args[1:])
        found = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _to_card, found) if to_card else found


def _is_device(x: Any) -> bool:
    return isinstance(x, str) and (x == "cpu" or x.startswith("cuda"))


def _without_card(x: Any) -> Any:
    return CPU if isinstance(x, torch.device) or _is_device(x) else x


def _to_card(x: torch.Tensor) -> OnCard:
    return x if isinstance(x, OnCard) else OnCard(x)


def _from_card(x: torch.Tensor) -> torch.Tensor:
    return x.detach().values.clone() if isinstance(x, OnCard) else x


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """`cuda` means the pretended card, in this thread."""
    with _Card():
        yield


class PretendLanes(Lanes):
    """Lanes of a card, whose threads pretend it too."""

    def __init__(self) -> None:
        super().__init__(2, CARD)

    def map(self, work: Callable[[T], R], items: Iterable[T], tick: Callable[[], None]) -> list[R]:
        def pretending(item: T) -> R:
            with pretended():
                return work(item)

        return super().map(pretending, items, tick)
