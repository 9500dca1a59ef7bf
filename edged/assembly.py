"""The parts of the daemon put together: what each is given, and who hears of what the workers say.

Built once by `edged.daemon`, which starts and stops it. No part looks up another; what they need of each other is
passed in here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from edged import resolved, status
from edged.api.app import build_app
from edged.api.control import update_object
from edged.api.feedback import feedback_object
from edged.base_model import BaseModel
from edged.control import Operator
from edged.deep_parts import DeepParts
from edged.failure import ADAPTER_FAULTS
from edged.fallback import Fallback
from edged.learn.folders import Folders
from edged.learning_parts import Heard, LearningParts
from edged.placing import Placing
from edged.practice_parts import PracticeParts
from edged.ratings import Ratings
from edged.readings import Readings
from edged.records import DeepVerdict, Episode, Feedback, Live, Update
from edged.removal import RecordedAnswers, RecordedCompletions
from edged.serve.admission import Limits as AdmissionLimits
from edged.serve.answers import Answers
from edged.serve.routing import Routing
from edged.serve.staging import Staging
from edged.serve.tokenising import Tokeniser
from edged.serve.translation import Serving
from edged.settings import Settings
from edged.store.store import Store
from edged.swapping import Swaps
from edged.system.broadcast import Broadcast
from edged.system.resting import Resting, Sleeper
from edged.system.workers import Role, Workers
from edged.watch_parts import WatchParts
from engine import protocol

log = logging.getLogger(__name__)


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
        self._serve_facts: protocol.Ready | None = None
        self._fallback = Fallback(store.lineage, folders)
        self._started_on = 0  # the version that the serve worker was told to start with
        self.serve_fault: protocol.Fault | None = None
        self.served = asyncio.Event()
        self.is_stopping = False
        self.events = Broadcast()
        self._candidates = asyncio.Lock()
        self._resting = Resting(self._announce_status)
        self._build_serving()
        self._build_learning()
        self.practice = PracticeParts(
            settings,
            model=model,
            store=store,
            workers=workers,
            cache_folder=state_folder / "cache",
            serve_worker=self.serve_worker,
            learner=self.learning.learner,
            is_stopping=lambda: self.is_stopping,
            hindered=lambda: self.deep.hindrance(),
            on_change=self._announce_status,
        )
        self.deep = DeepParts(
            settings,
            model=model,
            store=store,
            folders=folders,
            serve_worker=self.serve_worker,
            routing=self.routing,
            learning=self.learning,
            candidates=self._candidates,
            judge=self.practice.judge,
            swaps=self.swaps,
            on_verdict=self._deeply_judged,
            on_trouble=self._deep_gate_rests,
        )
        self.watch = WatchParts(
            settings,
            model=model,
            store=store,
            folders=folders,
            swaps=self.swaps,
            candidates=self._candidates,
            references=lambda: frozenset({self._settings().learn.reference, self.learning.reference.version()}),
            routing=self.routing,
            adapter=self._adapter,
            announce=self.events.publish,
            on_change=self._announce_status,
        )
        self.readings = Readings(
            self._settings,
            model=model,
            store=store,
            workers=workers,
            routing=self.routing,
            answers=self.answers,
            learner=self.learning.learner,
            calibration=self.learning.calibration,
            reference=self.learning.reference,
            practice=self.practice,
            deep=self.deep,
            placing=self.placing,
            watch=self.watch,
            current_trouble=lambda: self._folders.current_trouble,
            first_tokens=self.learning.pacing.first_tokens,
        )
        self._build_operator()

    def loops(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Name -> what runs as long as the daemon does."""
        return {
            **self.learning.loops(),
            **self.watch.loops(),
            "practice": self.practice.run,
            "deep gate": self.deep.run,
            "resting": self._resting.run,
        }

    def reloaded(self) -> None:
        """The settings have changed."""
        self.learning.changed()
        self.practice.reloaded()
        self.watch.changed()
        self.deep.changed()

    def app(self) -> FastAPI:
        """The HTTP application on these parts."""
        return build_app(
            answers=self.answers,
            feedback=Ratings(self._store.feedback, self._rated, self.learning.tokenising.wake),
            episodes=RecordedAnswers(
                self._store.episodes,
                self._forget_removed,
            ),
            completions=RecordedCompletions(self._store.completions, self._forget_removed),
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
            lambda: self._settings().serve.queue_timeout_s,
            self.serve_worker,
            self._store.episodes,
            self._episode_recorded,
            self._load_changed,
            lambda requests: self.learning.pacing.waiting(requests),
        )
        self._resting.add(
            Sleeper(
                name="serve",
                worker=self.serve_worker,
                in_use=lambda: (
                    bool(self.answers.active)
                    or self.learning.needs_serving
                    or self.practice.is_working
                    or self.deep.is_looking
                ),
                keep_warm_s=lambda: resolved.serve_keeps_warm_s(self._settings(), self._model.path),
            )
        )
        self._staging = Staging(self.serve_worker)
        self._tokeniser = Tokeniser(self.serve_worker)
        self.routing = Routing(self._staging, self._live_adapter, self._replace, self._serving_changed)
        self.swaps = Swaps(
            state_folder=self._state_folder,
            lineage=self._store.lineage,
            complaint_about=self._folders.complaint_about,
            write_current=self._folders.write_current,
            router=self.routing,
            candidates=self._candidates,
            announce=self.events.publish,
            on_change=self._live_changed,
        )

    def _build_learning(self) -> None:
        self.learning = LearningParts(
            self._settings,
            state_folder=self._state_folder,
            model=self._model,
            store=self._store,
            folders=self._folders,
            workers=self._workers,
            placing=self.placing,
            serve_worker=self.serve_worker,
            serve_facts=lambda: self._serve_facts,
            routing=self.routing,
            candidates=self._candidates,
            tokeniser=self._tokeniser,
            is_stopping=lambda: self.is_stopping,
            resting=self._resting,
            heard=Heard(
                changed=self._announce_status,
                learner_changed=self._learner_changed,
                published=self.events.publish,
                finished=self._update_finished,
            ),
        )

    def _build_operator(self) -> None:
        self._operator = Operator(
            state_folder=self._state_folder,
            base=self._model.shape,
            model_name=self._model.name,
            lineage=self._store.lineage,
            update_list=self._store.updates,
            audit_log=self._store.audit,
            learner=self.learning.learner,
            swaps=self.swaps,
            importer=self.learning.importer(),
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
        cache = str(self._state_folder / "cache")
        return resolved.start_serve(self._settings(), self._model, self._live_adapter(), cache)

    def _live_adapter(self) -> protocol.AdapterRef:
        """What is live, as workers are told of it. That its files are there is not said."""
        return self._adapter(self._store.lineage.live().version)

    def _adapter(self, version: int) -> protocol.AdapterRef:
        """A published version, as workers are told of it. Raises Refused 409 `no_files`."""
        folder = None if version == 0 else str(self._folders.adapters / self._store.lineage.folder(version))
        return protocol.AdapterRef(version=version, folder=folder)

    async def _replace(self, version: int, why: str) -> None:
        """The engine will not serve `version`: make live what it can serve."""
        self._fallback.condemn(version, why)
        self._tell_live(await self._fallback.servable())

    def _tell_live(self, live: Live) -> None:
        self.events.publish("adapter", {"version": live.version, "why": live.why, "pinned": live.pinned})
        self.learning.learner.wake()

    def _serve_ready(self, ready: protocol.Ready) -> None:
        self._serve_facts = ready
        self.served.set()
        self.routing.ready(self._started_on)
        self.answers.ready()
        self.learning.serve_ready()
        self.practice.changed()
        self._serving_changed()

    def _serve_said(self, message: protocol.Message) -> None:
        takers = (self._tokeniser, self.practice, self.deep, self.answers, self.routing, self.learning.pacing)
        if not any(part.received(message) for part in takers):
            log.warning("the serve worker sent a %s that nobody expects", type(message).__name__)

    def _serve_down(self, why: str) -> None:
        self.answers.down()
        self.routing.down()
        self._staging.down()
        self._tokeniser.down()
        self.practice.serve_down()
        self.deep.serve_down()
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

    # ------------------------------------------------------------------------------------------ what happened

    def _live_changed(self) -> None:
        self.learning.learner.wake()
        self._serving_changed()

    def _serving_changed(self) -> None:
        self.watch.changed()
        self.deep.changed()
        self._announce_status()

    def _load_changed(self) -> None:
        """A request has come or is done."""
        if self.answers.active:
            self._resting.used("serve")
        self.practice.users(self.answers.active)
        self.deep.users(self.answers.active)

    def _learner_changed(self) -> None:
        self.practice.changed()
        self.deep.changed()
        self._announce_status()

    async def _forget_removed(self) -> None:
        await self.learning.forget_removed()
        self.practice.removed()

    def _episode_recorded(self, episode_id: int, episode: Episode) -> None:
        self.learning.scorer.wake()
        self.practice.asked()

    def _rated(self, rows: list[Feedback]) -> None:
        self.learning.rated(is_corrected=any(row.correction is not None for row in rows))
        self.practice.rated()
        self.watch.rated()
        for row in rows:
            self.events.publish("feedback", feedback_object(row))

    def _update_finished(self, update: Update) -> None:
        self.events.publish("update", update_object(update))
        if update.verdict == "published":
            self.events.publish("adapter", {"version": update.version, "why": "published", "pinned": False})
        self.watch.judged()
        self._announce_status()

    def _deeply_judged(self, version: int, verdict: DeepVerdict) -> None:
        self.events.publish("deep_gate", {"version": version, **dataclasses.asdict(verdict)})
        self._deep_gate_rests()

    def _deep_gate_rests(self) -> None:
        self.practice.changed()
        self._announce_status()

    def _announce_status(self) -> None:
        self.events.publish("status", status.status(self.readings.parts()))

    def _readiness(self) -> tuple[bool, str]:
        if self.is_stopping:
            return False, "stopping"
        if not self.serve_worker.is_ready and not self._resting.is_asleep("serve"):
            return False, "the serve worker is starting"
        return True, "ready"
