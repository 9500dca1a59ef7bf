"""The life of the daemon: builds every part in order (`edged.assembly`), runs them, and stops them in reverse.

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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from adapters.errors import AdapterError
from edged import config, machine, resolved, status
from edged.addresses import Listen, UnixListen
from edged.api.listen import ListenError, open_listeners
from edged.api.server import HttpServer
from edged.assembly import Assembly
from edged.base_model import BaseModel, ModelError, choose_backend, open_base_model
from edged.fallback import Fallback
from edged.learn import collecting, profile
from edged.learn.folders import Folders
from edged.settings import Settings
from edged.store.errors import StoreError
from edged.store.store import Store
from edged.system import notify
from edged.system.lock import FolderLock, FolderLocked
from edged.system.workers import ENGINE_COMMAND, Workers
from engine import logs
from engine.placement import BadPin

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 78

STATUS_EVERY_S = 5.0  # the line for `systemctl status`
CUT_ANSWERS_S = 1.0  # for answers that were cut to be recorded
RETRY_FIRST_S = 1.0  # before a loop that failed begins again; doubles up to RETRY_MAX_S
RETRY_MAX_S = 60.0
MALLOC_ARENAS = 2
FILE_THREADS = 2  # for hashing and moving files off the event loop; the store has threads of its own


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
    machine.limit_malloc_arenas(MALLOC_ARENAS)
    os.umask(0o077)  # people's conversations lie in the state folder; workers inherit it, sockets set their own mode
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
    except (ModelError, BadPin) as error:
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
        self._started_at = time.monotonic()
        self._notifier = notify.Notifier(os.environ)
        self._workers = Workers(
            _runtime_folder(state_folder),
            command=worker_command,
            environment=lambda: (
                logs.environment(self._settings.log.level, self._settings.log.format) | dict(worker_environment)
            ),
        )
        self._stop = asyncio.Event()
        self._is_announced = False  # READY was sent
        self._parts: Assembly

    async def run(self) -> int:
        """Build, run, stop; the exit code."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files"))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._notifier.close)
            store = await self._open(stack)
            server = await self._listen(stack, store)
            self._catch_signals()
            self._parts.serve_worker.want()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    *(tasks.create_task(_again_and_again(name, run)) for name, run in self._parts.loops().items()),
                    tasks.create_task(self._report(), name="report"),
                ]
                code = await self._serve_until_stopped()
                for task in running:  # before its worker is stopped, or the learner would take that for a crash
                    task.cancel()
                await self._drain(server)
        return code

    async def _open(self, stack: contextlib.AsyncExitStack) -> Store:
        """Model, store, folders, workers, and the parts on top of them."""
        cache = self._state_folder / "cache"
        cache.mkdir(exist_ok=True)
        section = self._settings.model
        model = await asyncio.to_thread(open_base_model, section.path, section.name, cache)
        choose_backend(self._settings.serve.backend, self._settings.serve.url, model.path)
        store = await Store.open(self._state_folder / "edged.db", readers=self._settings.store.readers)
        stack.push_async_callback(store.close)
        folders = Folders(self._state_folder, model.sha256)
        await clear_up(store, folders)
        await self._compare_profiles(store, folders, model)
        self._workers.open()
        stack.push_async_callback(self._workers.close)
        self._parts = Assembly(
            lambda: self._settings,
            state_folder=self._state_folder,
            model=model,
            store=store,
            folders=folders,
            workers=self._workers,
            placing=await asyncio.to_thread(resolved.placed, self._settings, model),
        )
        return store

    async def _compare_profiles(self, store: Store, folders: Folders, model: BaseModel) -> None:
        """Say so if updates do not train what `[lora]` asks for."""
        lora = resolved.lora(self._settings, model.shape)
        live = store.lineage.live().version
        folder = folders.versions()[live] if live else None
        wanted = profile.of_settings(lora, model.shape)
        try:
            trained = await asyncio.to_thread(profile.in_force, folder, lora, model.shape)
        except AdapterError as error:
            log.error("no update can go on from v%d, which is live: %s", live, error)
            return
        if trained != wanted:
            log.warning(
                "[lora] asks for %s; v%d, which is live, has %s, and updates go on with that: "
                "promote version 0 to begin anew",
                wanted,
                live,
                trained,
            )

    async def _listen(self, stack: contextlib.AsyncExitStack, store: Store) -> HttpServer:
        fds = notify.handed_in_fds(os.environ, os.getpid())
        addresses: Sequence[Listen] = self._settings.api.listen
        if not fds and not addresses:
            addresses = [UnixListen(_runtime_folder(self._state_folder) / "edged.sock")]
        listeners = open_listeners(addresses, inherited_fds=fds, any_keys=store.keys.any_keys())
        server = HttpServer(self._parts.app(), listeners, patience_s=lambda: self._settings.api.read_timeout_s)
        await server.start()
        stack.push_async_callback(server.drain, 0.0)
        return server

    async def _serve_until_stopped(self) -> int:
        """READY once the first serve worker is; then until a signal. The exit code."""
        first = asyncio.create_task(self._parts.served.wait())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({first, stop}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        fault = self._parts.serve_fault
        if fault is not None and not stop.done():
            stop.cancel()
            print(f"edged: the model cannot be served: {fault.message}", file=sys.stderr)
            return EXIT_CONFIG
        if not stop.done():
            self._is_announced = True
            self._notifier.ready(status.one_line(self._parts.readings.parts()))
            log.info("ready after %.1f s", time.monotonic() - self._started_at)
        every_s = notify.watchdog_every_s(os.environ, os.getpid())
        if every_s is not None:
            self._notifier.feed_watchdog(asyncio.get_running_loop(), every_s)
        await stop
        return EXIT_OK

    async def _drain(self, server: HttpServer) -> None:
        self._notifier.stopping("finishing running answers")
        self._parts.is_stopping = True
        self._parts.answers.close("the daemon is stopping; ask again in a moment")
        self._parts.events.close()
        self._parts.learning.close()
        self._parts.practice.close()
        self._parts.routing.close()
        await server.drain(self._settings.api.drain_s)
        self._parts.answers.cancel_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_ANSWERS_S):
                await self._parts.answers.drained()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        """SIGHUP: take over what can change while running, and say what cannot."""
        if self._is_announced:  # else it is no reload to the service manager: READY ends the start
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
            self._parts.reloaded()
        if self._is_announced:
            self._notifier.ready(status.one_line(self._parts.readings.parts()))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            self._notifier.status(status.one_line(self._parts.readings.parts()))


