"""The train worker's loop: load the base, then score and train as the daemon asks, one thing at a time.

It holds no state that matters: what it has cached can be computed again, and a job is a folder. Between pieces of work
it beats and looks for Stop, so it can be told to end in the middle of an update; the job folder then still holds the
job.

torch is imported only after the scheduling class is set, because threads inherit it from the one that starts them.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.fault import EngineFault
from engine.link import Link, Stopped
from engine.protocol import Message, Pace, Progress, Ready, Score, Scored, StartTrain, Stop, Train, Trained, TrainFailed

if TYPE_CHECKING:
    from engine.train.scorer import Scorer

log = logging.getLogger(__name__)

AUTOGROUP = Path("/proc/self/autogroup")
AUTOGROUP_NICE = "10"  # weight 110, where a group's usual weight is 1024


def run(link: Link, start: StartTrain) -> None:
    """Serve the train role until Stop.

    Raises:
        EngineFault: the base cannot be loaded as asked.
        Stopped: Stop came during a piece of work; LinkLost: the daemon is gone.
    """
    if start.idle_class:
        enter_idle_class()
    began = time.monotonic()
    scorer = link.beat_while(lambda: _load(start), "loading the model")
    link.send(Ready(load_s=time.monotonic() - began))
    _Loop(link, start, scorer).turn()


def enter_idle_class() -> None:
    """Run only when no ordinary thread wants the core. Inherited by every thread started from here on.

    The scheduler shares the cores between groups of processes first (one a session, see sched(7) on autogroups), and
    only then within a group. The group that this worker is alone in gets a weight of about a tenth of another one's,
    so that learning goes on, slowly, on a box that is never idle.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a kernel without autogroups
        AUTOGROUP.write_text(AUTOGROUP_NICE)


def _load(start: StartTrain) -> Scorer:
    import torch

    from engine.fusion import compile_fusibles
    from engine.models import load_base
    from engine.train.device import choose_held, open_device
    from engine.train.lanes import Lanes
    from engine.train.scorer import Scorer

    device = open_device(start.device)
    if start.fuse:
        compile_fusibles()
    try:
        held = choose_held(start.base_weights, device, start.model_path, start.dtype)
        base = load_base(start.model_path, start.base_sha256, start.cache_folder, start.dtype, str(device), held)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EngineFault("out_of_memory", f"{start.model_path}: {error}") from error
    log.info("the base is held %s on %s", held, device)
    return Scorer(base, start.lora.layers, Lanes(start.threads, device))


class _Loop:
    """Messages in, answers out. `waiting` holds what came while a piece of work was running."""

    def __init__(self, link: Link, start: StartTrain, scorer: Scorer) -> None:
        self._link = link
        self._start = start
        self._scorer = scorer
        self._waiting: collections.deque[Message] = collections.deque()

    def turn(self) -> None:
        while True:
            message = self._waiting.popleft() if self._waiting else self._receive()
            match message:
                case None:
                    continue
                case Stop():
                    return
                case Score():
                    self._score(message)
                case Train():
                    self._train(message)
                case Pace():
                    self._scorer.lanes.pauses.set_share(message.share)
                case _:
                    log.warning("a train worker does not take %s", type(message).__name__)

    def _receive(self) -> Message | None:
        self._link.beat()
        return self._link.receive(self._link.until_next_beat_s())

    def _tick(self, busy: str) -> None:
        """Between pieces of work. Raises Stopped and LinkLost."""
        self._link.beat(busy)
        message = self._link.receive(0)
        if isinstance(message, Stop):
            raise Stopped
        if isinstance(message, Pace):
            self._scorer.lanes.pauses.set_share(message.share)
            return
        if message is not None:
            self._waiting.append(message)

    def _score(self, message: Score) -> None:
        try:
            scores = self._scorer.score(message.episodes, message.reference, lambda: self._tick("scoring"))
        except EngineFault as fault:
            # An adapter of the episodes was collected meanwhile: nothing to know about them, nothing broken.
            log.warning("score %s: %s", message.job_id, fault.message)
            scores = []
        self._link.send(Scored(job_id=message.job_id, scores=tuple(scores)))

    def _train(self, message: Train) -> None:
        from engine.train.device import return_free_memory
        from engine.train.job import JobFailed, run_job
        from engine.train.shortage import return_free_memory

        def tick(stage: str, done: int, total: int) -> None:
            self._tick(stage)
            if total:
                self._link.send(Progress(job_id=message.job_id, stage=stage, done=done, total=total))

        try:
            result = run_job(Path(message.folder), self._scorer, self._start.base_sha256, tick)
        except JobFailed as failure:
            log.warning("job %s failed: %s", message.job_id, failure.message)
            self._link.send(
                TrainFailed(
                    job_id=message.job_id, code=failure.code, message=failure.message, details=dict(failure.details)
                )
            )
        else:
            self._link.send(Trained(job_id=message.job_id, result=result))
        return_free_memory(self._scorer.base.device)
