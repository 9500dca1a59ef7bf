"""What new requests run on, made to follow what is live for as long as the two differ.

The store decides what is live. The serve worker can be behind: the version has to be staged first, the spare context
may be draining, or the worker started while what is live changed. Whoever changes what is live calls `go_live`, which
waits for a while; whatever is left is done in the background, and `serving` shows it.

What the worker holds is known from its messages alone, whoever still waits for them. A Route that was sent cannot be
taken back, so what is live is looked at again only once it is answered.

A live version that the engine will not serve is handed to `replace`, which makes another one live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from edged.failure import ADAPTER_FAULTS, JobRefused, WorkerBusy, WorkerLost
from edged.serve.staging import NOT_RESIDENT
from engine import protocol

log = logging.getLogger(__name__)

GO_LIVE_WAIT_S = 10.0
RETRY_FIRST_S = 0.5  # after the engine failed for no fault of the adapter; doubles up to RETRY_MAX_S
RETRY_MAX_S = 30.0


class Contexts(Protocol):
    """The worker's two contexts (`edged.serve.staging`)."""

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged: ...

    async def route(self, version: int) -> protocol.Routed: ...

    def received(self, message: protocol.Message) -> bool: ...


class Routing:
    """Lives on the event loop; `ready`, `down` and `received` are called by the owner of the serve worker.

    serving: the version that new requests run on; spare: what the other context holds, as far as is known. None while
    no worker is ready.
    """

    def __init__(
        self,
        contexts: Contexts,
        live: Callable[[], protocol.AdapterRef],
        replace: Callable[[int, str], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._contexts = contexts
        self._live = live
        self._replace = replace
        self._on_change = on_change
        self._following: asyncio.Task[float | None] | None = None
        self._sent: asyncio.Task[protocol.Routed] | None = None  # the newest Route
        self.serving: int | None = None
        self.spare: int | None = None

    def ready(self, version: int) -> None:
        """A worker is ready and serves `version`, which may not be what is live by now."""
        self.serving = self.spare = version
        self._follow_anew()

    def down(self) -> None:
        """The worker is gone. The next one starts on what is live."""
        self.serving = self.spare = None

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it is not an answer to Stage or Route."""
        match message:
            case protocol.Staged():
                self.spare = message.version
            case protocol.Routed() if message.version != self.serving:
                self.serving, self.spare = message.version, self.serving
                self._on_change()
        return self._contexts.received(message)

    def close(self) -> None:
        """Follow no longer; the daemon is stopping."""
        for task in (self._following, self._sent):
            if task is not None:
                task.cancel()

    async def stage(
        self, adapter: protocol.AdapterRef, *, fluency_prompts: tuple[str, ...], fluency_tokens: int, seed: int
    ) -> protocol.Staged:
        """Prove `adapter` beside what is live. Changes nothing for requests.

        Raises:
            WorkerBusy: the worker is not free for it, or does not serve what is live yet, so that a comparison of the
                two would be one with another version.
            JobRefused, WorkerLost.
        """
        if self.serving not in (None, self._live().version):
            raise WorkerBusy(f"new requests still run on v{self.serving}, which is not live any more")
        return await self._contexts.stage(
            adapter, fluency_prompts=fluency_prompts, fluency_tokens=fluency_tokens, seed=seed
        )

    async def go_live(self) -> float | None:
        """Make new requests run on what is live now.

        Returns:
            milliseconds in which no decode step ran because of it; None if there was nothing to do, no worker runs, or
            it takes longer than GO_LIVE_WAIT_S and is done in the background.
        """
        following = self._follow_anew()
        await asyncio.wait({following}, timeout=GO_LIVE_WAIT_S)
        if following.done() and not following.cancelled():
            return following.result()
        log.warning("v%d is live; new requests run on v%s until it can be staged", self._live().version, self.serving)
        return None

    def _follow_anew(self) -> asyncio.Task[float | None]:
        """Look at once at what is live now, whatever was waited for."""
        if self._following is not None:
            self._following.cancel()
        self._following = asyncio.create_task(self._follow(), name="routing")
        return self._following

    async def _follow(self) -> float | None:
        swap_ms, retry_s = None, RETRY_FIRST_S
        if self._sent is not None:
            await asyncio.wait({self._sent})
        while self.serving is not None and (adapter := self._live()).version != self.serving:
            try:
                swap_ms = await self._approach(adapter)
            except WorkerBusy as busy:
                log.info("v%d is not served yet: %s", adapter.version, busy)
            except WorkerLost as lost:
                log.warning("v%d is live, and the serve worker takes it at its next start: %s", adapter.version, lost)
                return None
            except JobRefused as refused:
                log.error("v%d is live and cannot be served: %s: %s", adapter.version, refused.code, refused)
                blames_adapter = refused.code in ADAPTER_FAULTS
                if not (blames_adapter and await self._replaced(adapter.version, refused)):
                    await asyncio.sleep(retry_s)
                    retry_s = min(RETRY_MAX_S, 2 * retry_s)
        return swap_ms

    async def _approach(self, adapter: protocol.AdapterRef) -> float | None:
        """Route to `adapter`, or stage it: what is live may be another one by then, so it is not routed to blindly."""
        try:
            return (await self._route(adapter.version)).swap_ms
        except JobRefused as refused:
            if refused.code != NOT_RESIDENT:
                raise
            await self._contexts.stage(adapter, fluency_prompts=(), fluency_tokens=0, seed=0)
            return None

    async def _route(self, version: int) -> protocol.Routed:
        """Send new requests to `version`. Who is cancelled here leaves the Route to `_follow`, which waits for it."""
        self._sent = asyncio.create_task(self._contexts.route(version), name=f"route to v{version}")
        await asyncio.wait({self._sent})
        return self._sent.result()

    async def _replaced(self, version: int, refused: JobRefused) -> bool:
        """Whether another version is live now."""
        try:
            await self._replace(version, str(refused))
        except Exception:  # a full disk, say: what is live stays so, and is tried again
            log.exception("v%d cannot be replaced", version)
            return False
        return self._live().version != version
