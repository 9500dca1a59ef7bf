"""The daemon as a service: readiness, sockets, signals, locks, and what is left of it when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

WATCHDOG_S = 1.5
LONG_SEED = 0  # makes the light worker's answer to "Once" one of 18 tokens


class Manager:
    """Plays the service manager: a datagram socket that collects what the daemon says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)

    def close(self) -> None:
        self._socket.close()

    def next_line(self, prefix: str) -> str:
        """The rest of the next line that starts with `prefix`."""
        while True:
            for line in self._socket.recv(4096).decode().splitlines():
                if line.startswith(prefix):
                    return line.removeprefix(prefix)

    def silent_for(self, seconds: float) -> bool:
        """True if nothing comes for `seconds`, after what is queued already."""
        self._socket.settimeout(0.0)
        while True:
            try:
                self._socket.recv(4096)
            except BlockingIOError:
                break
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(4096)
        except TimeoutError:
            return True
        return False


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with contextlib.closing(Manager(tmp_path / "notify.sock")) as playing:
        yield playing


def test_the_manager_hears_ready_only_when_answers_can_be_given_then_pings_then_stopping(
    start_light: Any, manager: Manager
) -> None:
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    daemon = start_light(environment=environment, wait=False)
    manager.next_line("READY=1")
    assert daemon.client.get("/readyz").status_code == 200
    assert daemon.chat()["choices"][0]["message"]["content"]
    for _ in range(3):
        manager.next_line("WATCHDOG=1")
    assert "v0 live" in manager.next_line("STATUS=")
    daemon.process.send_signal(signal.SIGTERM)
    manager.next_line("STOPPING=1")
    assert daemon.process.wait(60) == 0


def test_a_reload_before_anything_can_be_answered_is_no_readiness(
    start_light: Any, manager: Manager, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    environment = {
        "NOTIFY_SOCKET": str(manager.path), "EDGED_LIGHT_CRASH": "serve:start", "EDGED_LIGHT_CRASH_WHILE": str(broken)
    }  # fmt: skip
    daemon = start_light(environment=environment, wait=False)
    daemon.until(lambda: daemon.client.get("/readyz").status_code == 503)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.until(lambda: "reloaded" in daemon.log.read_text())
    broken.unlink()
    line = manager.next_line("")
    while not line.startswith("READY=1"):
        assert not line.startswith("RELOADING")
        line = manager.next_line("")
    assert daemon.client.get("/readyz").status_code == 200


def test_a_frozen_daemon_stops_feeding_the_watchdog(start_light: Any, manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    daemon = start_light(environment=environment)
    manager.next_line("WATCHDOG=1")
    daemon.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_state(daemon.process.pid) == "T")
    assert manager.silent_for(2 * WATCHDOG_S)
    daemon.process.send_signal(signal.SIGCONT)
    manager.next_line("WATCHDOG=1")


def test_it_serves_on_a_socket_that_the_manager_hands_in_and_leaves_its_file(start_light: Any, tmp_path: Path) -> None:
    path = tmp_path / "handed.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        # The queue of the socket holds a client that came before the daemon.
        early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        early.connect(str(path))
        early.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        state = tmp_path / "state"
        state.mkdir()
        run = Path(__file__).parent / "run_light.py"
        shell = f'exec 3<&{listening.fileno()}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", sys.executable, str(run), str(state)], pass_fds=(listening.fileno(),)
        )
    try:
        early.settimeout(60)
        assert b"200 OK" in early.recv(4096)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://edged") as client:
            assert client.get("/v1/status").json()["adapter"]["version"] == 0
        assert not (state / "edged.sock").exists()
    finally:
        early.close()
        process.terminate()
        assert process.wait(60) == 0
    assert path.exists()


