"""What all parts of the daemon say at one moment, as `edged.status` shows it. No I/O: everything is held in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from edged import __version__, machine, status
from edged.base_model import BaseModel
from edged.deep_parts import DeepParts
from edged.learn.calibrating import Calibration
from edged.learn.learner import Learner
from edged.learn.reference import Reference
from edged.placing import Placing
from edged.practice_parts import PracticeParts
from edged.serve.answers import Answers
from edged.serve.routing import Routing
from edged.settings import Settings
from edged.store.store import Store
from edged.system.workers import Worker, Workers
from edged.ttft import FirstTokens
from edged.watch_parts import WatchParts


class Readings:
    """Built once, read at every status and scrape."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        model: BaseModel,
        store: Store,
        workers: Workers,
        routing: Routing,
        answers: Answers,
        learner: Learner,
        calibration: Calibration,
        reference: Reference,
        practice: PracticeParts,
        deep: DeepParts,
        placing: Placing,
        watch: WatchParts,
        current_trouble: Callable[[], str],
        first_tokens: Callable[[], FirstTokens],
    ) -> None:
        self._settings = settings
        self._model = model
        self._store = store
        self._workers = workers
        self._routing = routing
        self._answers = answers
        self._learner = learner
        self._calibration = calibration
        self._reference = reference
        self._practice = practice
        self._deep = deep
        self._placing = placing
        self._watch = watch
        self._current_trouble = current_trouble
        self._first_tokens = first_tokens
        self._started_at = time.time()

    def _dropped(self) -> dict[str, int]:
        """Reason -> ratings, pairs and corrections that no update can use, or not on this base model."""
        dropped = self._store.feedback.drop_counts()
        for reason, number in {**self._learner.written.dropped, "other_base": self._learner.elsewhere}.items():
            if number:
                dropped[reason] = dropped.get(reason, 0) + number
        return dropped

    def parts(self) -> status.Parts:
        """Everything that a status shows, as it is now."""
        learner, store = self._learner, self._store
        feedback_rows, ratings = store.feedback.counts()
        progress, current_trouble = learner.progress, self._current_trouble()
        return status.Parts(
            version=__version__,
            started_at=self._started_at,
            model_name=self._model.name,
            model_sha256=self._model.sha256,
            live=store.lineage.live(),
            serving=self._routing.serving,
            learner_state=learner.state,
            learner_why=learner.why,
            ratings_until_update=learner.ratings_until_update,
            batch_ratings=self._settings().learn.batch_ratings,
            progress=None if progress is None else (progress.stage, progress.done, progress.total),
            updates_total=store.updates.count_finished(),
            latest=store.updates.latest_finished(),
            reference=self._reference.version(),
            anchor=self._reference.anchor(),
            practice=self._practice.view(),
            deep=self._deep.view(),
            dropped=self._dropped(),
            left_out=store.updates.left_out(),
            alarms=(*learner.alarms, current_trouble) if current_trouble else learner.alarms,
            noise=self._calibration.noise,
            noise_why=self._calibration.why,
            written=learner.written,
            active=self._answers.active,
            queued=self._answers.queued,
            counters=self._answers.counters(),
            first_tokens=self._first_tokens(),
            episodes=store.episodes.count(),
            feedback=feedback_rows,
            ratings=ratings,
            placement=self._placing.why,
            workers=tuple(
                status.WorkerView(
                    name=worker.role.name,
                    pid=worker.pid,
                    state=worker.state.phase,
                    rss_bytes=worker.rss_bytes,
                    busy=worker.busy,
                    restarts=max(0, worker.state.epoch - 1),
                    ranks=self._ranks(worker),
                    fault=worker.fault,
                )
                for worker in self._workers.all()
            ),
            daemon_rss_bytes=machine.own_rss_bytes(),
            watch=self._watch.view(),
            files=self._watch.files(),
        )

    def _ranks(self, worker: Worker) -> tuple[tuple[int, int], ...]:
        """Of the trainer, if its plan has several processes; they are not looked for otherwise."""
        if worker.pid is None or worker.role.role != "train" or len(self._placing.training.devices) < 2:
            return ()
        return machine.children(worker.pid)
