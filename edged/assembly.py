"""The parts of the daemon put together: what each is given, and who hears of what the workers say.

Built once by `edged.daemon`, which starts and stops it. No part looks up another; what they need of each other is
passed in here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from edged import resolved, status
from edged.api.app import build_app
from edged.api.control import update_object
from edged.api.feedback import feedback_object
from edged.base_model import BaseModel
from edged.control import PAUSED_FILE, Operator
from edged.failure import ADAPTER_FAULTS
from edged.fallback import Fallback
from edged.learn.anchor import Rules as AnchorRules
from edged.learn.calibrating import Calibration
from edged.learn.folders import Folders
from edged.learn.forgetting import forget_removed
from edged.learn.importing import Importer
from edged.learn.learner import Learner
from edged.learn.pacing import Pacing
from edged.learn.proving import Prover
from edged.learn.reference import Reference
from edged.learn.scoring import Scorer
from edged.learn.tokenising import Tokenising
from edged.learn.trainer import Trainer
from edged.learn.updating import Updater
from edged.placing import Placing
from edged.practice_parts import PracticeParts
from edged.ratings import Ratings
from edged.readings import Readings
from edged.records import Episode, Feedback, Live, Update
from edged.removal import RecordedAnswers
from edged.serve.admission import Limits as AdmissionLimits
from edged.serve.answers import Answers
from edged.serve.routing import Routing
from edged.serve.staging import Staging
from edged.serve.tokenising import Tokeniser
from edged.serve.translation import Serving
from edged.settings import Settings
from edged.store.store import Store
from edged.system.broadcast import Broadcast
from edged.system.workers import Role, Workers
from engine import protocol

log = logging.getLogger(__name__)

TRAIN_OOM_SCORE_ADJ = 500  # when memory runs out, the trainer goes before anything that answers


class Assembly:
    """Everything but the process's own life: workers, answers, learning, and the operator's commands.

    `settings` is asked at each use, so that a reload takes effect. `served` is set when the first serve worker is
    ready, or said that it never will be (`serve_fault`).
    """

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
    ) -> None:
        self._settings = settings
        self._state_folder = state_folder
        self._model = model
        self._store = store
        self._folders = folders
        self._workers = workers
        self.placing = placing
        self._candidates = asyncio.Lock()
        self._serve_facts: protocol.Ready | None = None
        self._fallback = Fallback(store.lineage, folders)
        self._started_on = 0  # the version that the serve worker was told to start with
        self.serve_fault: protocol.Fault | None = None
        self.served = asyncio.Event()
        self.is_stopping = False
        self.events = Broadcast()
        self._build_serving()
        self._build_learning()
        self.practice = PracticeParts(
            settings,
            model=model,
            store=store,
            workers=workers,
            cache_folder=state_folder / "cache",
            serve_worker=self.serve_worker,
            learner=self.learner,
            is_stopping=lambda: self.is_stopping,
            on_change=self._announce_status,
        )
        self.readings = Readings(
            self._settings,
            model=model,
            store=store,
            workers=workers,
            routing=self.routing,
            answers=self.answers,
            learner=self.learner,
            calibration=self.calibration,
            reference=self.reference,
            practice=self.practice,
            placing=self.placing,
        )
        self._build_operator()

    def app(self) -> FastAPI:
        """The HTTP application on these parts."""
        return build_app(
            answers=self.answers,
            feedback=Ratings(self._store.feedback, self._rated, self.tokenising.wake),
            episodes=RecordedAnswers(
                self._store.episodes,
                self._forget_removed,
            ),
            control=self._operator,
            keys=self._store.keys,
            settings=resolved.LiveApiSettings(self._settings),
        )

    # ------------------------------------------------------------------------------------------------ building

    def _build_serving(self) -> None:
        serve = self._settings().serve
        self.serve_worker = self._workers.add(
            Role(
                name="serve",
                role="serve",
                limits=resolved.worker_limits(serve.start_timeout_s, serve.hang_timeout_s),
                start=self._start_serve,
                on_ready=self._serve_ready,
                on_message=self._serve_said,
                on_down=self._serve_down,
                on_fault=self._serve_faulted,
            )
        )
        self.answers = Answers(
            Serving(model=self._model.name, base_sha256=self._model.sha256, wait_s=serve.start_timeout_s),
            lambda: AdmissionLimits(slots=serve.slots, max_queue=self._settings().serve.max_queue),
            lambda: self._settings().serve.default_max_tokens,
            self.serve_worker,
            self._store.episodes,
            self._episode_recorded,
            lambda: self.practice.users(self.answers.active),
        )
        self._staging = Staging(self.serve_worker)
        self._tokeniser = Tokeniser(self.serve_worker)
        self.routing = Routing(self._staging, self._live_adapter, self._replace, self._announce_status)

    def _build_learning(self) -> None:
        self.reference = Reference(
            self._store.anchors,
            self._store.lineage,
            self._folders,
            rules=lambda: AnchorRules(
                configured=self._settings().learn.reference, ratings=self._settings().learn.reanchor_ratings
            ),
            base_sha256=self._model.sha256,
            on_moved=self._reference_moved,
        )
        self._build_trainer()
        self._prover = Prover(
            self.routing,
            self._trainer,
            self._store.lineage,
            lambda: resolved.proving(self._settings()),
            self._eos_ids,
            self._model.shape,
            self._model.sha256,
        )
        self.calibration = Calibration(
            self.routing,
            self._trainer,
            self._store.lineage,
            candidates=self._candidates,
            base_sha256=self._model.sha256,
            trainer_kind=lambda: resolved.trainer_kind(self._settings()),
            is_serving=lambda: self.serve_worker.is_ready,
        )
        self.learner = Learner(
            settings=lambda: dataclasses.replace(
                resolved.learning(self._settings(), self._model.shape),
                reference=self.reference.version(),
                plan=self.placing.training,
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
            trainer=self._trainer,
            updater=self._build_updater(),
            calibration=self.calibration,
            on_change=self._learner_changed,
            on_finished=self._update_finished,
        )
        self.learner.switches.paused = (self._state_folder / PAUSED_FILE).exists()
        self.tokenising = Tokenising(
            self._store.written,
            self._tokeniser,
            base_sha256=self._model.sha256,
            on_tokenised=self.learner.wake,
        )
        self.scorer = Scorer(
            self._trainer,
            self._store.episodes,
            self._folders,
            base_sha256=self._model.sha256,
            oldest_version=lambda: max(0, self._store.lineage.live().version - self._settings().learn.staleness),
            reference=self.reference.version,
        )

    def _build_trainer(self) -> None:
        learn = self._settings().learn
        self.train_worker = self._workers.add(
            Role(
                name="train",
                role="train",
                limits=resolved.worker_limits(learn.start_timeout_s, learn.hang_timeout_s),
                start=self._start_train,
                on_ready=self._train_ready,
                on_message=self._train_said,
                on_down=lambda why: self._trainer.down(),
                on_fault=lambda fault: self._trainer.fault(fault),
                oom_score_adj=TRAIN_OOM_SCORE_ADJ,
            )
        )
        self._trainer = Trainer(self.train_worker, start_timeout_s=learn.start_timeout_s, on_progress=self._progressed)
        self._pacing = Pacing(
            self.train_worker,
            is_training=lambda: self._trainer.is_working,
            min_share=lambda: self._settings().learn.min_share,
        )

    def _build_updater(self) -> Updater:
        return Updater(
            folders=self._folders,
            updates=self._store.updates,
            trainer=self._trainer,
            prover=self._prover,
            router=self.routing,
            candidates=self._candidates,
            max_attempts=lambda: self._settings().learn.max_attempts,
            on_stage=lambda update, stage: self.learner.stage(update, stage),
        )

    def _build_operator(self) -> None:
        importer = Importer(
            folders=self._folders,
            lineage=self._store.lineage,
            trainer=self._trainer,
            prover=self._prover,
            router=self.routing,
            candidates=self._candidates,
            base=self._model.shape,
            base_sha256=self._model.sha256,
            base_name=self._model.name,
            lora=resolved.lora(self._settings(), self._model.shape),
            is_stopping=lambda: self.is_stopping,
        )
        self._operator = Operator(
            state_folder=self._state_folder,
            base=self._model.shape,
            model_name=self._model.name,
            complaint_about=self._folders.complaint_about,
            lineage=self._store.lineage,
            update_list=self._store.updates,
            audit_log=self._store.audit,
            learner=self.learner,
            router=self.routing,
            importer=importer,
            candidates=self._candidates,
            parts=self.readings.parts,
            readiness=self._readiness,
            subscribe=self.events.subscribe,
            announce=self.events.publish,
        )

    # -------------------------------------------------------------------------------------------- serve worker

    async def _start_serve(self) -> protocol.Message:
        before = self._store.lineage.live()
        live = await self._fallback.servable()
        if live != before:
            self._tell_live(live)
        self._started_on = live.version
        return resolved.start_serve(self._settings(), self._model, self._live_adapter())

    def _live_adapter(self) -> protocol.AdapterRef:
        """What is live, as workers are told of it. That its files are there is not said."""
        version = self._store.lineage.live().version
        folder = None if version == 0 else str(self._folders.adapters / self._store.lineage.folder(version))
        return protocol.AdapterRef(version=version, folder=folder)

    async def _replace(self, version: int, why: str) -> None:
        """The engine will not serve `version`: make live what it can serve."""
        self._fallback.condemn(version, why)
        self._tell_live(await self._fallback.servable())

    def _tell_live(self, live: Live) -> None:
        self.events.publish("adapter", {"version": live.version, "why": live.why, "pinned": live.pinned})
        self.learner.wake()

    def _serve_ready(self, ready: protocol.Ready) -> None:
        self._serve_facts = ready
        self.served.set()
        self.routing.ready(self._started_on)
        self.answers.ready()
        self.tokenising.wake()
        self.calibration.wake()
        self.learner.wake()
        self.practice.changed()
        self._announce_status()

    def _serve_said(self, message: protocol.Message) -> None:
        takers = (self._tokeniser, self.practice, self.answers, self._staging, self._pacing)
        if not any(part.received(message) for part in takers):
            log.warning("the serve worker sent a %s that nobody expects", type(message).__name__)

    def _serve_down(self, why: str) -> None:
        self.answers.down()
        self.routing.down()
        self._staging.down()
        self._tokeniser.down()
        self.practice.serve_down()
        self._announce_status()

    def _serve_faulted(self, fault: protocol.Fault) -> None:
        """An adapter that cannot be served is replaced at the next start. Else nothing is there to fall back on at the
        first start: say it and end; later it is tried again."""
        if fault.code in ADAPTER_FAULTS and self._started_on != 0:
            self._fallback.condemn(self._started_on, fault.message)
        elif self._serve_facts is None:
            self.serve_fault = fault
            self.serve_worker.unwant()
            self.served.set()

    # -------------------------------------------------------------------------------------------- train worker

    async def _start_train(self) -> protocol.Message:
        cache = str(self._state_folder / "cache")
        return resolved.start_train(self._settings(), self._model, cache, self.placing.training)

    def _train_ready(self, ready: protocol.Ready) -> None:
        self._trainer.ready()
        self._pacing.trainer_ready()
        self.calibration.wake()
        self.scorer.wake()
        self._announce_status()

    def _train_said(self, message: protocol.Message) -> None:
        if not self._trainer.received(message):
            log.warning("the train worker sent a %s that nobody expects", type(message).__name__)

    def _progressed(self, progress: protocol.Progress) -> None:
        self.learner.progress = progress
        self.events.publish("progress", {"stage": progress.stage, "done": progress.done, "total": progress.total})

    def _eos_ids(self) -> frozenset[int]:
        facts = self._serve_facts
        return frozenset() if facts is None or facts.model is None else frozenset(facts.model.eos_ids)

    def _probes(self) -> tuple[protocol.ProbeTokens, ...]:
        return () if self._serve_facts is None else self._serve_facts.probes

    # ------------------------------------------------------------------------------------------ what happened

    def _learner_changed(self) -> None:
        self.practice.changed()
        self._announce_status()

    async def _forget_removed(self) -> None:
        await forget_removed(self._store.episodes, self._store.written, self._folders)
        self.practice.removed()

    def _episode_recorded(self, episode_id: int, episode: Episode) -> None:
        self.scorer.wake()
        self.practice.asked()

    def _reference_moved(self) -> None:
        self.learner.wake()
        self._announce_status()

    def _rated(self, rows: list[Feedback]) -> None:
        self.learner.wake()
        self.reference.wake()
        self.practice.rated()
        if any(row.correction is not None for row in rows):
            self.tokenising.wake()
        for row in rows:
            self.events.publish("feedback", feedback_object(row))

    def _update_finished(self, update: Update) -> None:
        self.events.publish("update", update_object(update))
        if update.verdict == "published":
            self.events.publish("adapter", {"version": update.version, "why": "published", "pinned": False})
        self._announce_status()
        self.scorer.wake()

    def _announce_status(self) -> None:
        self.events.publish("status", status.status(self.readings.parts()))

    def _readiness(self) -> tuple[bool, str]:
        if self.is_stopping:
            return False, "stopping"
        if not self.serve_worker.is_ready:
            return False, "the serve worker is starting"
        return True, "ready"
