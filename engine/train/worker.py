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
    from engine.train.ranks.leader import Leader

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
    leader = link.beat_while(lambda: _load(start), "loading the model")
    link.send(Ready(load_s=time.monotonic() - began))
    try:
        _Loop(link, leader).turn()
    finally:
        leader.close()


def enter_idle_class() -> None:
    """Run only when no ordinary thread wants the core. Inherited by every thread started from here on.

    The scheduler shares the cores between groups of processes first (one a session, see sched(7) on autogroups), and
    only then within a group. The group that this worker is alone in gets a weight of about a tenth of another one's,
    so that learning goes on, slowly, on a box that is never idle.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a kernel without autogroups
        AUTOGROUP.write_text(AUTOGROUP_NICE)


def _load(start: StartTrain) -> Leader:
    from engine.fusion import compile_fusibles
    from engine.train.ranks.leader import Leader

    if start.fuse:
        compile_fusibles()
    return Leader(start)


class _Loop:
    """Messages in, answers out. `waiting` holds what came while a piece of work was running."""

    def __init__(self, link: Link, leader: Leader) -> None:
        self._link = link
        self._leader = leader
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
                    self._leader.pace(message)
                case _:
                    log.warning("a train worker does not take %s", type(message).__name__)

    def _receive(self) -> Message | None:
        self._link.beat()
        return self._link.receive(self._link.until_next_beat_s())

    def _tick(self, busy: str) -> None:
        """Between pieces of work. Raises Stopped and LinkLost."""
        self._link.beat(busy)
        while (message := self._link.receive(0)) is not None:
            match message:
                case Stop():
                    raise Stopped
                case Pace():
                    self._leader.pace(message)
                case _:
                    self._waiting.append(message)

    def _score(self, message: Score) -> None:
        from engine.train.ranks.group import RankLost

        try:
            scores = self._leader.score(message, lambda: self._tick("scoring"))
        except (EngineFault, RankLost) as error:
            # An adapter of the episodes was collected meanwhile, or a process was killed: nothing to know about them,
            # and the update that needs them computes it.
            log.warning("score %s: %s", message.job_id, error)
            scores = []
        self._link.send(Scored(job_id=message.job_id, scores=tuple(scores)))

    def _train(self, message: Train) -> None:
        from engine.train.job import JobFailed

        def tick(stage: str, done: int, total: int) -> None:
            self._tick(stage)
            if total:
                self._link.send(Progress(job_id=message.job_id, stage=stage, done=done, total=total))

        try:
            result = self._leader.train(Path(message.folder), tick)
        except JobFailed as failure:
            log.warning("job %s failed: %s", message.job_id, failure.message)
            self._link.send(
                TrainFailed(
                    job_id=message.job_id, code=failure.code, message=failure.message, details=dict(failure.details)
                )
            )
        else:
            self._link.send(Trained(job_id=message.job_id, result=result))
        self._leader.return_free_memory()
