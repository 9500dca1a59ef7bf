"""What learning needs from the rest of the daemon, as Protocols."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from edged.records import (
    Adapter,
    Caller,
    Episode,
    EpisodeScore,
    JudgedAnswer,
    Live,
    PracticeCounts,
    PracticePrompt,
    PublishedAdapter,
    RatedChoice,
    Update,
    UpdateOrigin,
    UpdateState,
    Verdict,
    Written,
    WrittenCounts,
    WrittenText,
    WrittenTokens,
)
from engine import protocol


class RatingsBook(Protocol):
    """The store's ratings as planning needs them."""

    async def unused_rated(self, limit: int, *, base_sha256: str | None = None) -> list[RatedChoice]:
        """Choices with a rating that no finished update has used as new and that were not dropped; oldest first."""
        ...

    async def count_unused_elsewhere(self, base_sha256: str) -> int:
        """How many such choices were sampled on another base model than this."""
        ...

    async def used_rated(
        self, versions: Collection[int] | None, limit: int, *, base_sha256: str | None = None
    ) -> list[RatedChoice]:
        """Choices that a finished update has used, made by one of `versions` (None: any); newest first."""
        ...

    async def drop(self, drops: Sequence[tuple[str, str]]) -> None:
        """Never train on these: (feedback id, reason)."""
        ...


class WrittenBook(Protocol):
    """The store's preferred pairs and corrections. base_sha256: only those with (or, for `untokenised`, without)
    tokens of this base model."""

    async def untokenised(self, limit: int, base_sha256: str) -> list[WrittenText]: ...

    async def set_tokens(
        self,
        written_id: int,
        *,
        base_sha256: str,
        prompt_ids: Sequence[int],
        chosen_ids: Sequence[int],
        rejected_ids: Sequence[int],
    ) -> None: ...

    async def unused_written(self, limit: int, base_sha256: str) -> list[Written]:
        """Those that no finished update has used and that were not dropped; oldest first."""
        ...

    async def used_written(self, limit: int, base_sha256: str) -> list[Written]:
        """Those that a finished update has used; newest first."""
        ...

    async def tokens(self, ids: Sequence[int]) -> list[WrittenTokens]:
        """In the order asked, without those that are gone."""
        ...

    async def drop_written(self, drops: Sequence[tuple[int, str]]) -> None: ...

    async def counts(self) -> WrittenCounts: ...


class PracticeBook(Protocol):
    """The store's answers of practice. base_sha256: only those sampled on this base model."""

    async def counts(self, base_sha256: str) -> PracticeCounts: ...

    async def prompts(self, limit: int, base_sha256: str) -> list[PracticePrompt]:
        """Different prompts of users, the one that was asked last first."""
        ...

    async def begin_round(self) -> None: ...

    async def add_group(self, answers: Sequence[Episode], *, prompt_of: int | None, answers_to: str) -> bool:
        """All answers to one prompt, together; False if the episode that the prompt was taken from is gone."""
        ...

    async def fail(self, reason: str) -> None:
        """Count something that gave no answers to judge."""
        ...

    async def unjudged(self, base_sha256: str) -> list[Episode]: ...

    async def set_rewards(self, rewards: Iterable[tuple[int, float | None, str | None]], *, now: float) -> None:
        """Keep what the judge said: (episode id, reward, reason)."""
        ...

    async def judged(self, base_sha256: str) -> list[JudgedAnswer]:
        """Answers with a reward that no update has used, oldest first."""
        ...

    async def skip(self, skipped: Iterable[tuple[int, str]]) -> None:
        """Never train on these: (episode id, reason)."""
        ...


class Tokeniser(Protocol):
    """The serve worker's tokeniser (`edged.serve.tokenising`)."""

    async def tokenise(
        self, messages: Sequence[Mapping[str, Any]] | None, answer: str, *, prompt_tokens: int = 0
    ) -> protocol.Tokenised:
        """Raises JobRefused, WorkerLost."""
        ...


class EpisodeShelf(Protocol):
    """The store's episodes as scoring and training need them."""

    async def get(self, ids: Sequence[int]) -> list[Episode]: ...

    async def unscored(
        self, limit: int, versions: Collection[int] | None, *, base_sha256: str | None = None
    ) -> list[Episode]: ...

    async def set_scores(self, scores: Sequence[EpisodeScore]) -> None: ...


class UpdateBook(Protocol):
    """The store's updates; every write returns when it is on disk."""

    async def create(
        self,
        *,
        parent_version: int,
        seed: int,
        new_episode_ids: Sequence[int],
        replay_episode_ids: Sequence[int],
        new_feedback_ids: Sequence[str],
        now: float,
        new_written_ids: Sequence[int] = (),
        origin: UpdateOrigin = "ratings",
    ) -> Update: ...

    async def set_state(self, update_id: int, state: UpdateState, attempts: int | None = None) -> Update: ...

    async def finish(
        self,
        update_id: int,
        *,
        verdict: Verdict,
        reason: str | None,
        seconds: dict[str, float],
        metrics: dict[str, float],
        now: float,
        publish: PublishedAdapter | None,
        caller: Caller,
    ) -> Update:
        """One transaction: the update ends, its ratings are used, and the adapter is published and live, or refused.

        Raises edged.refusal.Refused 409 with `publish`: `live_changed` if the parent is no longer live, `pinned`.
        """
        ...

    async def measured(self, update_id: int, seconds: dict[str, float], metrics: dict[str, float]) -> Update:
        """Merge figures that were known only after the verdict (the swap) into a finished update."""
        ...

    async def unfinished(self) -> list[Update]: ...

    async def list(self, limit: int) -> list[Update]:
        """Newest first."""
        ...


class LineageBook(Protocol):
    """The store's adapter versions."""

    def live(self) -> Live: ...

    def expect(self, if_live: int | None) -> Live:
        """What is live. Raises edged.refusal.Refused 409 `live_changed` if it is another version than `if_live`."""
        ...

    async def get(self, version: int) -> Adapter: ...

    async def newest_version(self) -> int: ...

    async def parents(self) -> dict[int, int | None]:
        """Published version -> the version that it was made from."""
        ...

    async def set_metrics(self, version: int, metrics: dict[str, float]) -> None:
        """Merge `metrics` into those of the version."""
        ...


class Stage(Protocol):
    """The serving side's staging of adapters beside what is live (`edged.serve.routing`)."""

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged: ...


class Router(Protocol):
    """What makes new requests follow what is live (`edged.serve.routing`)."""

    async def go_live(self) -> float | None:
        """Milliseconds without decoding because of it; None if new requests do not run on what is live yet."""
        ...


class RollsBack(Protocol):
    """What takes a live version back (`edged.swapping`)."""

    async def roll_back(self, version: int, reason: str, *, caller: Caller) -> Live:
        """What is live then. caller: one of `edged.swap.JUDGES`. Raises edged.refusal.Refused 409: `live_changed`,
        `pinned`, `nothing_before`, `not_servable`."""
        ...


class Calibrated(Protocol):
    """How far trainer and server round apart (`edged.learn.calibrating`)."""

    @property
    def noise(self) -> protocol.EngineNoise | None: ...

    @property
    def is_pending(self) -> bool:
        """Whether it is still to be expected."""
        ...

    async def over(self) -> None:
        """Returns once it is known, or was given up."""
        ...
