"""The worker processes and the link to them: the shell around `edged.system.supervise`.

One ROUTER socket for all workers. A worker process is started by exec of a fresh interpreter in its own process group
with a scrubbed environment; its death is told by the kernel (pidfd), its silence by missing beats. Messages of an
epoch that is over are dropped here, so nobody above sees them. Everything runs on one event loop.

What a worker does with its role is not known here: the owner passes a `Role` with callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from edged.system import supervise
from engine import protocol

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "engine.worker")
SOCKET_PATH_MAX_BYTES = 100
# The kernel kills a worker with its daemon from its very first instruction; it asks for it itself too, but a second
# later, when the interpreter runs.
TIE_TO_DAEMON = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()
# What a worker inherits; anything else in the daemon's environment (secrets, sockets of the manager) stays out.
ENVIRONMENT_KEPT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE", "VIRTUAL_ENV", "PYTHONPATH",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What the owner of a worker supplies.

    start: makes the message that answers Hello; if it fails, the process is killed and tried again. on_ready,
    on_message: what came from the current process. on_down: the process is gone; `why` for people. on_fault: the
    process said that it cannot do its role; it will exit.
    """

    name: str
    role: str
    limits: supervise.Limits
    start: Callable[[], Awaitable[protocol.Message]]
    on_ready: Callable[[protocol.Ready], None]
    on_message: Callable[[protocol.Message], None]
    on_down: Callable[[str], None]
    on_fault: Callable[[protocol.Fault], None]
    oom_score_adj: int = 0


