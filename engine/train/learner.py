"""What an update moves, and how it ends without a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from engine.lora import Lora
from engine.train import adamw
from engine.train.critic import Baseline, Critic


class NotFinite(Exception):
    """Raised when a loss or gradient is NaN or infinite: the update is void, nothing of it may be kept."""


class NothingToLearn(Exception):
    """Raised when no objective of the job can learn from what there is. `skipped`: reason -> answers left out."""

    def __init__(self, message: str, skipped: Mapping[str, int]) -> None:
        super().__init__(message)
        self.skipped = dict(skipped)


@dataclasses.dataclass(frozen=True, slots=True)
class SteeredPenalty:
    """coef: where the adaptive controller has brought the penalty's weight. began_at: the setting that it began at."""

    coef: float
    began_at: float


@dataclasses.dataclass(slots=True)
class Learner:
    """What an update moves, in place: the adapter with its optimizer state, the critic, and what goes with them.

    penalty: of the adaptive controller; None before its first update.
    checkpoint_lost: the state that belonged to the adapter could not be read, and everything but the adapter is fresh.
    """

    lora: Lora
    adam: adamw.AdamState
    critic: Critic
    baseline: Baseline = dataclasses.field(default_factory=Baseline)
    penalty: SteeredPenalty | None = None
    checkpoint_lost: bool = False
