"""Starts real daemons as child processes, with light workers or with the real ones, and ends what it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HANG_GUARD_S = 120.0


class Running:
    """A daemon under test. Its log is in `log`; requests go over its Unix socket."""

    def __init__(self, command: list[str], state: Path, environment: dict[str, str], pass_fds: tuple[int, ...]) -> None:
        self.state = state
        self.log = state.parent / f"{state.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=log, pass_fds=pass_fds
            )
        transport = httpx.HTTPTransport(uds=str(state / "edged.sock"))
        self.client = httpx.Client(transport=transport, base_url="http://edged", timeout=HANG_GUARD_S)

    def until_ready(self) -> Running:
        self.until(lambda: self.client.get("/readyz").status_code == 200)
        return self

    def until(self, condition: Callable[[], Any]) -> Any:
        """The first true value of `condition`; connection errors count as false."""
        deadline = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon left with {self.process.returncode}:\n{self.log.read_text()}")
            # Tried with a plain socket first: httpx leaves its own unclosed when it cannot connect.
            if can_connect(self.state / "edged.sock") and (value := condition()):
                return value
            time.sleep(0.02)
        raise AssertionError(f"waited {HANG_GUARD_S:g} s in vain:\n{self.log.read_text()[-4000:]}")

    def status(self) -> dict[str, Any]:
        return dict(self.client.get("/v1/status").raise_for_status().json())

    def chat(self, text: str = "What is a cat?", **options: Any) -> dict[str, Any]:
        body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 24} | options
        return dict(self.client.post("/v1/chat/completions", json=body).raise_for_status().json())

    def rate(self, completion_id: str, rating: float) -> dict[str, Any]:
        body = {"completion_id": completion_id, "rating": rating}
        return dict(self.client.post("/v1/feedback", json=body).raise_for_status().json())

    def rate_some(self, count: int) -> list[str]:
        """Ask and rate `count` answers with ratings that differ; the feedback ids."""
        ids = []
        for index in range(count):
            answer = self.chat(f"Question {index}?")
            ids.append(self.rate(answer["id"], 1.0 if index % 2 else -1.0)["id"])
        return ids

    def worker_pid(self, name: str) -> int | None:
        return next(w["pid"] for w in self.status()["workers"] if w["name"] == name)

    def all_feedback(self) -> list[str]:
        """Ids of every stored feedback row, oldest first."""
        ids: list[str] = []
        while True:
            query = {"limit": "1000"} | ({"after": ids[-1]} if ids else {})
            page = self.client.get("/v1/feedback", params=query).raise_for_status().json()
            ids += [row["id"] for row in page["data"]]
            if not page["has_more"]:
                return ids

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(HANG_GUARD_S)


def can_connect(path: Path) -> bool:
    """Whether somebody listens on the Unix socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


Start = Callable[..., Running]


@pytest.fixture
def start_light(tmp_path: Path) -> Iterator[Start]:
    """Start a daemon with light workers: start_light(state="name", environment={}, pass_fds=(), **settings)."""
    running: list[Running] = []

    def start(
        state: str = "state",
        environment: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        settings: dict[str, Any] | None = None,
        wait: bool = True,
    ) -> Running:
        folder = tmp_path / state
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(Path(__file__).parent / "run_light.py"), str(folder)]
        command += [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        daemon = Running(command, folder, environment or {}, pass_fds)
        running.append(daemon)
        return daemon.until_ready() if wait else daemon

    yield start
    for daemon in running:
        daemon.client.close()
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()
