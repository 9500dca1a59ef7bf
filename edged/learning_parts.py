"""Learning put together: the trainer and its worker, the learner with what it reads and writes, what runs beside it.

Built by `edged.assembly`, which passes on what others tell. Serving is known here by what is passed in: where a
candidate is routed, and what the serve worker said of its model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from edged import resolved
from edged.base_model import BaseModel
from edged.control import PAUSED_FILE
from edged.learn.ages import ages
from edged.learn.anchor import Rules as AnchorRules
from edged.learn.calibrating import Calibration
from edged.learn.folders import Folders
from edged.learn.forgetting import forget_removed
from edged.learn.importing import Importer
from edged.learn.learner import Learner
from edged.learn.pacing import Activity, Pacing
from edged.learn.proving import Prover
from edged.learn.reference import Reference
from edged.learn.scoring import Scorer
from edged.learn.tokenising import Tokenising
from edged.learn.trainer import Trainer
from edged.learn.updating import Updater
from edged.placing import Placing
from edged.records import Update
from edged.serve.routing import Routing
from edged.serve.tokenising import Tokeniser
from edged.settings import Settings
from edged.store.store import Store
from edged.system.resting import Resting, Sleeper
from edged.system.workers import Role, Worker, Workers
from engine import protocol

log = logging.getLogger(__name__)

TRAIN_OOM_SCORE_ADJ = 500  # when memory runs out, the trainer goes before anything that answers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Who hears of learning. changed: something that a status shows. published: an event and its data. finished: an
    update has its verdict."""

    changed: Callable[[], None]
    learner_changed: Callable[[], None]
    published: Callable[[str, dict[str, Any]], None]
    finished: Callable[[Update], None]


