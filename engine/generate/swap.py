"""Which of two contexts holds which adapter version, and which one takes new requests. Pure.

Roles of a context:

    live      takes new requests
    draining  not live; its requests run to their end on its version
    spare     has no request; what it holds is still there, so routing back to it is a pointer change
    staging   an adapter is being loaded and proved on it
    staged    holds a proved adapter, ready to be routed

    spare | staged --stage--> staging --proved--> staged --route--> live
                              staging --failed--> spare, with the version that it held before
    live --route--> draining (or spare, without requests) --last request ends--> spare
    draining | spare --route back--> live
    spare | staged --begin_on its version--> draining

A Stage that comes while the other context drains or stages waits; at most MAX_WAITING_STAGES do. The caller performs
the returned actions in order, and tells when a request begins and ends.

Invariants: exactly one context is live; a context's version changes only while it has no request, and then its memory
is cleared (`Place` and `Restore` say so); a request ends on the context and version on which it began; an adapter is
freed only when no context holds it and no failed stage could bring it back.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal

Role = Literal["live", "draining", "spare", "staging", "staged"]

MAX_WAITING_STAGES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Load the adapter of `version`, set it on `context`, clear the context's memory, and prove it there for stage job
    `job_id`; then report `proved` or `failed`."""

    context: int
    version: int
    job_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
    """Set the adapter of `version`, which is still loaded, on `context`, and clear the context's memory."""

    context: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Free the adapter of `version`: it is set nowhere."""

    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Decline:
    """Answer stage job `job_id` with a failure: too many wait already."""

    job_id: str
    version: int


Action = Place | Restore | Free | Decline


@dataclasses.dataclass(slots=True)
class _Slot:
    version: int
    role: Role
    n_requests: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    job_id: str
    version: int


class SwapError(ValueError):
    """Raised for an event that does not fit the state: a bug of the caller."""


class Swap:
    """The two contexts, 0 and 1. Both hold `version` at first; 0 is live."""

    def __init__(self, version: int) -> None:
        self._contexts = (_Slot(version, "live"), _Slot(version, "spare"))
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._job_id: str | None = None
        self._displaced: int | None = None  # what the context held that is being staged

    @property
    def live(self) -> int:
        """The context that takes new requests."""
        return 0 if self._contexts[0].role == "live" else 1

    @property
    def live_version(self) -> int:
        return self.version(self.live)

    def version(self, context: int) -> int:
        return self._contexts[context].version

    def role(self, context: int) -> Role:
        return self._contexts[context].role

    def begin(self) -> int:
        """A new request begins; the context that it runs on."""
        context = self.live
        self._contexts[context].n_requests += 1
        return context

    def begin_on(self, version: int) -> int | None:
        """A new request begins on `version`, live or not; the context that it runs on. None if no context holds it
        ready, or an adapter waits to be staged, which comes first."""
        if self.live_version == version:
            return self.begin()
        context = 1 - self.live
        slot = self._contexts[context]
        if slot.version != version or slot.role == "staging" or self._waiting:
            return None
        slot.role = "draining"
        slot.n_requests += 1
        return context

    def end(self, context: int) -> tuple[Action, ...]:
        """A request on `context` ended."""
        slot = self._contexts[context]
        if slot.n_requests == 0:
            raise SwapError(f"context {context} ({slot.role}) has no request to end")
        slot.n_requests -= 1
        if slot.role == "draining" and slot.n_requests == 0:
            slot.role = "spare"
            return self._next_stage()
        return ()

    def stage(self, job_id: str, version: int) -> tuple[Action, ...]:
        """Put `version` on the other context and prove it there, as soon as that context is free."""
        if len(self._waiting) >= MAX_WAITING_STAGES:
            return (Decline(job_id, version),)
        self._waiting.append(_Waiting(job_id, version))
        return self._next_stage()

    def proved(self, job_id: str) -> tuple[Action, ...]:
        """The stage job is done: its version can be routed."""
        slot = self._staging(job_id)
        slot.role = "staged"
        displaced, self._displaced, self._job_id = self._displaced, None, None
        assert displaced is not None
        return (*self._free_if_unused(displaced), *self._next_stage())

    def failed(self, job_id: str) -> tuple[Action, ...]:
        """The stage job failed: the context gets back what it held before."""
        slot = self._staging(job_id)
        failed, displaced = slot.version, self._displaced
        assert displaced is not None
        slot.version, slot.role = displaced, "spare"
        self._displaced = self._job_id = None
        return (Restore(1 - self.live, displaced), *self._free_if_unused(failed), *self._next_stage())

    def route(self, version: int) -> bool:
        """Send new requests to `version`; False if it is neither live, staged nor resident in the other context."""
        live, other = self._contexts[self.live], self._contexts[1 - self.live]
        if live.version == version:
            return True
        if other.version != version or other.role == "staging":
            return False
        other.role = "live"
        live.role = "draining" if live.n_requests else "spare"
        return True

    def after_route(self) -> tuple[Action, ...]:
        """What a route made possible: a stage that waited for the context that was just left."""
        return self._next_stage()

    def _staging(self, job_id: str) -> _Slot:
        if job_id != self._job_id:
            raise SwapError(f"stage job {job_id!r} ended, but {self._job_id!r} is being staged")
        return self._contexts[1 - self.live]

    def _next_stage(self) -> tuple[Action, ...]:
        context = 1 - self.live
        slot = self._contexts[context]
        if not self._waiting or slot.role not in ("spare", "staged"):
            return ()
        job = self._waiting.popleft()
        self._displaced, self._job_id = slot.version, job.job_id
        slot.version, slot.role = job.version, "staging"
        return (Place(context, job.version, job.job_id),)

    def _free_if_unused(self, version: int) -> tuple[Free, ...]:
        used = {slot.version for slot in self._contexts}
        return () if version in used else (Free(version),)