def test_sigterm_lets_a_running_answer_finish_and_takes_no_new_one(start_light: Any) -> None:
    daemon = start_light(settings={"api.drain_s": 3.0}, environment={"EDGED_LIGHT_TOKEN_S": "0.05"})
    lines: list[str] = []

    def read() -> None:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 40}
        with daemon.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    daemon.until(lambda: lines or daemon.status()["serve"]["active"])
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    reader.join(60)
    assert "data: [DONE]" in lines
    assert not (daemon.state / "edged.sock").exists()


def test_sigterm_cuts_a_long_answer_tells_its_reader_and_records_it(start_light: Any) -> None:
    daemon = start_light(settings={"api.drain_s": 1.0}, environment={"EDGED_LIGHT_TOKEN_S": "1"})
    completion = {"model": "default", "prompt": "Once", "stream": True, "max_tokens": 18, "seed": LONG_SEED}
    lines: list[str] = []

    def read() -> None:
        with daemon.client.stream("POST", "/v1/completions", json=completion) as answer:
            lines.extend(answer.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    daemon.until(lambda: daemon.status()["serve"]["active"])
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    assert time.monotonic() - began < 10  # the answer would take 18
    reader.join(60)
    assert "shutting_down" in "".join(lines)
    assert "data: [DONE]" not in lines
    again = start_light()
    (episode,) = again.client.get("/v1/episodes").json()["data"]
    assert episode["finish_reason"] == "cancelled"


@pytest.mark.parametrize("level", ["info", "error"])
def test_workers_log_at_the_level_and_in_the_form_of_the_daemon(start_light: Any, level: str) -> None:
    daemon = start_light(settings={"log.level": level, "log.format": "json"})
    assert daemon.stop() == 0
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    said = [entry for entry in entries if entry["logger"] == "light"]
    assert [entry["message"] for entry in said] == (["a light serve worker starts"] if level == "info" else [])
    assert {entry["level"] for entry in entries} == ({"info"} if level == "info" else set())


def test_sighup_takes_over_what_can_change_and_names_what_cannot(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text("[learn]\nbatch_ratings = 16\n")
    state = tmp_path / "state"
    state.mkdir()
    program = (
        "import sys; from pathlib import Path; from edged import config; from edged.daemon import run\n"
        f"path = Path({str(file)!r})\n"
        f"sys.exit(run(config.load(path), state_folder=Path({str(state)!r}), config_path=path,"
        f" worker_command=(sys.executable, '-P', {str(Path(__file__).parent / 'light_worker.py')!r})))"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stderr=output)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(state / "edged.sock")), base_url="http://e") as client:

            def missing() -> int:
                return int(client.get("/v1/status").json()["learner"]["ratings_until_update"])

            wait_for(lambda: "listening on" in log.read_text())
            wait_for(lambda: missing() == 16)
            file.write_text("[learn]\nbatch_ratings = 4\n[lora]\nrank = 4\n[api]\nread_timeout_s = 0.2\n")
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: missing() == 4)
            assert hears_no_more_of_half_a_request(state / "edged.sock")
            file.write_text("[learn]\nbatch_ratings = 'many'\n")
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: "learn.batch_ratings" in log.read_text().split("not reloaded")[-1])
            assert missing() == 4
        assert "lora.rank" in log.read_text()
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_second_daemon_on_the_folder_is_told_who_has_it_and_harms_nothing(start_light: Any) -> None:
    first = start_light()
    run = Path(__file__).parent / "run_light.py"
    second = subprocess.run(
        [sys.executable, str(run), str(first.state)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert str(first.process.pid) in second.stderr
    assert "--state-dir" in second.stderr
    assert first.chat()["id"]


def test_no_child_is_left_two_seconds_after_the_daemon_alone_is_killed(start_light: Any) -> None:
    daemon = start_light(settings={"learn.batch_ratings": 4})
    daemon.rate_some(2)  # half a batch starts the train worker
    pids = [daemon.until(lambda name=name: daemon.worker_pid(name)) for name in ("serve", "train")]
    daemon.process.kill()
    daemon.process.wait()
    time.sleep(2)
    assert [pid for pid in pids if is_alive(pid)] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"GGUF\x03\x00\x00\x00\x01", "truncated"), (b"hello world, no model at all", "GGUF")],
)
def test_a_model_file_that_is_none_is_a_configuration_error(tmp_path: Path, content: bytes, words: str) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(content)
    run = Path(__file__).parent / "run_light.py"
    state = tmp_path / "state"
    refused = subprocess.run(
        [sys.executable, str(run), str(state), f'model.path="{model}"'],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 78
    assert "broken.gguf" in refused.stderr
    assert words.lower() in refused.stderr.lower()


def test_another_base_model_gets_no_adapter_of_the_one_before_and_takes_none_of_its_ratings(
    start_light: Any, packaged_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copyfile(packaged_model, other)
    with other.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    settings = {"learn.batch_ratings": 4}
    daemon = start_light(settings=settings)
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    daemon.rate_some(2)
    before = daemon.chat()["system_fingerprint"]
    assert before.endswith("-v1")
    assert daemon.stop() == 0

    foreign = start_light(settings=settings | {"model.path": str(other)})
    served = foreign.chat()["system_fingerprint"]
    assert served.endswith("-v0")
    assert served.split("-")[1] != before.split("-")[1]
    assert foreign.status()["learner"]["dropped"] == {"other_base": 2}
    refused = foreign.client.post("/v1/adapters/1/promote", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_servable")
    assert foreign.stop() == 0

    back = start_light(settings=settings)
    assert back.chat()["system_fingerprint"] == before
    assert back.status()["learner"]["dropped"] == {}
    back.rate_some(2)
    back.until(lambda: back.status()["learner"]["updates_total"] == 2)
    assert back.status()["learner"]["last_update"]["verdict"] == "published"


def test_settings_that_the_live_version_does_not_follow_are_told_at_the_start(start_light: Any) -> None:
    daemon = start_light(settings={"learn.batch_ratings": 4})
    daemon.rate_some(4)
    daemon.until(lambda: daemon.status()["learner"]["updates_total"] == 1)
    assert daemon.stop() == 0
    assert "[lora] asks for" not in daemon.log.read_text()
    again = start_light(settings={"lora.rank": 4})
    told = again.log.read_text().partition("[lora] asks for rank 4")[2]
    assert "v1, which is live, has rank 8" in told
    assert "promote version 0" in told


def test_five_mistakes_in_the_configuration_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "edged.toml"
    file.write_text(
        "[learn]\nbatch_ratings = 'x'\nepochs = 0\nclip_lo = 0.1\n[serve]\nslots = -1\n[sreve]\nthreads = 2\n"
    )
    command = [sys.executable, "-m", "edged", "run", "--config", str(file), "--state-dir", str(tmp_path / "state")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 78
    for key in ("learn.batch_ratings", "learn.epochs", "learn.clip_lo", "serve.slots", "sreve"):
        assert key in refused.stderr
    assert not (tmp_path / "state").exists()


def hears_no_more_of_half_a_request(path: Path) -> bool:
    """Whether the daemon hangs up on a client that does not go on, before the 30 s of the default are over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: local")
        return client.recv(4096) == b""


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s in vain"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return process_state(pid) not in ("", "Z")


def process_state(pid: int) -> str:
    """The kernel's letter for it: R, S, T (stopped), Z (zombie), ...; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_what_people_said_is_readable_by_the_daemons_user_only(start_light: Any) -> None:
    daemon = start_light(settings={"learn.batch_ratings": 4}, environment={"EDGED_LIGHT_TRAIN_S": "1.5"})
    daemon.rate_some(4)
    daemon.until(lambda: list((daemon.state / "spool").glob("update-*/job.msgpack")))
    for path in daemon.state.rglob("*"):
        if path.name != "edged.sock":
            assert path.stat().st_mode & 0o077 == 0, path
