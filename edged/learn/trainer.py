"""The client of the train worker: Score and Train as awaitable calls.

The worker is started on demand and stays while somebody wants it; what starts and stops it lives in
`edged.learn.learner`. A worker that dies ends what is under way with `WorkerLost`; the job folder is still there, and
the same job may be given to the next worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edged.failure import JobRefused, WorkerFault, WorkerLost
from edged.readiness import Readiness
from edged.underway import Underway
from engine import protocol


class TrainEngine(Protocol):
    """The train worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def want(self) -> None: ...

    def unwant(self) -> None: ...

    def send(self, message: protocol.Message) -> None: ...


class Trainer:
    """Lives on the event loop; `ready`, `down`, `fault` and `received` are called by its owner."""

    def __init__(
        self, engine: TrainEngine, *, start_timeout_s: float, on_progress: Callable[[protocol.Progress], None]
    ):
        self._engine = engine
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._readiness = Readiness(engine)
        self._underway = Underway(engine, "train")
        self._numbers = itertools.count(1)

    @property
    def is_ready(self) -> bool:
        return self._engine.is_ready

    @property
    def is_working(self) -> bool:
        """Whether it has work that it has not answered."""
        return not self._underway.is_empty

    async def start(self) -> None:
        """Returns once the worker is ready. Raises WorkerFault, WorkerLost."""
        try:
            fault = await self._readiness.start(self._start_timeout_s)
        except TimeoutError:
            raise WorkerLost(f"the train worker was not ready within {self._start_timeout_s:g} s") from None
        if fault is not None:
            raise WorkerFault(fault.code, fault.message)

    def warm_up(self) -> None:
        """Start the worker without waiting for it."""
        self._engine.want()

    async def score(
        self, episodes: tuple[protocol.EpisodeTokens, ...], reference: protocol.AdapterRef
    ) -> tuple[protocol.EpisodeScore, ...]:
        """Scores of `episodes`; the trainer also keeps what it computed for a coming update. Raises WorkerLost."""
        job_id = f"score-{next(self._numbers)}"
        answer = await self._underway.call(
            job_id, protocol.Score(job_id=job_id, episodes=episodes, reference=reference)
        )
        match answer:
            case protocol.Scored():
                return answer.scores
            case protocol.TrainFailed():
                raise JobRefused(answer.code, answer.message)
            case _:
                raise WorkerLost(f"the train worker answered Score with {type(answer).__name__}")

    async def train(self, job_id: str, folder: Path) -> protocol.TrainResult:
        """Run the job in `folder`. Raises JobRefused, WorkerLost."""
        answer = await self._underway.call(job_id, protocol.Train(job_id=job_id, folder=str(folder)))
        match answer:
            case protocol.Trained():
                return answer.result
            case protocol.TrainFailed():
                counts = {reason: n for reason, n in answer.details.items() if isinstance(n, int)}
                raise JobRefused(answer.code, answer.message, counts)
            case _:
                raise WorkerLost(f"the train worker answered Train with {type(answer).__name__}")

    def ready(self) -> None:
        """A worker is ready."""
        self._readiness.ready()

    def fault(self, fault: protocol.Fault) -> None:
        """The worker said that it cannot do its role; it is not started again until somebody asks."""
        self._readiness.fault(fault)

    def down(self) -> None:
        """The worker is gone."""
        self._readiness.down()
        self._underway.lose()

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the train worker; False if it is none of Scored, Progress, Trained, TrainFailed."""
        match message:
            case protocol.Progress():
                self._on_progress(message)
                return True
            case protocol.Scored() | protocol.Trained() | protocol.TrainFailed():
                self._underway.answer(message.job_id, message)
                return True
            case _:
                return False