class LearningParts:
    """The parts of learning. `candidates` is held by whoever proves an adapter: one at a time."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        state_folder: Path,
        model: BaseModel,
        store: Store,
        folders: Folders,
        workers: Workers,
        placing: Placing,
        serve_worker: Worker,
        serve_facts: Callable[[], protocol.Ready | None],
        routing: Routing,
        candidates: asyncio.Lock,
        tokeniser: Tokeniser,
        is_stopping: Callable[[], bool],
        resting: Resting,
        heard: Heard,
    ) -> None:
        self._settings = settings
        self._state_folder = state_folder
        self._model = model
        self._store = store
        self._folders = folders
        self._workers = workers
        self._placing = placing
        self._serve_worker = serve_worker
        self._serve_facts = serve_facts
        self._routing = routing
        self._is_stopping = is_stopping
        self._resting = resting
        self._heard = heard
        self._candidates = candidates
        self.reference = self._build_reference()
        self._build_trainer()
        self._build_learner()
        self.tokenising = Tokenising(store.written, tokeniser, base_sha256=model.sha256, on_tokenised=self.learner.wake)
        self.scorer = Scorer(
            self.trainer,
            store.episodes,
            folders,
            base_sha256=model.sha256,
            versions=self._near,
            reference=self.reference.version,
        )

    def loops(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Name -> what runs until it is cancelled."""
        return {
            "learner": self.learner.run,
            "scorer": self.scorer.run,
            "calibration": self.calibration.run,
            "tokenising": self.tokenising.run,
            "reference": self.reference.run,
        }

    def importer(self) -> Importer:
        """What brings adapters from outside, past the same gate."""
        return Importer(
            folders=self._folders,
            lineage=self._store.lineage,
            trainer=self.trainer,
            prover=self._prover,
            router=self._routing,
            candidates=self._candidates,
            base=self._model.shape,
            base_sha256=self._model.sha256,
            base_name=self._model.name,
            lora=resolved.lora(self._settings(), self._model.shape),
            is_stopping=self._is_stopping,
            awake=lambda: self._resting.awake("serve", self._settings().serve.start_timeout_s),
        )

    @property
    def needs_serving(self) -> bool:
        """Whether the serve worker has a part in what learning does now or at once."""
        return self.is_updating or (self.calibration.is_pending and self.trainer.is_ready)

    @property
    def is_updating(self) -> bool:
        """Whether an update trains or is judged."""
        return self.learner.state in ("training", "gating")

    # ------------------------------------------------------------------------------------------------------- building

    def _build_reference(self) -> Reference:
        return Reference(
            self._store.anchors,
            self._store.lineage,
            self._folders,
            rules=lambda: AnchorRules(
                configured=self._settings().learn.reference, ratings=self._settings().learn.reanchor_ratings
            ),
            base_sha256=self._model.sha256,
            on_moved=self._reference_moved,
        )

    def _build_trainer(self) -> None:
        learn = self._settings().learn
        self._train_worker = self._workers.add(
            Role(
                name="train",
                role="train",
                limits=resolved.worker_limits(learn.start_timeout_s, learn.hang_timeout_s),
                start=self._start_train,
                on_ready=self._train_ready,
                on_message=self._train_said,
                on_down=lambda why: self.trainer.down(),
                on_fault=lambda fault: self.trainer.fault(fault),
                oom_score_adj=TRAIN_OOM_SCORE_ADJ,
            )
        )
        self._resting.add(
            Sleeper(
                name="train",
                worker=self._train_worker,
                in_use=lambda: self.trainer.is_working or self.is_updating,
                keep_warm_s=lambda: resolved.train_keeps_warm_s(self._settings(), self._placing.training),
            )
        )
        self.trainer = Trainer(self._train_worker, start_timeout_s=learn.start_timeout_s, on_progress=self._progressed)
        self.pacing = Pacing(
            self._train_worker,
            activity=self._training_activity,
            targets=lambda: resolved.pace_targets(self._settings()),
        )
        self._prover = Prover(
            self._routing,
            self.trainer,
            self._store.lineage,
            lambda: resolved.proving(self._settings()),
            self.eos_ids,
            self._model.shape,
            self._model.sha256,
        )
        self.calibration = Calibration(
            self._routing,
            self.trainer,
            self._store.lineage,
            candidates=self._candidates,
            base_sha256=self._model.sha256,
            trainer_kind=lambda: resolved.trainer_kind(self._settings()),
            is_serving=lambda: self._serve_worker.is_ready,
        )

    def _build_learner(self) -> None:
        self.learner = Learner(
            settings=lambda: dataclasses.replace(
                resolved.learning(self._settings(), self._model.shape),
                reference=self.reference.version(),
                plan=self._placing.training,
            ),
            base_sha256=self._model.sha256,
            probes=self._probes,
            ratings=self._store.feedback,
            episodes=self._store.episodes,
            written=self._store.written,
            practice_book=self._store.practice,
            updates=self._store.updates,
            lineage=self._store.lineage,
            folders=self._folders,
            trainer=self.trainer,
            updater=self._build_updater(),
            calibration=self.calibration,
            on_change=self._heard.learner_changed,
            on_finished=self._finished,
        )
        self.learner.switches.paused = (self._state_folder / PAUSED_FILE).exists()

    def _build_updater(self) -> Updater:
        return Updater(
            folders=self._folders,
            updates=self._store.updates,
            trainer=self.trainer,
            prover=self._prover,
            router=self._routing,
            candidates=self._candidates,
            max_attempts=lambda: self._settings().learn.max_attempts,
            on_stage=lambda update, stage: self.learner.stage(update, stage),
        )

    # -------------------------------------------------------------------------------------------------- what happened

    def serve_ready(self) -> None:
        """The serve worker answers again."""
        self.tokenising.wake()
        self.calibration.wake()
        self.learner.wake()

    def changed(self) -> None:
        """The settings have changed."""
        self.learner.wake()
        self.reference.wake()

    def rated(self, *, is_corrected: bool) -> None:
        """A person has rated; with a correction, or without."""
        self.learner.wake()
        self.reference.wake()
        if is_corrected:
            self._resting.used("serve")
            self.tokenising.wake()

    async def forget_removed(self) -> None:
        """Answers of a user were removed: so is what was made of them."""
        await forget_removed(self._store.episodes, self._store.written, self._folders)

    def close(self) -> None:
        """The daemon is stopping."""
        self._train_worker.unwant()

    async def _near(self) -> frozenset[int]:
        """The versions whose answers may be trained on."""
        lineage = self._store.lineage
        return ages(await lineage.parents(), lineage.live().version).within(self._settings().learn.staleness)

    async def _start_train(self) -> protocol.Message:
        cache = str(self._state_folder / "cache")
        return resolved.start_train(self._settings(), self._model, cache, self._placing.training)

    def _training_activity(self) -> Activity:
        if self._train_worker.state.phase == "starting":
            return "starting"
        return "training" if self.trainer.is_working else "idle"

    def _train_ready(self, ready: protocol.Ready) -> None:
        self.trainer.ready()
        self.pacing.trainer_ready()
        self.calibration.wake()
        self.scorer.wake()
        self._heard.changed()

    def _train_said(self, message: protocol.Message) -> None:
        if not self.trainer.received(message):
            log.warning("the train worker sent a %s that nobody expects", type(message).__name__)

    def _progressed(self, progress: protocol.Progress) -> None:
        self.learner.progress = progress
        data = {"stage": progress.stage, "done": progress.done, "total": progress.total}
        self._heard.published("progress", data)

    def _reference_moved(self) -> None:
        self.learner.wake()
        self._heard.changed()

    def _finished(self, update: Update) -> None:
        self._heard.finished(update)
        self.scorer.wake()

    # --------------------------------------------------------------------------------------- what the serve worker said

    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer; none before the first serve worker is ready."""
        facts = self._serve_facts()
        return frozenset() if facts is None or facts.model is None else frozenset(facts.model.eos_ids)

    def _probes(self) -> tuple[protocol.ProbeTokens, ...]:
        facts = self._serve_facts()
        return () if facts is None else facts.probes
