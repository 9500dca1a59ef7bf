"""What updates train: rank, scale and modules of the adapter.

`[lora]` says them for an adapter that begins on the base. An update goes on from the live version and keeps that one's,
whatever `[lora]` says by now: another rank would mean to begin anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from adapters.peft import load_peft
from adapters.shape import BaseShape
from adapters.weights import AdapterWeights
from engine import protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """modules: names of the linear maps that are adapted."""

    rank: int
    alpha: float
    modules: frozenset[str]

    def __str__(self) -> str:
        return f"rank {self.rank} and alpha {self.alpha:g} on {len(self.modules)} modules"


def of_settings(lora: protocol.LoraSettings, base: BaseShape) -> Profile:
    """The profile that `[lora]` asks for."""
    return Profile(rank=lora.rank, alpha=lora.alpha, modules=frozenset(base.top_modules(lora.layers)))


def of_weights(weights: AdapterWeights) -> Profile:
    """The profile of an adapter."""
    return Profile(rank=weights.rank, alpha=weights.alpha, modules=frozenset(weights.matrices))


def in_force(live: Path | None, lora: protocol.LoraSettings, base: BaseShape) -> Profile:
    """The profile of the next update. Blocking: reads the folder of the live version, None for the base.

    Raises AdapterError: the folder cannot be read.
    """
    return of_settings(lora, base) if live is None else of_weights(load_peft(live, base))
