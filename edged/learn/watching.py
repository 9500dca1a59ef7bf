"""The watch over the live version: what people rate it decides whether it is kept or rolled back.

A thin shell around `edged.learn.watch`: it counts the ratings after each new one, and has the version rolled back or
writes down that it stood. Only people's ratings count: what a judge says of practice is kept elsewhere. Watched is what
an update, an import or an operator made live, from then on; not the base, not a stopgap, and not what a rollback led
to: if that is rated as badly as the version that was rolled back, then it is not the adapter's doing. A pinned version
is watched and stays; the rollback that did not happen is shown and audited once. All that counts is read from the
store each time, so a restart changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

from edged import swap
from edged.learn import watch
from edged.learn.ages import ages
from edged.learn.ports import RollsBack
from edged.records import AuditEntry, Caller, Live
from edged.refusal import Refused

log = logging.getLogger(__name__)

LOOK_PAUSE_S = 0.2  # between looks: a flood of ratings is looked at in portions


class RatingCounts(Protocol):
    """What people said of versions (`edged.store.anchors`)."""

    async def counts_of(self, version: int, base_sha256: str, *, since: float = 0.0) -> dict[float, int]: ...


class LiveBook(Protocol):
    """What is and was live (`edged.store.lineage`)."""

    def live(self) -> Live: ...

    async def history(self, limit: int) -> list[Live]: ...

    async def parents(self) -> dict[int, int | None]: ...

    async def hold(self, version: int, reason: str) -> Live: ...


class AuditLog(Protocol):
    """Who did what, when (`edged.store.audit`)."""

    async def add(self, action: str, detail: dict[str, Any], *, caller: Caller) -> AuditEntry: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where the watch over `version` stands. is_on: it is watched. finding: None before the first look.

    rollbacks: by judges, as far back as the live history is read. withheld: of pinned versions, since the start.
    """

    version: int
    is_on: bool
    finding: watch.Finding | None
    why: str
    rollbacks: int
    withheld: int


class Watch:
    """`wake` after a rating and whenever another version is live or other settings hold."""

    def __init__(
        self,
        ratings: RatingCounts,
        lineage: LiveBook,
        audit: AuditLog,
        swaps: RollsBack,
        *,
        rules: Callable[[], watch.Rules],
        staleness: Callable[[], int],
        base_sha256: str,
        announce: Callable[[str, dict[str, Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._ratings = ratings
        self._lineage = lineage
        self._audit = audit
        self._swaps = swaps
        self._rules = rules
        self._staleness = staleness
        self._base_sha256 = base_sha256
        self._announce = announce
        self._on_change = on_change
        self._awake = asyncio.Event()
        self._withheld: set[tuple[int, float]] = set()  # version, and since when it was live
        self.view: View | None = None

    def wake(self) -> None:
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled: look at each rating."""
        while True:
            self._awake.clear()
            await self.consider()
            await self._awake.wait()
            await asyncio.sleep(LOOK_PAUSE_S)

    async def consider(self) -> None:
        """Look at the ratings of the live version, and act on what they say."""
        live = self._lineage.live()
        history = await self._lineage.history(swap.HISTORY_ROWS)
        if history[0] != live:
            self.wake()  # another one went live meanwhile
            return
        is_on = is_watched(live) and live.verdict is None and self._rules().false_alarm > 0.0
        finding = await self._find(live, history) if is_watched(live) else None
        view = View(
            version=live.version,
            is_on=is_on,
            finding=finding,
            why=finding.reason if finding else "",
            rollbacks=sum(row.why == "rolled_back" and row.caller in swap.JUDGES for row in history),
            withheld=len(self._withheld),
        )
        if view != self.view:
            self.view = view
            self._on_change()
        if is_on and finding is not None and finding.outcome != "open":
            await self._conclude(live, finding)

    async def _find(self, live: Live, history: list[Live]) -> watch.Finding:
        """The nearest version before counts whatever its number; those behind it only inside the staleness cap."""
        before = swap.versions_before(history)
        near = ages(await self._lineage.parents(), live.version).within(self._staleness())
        said = [
            watch.Rated(versions=(version,), counts=await self._ratings.counts_of(version, self._base_sha256))
            for version in before[:1] + [version for version in before[1:] if version in near]
        ]
        counts = await self._ratings.counts_of(live.version, self._base_sha256, since=live.since)
        return watch.judge(watch.Rated(versions=(live.version,), counts=counts), said, self._rules())

    async def _conclude(self, live: Live, finding: watch.Finding) -> None:
        try:
            if finding.outcome == "stood":
                await self._lineage.hold(live.version, finding.reason)
                log.info("v%d is kept: %s", live.version, finding.reason)
                self._announce("adapter", {"version": live.version, "why": "kept", "reason": finding.reason})
            elif live.pinned:
                await self._withhold(live, finding.reason)
                return
            else:
                await self._swaps.roll_back(live.version, finding.reason, caller=swap.WATCH)
        except Refused as refused:
            if refused.code not in ("live_changed", "pinned"):  # the next rating or change of what is live tries again
                log.error("v%d stays live although %s: %s", live.version, finding.reason, refused)
                return
        self.wake()

    async def _withhold(self, live: Live, reason: str) -> None:
        if (live.version, live.since) in self._withheld:
            return
        log.warning("v%d is pinned, and stays live although %s", live.version, reason)
        await self._audit.add("withhold rollback", {"version": live.version, "reason": reason}, caller=swap.WATCH)
        self._withheld.add((live.version, live.since))
        self.wake()


def is_watched(live: Live) -> bool:
    """Whether what is live is one of those that are watched."""
    return live.version != 0 and live.why in ("published", "promoted") and live.caller != swap.STOPGAP
