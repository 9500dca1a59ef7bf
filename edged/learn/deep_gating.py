"""The deep gate in the background: looks at what went live, keeps the verdict, and has a refused version rolled back.

It works in the time that nobody needs: a request, or an update in training or before the gate, ends the answers that
are under way in the same turn of the event loop, and the rest waits. Nothing of an examination is kept but its verdict,
so a stop costs what was sampled so far, which `gate.deep_tokens` bounds, and the next start begins anew. The verdict is
on disk before anything is rolled back, so that a stop between the two is made up for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from edged.failure import JobRefused, WorkerBusy, WorkerLost
from edged.learn import deep_rules
from edged.learn.deep_gate import Judgement
from edged.learn.deep_proving import DeepProver
from edged.records import Adapter, DeepVerdict, Live
from edged.refusal import Refused
from engine import protocol

log = logging.getLogger(__name__)

RETRY_S = 60.0  # after workers did not answer


class Lineage(Protocol):
    """The store's adapter versions, as the deep gate needs them."""

    def live(self) -> Live: ...

    async def get(self, version: int) -> Adapter: ...

    async def list(self) -> list[Adapter]: ...


class Interruptible(Protocol):
    """Whose answers are given up for a user."""

    def interrupt(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a status shows. state: off, idle, waiting (for the box), looking. verdict: on what is live; None: there is
    none (yet), or the base is live."""

    state: str
    why: str
    verdict: DeepVerdict | None


class _Superseded(Exception):
    """Raised when the version that is looked at is not live any more."""


class DeepGating:
    """`users` when a request has come or gone, `changed` when anything else may have made or taken away the time."""

    def __init__(
        self,
        *,
        enabled: Callable[[], bool],
        blocked: Callable[[], str],
        lineage: Lineage,
        keep: Callable[[int, DeepVerdict, dict[str, float]], Awaitable[None]],
        versions: Callable[[], Mapping[int, object]],
        complaint_about: Callable[[int], str | None],
        reference_to: Callable[[int], protocol.AdapterRef],
        prover: Callable[[Callable[[], Awaitable[None]]], DeepProver],
        sampler: Interruptible,
        roll_back: Callable[[int, str], Awaitable[Live]],
        on_verdict: Callable[[int, DeepVerdict], None],
        on_trouble: Callable[[], None],
    ) -> None:
        """
        Args:
            blocked: why the box has no time now, besides users; "" if it has.
            keep: a version's verdict and figures; on disk when it returns.
            versions: those whose files are there. Blocking.
            complaint_about: why the files of a version are not whole; None if they are. Blocking.
            reference_to: as workers are told of a version. Blocking.
            prover: makes the prover from what returns once the box has time.
            on_trouble: it could not look at what is live, and rests before it tries again.
            roll_back: serve the version before the one that is given, which must be live, for a reason. Raises Refused.
        """
        self._enabled = enabled
        self._blocked = blocked
        self._lineage = lineage
        self._keep_on_disk = keep
        self._versions = versions
        self._complaint_about = complaint_about
        self._reference_to = reference_to
        self._prover = prover(self._free)
        self._sampler = sampler
        self._roll_back = roll_back
        self._on_verdict = on_verdict
        self._on_trouble = on_trouble
        self._awake = asyncio.Event()
        self._users = 0
        self._looking_at: int | None = None
        self._known: tuple[int, DeepVerdict | None] = (0, None)
        self._trouble = ""

    @property
    def is_looking(self) -> bool:
        """Whether a version is being examined."""
        return self._looking_at is not None

    def view(self) -> View:
        """Where it stands. No I/O."""
        version, verdict = self._known
        if version != self._lineage.live().version:
            verdict = None
        if not self._enabled():
            return View(state="off", why="gate.deep is false", verdict=verdict)
        if self._looking_at is None:
            return View(state="idle", why=self._trouble, verdict=verdict)
        why = self._hindrance()
        return View(state="waiting" if why else "looking", why=why or f"at v{self._looking_at}", verdict=verdict)

    def users(self, active: int) -> None:
        """So many requests are under way."""
        self._users = active
        self.changed()

    def changed(self) -> None:
        """What is live, the learner, a worker or the settings have changed."""
        if self.is_looking and self._hindrance():
            self._sampler.interrupt()
        self._awake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._awake.clear()
            live = self._lineage.live()
            adapter = await self._lineage.get(live.version)
            self._known = (live.version, adapter.deep)
            if not (self._enabled() and deep_rules.is_due(live, adapter)):
                await self._awake.wait()
                continue
            self._trouble = await self._try(adapter)
            if self._trouble:
                log.warning("deep gate: %s; next try in %.0f s", self._trouble, RETRY_S)
                self._on_trouble()
                await asyncio.sleep(RETRY_S)

    async def _try(self, adapter: Adapter) -> str:
        """Look at it. Why that was not possible; "" if it was, or if it is not live any more."""
        try:
            await self._look_at(adapter)
        except _Superseded:
            log.info("deep gate: v%d is not live any more", adapter.version)
        except (WorkerLost, WorkerBusy, JobRefused) as error:
            return f"v{adapter.version} could not be looked at: {error}"
        finally:
            self._looking_at = None
        return ""

    async def _look_at(self, adapter: Adapter) -> None:
        """Judge it, or finish what a stop cut off."""
        self._looking_at = adapter.version
        verdict, metrics = adapter.deep, {}
        if verdict is None:
            against = await self._compared_with(adapter.version)
            refs = [await asyncio.to_thread(self._reference_to, version) for version in (adapter.version, against)]
            judgement = await self._prover.examine(*refs)
            verdict, metrics = _verdict(judgement, against), judgement.metrics
            await self._keep(adapter.version, verdict, metrics)
        if verdict.verdict == "refused":
            verdict = await self._withdraw(adapter.version, verdict)
            await self._keep(adapter.version, verdict, metrics)
        log.info("deep gate: v%d %s (%s)", adapter.version, verdict.verdict, verdict.reason)
        self._looking_at = None
        self._on_verdict(adapter.version, verdict)

    async def _compared_with(self, version: int) -> int:
        """The nearest that `deep_rules` allows and whose files are whole."""
        on_disk = set(await asyncio.to_thread(self._versions))
        if version not in on_disk:
            raise JobRefused("no_files", "its files are gone")
        adapters = {adapter.version: adapter for adapter in await self._lineage.list()}
        while against := deep_rules.compared_with(version, adapters, on_disk):
            complaint = await asyncio.to_thread(self._complaint_about, against)
            if complaint is None:
                return against
            log.warning("deep gate: v%d is not compared with v%d: %s", version, against, complaint)
            on_disk.remove(against)
        return 0

    async def _keep(self, version: int, verdict: DeepVerdict, metrics: dict[str, float]) -> None:
        await self._keep_on_disk(version, verdict, metrics)
        self._known = (version, verdict)

    async def _withdraw(self, version: int, verdict: DeepVerdict) -> DeepVerdict:
        """Roll a refused version back, or say why it stays."""
        why = deep_rules.objection(self._lineage.live(), version)
        if not why:
            try:
                live = await self._roll_back(version, verdict.reason)
                return dataclasses.replace(verdict, rolled_back_to=live.version)
            except Refused as refused:  # an operator was faster
                why = str(refused)
        log.warning("deep gate: v%d is refused and stays: %s", version, why)
        return dataclasses.replace(verdict, kept_why=why)

    def _hindrance(self) -> str:
        if self._users:
            return f"{self._users} requests are under way"
        return self._blocked()

    async def _free(self) -> None:
        """Returns once nobody needs the box. Raises _Superseded."""
        while True:
            if self._lineage.live().version != self._looking_at:
                raise _Superseded
            if not self._hindrance():
                return
            self._awake.clear()
            await self._awake.wait()


def _verdict(judgement: Judgement, against: int) -> DeepVerdict:
    return DeepVerdict(verdict=judgement.verdict, against=against, at=time.time(), reason=judgement.reason)
