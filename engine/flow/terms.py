"""What a flow is made of, said before anything starts; an answer as a reward function sees it; what a round did.

Records only: nothing here starts a process or looks at a card. What cannot be is refused when the record is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsFloat, get_args, get_origin, get_type_hints

from adapters.store import list_versions
from engine.flow.ranges import check_drawn_from_the_policy, check_settings
from engine.flow.roles import Role, placed
from engine.protocol import (
    OBJECTIVES,
    ChatMessage,
    EpisodeTokens,
    LoraSettings,
    PpoSettings,
    PreferenceSettings,
    Sampling,
)

Prompt = str | Sequence[ChatMessage]

ADAPTERS = "adapters"  # folder below the flow's
RATED_FEEDS = ("rated", "groups", "thumbs")
SAMPLING = Sampling(temperature=0.7, max_tokens=64)


class FlowError(Exception):
    """Raised when a worker refuses what it is asked, with the reason that it gives."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sampled answer as a reward function sees it, with the tokens that it is trained on."""

    messages: tuple[ChatMessage, ...]
    text: str
    finish_reason: str
    episode: EpisodeTokens

    @property
    def version(self) -> int:
        """Of the adapter that gave it; 0 is the base."""
        return self.episode.adapter.version


Reward = Callable[[Sequence[Answer]], Sequence[SupportsFloat | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round did.

    Attributes:
        version: that answers after it.
        rewards: that were learned from, in [-1, 1]; None where the reward function had no opinion.
        mean_reward: of the rewards that are finite; NaN without one.
        clipped: how many rewards lay beyond [-1, 1].
        metrics, seconds: the update's; empty without one.
        skipped: reason -> answers that could not be trained on.
        idle: objectives of the flow that found nothing in this round to learn from.
        no_update: why none was made; "" where one was.
    """

    version: int
    answers: tuple[Answer, ...]
    rewards: tuple[float | None, ...]
    mean_reward: float
    clipped: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    skipped: Mapping[str, int]
    idle: tuple[str, ...]
    no_update: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What takes part in learning.

    Attributes:
        model: a .gguf file, served as it is and trained on dequantised.
        folder: of the run; holds `adapters/`, `checkpoints/`, `jobs/` and `cache/`.
        reward: judges a batch of answers, each with a number or None; a number beyond [-1, 1] is limited, and counted.
        objectives: name -> weight, of `engine.protocol.OBJECTIVES` that feed on rated answers.
        actor: the adapter's size; None: rank 8 of the topmost third of the blocks, on a card of all of them.
        ppo, preference: hyper-parameters; `ppo.critic` says what the critic is.
        reference: the version in `folder` that the KL penalty pulls towards; 0: the base.
        sampling: of the answers. A policy gradient takes none but plain samples, at a temperature above 0.
        devices: of the roles, see `engine.roles`.
        threads: of each worker. dtype: of the base in the trainer; bfloat16 is for processors that compute with it.

    Raises:
        ValueError: one of them cannot be. Whether the cards are there is asked by `Trainer`.
    """

    model: str | Path
    folder: str | Path
    reward: Reward
    objectives: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"ppo": 1.0})
    actor: LoraSettings | None = None
    ppo: PpoSettings = dataclasses.field(default_factory=PpoSettings)
    preference: PreferenceSettings = dataclasses.field(default_factory=PreferenceSettings)
    reference: int = 0
    sampling: Sampling = SAMPLING
    devices: Mapping[Role, str] = dataclasses.field(default_factory=dict)
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    dtype: Literal["bfloat16", "float32"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ValueError(f"objectives: got none; give one or more of {_rated_objectives()} a weight")
        for name, weight in self.objectives.items():
            if OBJECTIVES.get(name) not in RATED_FEEDS:
                raise ValueError(f"objective {name!r}: a flow has rated answers only; use one of {_rated_objectives()}")
            if not 0.0 < weight < math.inf:
                raise ValueError(f"objective {name!r}: got the weight {weight}, expected a finite one above 0")
        for settings in (self, self.ppo):
            _check_choices(settings)
        check_settings(self.ppo)
        check_settings(self.preference)
        check_settings(self.sampling)
        if self.actor is not None:
            check_settings(self.actor)
        check_drawn_from_the_policy(self.sampling, [name for name in self.objectives if OBJECTIVES[name] != "thumbs"])
        if self.threads < 1:
            raise ValueError(f"threads: got {self.threads}, expected at least 1")
        made = [found.version for found in list_versions(Path(self.folder) / ADAPTERS)]
        if self.reference not in (0, *made):
            raise ValueError(
                f"reference: {self.folder} holds no version {self.reference}; expected one of {[0, *made]}"
            )
        placed(self.devices)


def _check_choices(settings: Any) -> None:
    """Raises ValueError if a field that is one of a few words is another."""
    for name, kind in get_type_hints(type(settings)).items():
        if get_origin(kind) is Literal and getattr(settings, name) not in get_args(kind):
            words = ", ".join(map(repr, get_args(kind)))
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected one of {words}")


def _rated_objectives() -> str:
    return ", ".join(name for name, feed in OBJECTIVES.items() if feed in RATED_FEEDS)
