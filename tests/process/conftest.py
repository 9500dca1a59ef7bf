"""Daemons with light workers: everything is real but the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]


@pytest.fixture
def start_light(tmp_path: Path, daemon_class: Any) -> Iterator[Start]:
    """Start a daemon with light workers: start_light(state="name", environment={}, pass_fds=(), settings={})."""
    running: list[Any] = []

    def start(
        state: str = "state",
        environment: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        settings: dict[str, Any] | None = None,
        wait: bool = True,
    ) -> Any:
        folder = tmp_path / state
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(Path(__file__).parent / "run_light.py"), str(folder)]
        command += [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        daemon = daemon_class(command, folder, environment or {}, pass_fds)
        running.append(daemon)
        return daemon.until_ready() if wait else daemon

    yield start
    for daemon in running:
        daemon.end()
