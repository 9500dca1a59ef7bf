"""A LoRA adapter as trainable tensors, and its way to and from `adapters.AdapterWeights`.

The tensors are float32 masters whatever the base's dtype: an update of 1e-3 of a bfloat16 value would vanish in
rounding. The effect on a module is `scale * B @ A` with scale = alpha / rank. Never merged into the base.

Dimension letters: r rank, I input width, O output width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import torch

from adapters.shape import BaseShape, split_module
from adapters.weights import AdapterWeights
from engine.protocol import LoraSettings

Pair = tuple[torch.Tensor, torch.Tensor]  # A float32[r, I], B float32[O, r]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """matrices: module -> (A, B), in order of depth."""

    shape: BaseShape
    rank: int
    alpha: float
    matrices: Mapping[str, Pair]

    @property
    def scale(self) -> float:
        """Factor of B @ A."""
        return self.alpha / self.rank

    @property
    def first_layer(self) -> int:
        """The lowest adapted block: everything below it is the frozen trunk."""
        return min(split_module(module)[0] for module in self.matrices)

    def parameters(self) -> list[torch.Tensor]:
        """Every A and B, in an order that depends on the modules only."""
        return [matrix for pair in self.matrices.values() for matrix in pair]


def new_lora(shape: BaseShape, settings: LoraSettings, seed: int, device: torch.device) -> Lora:
    """A fresh adapter without effect: A uniform in +-1/sqrt(I) (as PEFT draws it), B zero.

    Args:
        seed: the same seed gives the same matrices, on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for module in shape.top_modules(settings.layers):
        n_out, n_in = shape.module_shape(module)
        bound = 1 / math.sqrt(n_in)
        a = torch.empty(settings.rank, n_in).uniform_(-bound, bound, generator=generator)
        matrices[module] = (a.to(device), torch.zeros(n_out, settings.rank, device=device))
    return Lora(shape=shape, rank=settings.rank, alpha=settings.alpha, matrices=matrices)


def lora_from_weights(weights: AdapterWeights, device: torch.device) -> Lora:
    """A trainable copy of an adapter read from disk."""
    matrices = {
        module: (torch.tensor(a, device=device), torch.tensor(b, device=device))
        for module, (a, b) in weights.matrices.items()
    }
    return Lora(shape=weights.base, rank=weights.rank, alpha=weights.alpha, matrices=matrices)


def weights_of_lora(lora: Lora) -> AdapterWeights:
    """A copy of the adapter to write to disk. Raises MismatchedAdapter if it does not fit its base."""

    def copy(matrix: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return matrix.detach().cpu().numpy().astype(np.float32, copy=True)

    return AdapterWeights(
        base=lora.shape,
        rank=lora.rank,
        alpha=lora.alpha,
        matrices={module: (copy(a), copy(b)) for module, (a, b) in lora.matrices.items()},
    )
