"""The composition root of the daemon: builds every part in order, runs them, and stops them in reverse.

No part looks up another; what they need of each other is passed in here. The life of a daemon:

    lock the state folder, open model header and store, clear up after a crash
    -> start the serve worker, listen, READY to the service manager once answers can be given
    -> until SIGTERM or SIGINT: serve, learn; SIGHUP reads the configuration again
    -> STOPPING: no new connections, running answers get their time, workers are stopped, the store is closed

A start after a crash takes the same path as any start: what is live, which updates are unfinished and which ratings are
new is read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from edged import __version__, config, machine, resolved, status
from edged.api.app import build_app
from edged.api.control import update_object
from edged.api.feedback import feedback_object
from edged.api.listen import ListenError, open_listeners
from edged.api.server import HttpServer
from edged.base_model import BaseModel, ModelError, open_base_model
from edged.control import PAUSED_FILE, Operator
from edged.learn.folders import Folders
from edged.learn.importing import Importer
from edged.learn.learner import Learner
from edged.learn.proving import Prover
from edged.learn.scoring import Scorer
from edged.learn.trainer import Trainer
from edged.learn.updating import Updater
from edged.ratings import Ratings
from edged.records import Episode, Feedback, Update
from edged.serve.admission import Limits as AdmissionLimits
from edged.serve.answers import Answers, Serving
from edged.serve.staging import Staging
from edged.settings import Listen, Settings, UnixListen
from edged.store.errors import StoreError
from edged.store.store import Store
from edged.system import logs, notify
from edged.system.broadcast import Broadcast
from edged.system.lock import FolderLock, FolderLocked
from edged.system.workers import ENGINE_COMMAND, Role, Workers
from engine import protocol

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 78

STATUS_EVERY_S = 5.0  # the line for `systemctl status`
STOP_MARGIN_S = 3.0  # of [api] drain_s, for workers and store after the answers had theirs
TRAIN_OOM_SCORE_ADJ = 500  # when memory runs out, the trainer goes before anything that answers


def run(
    settings: Settings,
    *,
    state_folder: Path,
    config_path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    worker_command: Sequence[str] = ENGINE_COMMAND,
    worker_environment: Mapping[str, str] | None = None,
) -> int:
    """Run the daemon in this process until it is told to stop; the exit code.

    Args:
        settings: as `edged.config.load` gave them from `config_path` and `overrides`, which SIGHUP reads again.
        worker_command: what starts a worker; its role is appended.
        worker_environment: variables added to a worker's environment.
    """
    logs.configure(settings.log.level, settings.log.format)
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(state_folder):
            daemon = Daemon(
                settings,
                state_folder=state_folder.resolve(),
                reload=lambda: config.load(config_path, overrides),
                worker_command=worker_command,
                worker_environment=worker_environment or {},
            )
            return uvloop.run(daemon.run())
    except FolderLocked as error:
        return _give_up(str(error), EXIT_FAILED)
    except ModelError as error:
        return _give_up(str(error), EXIT_CONFIG)
    except (ListenError, StoreError) as error:
        return _give_up(str(error), EXIT_FAILED)
    except OSError as error:
        return _give_up(f"state folder {state_folder}: {error}", EXIT_FAILED)


def _give_up(message: str, code: int) -> int:
    print(f"edged: {message}", file=sys.stderr)
    return code


class Daemon:
    """One run of the daemon. `run` may be called once."""

    def __init__(
        self,
        settings: Settings,
        *,
        state_folder: Path,
        reload: Callable[[], Settings],
        worker_command: Sequence[str],
        worker_environment: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._state_folder = state_folder
        self._reload_settings = reload
        self._started_at = time.time()
        self._notifier = notify.Notifier(os.environ)
        self._events = Broadcast()
        self._workers = Workers(_runtime_folder(state_folder), command=worker_command, environment=worker_environment)
        self._folders = Folders(state_folder)
        self._candidates = asyncio.Lock()
        self._stop = asyncio.Event()
        self._served_once = asyncio.Event()
        self._serve_fault: protocol.Fault | None = None
        self._serve_facts: protocol.Ready | None = None
        self._model: BaseModel
        self._store: Store

    async def run(self) -> int:
        """Build, run, stop; the exit code."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._notifier.close)
            await self._open(stack)
            server = await self._listen(stack)
            self._catch_signals()
            self._serve_worker.want()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._learner.run(), name="learner"),
                    tasks.create_task(self._scorer.run(), name="scorer"),
                    tasks.create_task(self._report(), name="report"),
                ]
                code = await self._serve_until_stopped()
                await self._drain(server)
                for task in running:
                    task.cancel()
        return code

    # ------------------------------------------------------------------------------------------------ building

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Model, store, folders, and the parts on top of them."""
        cache = self._state_folder / "cache"
        cache.mkdir(exist_ok=True)
        self._model = await asyncio.to_thread(
            open_base_model, self._settings.model.path, self._settings.model.name, cache
        )
        self._store = await Store.open(self._state_folder / "edged.db", readers=self._settings.store.readers)
        stack.push_async_callback(self._store.close)
        await self._clear_up()
        self._workers.open()
        stack.push_async_callback(self._workers.close)
        self._build_serving()
        self._build_learning()
        self._build_operator()

    async def _clear_up(self) -> None:
        """What a crash may have left: half-written files, candidates that nobody carries any more, a stale CURRENT."""
        unfinished = await self._store.updates.unfinished()
        await asyncio.to_thread(self._folders.prepare, [update.id for update in unfinished])
        carried = {update.version for update in unfinished}
        for adapter in await self._store.lineage.list():
            if adapter.state == "candidate" and adapter.version not in carried:
                await self._store.lineage.refuse(adapter.version, "the daemon stopped before it was judged")
        await asyncio.to_thread(self._folders.write_current, self._store.lineage.live().version)

    def _build_serving(self) -> None:
        serve = self._settings.serve
        self._serve_worker = self._workers.add(
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
        self._answers = Answers(
            Serving(model=self._model.name, base_sha256=self._model.sha256, wait_s=serve.start_timeout_s),
            lambda: AdmissionLimits(slots=serve.slots, max_queue=self._settings.serve.max_queue),
            lambda: self._settings.serve.default_max_tokens,
            self._serve_worker,
            self._store.episodes,
            self._episode_recorded,
        )
        self._staging = Staging(self._serve_worker)

    def _build_learning(self) -> None:
        learn = self._settings.learn
        self._train_worker = self._workers.add(
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
        self._trainer = Trainer(self._train_worker, start_timeout_s=learn.start_timeout_s, on_progress=self._progressed)
        self._prover = Prover(
            self._staging,
            self._trainer,
            self._store.lineage,
            lambda: resolved.proving(self._settings),
            self._eos_ids,
            self._model.shape,
        )
        updater = Updater(
            folders=self._folders,
            updates=self._store.updates,
            trainer=self._trainer,
            prover=self._prover,
            stage=self._staging,
            candidates=self._candidates,
            max_attempts=lambda: self._settings.learn.max_attempts,
            on_stage=lambda update, stage: self._learner.stage(update, stage),
        )
        self._learner = Learner(
            settings=lambda: resolved.learning(self._settings, self._model.shape),
            base_sha256=self._model.sha256,
            probes=self._probes,
            ratings=self._store.feedback,
            episodes=self._store.episodes,
            updates=self._store.updates,
            lineage=self._store.lineage,
            folders=self._folders,
            trainer=self._trainer,
            updater=updater,
            on_change=self._announce_status,
            on_finished=self._update_finished,
        )
        self._learner.switches.paused = (self._state_folder / PAUSED_FILE).exists()
        self._scorer = Scorer(
            self._trainer,
            self._store.episodes,
            self._folders,
            oldest_version=lambda: max(0, self._store.lineage.live().version - self._settings.learn.staleness),
            reference=lambda: self._settings.learn.reference,
        )

    def _build_operator(self) -> None:
        importer = Importer(
            folders=self._folders,
            lineage=self._store.lineage,
            trainer=self._trainer,
            prover=self._prover,
            stage=self._staging,
            candidates=self._candidates,
            base=self._model.shape,
            base_sha256=self._model.sha256,
            base_name=self._model.name,
            profile=resolved.lora(self._settings, self._model.shape),
        )
        self._operator = Operator(
            state_folder=self._state_folder,
            base=self._model.shape,
            model_name=self._model.name,
            lineage=self._store.lineage,
            update_list=self._store.updates,
            audit_log=self._store.audit,
            learner=self._learner,
            router=self._staging,
            importer=importer.bring,
            candidates=self._candidates,
            parts=self._parts,
            readiness=self._readiness,
            subscribe=self._events.subscribe,
            announce=self._events.publish,
        )

    async def _listen(self, stack: contextlib.AsyncExitStack) -> HttpServer:
        app = build_app(
            answers=self._answers,
            feedback=Ratings(self._store.feedback, self._rated),
            episodes=self._store.episodes,
            control=self._operator,
            keys=self._store.keys,
            settings=resolved.LiveApiSettings(lambda: self._settings),
        )
        fds = notify.handed_in_fds(os.environ, os.getpid())
        addresses: Sequence[Listen] = self._settings.api.listen
        if not fds and not addresses:
            addresses = [UnixListen(_runtime_folder(self._state_folder) / "edged.sock")]
        listeners = open_listeners(addresses, inherited_fds=fds, any_keys=self._store.keys.any_keys())
        server = HttpServer(app, listeners, head_timeout_s=self._settings.api.read_timeout_s)
        await server.start()
        stack.push_async_callback(server.drain, 0.0)
        return server

    # ------------------------------------------------------------------------------------------------- running

    async def _serve_until_stopped(self) -> int:
        """READY once the first serve worker is; then until a signal. The exit code."""
        first = asyncio.create_task(self._served_once.wait())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({first, stop}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._serve_fault is not None and not stop.done():
            stop.cancel()
            print(f"edged: the model cannot be served: {self._serve_fault.message}", file=sys.stderr)
            return EXIT_CONFIG
        if not stop.done():
            self._notifier.ready(status.one_line(self._parts()))
            log.info("ready after %.1f s", time.time() - self._started_at)
        every_s = notify.watchdog_every_s(os.environ, os.getpid())
        if every_s is not None:
            self._notifier.feed_watchdog(asyncio.get_running_loop(), every_s)
        await stop
        return EXIT_OK

    async def _drain(self, server: HttpServer) -> None:
        self._notifier.stopping("finishing running answers")
        self._answers.close("the daemon is stopping; ask again in a moment")
        self._events.close()
        self._train_worker.unwant()
        within_s = max(0.0, self._settings.api.drain_s - STOP_MARGIN_S)
        await server.drain(within_s)
        self._answers.cancel_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._answers.drained()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        """SIGHUP: take over what can change while running, and say what cannot."""
        self._notifier.reloading()
        try:
            new = self._reload_settings()
        except config.ConfigError as error:
            log.error("the configuration was not reloaded:\n%s", error)
        else:
            changed, needs_restart = config.live_changes(self._settings, new)
            self._settings = config.with_live_changes(self._settings, new)
            logs.configure(self._settings.log.level, self._settings.log.format)
            log.info("reloaded; changed: %s", ", ".join(changed) or "nothing")
            if needs_restart:
                log.warning("these keys change at the next start only: %s", ", ".join(needs_restart))
            self._learner.wake()
        self._notifier.ready(status.one_line(self._parts()))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            self._notifier.status(status.one_line(self._parts()))

    # -------------------------------------------------------------------------------------------- serve worker

    def _start_serve(self) -> protocol.Message:
        live = self._store.lineage.live()
        adapter = self._folders.reference_to(live.version, self._folders.versions())
        return resolved.start_serve(self._settings, self._model, adapter)

    def _serve_ready(self, ready: protocol.Ready) -> None:
        self._serve_facts = ready
        self._served_once.set()
        self._answers.ready()
        self._announce_status()

    def _serve_said(self, message: protocol.Message) -> None:
        if not (self._answers.received(message) or self._staging.received(message)):
            log.warning("the serve worker sent a %s that nobody expects", type(message).__name__)

    def _serve_down(self, why: str) -> None:
        self._answers.down()
        self._staging.down()
        self._announce_status()

    def _serve_faulted(self, fault: protocol.Fault) -> None:
        """At the first start there is nothing to fall back on: say it and end. Later it is tried again."""
        if self._serve_facts is None:
            self._serve_fault = fault
            self._serve_worker.unwant()
            self._served_once.set()

    # -------------------------------------------------------------------------------------------- train worker

    def _start_train(self) -> protocol.Message:
        return resolved.start_train(self._settings, self._model, str(self._state_folder / "cache"))

    def _train_ready(self, ready: protocol.Ready) -> None:
        self._trainer.ready()
        self._scorer.wake()
        self._announce_status()

    def _train_said(self, message: protocol.Message) -> None:
        if not self._trainer.received(message):
            log.warning("the train worker sent a %s that nobody expects", type(message).__name__)

    def _progressed(self, progress: protocol.Progress) -> None:
        self._learner.progress = progress
        self._events.publish("progress", {"stage": progress.stage, "done": progress.done, "total": progress.total})

    def _eos_ids(self) -> frozenset[int]:
        facts = self._serve_facts
        return frozenset() if facts is None or facts.model is None else frozenset(facts.model.eos_ids)

    def _probes(self) -> tuple[protocol.ProbeTokens, ...]:
        return () if self._serve_facts is None else self._serve_facts.probes

    # ------------------------------------------------------------------------------------------ what happened

    def _episode_recorded(self, episode_id: int, episode: Episode) -> None:
        self._scorer.wake()

    def _rated(self, rows: list[Feedback]) -> None:
        self._learner.wake()
        for row in rows:
            self._events.publish("feedback", feedback_object(row))

    def _update_finished(self, update: Update) -> None:
        self._events.publish("update", update_object(update))
        if update.verdict == "published":
            self._events.publish("adapter", {"version": update.version, "why": "published", "pinned": False})
        self._announce_status()
        self._scorer.wake()

    def _announce_status(self) -> None:
        self._events.publish("status", status.status(self._parts()))

    def _readiness(self) -> tuple[bool, str]:
        if self._stop.is_set():
            return False, "stopping"
        if self._serve_facts is None:
            return False, "the serve worker is starting"
        return True, "ready"

    def _parts(self) -> status.Parts:
        learner, store = self._learner, self._store
        feedback_rows, ratings = store.feedback.counts()
        progress = learner.progress
        return status.Parts(
            version=__version__,
            started_at=self._started_at,
            model_name=self._model.name,
            model_sha256=self._model.sha256,
            live=store.lineage.live(),
            learner_state=learner.state,
            learner_why=learner.why,
            ratings_until_update=learner.ratings_until_update,
            batch_ratings=self._settings.learn.batch_ratings,
            progress=None if progress is None else (progress.stage, progress.done, progress.total),
            updates_total=store.updates.count_finished(),
            latest=store.updates.latest_finished(),
            dropped=store.feedback.drop_counts(),
            active=self._answers.active,
            queued=self._answers.queued,
            counters=self._answers.counters(),
            episodes=store.episodes.count(),
            feedback=feedback_rows,
            ratings=ratings,
            workers=tuple(
                status.WorkerView(
                    name=worker.role.name,
                    pid=worker.pid,
                    state=worker.state.phase,
                    rss_bytes=worker.rss_bytes,
                    busy=worker.busy,
                    restarts=max(0, worker.state.epoch - 1),
                )
                for worker in self._workers.all()
            ),
            daemon_rss_bytes=machine.own_rss_bytes(),
        )


def _runtime_folder(state_folder: Path) -> Path:
    """Where sockets go: the service manager's runtime folder, or the state folder."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(given) if given else state_folder