class Worker:
    """One worker, alive or not. Made by `Workers.add`."""

    def __init__(self, role: Role, workers: Workers) -> None:
        self.role = role
        self.state = supervise.State()
        self.rss_bytes = 0
        self.busy = ""
        self.fault = ""  # why the last process could not do its role; "" once one is ready
        self._workers = workers
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._stopped.set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_ready(self) -> bool:
        return self.state.phase == "ready"

    def want(self) -> None:
        """Run, and run again after every death, until `unwant`."""
        self._step(supervise.Want())

    def unwant(self) -> None:
        self._step(supervise.Unwant())

    async def stopped(self) -> None:
        """Returns once no process is left."""
        await self._stopped.wait()

    def kill(self, why: str) -> None:
        """End the current process at once; it is started again if it is wanted."""
        self._act(supervise.Kill(self.state.epoch, why))

    def send(self, message: protocol.Message) -> None:
        """Queue a message for the current process. A message to a process that just died is lost with it."""
        self._workers.send(self.role.name, self.state.epoch, message)

    def received(self, epoch: int, message: protocol.Message) -> None:
        """A message of this worker's socket; called by `Workers`."""
        if epoch != self.state.epoch:
            return
        match message:
            case protocol.Hello():
                self._step(supervise.Heard(epoch))
                # What was sent before its first message did not reach it, so a request to stop is repeated.
                if self.state.phase == "stopping":
                    self.send(protocol.Stop(within_s=self.role.limits.stop_timeout_s))
                else:
                    self._starting = asyncio.create_task(self._start(epoch), name=f"start {self.role.name}")
            case protocol.Ready():
                self._step(supervise.Heard(epoch, ready=True))
                self.fault = ""
                if self.is_ready:  # else it is on its way out already
                    log.info("worker %s: ready after %.1f s", self.role.name, message.load_s)
                    self.role.on_ready(message)
            case protocol.Beat():
                self._step(supervise.Heard(epoch))
                self.rss_bytes, self.busy = message.rss_bytes, message.busy
            case protocol.Fault():
                log.error("worker %s: %s: %s", self.role.name, message.code, message.message)
                self.fault = f"{message.code}: {message.message}"
                self.role.on_fault(message)
            case _:
                self._step(supervise.Heard(epoch))
                self.role.on_message(message)

    async def _start(self, epoch: int) -> None:
        try:
            message = await self.role.start()
        except Exception as error:
            log.exception("worker %s: cannot be told what to start with", self.role.name)
            if epoch == self.state.epoch:
                self.kill(f"nothing to start it with: {error}")
            return
        if epoch == self.state.epoch and self.state.phase == "starting":
            self.send(message)

    def _step(self, event: supervise.Event) -> None:
        before = self.state
        self.state, actions = supervise.step(before, event, time.monotonic(), self.role.limits)
        if before.phase != self.state.phase:
            log.info("worker %s: %s -> %s %s", self.role.name, before.phase, self.state.phase, self.state.why)
        for action in actions:
            self._act(action)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = supervise.next_tick_at(self.state, self.role.limits)
        if at is not None:
            wait_s = max(0.0, at - time.monotonic()) + 0.01
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._step, supervise.Tick())

    def _act(self, action: supervise.Action) -> None:
        match action:
            case supervise.Spawn():
                self._spawn(action.epoch)
            case supervise.AskToStop():
                self.send(protocol.Stop(within_s=action.within_s))
            case supervise.Kill():
                if self._process is not None:
                    log.warning("worker %s: killing process %d: %s", self.role.name, self._process.pid, action.why)
                    self._kill()

    def _kill(self) -> None:
        """The process, and what it has started: it leads a group of its own, in which its children are."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self._process.pid, signal.SIGKILL)

    def _spawn(self, epoch: int) -> None:
        try:
            self._process = self._workers.spawn(self.role, epoch)
        except OSError as error:  # no memory, no process left to have, no such command: tried again like a crash
            log.error("worker %s: cannot be started: %s", self.role.name, error)
            self._step(supervise.Exited(epoch, f"cannot be started: {error}"))
            return
        self._stopped.clear()
        self.rss_bytes, self.busy = 0, "starting"
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap, epoch)

    def _reap(self, epoch: int) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill()  # what it has started goes with it; until it is waited for, nobody else can have its number
        code = self._process.wait()
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._process = None
        self.rss_bytes, self.busy = 0, ""
        self._stopped.set()
        self._step(supervise.Exited(epoch, why))
        self.role.on_down(why)


class Workers:
    """The link and every worker on it. `open` binds; `close` ends every process that is left."""

    def __init__(
        self,
        runtime_folder: Path,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """environment: variables beyond the inherited ones, asked for whenever a process is started."""
        self._command = tuple(command)
        self._environment = environment
        self._workers: dict[str, Worker] = {}
        self._folder_fd = -1
        self._path = runtime_folder / "link.sock"
        self._address = self._path  # by which the socket is bound and found
        self._context = zmq.asyncio.Context()
        self._router: zmq.asyncio.Socket | None = None
        self._receiving: asyncio.Task[None] | None = None

    def add(self, role: Role) -> Worker:
        worker = self._workers[role.name] = Worker(role, self)
        return worker

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def open(self) -> None:
        """Bind the link. The socket file is readable by this user only."""
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.set_hwm(10_000)
        self._path.unlink(missing_ok=True)
        if len(os.fsencode(self._path)) > SOCKET_PATH_MAX_BYTES:
            # The socket lies in the same folder all the same: the kernel only limits the name that it is given.
            self._folder_fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._address = Path(f"/proc/{os.getpid()}/fd/{self._folder_fd}") / self._path.name
        old_mask = os.umask(0o177)
        try:
            router.bind(f"ipc://{self._address}")
        finally:
            os.umask(old_mask)
        self._router = router
        self._receiving = asyncio.get_running_loop().create_task(self._receive(), name="workers.receive")

    async def close(self) -> None:
        """Stop every worker (asked, then killed) and unbind."""
        for worker in self._workers.values():
            worker.unwant()
        await asyncio.gather(*(worker.stopped() for worker in self._workers.values()))
        if self._receiving is not None:
            self._receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiving
        if self._router is not None:
            self._router.close()
        self._context.term()
        self._path.unlink(missing_ok=True)
        if self._folder_fd >= 0:
            os.close(self._folder_fd)

    def send(self, name: str, epoch: int, message: protocol.Message) -> None:
        assert self._router is not None
        frames = [f"{name}:{epoch}".encode(), protocol.encode(message, epoch)]
        sending = asyncio.ensure_future(self._router.send_multipart(frames))
        sending.add_done_callback(_consume)

    def spawn(self, role: Role, epoch: int) -> subprocess.Popen[bytes]:
        """A new process of `role`; it reports on the link."""
        environment = {key: os.environ[key] for key in ENVIRONMENT_KEPT if key in os.environ}
        environment |= {
            protocol.ENV_ENDPOINT: f"ipc://{self._address}",
            protocol.ENV_NAME: role.name,
            protocol.ENV_EPOCH: str(epoch),
            "EDGED_DAEMON_PID": str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        environment |= self._environment()
        command = [*TIE_TO_DAEMON, *self._command, role.role]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        if role.oom_score_adj:
            with contextlib.suppress(OSError):  # the process may be gone already; its exit is told elsewhere
                Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(role.oom_score_adj))
        return process

    async def _receive(self) -> None:
        assert self._router is not None
        while True:
            frames = await self._router.recv_multipart()
            name, _, incarnation = frames[0].decode("utf-8", "replace").rpartition(":")
            worker = self._workers.get(name)
            if worker is None or len(frames) != 2 or incarnation != str(worker.state.epoch):
                log.warning("a message of %d frames from an unknown peer %r was dropped", len(frames), frames[0])
                continue
            try:
                epoch, message = protocol.decode(frames[1])
            except protocol.WireError as error:
                worker.kill(f"sent a message that is none: {error}")
                continue
            try:
                worker.received(epoch, message)
            except Exception:
                log.exception("worker %s: a %s could not be handled", name, type(message).__name__)


def _consume(future: asyncio.Future[Any]) -> None:
    """A send to a peer that is gone is dropped by the ROUTER; its exit is told by the pidfd."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("a message could not be sent: %s", error)
