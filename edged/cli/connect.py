"""How a command finds the daemon and speaks HTTP with it, over its Unix socket or over TCP.

Finding: `--connect`, else `EDGED_CONNECT`, else the first of `DEFAULT_SOCKETS` that answers. Speaking: one request, one
answer; an answer of 400 and above becomes a `CommandError` with the daemon's own message, no answer becomes `NoDaemon`.
There are no retries here: a command that ran once has asked once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from edged.cli.exits import CommandError, NoDaemon

if TYPE_CHECKING:
    import httpx

DEFAULT_SOCKETS = (Path("var/edged.sock"), Path("/run/edged/edged.sock"))
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0  # promotes and imports wait for the gate; a long answer for its last token

_NO_DAEMON_HINT = "start one with `edged run`, or say where it listens with --connect or EDGED_CONNECT"

ConnectOption = Annotated[
    str | None,
    typer.Option("--connect", envvar="EDGED_CONNECT", help="unix:PATH or URL.  [default: ./var, then /run/edged]"),
]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="EDGED_API_KEY", help="API key, for TCP.", show_envvar=True)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
IfLiveOption = Annotated[
    int | None, typer.Option("--if-live", help="Only if this version is live now; else fail and change nothing.")
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where the daemon listens. Exactly one of `socket` and `url` is set. `name` is what messages show."""

    socket: Path | None = None
    url: str | None = None

    @property
    def name(self) -> str:
        return f"unix:{self.socket}" if self.socket is not None else str(self.url)

    @property
    def base_url(self) -> str:
        # Over a Unix socket the host is only the Host header, which the daemon checks against DNS rebinding.
        return self.url if self.url is not None else "http://localhost"


def find_peer(
    connect: str | None,
    *,
    exists: Callable[[Path], bool] = os.path.exists,
    why_not: Callable[[Path], str | None] | None = None,
) -> Peer:
    """The peer that `connect` names, or without it the first default socket that answers.

    Args:
        exists: whether there is a file at the path.
        why_not: why nobody answers there, or None; `refusal_of_socket` by default.

    Raises:
        typer.BadParameter: `connect` is neither unix:PATH nor an http(s) URL.
        NoDaemon: `connect` is None and no default socket answers.
    """
    if connect is None:
        return _first_that_answers(exists, why_not or refusal_of_socket)
    if connect.startswith("unix:") and len(connect) > len("unix:"):
        return Peer(socket=Path(connect.removeprefix("unix:")))
    if connect.startswith(("http://", "https://")) and _is_address(connect):
        return Peer(url=connect.rstrip("/"))
    raise typer.BadParameter(f"{connect!r}: expected unix:PATH, http://HOST:PORT or https://HOST:PORT")


def _is_address(url: str) -> bool:
    """Whether it names a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _first_that_answers(exists: Callable[[Path], bool], why_not: Callable[[Path], str | None]) -> Peer:
    silent = []
    for socket in DEFAULT_SOCKETS:
        if exists(socket):
            if (why := why_not(socket)) is None:
                return Peer(socket=socket)
            silent.append(f"unix:{socket}: {why}")
    if silent:
        raise NoDaemon(f"no daemon answers at {', nor at '.join(silent)}", hint=_NO_DAEMON_HINT)
    places = " nor ".join(str(socket) for socket in DEFAULT_SOCKETS)
    raise NoDaemon(f"no daemon: neither {places} exists", hint=_NO_DAEMON_HINT)


class Client:
    """A connection to one daemon. Not thread-safe; close it, or use `opened`."""

    def __init__(self, peer: Peer, *, api_key: str | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        import httpx  # not at the top: `edged --help` must not pay for it

        self.peer = peer
        self._httpx = httpx
        self._http = httpx.Client(
            base_url=peer.base_url,
            transport=httpx.HTTPTransport(uds=None if peer.socket is None else str(peer.socket)),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int | bool) -> Any:
        """The JSON body of GET `path`."""
        return self._ask("GET", path, params=params).json()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON body of POST `path`, or None if the answer has no body."""
        answer = self._ask("POST", path, json={} if body is None else dict(body))
        return answer.json() if answer.content else None

    def delete(self, path: str) -> Any:
        """The JSON body of DELETE `path`, or None if the answer has no body."""
        answer = self._ask("DELETE", path)
        return answer.json() if answer.content else None

    def download(self, path: str, params: Mapping[str, str | int] | None = None) -> Iterator[bytes]:
        """The bytes of GET `path`, in pieces."""
        with self._guard(), self._http.stream("GET", path, params=params) as answer:
            self._check(answer)
            yield from answer.iter_bytes()

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent `data` objects of a streamed POST, up to [DONE].

        Raises CommandError when the daemon ends the stream with an error event.
        """
        with self._guard(), self._http.stream("POST", path, json=dict(body)) as answer:
            self._check(answer)
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise CommandError(message_of(event, fallback="the answer was interrupted"))
                yield event

    def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        with self._guard():
            answer = self._http.request(method, path, **arguments)
            self._check(answer)
            return answer

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code >= 400:
            answer.read()
            raise refusal(answer)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            raise NoDaemon(f"no daemon answers at {self.peer.name}: {error}", hint=_NO_DAEMON_HINT) from error
        except self._httpx.HTTPError as error:
            raise CommandError(
                f"the connection to {self.peer.name} broke: {error or type(error).__name__}",
                hint="ask `edged status` whether the daemon still runs, then try again",
            ) from error


_HINTS = {
    401: "pass an API key with --api-key or EDGED_API_KEY",
    403: "use a key that has the scope for this, or the Unix socket",
}


def refusal(answer: httpx.Response) -> CommandError:
    """The error that an answer of 400 and above, already read, stands for."""
    try:
        message = message_of(answer.json(), fallback=f"HTTP {answer.status_code}")
    except ValueError:
        message = f"{answer.url} answered HTTP {answer.status_code} without a JSON body; is it edged?"
    return CommandError(message, hint=_HINTS.get(answer.status_code, ""))


def checked_json(answer: httpx.Response) -> Any:
    """The JSON body of `answer`. Raises CommandError if its status is 400 or above."""
    if answer.status_code >= 400:
        raise refusal(answer)
    return answer.json()


def message_of(body: Any, *, fallback: str) -> str:
    """The message in an error body of OpenAI's shape, or `fallback` if the body has another shape."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) and message else fallback


@contextmanager
def opened(connect: str | None, api_key: str | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Iterator[Client]:
    """A client of the daemon that `connect` names (see `find_peer`), closed at the end."""
    peer = find_peer(connect)
    if peer.socket is not None and (why := refusal_of_socket(peer.socket)) is not None:
        raise NoDaemon(f"no daemon answers at {peer.name}: {why}", hint=_NO_DAEMON_HINT)
    client = Client(peer, api_key=api_key, timeout_s=timeout_s)
    try:
        yield client
    finally:
        client.close()


def open_async_http(peer: Peer, *, api_key: str | None = None) -> httpx.AsyncClient:
    """An httpx client of `peer` for many requests at once; the caller closes it and checks the answers."""
    import httpx

    return httpx.AsyncClient(
        base_url=peer.base_url,
        transport=httpx.AsyncHTTPTransport(
            uds=None if peer.socket is None else str(peer.socket), limits=httpx.Limits(max_connections=None)
        ),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
    )


def refusal_of_socket(path: Path) -> str | None:
    """Why nobody can be reached at the Unix socket `path`, in the system's words; None if somebody accepts."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.strerror or str(error)
    return None
