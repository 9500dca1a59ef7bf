"""HTTP to one server: JSON there and back, and streams of events that can be cut off from another thread.

Blocking; a connection for each request. What may be repeated without harm is repeated when the connection breaks; a
generation never is.

    ServerGone      no connection, a broken one, silence, or an answer that is none
    ServerRefused   the server understood and said no
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0  # an adapter may have to be read from a slow disk
QUICK_TIMEOUT_S = 3.0
SILENCE_S = 120.0  # of a stream, from one token to the next, or in the server's queue
TRIES = 3
PAUSE_S = 0.2  # before the second try; doubles
MAX_REASON_CHARS = 500


class ServerGone(Exception):
    """Raised when the server cannot be reached, falls silent, or answers with what is no answer."""


class ServerRefused(Exception):
    """Raised when the server says no. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Transport:
    """One server. url: http://HOST:PORT, https://HOST:PORT or unix:PATH. May be used by several threads."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, quickly: bool = False) -> Any:
        """The JSON behind `path`. quickly: for a caller who holds others up: one try, and little patience. Raises
        ServerGone, ServerRefused."""
        return self._once("GET", path, None, QUICK_TIMEOUT_S) if quickly else self._patiently("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON, or else the text, that answers `body`; only for what may be repeated. Raises ServerGone,
        ServerRefused."""
        return self._patiently("POST", path, body)

    def stream(self) -> Stream:
        """A stream that has not begun."""
        return Stream(self)

    def _patiently(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        for pause in range(TRIES - 1):
            try:
                return self._once(method, path, body)
            except ServerGone:
                time.sleep(PAUSE_S * 2**pause)
        return self._once(method, path, body)

    def _once(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        connection = self.connect(timeout_s)
        try:
            data = self.request(connection, method, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise self.gone(error) from error
        finally:
            connection.close()
        try:
            return json.loads(data)
        except ValueError:
            return data.decode(errors="replace")

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """An open connection. Raises ServerGone."""
        parts, patience_s = urlsplit(self.url), min(CONNECT_TIMEOUT_S, timeout_s)
        connection: http.client.HTTPConnection
        if parts.scheme == "unix":
            connection = _UnixConnection(parts.path, timeout=patience_s)
        elif parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=patience_s)
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience_s)
        try:
            connection.connect()
        except OSError as error:
            raise self.gone(error) from error
        connection.sock.settimeout(timeout_s)
        return connection

    def request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        """Send, and read the head of the response. Raises ServerRefused, OSError, HTTPException."""
        prefix = "" if self.url.startswith("unix:") else urlsplit(self.url).path.rstrip("/")
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, prefix + path, data, self._headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise ServerRefused(response.status, _reason(response.read()))
        return response

    def gone(self, error: Exception | str) -> ServerGone:
        """What to raise of a connection that failed."""
        why = str(error) or type(error).__name__
        return ServerGone(f"{self.url}: {why}")


class Stream:
    """One request whose answer comes in pieces. `abort` may be called from any thread, at any time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Cut it off: the server stops generating for whoever is gone. `events` ends without a word."""
        with self._lock:
            self._aborted.set()
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # it is over already

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of each server-sent event, up to `[DONE]`. Raises ServerGone, ServerRefused."""
        if self._aborted.is_set():
            return
        connection = self._transport.connect(SILENCE_S)
        try:
            with self._lock:
                self._socket = connection.sock
                if self._aborted.is_set():
                    return
            response = self._transport.request(connection, "POST", path, body)
            yield from self._read(response)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._aborted.is_set():
                raise self._transport.gone(error) from error
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError(f"an event that is no table of keys: {data[:80]!r}")
            yield event
        if not self._aborted.is_set():
            raise self._transport.gone("the stream broke off")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError:
            self.sock.close()
            raise


def _reason(data: bytes) -> str:
    """What a server says of its refusal; both put it in a table, in one place or another."""
    text = data.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except ValueError:
        return text[:MAX_REASON_CHARS]
    while isinstance(told, dict):
        told = next((told[key] for key in ("error", "message", "error_message", "detail") if told.get(key)), str(told))
    return str(told)[:MAX_REASON_CHARS]
