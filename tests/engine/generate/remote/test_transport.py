"""HTTP to a server that answers, refuses, breaks off, says nothing or is not there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.generate.remote import transport
from engine.generate.remote.transport import ServerGone, ServerRefused, Transport

Reply = Callable[[socket.socket], None]


class Scripted:
    """A server that does to each connection what it is told, in order; the last for all that follow."""

    def __init__(self, *replies: Reply, path: Path | None = None) -> None:
        self.seen: list[bytes] = []
        self._replies = list(replies)
        self._socket = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._socket.bind(str(path) if path else ("127.0.0.1", 0))
        self._socket.listen()
        self.url = f"unix:{path}" if path else f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            data = b""
            while b"\r\n\r\n" not in data or (data.endswith(b"\r\n\r\n") and b"Content-Length" in data):
                data += connection.recv(65536)
            self.seen.append(data)
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            with connection:
                reply(connection)

    def close(self) -> None:
        self._socket.close()


def says(body: bytes, status: str = "200 OK") -> Reply:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    return lambda connection: connection.sendall(head + body)


def breaks(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    servers: list[Scripted] = []

    def start(*replies: Reply, path: Path | None = None) -> Scripted:
        servers.append(Scripted(*replies, path=path))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PAUSE_S", 0.001)


def test_json_comes_back_and_the_key_goes_along(scripted: Callable[..., Scripted]) -> None:
    server = scripted(says(b'{"data": []}'))
    assert Transport(server.url + "/prefix/", api_key="secret").get("/v1/models") == {"data": []}
    assert b"GET /prefix/v1/models HTTP/1.1" in server.seen[0]
    assert b"Authorization: Bearer secret" in server.seen[0]


def test_a_unix_socket_is_spoken_to_as_a_port_is(scripted: Callable[..., Scripted], tmp_path: Path) -> None:
    assert Transport(scripted(says(b"fine"), path=tmp_path / "s").url).post("/x", {}) == "fine"


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "no such model", "type": "NotFoundError"}}',
        b'{"success": false, "error_message": "no such model"}',
        b'{"detail": "no such model"}',
        b"no such model",
    ],
)
def test_a_refusal_is_told_in_the_server_s_own_words_and_not_repeated(
    scripted: Callable[..., Scripted], body: bytes
) -> None:
    server = scripted(says(body, "404 Not Found"))
    with pytest.raises(ServerRefused, match="no such model") as refused:
        Transport(server.url).post("/x", {})
    assert refused.value.status == 404
    assert len(server.seen) == 1


def test_what_may_be_repeated_is_when_the_connection_breaks(scripted: Callable[..., Scripted]) -> None:
    server = scripted(breaks, breaks, says(b"1"))
    assert Transport(server.url).get("/x") == 1
    with pytest.raises(ServerGone):
        Transport(scripted(breaks).url).get("/x")


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(ServerGone, match=f"http://127.0.0.1:{port}: .*refused"):
        Transport(f"http://127.0.0.1:{port}").get("/x")


def events(*parts: bytes, then: Reply = breaks) -> Reply:
    def reply(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for part in parts:
            connection.sendall(part)
        then(connection)

    return reply


def test_a_stream_gives_its_events_up_to_its_end(scripted: Callable[..., Scripted]) -> None:
    server = scripted(events(b': ping\n\ndata: {"a": 1}\n\nda', b'ta: {"a": 2}\n\n', b"data: [DONE]\n\ndata: {}\n\n"))
    assert list(Transport(server.url).stream().events("/x", {"b": 2})) == [{"a": 1}, {"a": 2}]
    assert json.loads(server.seen[0].partition(b"\r\n\r\n")[2]) == {"b": 2}


@pytest.mark.parametrize("parts", [(b'data: {"a": 1}\n\n',), (b'data: {"a": \n\n',), (b"data: [1]\n\n",)])
def test_a_stream_that_breaks_off_or_makes_no_sense_is_no_end(
    scripted: Callable[..., Scripted], parts: tuple[bytes, ...]
) -> None:
    with pytest.raises(ServerGone):
        list(Transport(scripted(events(*parts)).url).stream().events("/x", {}))


def test_an_aborted_stream_ends_without_a_word_wherever_it_is(scripted: Callable[..., Scripted]) -> None:
    left = threading.Event()

    def waits(connection: socket.socket) -> None:
        while connection.recv(100):  # what is left of the request, and then nothing, because it is gone
            pass
        left.set()

    stream = Transport(scripted(events(b'data: {"a": 1}\n\n', then=waits)).url).stream()
    got = []
    for event in stream.events("/x", {}):
        got.append(event)
        stream.abort()
    assert got == [{"a": 1}]
    assert left.wait(60)
    assert list(stream.events("/x", {})) == []  # one that was aborted before it began does not begin
