"""What the HTTP API needs from the rest of the daemon, as Protocols; `edged.daemon` passes the real ones in.

The API parses and checks requests, asks these ports, and shapes the answers. It holds no state of its own beyond open
connections. Every port raises `Refused` for what a caller may not have or did wrong; anything else is a bug.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from edged.answer import AnswerEvent, Ask, Ended, Piece, Started, Usage
from edged.records import (
    Adapter,
    ApiKey,
    AuditEntry,
    Caller,
    Episode,
    EpisodeOrigin,
    EpisodeScore,
    Feedback,
    Live,
    NewFeedback,
    Preference,
    Scope,
    StoredChoice,
    Update,
)
from edged.refusal import Refused

__all__ = [
    "AnswerEvent",
    "Answers",
    "Ask",
    "CompletionBook",
    "Control",
    "Ended",
    "EpisodeBook",
    "FeedbackBook",
    "KeyRing",
    "Piece",
    "Refused",
    "Started",
    "Usage",
]


class Answers(Protocol):
    """The serving side."""

    def ask(self, ask: Ask) -> AsyncIterator[AnswerEvent]:
        """The events of one answer, in order: Started, then Pieces and one Ended per choice, then Usage.

        Closing the iterator early (the client went away) cancels the work; what was sampled is still recorded as an
        episode. Raises Refused, before Started wherever possible; `answer_interrupted` (503) after it when the engine
        died in the middle of an answer.
        """
        ...

    def is_running(self, completion_id: str) -> bool:
        """True while the answer is being made: feedback on it is refused with 409."""
        ...


class FeedbackBook(Protocol):
    """Ratings. Every method that writes returns only when the row is on disk."""

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]:
        """The stored row, and False if an earlier call with the same key and body already made it.

        Raises Refused: 404 `completion_not_found`, 409 `idempotency_conflict`.
        """
        ...

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[Feedback | Refused]:
        """One result per item, in order; a bad item does not stop the others. One commit for all.

        `idempotency_keys` is empty or as long as `feedback`.
        """
        ...

    async def get(self, feedback_id: str) -> Feedback | None: ...

    async def list(self, *, completion_id: str | None, after: str | None, limit: int) -> tuple[list[Feedback], bool]:
        """Oldest first, and whether there are more. Raises Refused 404 if `after` names no row."""
        ...

    async def prefer(self, preference: Preference) -> Preference: ...


class EpisodeBook(Protocol):
    """The recorded answers."""

    async def list(
        self, *, after: int, limit: int, version: int | None, rated: bool | None, origin: EpisodeOrigin = "user"
    ) -> list[tuple[Episode, Feedback | None, EpisodeScore | None]]:
        """Episodes with id > after, oldest first, with the feedback that counts and the trainer's score, if any."""
        ...

    async def delete_user(self, user: str, *, caller: Caller) -> int:
        """Remove every episode, rating and preference of `user`; the number of episodes removed."""
        ...


class CompletionBook(Protocol):
    """Stored completions, each as its choices. `caller` None: of anybody, else only of this name."""

    async def get(self, completion_id: str, *, caller: str | None) -> list[StoredChoice]:
        """The choices in order; none if there is no such completion to be shown."""
        ...

    async def page(
        self,
        *,
        caller: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[list[StoredChoice]], bool]:
        """Those of `model` with all pairs of `metadata`, and whether there are more. Raises Refused 404 if `after`
        names none."""
        ...

    async def set_metadata(self, completion_id: str, metadata: Mapping[str, str]) -> None:
        """Returns when it is on disk."""
        ...

    async def delete(self, completion_id: str, *, caller: Caller) -> int:
        """Remove its episodes and all that was said of them; the number of episodes removed."""
        ...


class Control(Protocol):
    """What an operator can do. `if_live` is compare-and-swap: Refused 409 `live_changed` if another version is live."""

    def status(self) -> dict[str, Any]:
        """The body of GET /v1/status."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether requests are accepted, and why not."""
        ...

    def model_id(self) -> str:
        """The public model name of GET /v1/models."""
        ...

    def metrics(self) -> str:
        """Prometheus text format."""
        ...

    async def adapters(self) -> tuple[Live, list[Adapter]]: ...

    async def promote(self, version: int, *, if_live: int | None, caller: Caller) -> Live: ...

    async def rollback(self, *, if_live: int | None, caller: Caller) -> Live:
        """Back to the version that was live before this one."""
        ...

    async def pin(self, version: int, pinned: bool, *, if_live: int | None, caller: Caller) -> Live: ...

    async def keep(self, version: int, kept: bool, *, caller: Caller, if_live: int | None = None) -> Adapter: ...

    async def import_adapter(self, folder: str, *, if_live: int | None = None, caller: Caller) -> Adapter:
        """Judge a PEFT folder on this machine as a candidate; the adapter is then published and live, or refused."""
        ...

    def adapter_folder(self, version: int) -> Path:
        """Where the files of a published version lie. Refused 404 `adapter_not_found`, 409 `no_files` (version 0)."""
        ...

    async def diff(self, version: int, other: int) -> dict[str, Any]:
        """How far two versions lie apart: {"norm", "other_norm", "distance", "cosine", "modules": {name: distance}}."""
        ...

    async def updates(self, *, limit: int) -> list[Update]:
        """Newest first."""
        ...

    async def train(self, *, caller: Caller) -> dict[str, Any]:
        """Make an update now of what there is; {"accepted": bool, "reason": str}."""
        ...

    async def pause(self, *, caller: Caller) -> None: ...

    async def resume(self, *, caller: Caller) -> None: ...

    def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(name, data) as things happen: status, update, adapter, feedback, progress. Slow readers lose the oldest."""
        ...

    async def audit(self, *, limit: int) -> list[AuditEntry]: ...


class KeyRing(Protocol):
    """The API keys."""

    def any_keys(self) -> bool:
        """Whether a key was ever made, revoked ones included: from then on loopback TCP needs a valid one too."""
        ...

    def check(self, secret: str) -> ApiKey | None:
        """The key with this secret, if it is valid. Constant-time comparison of hashes."""
        ...

    async def create(self, name: str, scopes: frozenset[Scope], *, caller: Caller) -> tuple[ApiKey, str]:
        """A new key and its secret, which is shown this once."""
        ...

    async def list(self) -> list[ApiKey]: ...

    async def revoke(self, key_id: str, *, caller: Caller) -> ApiKey:
        """Raises Refused 404 `key_not_found`."""
        ...
