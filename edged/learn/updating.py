"""One update, carried from its plan to its verdict: train, prove, publish or refuse.

Every step can be cut off by a kill at any point; `carry` picks an update up from what is on disk:

    no out/            train (the same job folder, so the same bytes)
    out/ is there      prove, then publish or refuse
    already published  (files moved, verdict not yet written) prove and publish again: every step may be repeated

What the machine is to blame for (a full disk, no memory, files that cannot be read) is tried again, and then `PutOff`
leaves the ratings to a later update. So is a trainer that dies: whatever killed it, nothing says that the ratings are
bad. What speaks against the batch or the candidate uses them up.

The verdict, the version's state and what is live change in one transaction of the store; routing follows it. So after
a kill between the two the daemon starts on what the store says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from edged.failure import JobRefused, WorkerBusy, WorkerDown, WorkerLost
from edged.learn import gate
from edged.learn.folders import Folders, bytes_under
from edged.learn.laps import Laps
from edged.learn.ports import Router, UpdateBook
from edged.learn.proving import Prover
from edged.learn.trainer import Trainer
from edged.records import LEFT_OUT, Caller, PublishedAdapter, Update, Verdict
from edged.refusal import Refused
from engine import protocol

log = logging.getLogger(__name__)

LEARNER = Caller(name="learner", scopes=frozenset())
TRAINING_PAUSE_S = 2.0  # between attempts, when the machine lacked something
PROVING_ATTEMPTS = 3
PROVING_PAUSE_S = 1.0  # between attempts: the worker needs a moment to be started again
PROVING_WAIT_S = 60.0  # for workers to run at all; what is live cannot be changed meanwhile

# Codes of `engine.protocol.TrainFailed` and `StageFailed` that say nothing against the batch or the candidate.
TRAINING_SHORT = frozenset({"engine_error", "out_of_memory", "rank_lost", "adapter_unreadable", "bad_job"})
PROVING_SHORT = frozenset({"engine_error", "out_of_memory"})


class PutOff(RuntimeError):
    """Raised when the machine could not make or prove an update, which is then unfinished and to be given back.

    deaths: how often the trainer died under it, if that is why.
    """

    def __init__(self, why: str, *, deaths: int = 0) -> None:
        super().__init__(why)
        self.deaths = deaths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """An update on its way to a verdict. metrics: what is known so far."""

    update: Update
    job: protocol.TrainJob
    laps: Laps
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Updater:
    """Carries updates, one at a time; `candidates` is held while a candidate stands staged, also by imports."""

    def __init__(
        self,
        *,
        folders: Folders,
        updates: UpdateBook,
        trainer: Trainer,
        prover: Prover,
        router: Router,
        candidates: asyncio.Lock,
        max_attempts: Callable[[], int],
        on_stage: Callable[[Update, Literal["training", "gating"]], None],
    ) -> None:
        self._folders = folders
        self._updates = updates
        self._trainer = trainer
        self._prover = prover
        self._router = router
        self._candidates = candidates
        self._max_attempts = max_attempts
        self._on_stage = on_stage

    async def carry(self, update: Update, job: protocol.TrainJob, rated_at: float | None) -> Update:
        """The finished update. rated_at: when the last of its new ratings came, to tell how long all took.

        Raises WorkerFault if the trainer cannot start at all, and PutOff if the machine lacks what the update needs;
        the update is then unfinished, as before.
        """
        queue_s = None if rated_at is None else max(0.0, time.time() - rated_at)
        run = _Run(update=update, job=job, laps=Laps(queue_s))
        try:
            result = await self._train(run)
        except JobRefused as refused:
            run.metrics.update(_left_out(refused.left_out))
            finished = await self._finish(run, "failed", f"{refused.code}: {refused}")
        else:
            await self._updates.set_state(update.id, "gating")
            self._on_stage(update, "gating")
            finished = await self._judge(run, result)
        await asyncio.to_thread(self._folders.clear_job, update.id)
        return finished

    async def _train(self, run: _Run) -> protocol.TrainResult:
        """The trainer's result, from disk if it is there already.

        Raises JobRefused for what is wrong with the batch; PutOff, also when the trainer died every time; WorkerFault.
        """
        update, laps = run.update, run.laps
        attempts, shortages = update.attempts, 0
        while True:
            result = await self._result(update)
            if result is not None:
                laps.trained_before(result.seconds)
                return result
            if attempts >= self._max_attempts():
                raise PutOff(f"the trainer died every time: {attempts} attempts", deaths=attempts)
            await self._updates.set_state(update.id, "training")
            self._on_stage(update, "training")
            try:
                await self._trainer.start()
                laps.lap("start")
                result = await self._trainer.train(run.job.job_id, self._folders.job(update.id))
                laps.trained(result.seconds)
                return result
            except WorkerLost as lost:
                # Counted when it is seen, so that stopping or killing the daemon costs the update nothing.
                attempts += 1
                await self._updates.set_state(update.id, "training", attempts=attempts)
                log.warning("update %d, attempt %d of %d: %s", update.id, attempts, self._max_attempts(), lost)
            except JobRefused as refused:
                if refused.code not in TRAINING_SHORT:
                    laps.lap("lost")
                    raise
                shortages += 1
                log.warning("update %d, attempt %d of %d: %s", update.id, shortages, self._max_attempts(), refused)
                if shortages >= self._max_attempts():
                    raise PutOff(f"{refused.code}: {refused}") from refused
                await asyncio.sleep(TRAINING_PAUSE_S)
            laps.lap("lost")

    async def _result(self, update: Update) -> protocol.TrainResult | None:
        """What was trained already; a result that cannot be read is cleared away, and the job trained again."""
        try:
            return await asyncio.to_thread(self._folders.result, update.id)
        except protocol.WireError as error:
            log.warning("update %d is trained again: its result cannot be read: %s", update.id, error)
            await asyncio.to_thread(self._folders.clear_result, update.id)
            return None

    async def _judge(self, run: _Run, result: protocol.TrainResult) -> Update:
        """The finished update. While the serve worker is not free, others may change what is live."""
        while True:
            async with self._candidates:
                run.laps.lap("wait")
                try:
                    return await self._prove_and_publish(run, result)
                except WorkerBusy as busy:
                    log.info("v%d: proving waits: %s", run.update.version, busy)
            await asyncio.sleep(PROVING_PAUSE_S)
            run.laps.lap("wait")

    async def _prove_and_publish(self, run: _Run, result: protocol.TrainResult) -> Update:
        update, metrics = run.update, run.metrics
        metrics |= result.metrics | result.usage
        metrics |= _left_out(result.dropped)
        candidate = await asyncio.to_thread(self._folders.candidate, update.id, update.version)
        metrics["bytes/written"] = float(await asyncio.to_thread(self._bytes_written, update, candidate))
        try:
            judgement = await self._prove(
                protocol.AdapterRef(version=update.version, folder=str(candidate)), run.job.parent, result
            )
        except WorkerDown as down:
            run.laps.lap("wait")
            return await self._finish(run, "skipped", f"it could not be proved: {down}")
        except Refused as refused:  # another version went live meanwhile, so there is nothing to compare it with
            run.laps.lap("gate")
            return await self._finish(run, "skipped", str(refused))
        run.laps.lap("gate")
        metrics |= judgement.metrics
        if not judgement.accepted:
            return await self._finish(run, "refused", judgement.reason)
        return await self._publish(run, judgement.reason)

    def _bytes_written(self, update: Update, candidate: Path) -> int:
        out = self._folders.job(update.id) / protocol.OUT_FOLDER
        return bytes_under(out) + (0 if candidate.is_relative_to(out) else bytes_under(candidate))

    async def _prove(
        self, candidate: protocol.AdapterRef, parent: protocol.AdapterRef, result: protocol.TrainResult
    ) -> gate.Judgement:
        """The gate's judgement. A worker that dies under the candidate every time speaks against the candidate.

        Raises WorkerDown if the workers did not run for PROVING_WAIT_S, WorkerBusy if the serve worker is not free,
        Refused if the parent is not live any more, and PutOff if the machine could not prove it.
        """
        deaths = shortages = 0
        give_up_at = time.monotonic() + PROVING_WAIT_S
        while deaths < PROVING_ATTEMPTS:
            try:
                await self._trainer.start()
                return await self._prover.prove(candidate, parent, result)
            except JobRefused as refused:
                if refused.code not in PROVING_SHORT:
                    return gate.Judgement(accepted=False, reason=f"a worker refused it: {refused}", metrics={})
                shortages += 1
                log.warning(
                    "v%d: proving, attempt %d of %d: %s", candidate.version, shortages, PROVING_ATTEMPTS, refused
                )
                if shortages >= PROVING_ATTEMPTS:
                    raise PutOff(f"it could not be proved: {refused}") from refused
            except WorkerDown as down:  # nothing was tried: a worker is just being started
                if time.monotonic() >= give_up_at:
                    raise
                log.info("v%d: proving waits: %s", candidate.version, down)
            except WorkerLost as lost:
                deaths += 1
                log.warning("v%d: proving, death %d of %d: %s", candidate.version, deaths, PROVING_ATTEMPTS, lost)
            await asyncio.sleep(PROVING_PAUSE_S)
        return gate.Judgement(accepted=False, reason="a worker died under it every time it was tried", metrics={})

    async def _publish(self, run: _Run, reason: str) -> Update:
        update, laps, metrics = run.update, run.laps, run.metrics
        candidate = await asyncio.to_thread(self._folders.candidate, update.id, update.version)
        checkpoint = self._folders.job(update.id) / protocol.OUT_FOLDER / "checkpoint"
        folder, sha256 = await asyncio.to_thread(self._folders.publish, candidate, checkpoint, update.version)
        try:
            finished = await self._updates.finish(
                update.id,
                verdict="published",
                reason=reason,
                seconds=laps.seconds,
                metrics=metrics,
                now=time.time(),
                publish=PublishedAdapter(folder=folder, sha256=sha256, metrics=metrics),
                caller=LEARNER,
            )
        except Refused as refused:
            await asyncio.to_thread(self._folders.withdraw, update.version)
            laps.lap("publish")
            return await self._finish(run, "skipped", str(refused))
        await asyncio.to_thread(self._folders.write_current, update.version)
        laps.lap("publish")
        swap_ms = await self._router.go_live()
        laps.lap("wait" if swap_ms is None else "swap")
        if swap_ms is not None:
            metrics["swap_ms"] = swap_ms
            laps.live()
        return await self._updates.measured(finished.id, laps.seconds, metrics)

    async def _finish(self, run: _Run, verdict: Verdict, reason: str) -> Update:
        return await self._updates.finish(
            run.update.id,
            verdict=verdict,
            reason=reason,
            seconds=run.laps.seconds,
            metrics=run.metrics,
            now=time.time(),
            publish=None,
            caller=LEARNER,
        )


def _left_out(counts: Mapping[str, int]) -> dict[str, float]:
    """Reason -> answers that the trainer could not use, as figures of the update."""
    return {LEFT_OUT + reason: float(count) for reason, count in counts.items()}
