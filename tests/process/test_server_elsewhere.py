"""A real daemon whose answers come from a server elsewhere, which goes away and comes back.

Daemon and serve worker are real; the server is the stand-in, and nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.generate.chatter import write_chatter
from tests.engine.generate.stand_in import Options, StandIn

OPTIONS = Options("vllm", "processed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    started = StandIn(write_chatter(tmp_path).folder, OPTIONS)
    yield started
    started.down()


@pytest.fixture
def daemon(server: StandIn, tmp_path: Path, daemon_class: Any) -> Iterator[Any]:
    state, settings = tmp_path / "state", tmp_path / "edged.toml"
    state.mkdir()
    settings.write_text(f'[serve]\nurl = "{server.url}"\ncontext_tokens = 512\n[learn]\nenabled = false\n')
    command = [sys.executable, "-m", "edged", "run", "--config", str(settings), "--state-dir", str(state)]
    running = daemon_class([*command, "--model", str(tmp_path / "model")], state, {"HF_HUB_OFFLINE": "1"}, ())
    yield running.until_ready()
    running.end()


def serve_worker(daemon: Any) -> dict[str, Any]:
    return next(worker for worker in daemon.status()["workers"] if worker["name"] == "serve")


def test_answers_come_from_the_server_and_the_status_says_why_there_are_none_without_it(
    daemon: Any, server: StandIn, tmp_path: Path
) -> None:
    answer = daemon.chat("the cat", max_tokens=5, seed=1)
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["system_fingerprint"].endswith("-v0")
    server.down()
    with pytest.raises(httpx.TimeoutException):  # it waits for a worker, and the worker for its server
        daemon.client.post(
            "/v1/chat/completions",
            json={"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
            timeout=0.5,
        )
    fault = daemon.until(lambda: serve_worker(daemon)["fault"])
    assert fault.startswith("server_unreachable: ")
    assert server.url in fault
    again = StandIn(tmp_path / "model", OPTIONS, server.port)
    try:
        assert daemon.chat("the cat", max_tokens=5, seed=1)["choices"][0] == answer["choices"][0]
        assert serve_worker(daemon)["fault"] == ""
    finally:
        again.down()
