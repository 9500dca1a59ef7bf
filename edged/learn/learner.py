"""The learner: the loop that looks at what is on disk, decides, and makes updates.

A thin shell around `edged.learn.plan`: it gathers the view, asks for a decision, writes the job and lets
`edged.learn.updating` carry it. It starts with the updates that a crash left unfinished. One update at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from edged.failure import WorkerFault, WorkerLost
from edged.learn import plan, practice
from edged.learn.ages import ages
from edged.learn.alarms import LOOK_BACK, TRAINER_DEATHS, alarms
from edged.learn.folders import Folders
from edged.learn.forgetting import without_removed
from edged.learn.job import LearnSettings, make_job
from edged.learn.meanwhile import meanwhile
from edged.learn.ports import (
    Calibrated,
    EpisodeShelf,
    LineageBook,
    PracticeBook,
    RatingsBook,
    UpdateBook,
    WrittenBook,
)
from edged.learn.trainer import Trainer
from edged.learn.updating import LEARNER, PutOff, Updater
from edged.records import RatedChoice, Update, UpdateOrigin, WrittenCounts
from engine import protocol

log = logging.getLogger(__name__)

HOLD_FIRST_S = 60.0  # after the machine could not make an update; doubles up to HOLD_MAX_S
HOLD_MAX_S = 3600.0
PROBES_POLL_S = 1.0  # while the serve worker, which tokenises the probes, is starting
CALIBRATION_WAIT_S = 60.0  # several times what it takes; learning does not hang on it
ROWS = 512  # of each kind, that one decision looks at; more where these do not decide

T = TypeVar("T")


@dataclasses.dataclass(slots=True, kw_only=True)
class Switches:
    """What the operator has set; the learner reads it at every decision."""

    paused: bool = False
    asked: bool = False


class Learner:
    """`wake` after anything that may change a decision: a rating, a switch, a pin, new settings."""

    def __init__(
        self,
        *,
        settings: Callable[[], LearnSettings],
        base_sha256: str,
        probes: Callable[[], tuple[protocol.ProbeTokens, ...]],
        ratings: RatingsBook,
        episodes: EpisodeShelf,
        written: WrittenBook,
        practice_book: PracticeBook,
        updates: UpdateBook,
        lineage: LineageBook,
        folders: Folders,
        trainer: Trainer,
        updater: Updater,
        calibration: Calibrated,
        on_change: Callable[[], None],
        on_finished: Callable[[Update], None],
    ) -> None:
        self._settings = settings
        self._base_sha256 = base_sha256
        self._probes = probes
        self._ratings = ratings
        self._episodes = episodes
        self._written = written
        self._practice_book = practice_book
        self._updates = updates
        self._lineage = lineage
        self._folders = folders
        self._trainer = trainer
        self._updater = updater
        self._calibration = calibration
        self._has_awaited_calibration = False
        self._on_change = on_change
        self._on_finished = on_finished
        self._awake = asyncio.Event()
        self._practised: asyncio.Future[bool] | None = None  # somebody waits for a practice update
        self._held_until = 0.0  # monotonic: a clock that is set back must not make it a day
        self._held_why = ""
        self._hold_s = HOLD_FIRST_S
        self.switches = Switches()
        self.state: plan.LearnerState = "idle"
        self.why = ""
        self.ratings_until_update = settings().rules.batch_ratings
        self.due = False  # whether there is an update to be made, if only it can be
        self.elsewhere = 0  # ratings of answers of another base model, which wait until that one is served again
        self.written = WrittenCounts()
        self.progress: protocol.Progress | None = None
        self.alarms: tuple[str, ...] = ()

    def wake(self) -> None:
        self._awake.set()

    def stage(self, update: Update, stage: Literal["training", "gating"]) -> None:
        """The updater says where it stands."""
        self._show(stage, f"update {update.id} makes v{update.version}")

    async def run(self) -> None:
        """Until cancelled: first the unfinished updates, then new ones as ratings come."""
        await self._look_back()
        for update in await self._updates.unfinished():
            await self._carry(update)
        while True:
            self._awake.clear()
            decision, view = await self._decide()
            if decision.makes_update and await self._await_calibration():
                continue
            if decision.makes_update:
                self.switches.asked = False
                await self._begin(decision, view)
            elif self._practised is not None:
                await self._practise(decision, view)
            elif not decision.drops:  # after drops the next rows come into view
                await self._sleep(decision.wake_at)

    async def _await_calibration(self) -> bool:
        """Have the first update wait for the calibration; whether there was anything to wait for. A trainer that cannot
        run is met again, and told of, by the update."""
        if self._has_awaited_calibration or not self._calibration.is_pending:
            return False
        self._has_awaited_calibration = True
        self._show("collecting", "measuring how far trainer and server round apart")
        with contextlib.suppress(WorkerFault, WorkerLost, TimeoutError):
            async with asyncio.timeout(CALIBRATION_WAIT_S):
                await self._trainer.start()
                await self._calibration.over()
        return True

    async def _look_back(self) -> None:
        found = alarms(await self._updates.list(LOOK_BACK))
        for alarm in found:
            if alarm not in self.alarms:
                log.warning("alarm: %s", alarm)
        self.alarms = found

    async def _sleep(self, wake_at: float | None) -> None:
        waits_s = [self._held_until - time.monotonic(), 0.0 if wake_at is None else wake_at - time.time()]
        try:
            async with asyncio.timeout(min((wait_s for wait_s in waits_s if wait_s > 0.0), default=None)):
                await self._awake.wait()
        except TimeoutError:
            return

    def pause(self, paused: bool) -> None:
        """Plan no update while paused; one that runs is finished."""
        self.switches.paused = paused
        self.wake()

    async def practise(self) -> bool:
        """Make an update of what was judged in practice, once no rating waits for one; whether it came to a verdict or
        there is nothing to make one of. Cancelling takes the wish back, not an update that has begun."""
        self._practised = asyncio.get_running_loop().create_future()
        self.wake()
        return await self._practised

    async def _practise(self, decision: plan.Decision, view: plan.View) -> None:
        waiting, self._practised = self._practised, None
        if waiting is None or waiting.done():
            return
        try:
            made = await self._practice_update(decision, view)
        except BaseException as error:
            if not waiting.done():
                waiting.set_exception(error) if isinstance(error, Exception) else waiting.cancel()
            raise
        if not waiting.done():
            waiting.set_result(made)

    async def _practice_update(self, decision: plan.Decision, view: plan.View) -> bool:
        if decision.state == "paused" or time.monotonic() < self._held_until or not self._probes():
            return False
        rules = self._settings().rules
        picked = practice.pick(await self._practice_book.judged(self._base_sha256), view, rules)
        await self._practice_book.skip([(choice.episode_id, reason) for choice, reason in picked.skipped])
        if not picked.batch:
            return True
        batch = dataclasses.replace(decision, batch=picked.batch, written=())
        finished = await self._begin(batch, view, origin="practice")
        return finished is not None and finished.verdict != "skipped"

    async def ask(self) -> tuple[bool, str]:
        """Make an update now of what there is; whether there will be one, and why (not)."""
        if self.state in ("training", "gating"):
            return False, f"{self.why}; ask again when it is done"
        decision = plan.decide(await self._view(asked=True), time.time(), self._settings().rules)
        if decision.makes_update:
            self.switches.asked = True
            self._held_until = 0.0
            self.wake()
        return decision.makes_update, decision.why

    async def _view(self, *, asked: bool) -> plan.View:
        settings = self._settings()
        versions = await asyncio.to_thread(self._folders.versions)
        parents, live = await self._lineage.parents(), self._lineage.live()
        view = plan.View(
            unused=(),
            base_sha256=self._base_sha256,
            ages=ages(parents, live.version),
            versions_on_disk=frozenset({0, *versions}),
            reference=settings.reference,
            paused=self.switches.paused or not settings.enabled,
            pinned=live.pinned,
            asked=asked,
            written=await _read(
                lambda rows: self._written.unused_written(rows, self._base_sha256),
                lambda found: plan.written_suffice(found, settings.rules),
            ),
        )
        unused = await _read(
            lambda rows: self._ratings.unused_rated(rows, base_sha256=self._base_sha256),
            lambda found: plan.sees_enough(dataclasses.replace(view, unused=found), settings.rules),
        )
        return dataclasses.replace(view, unused=unused)

    async def _decide(self) -> tuple[plan.Decision, plan.View]:
        view = await self._view(asked=self.switches.asked)
        self.elsewhere = await self._ratings.count_unused_elsewhere(self._base_sha256)
        self.written = await self._written.counts()
        now = time.time()
        decision = plan.decide(view, now, self._settings().rules)
        self.due = decision.makes_update
        if self._lineage.live().version not in view.versions_on_disk:
            decision = dataclasses.replace(decision, drops=())  # it may be back before it is missed
        if decision.drops:
            await self._ratings.drop([(choice.feedback_id, reason) for choice, reason in decision.drops])
        elif view.asked and not decision.makes_update:  # who asks while this is decided is heard the next time
            self.switches.asked = False
        decision = self._as_possible(decision, view)
        if decision.want_trainer:
            self._trainer.warm_up()
        self.ratings_until_update = decision.ratings_until_update
        if not decision.makes_update:
            self._show(decision.state, decision.why)
        return decision, view

    def _as_possible(self, decision: plan.Decision, view: plan.View) -> plan.Decision:
        """The decision, without its batch while it cannot be carried out."""
        live = self._lineage.live().version
        if live not in view.versions_on_disk and decision.want_trainer:
            why = f"the files of v{live}, which is live, are gone; promote another version, or bring them back"
            return dataclasses.replace(decision, state="paused", batch=(), written=(), want_trainer=False, why=why)
        if time.monotonic() < self._held_until and decision.want_trainer:
            return dataclasses.replace(
                decision,
                state="paused",
                batch=(),
                written=(),
                want_trainer=False,
                why=f"{self._held_why}; it is tried again later",
            )
        if decision.makes_update and not self._probes():
            return dataclasses.replace(
                decision,
                state="collecting",
                batch=(),
                written=(),
                wake_at=time.time() + PROBES_POLL_S,
                why="the serve worker is starting",
            )
        return decision

    def _show(self, state: plan.LearnerState, why: str) -> None:
        if (state, why) != (self.state, self.why):
            if state != self.state:
                log.info("learner: %s -> %s (%s)", self.state, state, why)
            self.state, self.why, self.progress = state, why, None
            self._on_change()

    async def _begin(self, decision: plan.Decision, view: plan.View, origin: UpdateOrigin = "ratings") -> Update | None:
        """Plan an update on disk, and carry it. What a judge rewarded is not mixed with what people rated before."""
        settings = self._settings()
        live = self._lineage.live()
        seed = settings.seed + await self._lineage.newest_version() + 1
        near = view.ages.within(settings.rules.staleness)
        used: Sequence[RatedChoice] = ()
        if origin == "ratings":
            used = await _read(
                lambda rows: self._ratings.used_rated(near, rows, base_sha256=self._base_sha256),
                lambda found: plan.sees_enough(dataclasses.replace(view, unused=found), settings.rules),
            )
        n_new = len(decision.batch) + len(decision.written)
        replayed = plan.replay(used, n_new=n_new, seed=seed, view=view, rules=settings.rules)
        again = plan.replay_written(
            await _read(
                lambda rows: self._written.used_written(rows, self._base_sha256),
                lambda found: plan.written_suffice(found, settings.rules),
            ),
            n_new=len(decision.written),
            seed=seed,
            rules=settings.rules,
        )
        update = await self._updates.create(
            parent_version=live.version,
            seed=seed,
            new_episode_ids=[choice.episode_id for choice in decision.batch],
            replay_episode_ids=[choice.episode_id for choice in replayed],
            new_feedback_ids=[choice.feedback_id for choice in decision.batch if choice.feedback_id],
            new_written_ids=[one.id for one in decision.written],
            now=time.time(),
            origin=origin,
        )
        written_ids = [one.id for one in (*decision.written, *again)]
        try:
            job = await self._job(update, decision.batch, replayed, written_ids, view, settings)
            await asyncio.to_thread(self._folders.write_job, update.id, job)
        except OSError as error:
            await self._put_off(update, f"its job cannot be written: {error}")
            return None
        came_at = [choice.rated_at for choice in decision.batch] + [one.written_at for one in decision.written]
        return await self._carry(update, max(came_at) if origin == "ratings" else None)

    async def _carry(self, update: Update, rated_at: float | None = None) -> Update | None:
        """The update with its verdict; None if it was given back."""
        try:
            job = await asyncio.to_thread(self._folders.read_job, update.id)
        except protocol.WireError as error:
            await self._give_back(update, f"its job cannot be read: {error}")
            return None
        if job is None:
            await self._give_back(update, "cut off before its job was written")
            return None
        if job.base_sha256 != self._base_sha256:
            await self._give_back(update, "it was planned on another base model than the one that is served")
            return None
        job = await without_removed(update.id, job, self._episodes, self._written, self._folders)
        if not (job.episodes or job.pairs or job.corrections):
            await self._give_back(update, "all that it was to learn from was removed")
            return None
        try:
            async with meanwhile(self._awake, lambda: self._count_without(update.new_episode_ids)):
                finished = await self._updater.carry(update, job, rated_at)
        except WorkerFault as fault:
            await self._put_off(update, f"the train worker cannot run: {fault}")
            return None
        except PutOff as short:
            await self._put_off(update, f"the machine could not make it: {short}", deaths=short.deaths)
            return None
        self._hold_s = HOLD_FIRST_S
        await self._look_back()
        self._tell(finished)
        return finished

    async def _count_without(self, taken: Sequence[int]) -> None:
        """Count what makes the next update, while one is made of `taken`."""
        view = await self._view(asked=False)
        left = [choice for choice in view.unused if choice.episode_id not in taken]
        self.ratings_until_update = plan.missing(dataclasses.replace(view, unused=left), self._settings().rules)

    async def _put_off(self, update: Update, why: str, *, deaths: int = 0) -> None:
        """Give an update back, and make none for a while: what was lacking comes back, or somebody sees it."""
        self._held_until, self._held_why = time.monotonic() + self._hold_s, why
        log.error("update %d is put off, next try in %.0f s: %s", update.id, self._hold_s, why)
        self._hold_s = min(HOLD_MAX_S, self._hold_s * 2)
        await self._give_back(update, why, {TRAINER_DEATHS: float(deaths)} if deaths else {})
        if deaths:
            await self._look_back()

    async def _give_back(self, update: Update, reason: str, metrics: dict[str, float] | None = None) -> None:
        """End an update that trained nothing: its ratings wait for the next one."""
        finished = await self._updates.finish(
            update.id,
            verdict="skipped",
            reason=reason,
            seconds={},
            metrics=metrics or {},
            now=time.time(),
            publish=None,
            caller=LEARNER,
        )
        await asyncio.to_thread(self._folders.clear_job, update.id)
        self._tell(finished)

    def _tell(self, finished: Update) -> None:
        log.info("update %d: v%d %s (%s)", finished.id, finished.version, finished.verdict, finished.reason)
        self._on_finished(finished)

    async def _job(
        self,
        update: Update,
        batch: tuple[RatedChoice, ...],
        replayed: tuple[RatedChoice, ...],
        written_ids: Sequence[int],
        view: plan.View,
        settings: LearnSettings,
    ) -> protocol.TrainJob:
        ids = [choice.episode_id for choice in (*batch, *replayed)]
        versions = await asyncio.to_thread(self._folders.versions)
        checkpoint = await asyncio.to_thread(self._folders.checkpoint, update.parent_version)
        return make_job(
            update,
            settings,
            view,
            batch=batch,
            replayed=replayed,
            episodes={episode.id: episode for episode in await self._episodes.get(ids)},
            written=await self._written.tokens(written_ids),
            adapter_of=lambda version: self._folders.reference_to(version, versions),
            checkpoint=None if checkpoint is None else str(checkpoint),
            probes=self._probes(),
            noise=self._calibration.noise,
            base_sha256=self._base_sha256,
        )


async def _read(rows: Callable[[int], Awaitable[list[T]]], suffices: Callable[[list[T]], bool]) -> list[T]:
    """Rows in their order until they suffice, or all: what decides may lie behind any number of others."""
    limit = ROWS
    while len(found := await rows(limit)) == limit and not suffices(found):
        limit *= 2
    return found
