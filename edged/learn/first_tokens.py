"""How much longer the first token of an answer takes while something trains. Pure: waits in, figures out.

A wait is the time from the arrival of a request in the serve worker to its first token: for a slot, and then for its
prompt. It depends on the prompt and on who else is there, so waits are compared with waits of their kind alone: about
as many prompt tokens to evaluate, about as many requests beside it (powers of two). What is usual for a kind is the
median of its newest waits while nothing trained. The inflation is the upper quartile of the ratios to what is usual
while something trained, over the same while nothing did: a tail, because that is what is felt, and no further out than
a few waits can show. One request that was held up by something else moves neither median nor quartile.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from engine.protocol import FirstToken

KEPT = 32  # newest waits of each kind while nothing trains
KEPT_TRAINING = 16
QUIET_MIN = 4  # of a kind, before it can be compared with
TRAINING_MIN = 6  # before anything is concluded
QUARTILE = 0.75

Kind = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """A wait while something trained. usual: what it would have been otherwise, as far as is known."""

    seconds: float
    usual_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Waits:
    """quiet_s: waits while nothing trained, by kind, newest last. training: the other ones, newest last."""

    quiet_s: Mapping[Kind, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    training: tuple[Ratio, ...] = ()

    @property
    def quiet_median_s(self) -> float | None:
        """Of all kinds that are kept."""
        waits = [wait for of_kind in self.quiet_s.values() for wait in of_kind]
        return statistics.median(waits) if waits else None

    @property
    def training_median_s(self) -> float | None:
        return statistics.median(ratio.seconds for ratio in self.training) if self.training else None


def kind_of(first: FirstToken) -> Kind:
    """What it is comparable with."""
    return first.evaluated_tokens.bit_length(), first.beside.bit_length()


def without_training(waits: Waits, firsts: Iterable[FirstToken]) -> Waits:
    """`waits`, and those of requests that came while nothing trained."""
    quiet_s = dict(waits.quiet_s)
    for first in firsts:
        kind = kind_of(first)
        quiet_s[kind] = (*quiet_s.get(kind, ()), _wait_s(first))[-KEPT:]
    return dataclasses.replace(waits, quiet_s=quiet_s)


def with_training(waits: Waits, firsts: Iterable[FirstToken]) -> Waits:
    """`waits`, and those of requests that came while something trained, as far as they can be compared."""
    ratios = [
        Ratio(_wait_s(first), statistics.median(usual))
        for first in firsts
        if len(usual := waits.quiet_s.get(kind_of(first), ())) >= QUIET_MIN
    ]
    return dataclasses.replace(waits, training=(*waits.training, *ratios)[-KEPT_TRAINING:])


def inflation(waits: Waits) -> float | None:
    """How many times as long waits are while something trains; None while too few are known."""
    if len(waits.training) < TRAINING_MIN:
        return None
    quiet = [
        wait / usual
        for of_kind in waits.quiet_s.values()
        if len(of_kind) >= QUIET_MIN and (usual := statistics.median(of_kind)) > 0
        for wait in of_kind
    ]
    training = [ratio.seconds / ratio.usual_s for ratio in waits.training if ratio.usual_s > 0]
    if not quiet or not training:
        return None
    return _quartile(training) / _quartile(quiet)


def _wait_s(first: FirstToken) -> float:
    return first.queue_s + first.prefill_s


def _quartile(values: Sequence[float]) -> float:
    """The smallest of `values` that a quarter of them at most exceeds."""
    ordered = sorted(values)
    return ordered[math.ceil(QUARTILE * len(ordered)) - 1]