async def clear_up(store: Store, folders: Folders) -> None:
    """What a crash may have left: half-written files, candidates that nobody carries any more, a stale CURRENT; and a
    live version that cannot be served, because its files are damaged or gone or the base model is another one. The
    nearest one before it that can be served takes its place, until it can be served again."""
    unfinished = await store.updates.unfinished()
    await asyncio.to_thread(folders.prepare, [update.id for update in unfinished])
    carried = {update.version for update in unfinished}
    for adapter in await store.lineage.list():
        if adapter.state == "candidate" and adapter.version not in carried:
            await store.lineage.refuse(adapter.version, "the daemon stopped before it was judged")
    await store.lineage.skip_versions(await asyncio.to_thread(folders.highest_version))
    await asyncio.to_thread(collecting.finish, await store.lineage.list(), folders)
    live = await Fallback(store.lineage, folders).servable()
    await asyncio.to_thread(folders.write_current, live.version)


async def _again_and_again(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop of the daemon for ever: what makes it fail (a full disk) must not end the answers. It starts from what
    is on disk each time, so beginning again is safe."""
    wait_s = RETRY_FIRST_S
    while True:
        began = time.monotonic()
        try:
            await run()
        except Exception:
            if time.monotonic() - began > RETRY_MAX_S:
                wait_s = RETRY_FIRST_S
            log.exception("%s failed; it begins again in %.0f s", name, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MAX_S, 2 * wait_s)


def _runtime_folder(state_folder: Path) -> Path:
    """Where sockets go: the service manager's runtime folder, or the state folder."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(given) if given else state_folder
