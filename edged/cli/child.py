"""A daemon as the child of a command: `edged demo` and `edged bench` start the real thing and stop it again.

The child runs in its own session, so that Ctrl-C reaches the command only, which then stops the child in order; it gets
SIGTERM from the kernel if the command dies. Its log goes to a file in the state folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edged.cli.connect import Client, Peer, refusal_of_socket
from edged.cli.exits import CommandError

LOG_FILE = "daemon.log"
LOG_TAIL_LINES = 12
READY_TIMEOUT_S = 300.0  # the first start may have to hash and load a large model
READY_POLL_S = 0.05
STOP_TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1


class DaemonChild:
    """A running `edged run`. `started_at` is on the monotonic clock."""

    def __init__(self, arguments: list[str], state_folder: Path) -> None:
        """Start it and return at once.

        Args:
            arguments: of `edged run`, without --state-dir.
            state_folder: made if missing.
        Raises:
            CommandError: the folder or the process cannot be made.
        """
        self.state_folder = state_folder
        self.log_path = state_folder / LOG_FILE
        try:
            state_folder.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self.started_at = time.monotonic()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "edged", "run", "--state-dir", str(state_folder), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
        except OSError as error:
            raise CommandError(f"{state_folder}: the daemon cannot be started there: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self, peer: Peer, *, tick: Callable[[], None] = lambda: None) -> float:
        """Wait until it accepts requests; seconds from its start. `tick` is called while waiting.

        Raises CommandError with the end of its log when it ends or is not ready in time.
        """
        client = Client(peer, timeout_s=READY_TIMEOUT_S)
        try:
            while time.monotonic() < self.started_at + READY_TIMEOUT_S:
                self.check_alive()
                if self._accepts(client):
                    return time.monotonic() - self.started_at
                tick()
                time.sleep(READY_POLL_S)
        finally:
            client.close()
        raise CommandError(
            f"the daemon is not ready after {READY_TIMEOUT_S:.0f} s\n{self.log_tail()}", hint=f"read {self.log_path}"
        )

    def _accepts(self, client: Client) -> bool:
        if client.peer.socket is not None and refusal_of_socket(client.peer.socket) is not None:
            return False
        try:
            client.get("/readyz")
        except CommandError:
            return False
        return True

    def check_alive(self) -> None:
        """Raises CommandError with the end of its log if it has ended."""
        if (code := self._process.poll()) is not None:
            raise CommandError(
                f"the daemon ended with exit code {code}\n{self.log_tail()}",
                hint=f"read {self.log_path}; `edged doctor` checks this machine",
            )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Turn a broken connection inside the block into a CommandError that shows why the daemon ended, if it did."""
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            self.check_alive()
            raise CommandError(
                f"the daemon does not answer: {error or type(error).__name__}\n{self.log_tail()}",
                hint=f"read {self.log_path}",
            ) from error

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if it does not end in time. Does nothing if it has ended."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])


@contextmanager
def running(arguments: list[str], state_folder: Path) -> Iterator[DaemonChild]:
    """A daemon child that is stopped at the end, however the block ends."""
    child = DaemonChild(arguments, state_folder)
    try:
        yield child
    finally:
        child.stop()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def pick_port(wanted: int, host: str = "127.0.0.1") -> int:
    """`wanted` if it is free on `host`, else a free one."""
    import socket

    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CommandError(f"no free TCP port on {host}")


def socket_of(state_folder: Path) -> Path:
    """The daemon's Unix socket in `state_folder`, short enough for the kernel's limit of 107 bytes.

    Raises CommandError if the path is too long.
    """
    path = Path(os.path.abspath(state_folder)) / "edged.sock"
    relative = Path(os.path.relpath(path))
    for candidate in (path, relative):
        if len(os.fsencode(candidate)) <= 107:
            return candidate
    raise CommandError(f"{path}: too long for a Unix socket (107 bytes)", hint="use a --state-dir with a shorter path")
