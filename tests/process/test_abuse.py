"""Clients that mean no good, or do not know better, against a real daemon: what they cost others, and its memory.

`RSS_BOUND_BYTES` is what the daemon may grow by under any of them. Other people's answers are asked for all the while.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HANG_S = 300.0
RSS_BOUND_BYTES = 48 * 2**20
FLOOD = 500
WAIT_S = 2.0  # that the daemon waits for a client
MIB = 2**20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the daemon is gone")


class Crowd:
    """Connections of one attacker, as raw sockets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HANG_S)
        self.sockets.append(sock)
        sock.connect(str(self._path))
        return sock

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, daemon_class: Any) -> Iterator[Any]:
    """One for all of them, as it would be for their makers. Prompts with "hold" in them are not answered."""
    state = tmp_path_factory.mktemp("abuse")
    hold = state / "hold"
    hold.touch()
    command = [sys.executable, str(Path(__file__).parent / "run_light.py"), str(state), f"api.read_timeout_s={WAIT_S}"]
    running = daemon_class(command, state, {"EDGED_LIGHT_HOLD": str(hold)}, ())
    try:
        running.until_ready()
        for _ in range(20):
            running.chat()
        yield running
    finally:
        running.end()


@pytest.fixture
def crowd(daemon: Any) -> Iterator[Crowd]:
    with contextlib.closing(Crowd(daemon.state / "edged.sock")) as made:
        yield made


@contextlib.contextmanager
def unharmed(daemon: Any) -> Iterator[Callable[[int], None]]:
    """Others ask on fresh connections all the while: everyone gets an answer, and the daemon stays small.

    Yields a function that waits until so many have been answered from now on.
    """
    before, highest = rss_bytes(daemon.process.pid), 0
    answered: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            transport = httpx.HTTPTransport(uds=str(daemon.state / "edged.sock"))
            with httpx.Client(transport=transport, base_url="http://edged", timeout=HANG_S) as client:
                body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
                answered.append(client.post("/v1/chat/completions", json=body).status_code)

    def wait_for(n: int) -> None:
        nonlocal highest
        wanted, deadline = len(answered) + n, time.monotonic() + HANG_S
        while len(answered) < wanted:
            assert time.monotonic() < deadline, "others are not answered any more"
            highest = max(highest, rss_bytes(daemon.process.pid))
            time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield wait_for
        wait_for(2)
    finally:
        done.set()
        asking.join(HANG_S)
    assert set(answered) == {200}
    grown = highest - before
    assert grown < RSS_BOUND_BYTES, f"the daemon grew by {grown / MIB:.1f} MiB"


def status_of(sock: socket.socket) -> int:
    """The status of the answer that comes, 0 if the connection ends without one."""
    with sock.makefile("rb") as file:
        line = file.readline()
    return int(line.split()[1]) if line else 0


def test_a_flood_of_connections_that_say_nothing_leaves_room_for_who_asks(daemon: Any, crowd: Crowd) -> None:
    with unharmed(daemon) as wait_for:
        for _ in range(FLOOD + 100):  # more than the daemon keeps open
            crowd.connect()
        wait_for(10)


def test_a_flood_of_bodies_that_stop_just_before_their_end_is_not_kept(daemon: Any, crowd: Crowd) -> None:
    body = HEAD + b"content-length: %d\r\n\r\n" % MIB + b" " * (MIB - 2)
    with unharmed(daemon) as wait_for:
        for _ in range(FLOOD // 5):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                crowd.connect().sendall(body)
        wait_for(10)


def test_readers_that_take_nothing_of_their_answers_are_left(daemon: Any, crowd: Crowd) -> None:
    for _ in range(20):
        daemon.chat("word " * 1600)
    with unharmed(daemon) as wait_for:
        for _ in range(FLOOD // 10):
            crowd.connect().sendall(b"GET /v1/episodes?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4)
        wait_for(10)
        for sock in crowd.sockets:
            daemon.until(lambda sock=sock: is_left(sock))


def is_left(sock: socket.socket) -> bool:
    """Whether the other end has hung up, found out by saying something more."""
    try:
        sock.sendall(b" ")
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(daemon: Any, crowd: Crowd) -> None:
    slow = crowd.connect()

    def drip() -> None:
        for byte in HEAD * 100:
            slow.send(bytes([byte]))
            time.sleep(0.02)

    with unharmed(daemon), pytest.raises((BrokenPipeError, ConnectionResetError)):
        drip()


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_a_body_of_100_mb_is_refused_and_not_kept(daemon: Any, crowd: Crowd, chunked: bool) -> None:
    head, piece, end = HEAD + b"content-length: %d\r\n\r\n" % (100 * MIB), b"x" * MIB, b""
    if chunked:
        head, piece, end = HEAD + b"transfer-encoding: chunked\r\n\r\n", b"100000\r\n" + piece + b"\r\n", b"0\r\n\r\n"
    with unharmed(daemon):
        sock = crowd.connect()
        sock.sendall(head)
        for _ in range(100):
            sock.sendall(piece)
        sock.sendall(end)
        assert status_of(sock) == 413


def test_a_body_in_tiny_chunks_is_not_taken_apart(daemon: Any, crowd: Crowd) -> None:
    with unharmed(daemon) as wait_for:
        for _ in range(20):
            sock = crowd.connect()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000)
            assert status_of(sock) == 400
        wait_for(3)


def test_who_hangs_up_half_way_is_cancelled(daemon: Any, crowd: Crowd) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hold this"}], "stream": True}).encode()
    with unharmed(daemon):
        for _ in range(8):
            crowd.connect().sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        daemon.until(lambda: daemon.status()["serve"]["active"] >= 8)
        for sock in crowd.sockets:
            sock.shutdown(socket.SHUT_WR)  # half-open: it could still read
        daemon.until(lambda: daemon.status()["serve"]["active"] <= 1)
