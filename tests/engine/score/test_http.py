"""The reward service on a real loopback socket: it answers, lies, floods, drips, closes, or is not there."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.protocol import HttpSource
from engine.score.http import RewardService, open_http, parse_rewards
from engine.score.verdict import SourceFailed
from tests.engine.score.answers import make_item, soon

GUARD_S = 60.0
Behave = Callable[[socket.socket, bytes], None]


def read_request(connection: socket.socket) -> bytes:
    """One whole request: headers and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (chunk := connection.recv(65536)):
            return data
        data += chunk
    headers, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length and (chunk := connection.recv(65536)):
        body += chunk
    return headers + b"\r\n\r\n" + body


def answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def service(behave: Behave) -> Iterator[str]:
    """A server that treats every connection's first request with `behave`; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(GUARD_S)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(GUARD_S)
                    behave(connection, read_request(connection))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/judge"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(GUARD_S)


def saying(status: str, body: bytes, *headers: str) -> Behave:
    return lambda connection, request: connection.sendall(answer(status, body, *headers))


def ask(url: str, *, seconds: float = GUARD_S, n_items: int = 2) -> tuple[float | None, ...]:
    judge: RewardService = open_http(HttpSource(url=url))
    return judge.judge([make_item(f"answer {i}") for i in range(n_items)], 1.0, soon(seconds)).rewards


def failure(behave: Behave, *, seconds: float = GUARD_S) -> SourceFailed:
    with service(behave) as url, pytest.raises(SourceFailed) as caught:
        ask(url, seconds=seconds)
    return caught.value


def test_the_service_is_sent_the_answers_and_its_numbers_are_the_rewards() -> None:
    requests: list[bytes] = []

    def behave(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        connection.sendall(answer("200 OK", b'{"rewards": [0.5, null], "model": "mine"}'))

    with service(behave) as url:
        assert ask(url) == (0.5, None)
    headers, _, body = requests[0].partition(b"\r\n\r\n")
    assert headers.startswith(b"POST /judge HTTP/1.1\r\n")
    assert b"content-type: application/json" in headers.lower()
    sent = json.loads(body)["items"]
    assert [item["answer"] for item in sent] == ["answer 0", "answer 1"]
    assert sent[0]["messages"] == [{"role": "user", "content": "Why?"}]


def test_text_that_is_no_unicode_reaches_the_service_as_json() -> None:
    with service(saying("200 OK", b'{"rewards": [1]}')) as url:
        found = open_http(HttpSource(url=url)).judge([make_item("\ud800")], 1.0, soon())
    assert found.rewards == (1.0,)


def test_another_status_is_told_with_the_beginning_of_what_came() -> None:
    failed = failure(saying("503 Service Unavailable", b"the model is loading" + b"." * 5000))
    assert failed.reason == "judge_http_status"
    assert "answered 503: the model is loading" in failed.detail


def test_a_redirect_is_not_followed() -> None:
    failed = failure(saying("302 Found", b"", "location: http://127.0.0.1:9/elsewhere"))
    assert (failed.reason, "answered 302" in failed.detail) == ("judge_http_status", True)


@pytest.mark.parametrize(
    "body", [b"", b"fine", b"[0.5, 0.5]", b'{"reward": [0.5, 0.5]}', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_a_body_without_rewards_is_a_bad_answer(body: bytes) -> None:
    with pytest.raises(SourceFailed) as caught:
        parse_rewards(body)
    assert caught.value.reason == "judge_bad_answer"


def test_what_the_service_says_is_checked_like_any_source() -> None:
    with service(saying("200 OK", b'{"rewards": [NaN, 1e999, "1", 7]}')) as url:
        found = open_http(HttpSource(url=url)).judge([make_item()] * 4, 1.0, soon())
    assert found.rewards == (None, None, None, 1.0)
    assert found.reasons == ("judge_not_finite", "judge_not_finite", "judge_not_a_number", "judge_clipped")


def test_a_flood_is_cut_off() -> None:
    def flood(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")

    assert failure(flood).reason == "judge_answer_too_large"


def test_a_compressed_answer_is_not_unpacked() -> None:
    failed = failure(saying("200 OK", b"\x1f\x8b", "content-encoding: gzip"))
    assert (failed.reason, "compressed" in failed.detail) == ("judge_bad_answer", True)


def test_a_service_that_says_nothing_is_not_waited_for() -> None:
    def wait(connection: socket.socket, request: bytes) -> None:
        connection.recv(1)  # until the other side closes

    failed = failure(wait, seconds=0.2)
    assert failed.reason == "judge_timeout"


def test_a_service_that_drips_is_not_waited_for() -> None:
    def drip(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
        while not threading.Event().wait(0.05):
            connection.sendall(b" ")

    failed = failure(drip, seconds=0.3)
    assert (failed.reason, "still sending" in failed.detail) == ("judge_timeout", True)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", b"SSH-2.0-OpenSSH\r\n"])
def test_a_connection_that_ends_early_or_speaks_no_http_is_told(said: bytes) -> None:
    assert failure(lambda connection, request: connection.sendall(said)).reason == "judge_unreachable"


def test_a_service_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SourceFailed) as caught:
        ask(f"http://127.0.0.1:{port}/")
    assert caught.value.reason == "judge_unreachable"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with service(saying("200 OK", b'{"rewards": [0.5, 0.5]}')) as url:
        assert ask(url) == (0.5, 0.5)
