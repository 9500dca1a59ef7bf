"""A worker as a child of this process: the other end of `engine.link`, for who has no daemon.

Blocking and for one thread, as a script is: one request goes out and the answers to it are waited for. A child that
dies or says nothing for `hang_timeout_s` is an error and is not started again; supervision is the daemon's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self, TypeVar

import zmq

from engine.logs import ENV_LOG_LEVEL
from engine.protocol import (
    ENV_ENDPOINT,
    ENV_EPOCH,
    ENV_NAME,
    MAX_MESSAGE_BYTES,
    Beat,
    Fault,
    Hello,
    Message,
    Ready,
    Stop,
    decode,
    encode,
)
from engine.worker import ENV_DAEMON_PID

M = TypeVar("M", bound=Message)

EPOCH = 1  # a child is never started again
POLL_MS = 200
STOP_WITHIN_S = 2.0
HANG_TIMEOUT_S = 120.0


class ChildLost(Exception):
    """Raised when a worker cannot do its role, has died, or is silent."""


class Child:
    """One worker process of `role`. A context manager: it ends with the block."""

    def __init__(
        self, role: str, environment: Mapping[str, str] | None = None, *, hang_timeout_s: float = HANG_TIMEOUT_S
    ) -> None:
        """Start it. environment: what it sees beside what this process does."""
        self.role = role
        self._hang_timeout_s = hang_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="edged-child-")
        endpoint = f"ipc://{Path(self._folder.name) / 'link'}"
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(endpoint)
        whole = {
            **os.environ,
            **(environment or {}),
            ENV_ENDPOINT: endpoint,
            ENV_NAME: role,
            ENV_EPOCH: str(EPOCH),
            ENV_DAEMON_PID: str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
        }
        whole.setdefault(ENV_LOG_LEVEL, "warning")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker", role], env=whole, stdin=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, message: Message) -> Ready:
        """Answer its Hello with its settings; what it says when it can work. Raises ChildLost."""
        self.expect(Hello)
        self.send(message)
        return self.expect(Ready)

    def send(self, message: Message) -> None:
        """Queue one message."""
        self._socket.send_multipart([f"{self.role}:{EPOCH}".encode(), encode(message, EPOCH)])

    def expect(self, kind: type[M]) -> M:
        """The next message of this kind; others are passed over. Raises ChildLost."""
        for message in self.messages():
            if isinstance(message, kind):
                return message
        raise AssertionError("messages() never ends")

    def messages(self) -> Iterator[Message]:
        """What it says, without its heartbeats, for as long as the caller listens. Raises ChildLost."""
        silent_until = time.monotonic() + self._hang_timeout_s
        while True:
            ended = self._process.poll() is not None  # asked first: what it said before it ended is here then
            if self._socket.poll(POLL_MS):
                _, message = decode(self._socket.recv_multipart()[1])
                silent_until = time.monotonic() + self._hang_timeout_s
                if isinstance(message, Fault):
                    raise ChildLost(f"the {self.role} worker cannot work: {message.code}: {message.message}")
                if not isinstance(message, Beat):
                    yield message
            elif ended:
                raise ChildLost(f"the {self.role} worker has died with status {self._process.returncode}")
            elif time.monotonic() > silent_until:
                raise ChildLost(f"the {self.role} worker says nothing for {self._hang_timeout_s:g} s")

    def close(self) -> None:
        """Ask it to end, and end it. Does nothing the second time."""
        if self._socket.closed:
            return
        if self._process.poll() is None:
            self.send(Stop(within_s=STOP_WITHIN_S))
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()
