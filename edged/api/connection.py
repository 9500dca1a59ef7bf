"""One HTTP connection: uvicorn's h11 protocol with what it lacks for a server that strangers can reach.

- It says who is at the other end (`edged.api.peer`).
- A request head must be complete in time, and so must the rest of a body that was refused; a reader must take some of
  its answer in that time. uvicorn would wait for ever.
- A body in tiny chunks is refused: taking each of them apart would cost more than everybody else's requests.
- Where there are too many connections, the one that waits for its client the longest (for a request, or until an answer
  is taken) makes room for the new one: who owes something goes, who is owed something stays.
- Who ends his half of the connection is gone: a request of his that runs is cancelled. A client must keep it open until
  it has its answer, because otherwise nobody could tell that he left.
- What is answered before a request exists (bad HTTP, too many connections) has OpenAI's error shape too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from edged.api.errors import error_body, error_response
from edged.api.peer import PEER, SHUTDOWN, Shutdown, peer_of_socket
from edged.refusal import Refused

CHUNKS_FREE = 256  # of a body, of whatever size
CHUNK_BYTES_MIN = 32  # on average, of a body with more chunks
SPARE_CONNECTIONS = 64  # beyond the limit, these many are still told so; further ones are dropped

_TOO_MANY = Refused(
    429, "too_many_connections", "the server has too many open connections; try again", retry_after_s=1.0
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """patience_s: how long a client may leave a head or the rest of a refused body incomplete, or take nothing of its
    answer; asked each time."""

    max_connections: int
    max_head_bytes: int
    patience_s: Callable[[], float]


class Wire(h11.Connection):
    """h11's state machine, which counts the chunks of the body that it reads."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._n_chunks = 0
        self._body_bytes = 0
        self.is_shredded = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._n_chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._n_chunks > CHUNKS_FREE and self._body_bytes < self._n_chunks * CHUNK_BYTES_MIN:
                self.is_shredded = True
                raise h11.RemoteProtocolError("the chunks are too small")
        return event


class Connection(H11Protocol):
    """uvicorn's protocol, one instance a connection."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits, shutdown: Shutdown) -> None:
        super().__init__(config=config, server_state=state, app_state={SHUTDOWN: shutdown})
        self.conn: Wire = Wire(limits.max_head_bytes)
        self._limits = limits
        self._impatience: asyncio.TimerHandle | None = None
        self._reader_is_due: asyncio.TimerHandle | None = None
        self._untaken_bytes = 0
        self._waiting_since: float | None = None  # for the client: loop time; None while the client is owed an answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What the kernel does not take at once is pressure: an answer is held up and not kept twice, and every byte
        # that a reader leaves is noticed.
        transport.set_write_buffer_limits(high=0)
        over = len(self.connections) - self._limits.max_connections
        if over > 0 and not self._make_room():
            if over > SPARE_CONNECTIONS:
                transport.abort()
                return
            self.app = _turn_away
        self.app_state = {**self.app_state, PEER: peer_of_socket(transport.get_extra_info("socket"))}
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._refresh_date()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._waiting_since = None  # a new request has its own time
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)
        self._stop_waiting_for_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()
        self._note_waiting()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()
        self._note_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large a head, and hang up."""
        if self.conn.is_shredded:
            refused = Refused(400, "chunks_too_small", "the body comes in too many tiny chunks; send larger ones")
        elif len(self.conn.trailing_data[0]) > self._limits.max_head_bytes:
            refused = Refused(431, "head_too_large", "the request's headers are too large")
        else:
            refused = Refused(400, "invalid_http", "this is not a valid HTTP request")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is under way: nothing can be said any more
            return
        content = json.dumps(error_body(refused)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=refused.status, headers=headers),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _refresh_date(self) -> None:
        # uvicorn's own server refreshes these from a timer; a daemon that idles should not wake up for it.
        self.server_state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]

    def _watch(self) -> None:
        """Keep a deadline while we wait for bytes that nobody else limits."""
        head_is_due = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        rest_is_due = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if not (head_is_due or rest_is_due):
            self._unwatch()
        elif self._impatience is None:
            self._impatience = self.loop.call_later(self._limits.patience_s(), self._give_up)
        self._note_waiting()

    def _unwatch(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _give_up(self) -> None:
        self._impatience = None
        self.transport.close()

    def _wait_for_reader(self) -> None:
        self._untaken_bytes = self.transport.get_write_buffer_size()
        self._reader_is_due = self.loop.call_later(self._limits.patience_s(), self._check_reader)

    def _stop_waiting_for_reader(self) -> None:
        if self._reader_is_due is not None:
            self._reader_is_due.cancel()
            self._reader_is_due = None

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._untaken_bytes:
            self._wait_for_reader()
        else:
            self._reader_is_due = None
            self.transport.abort()  # closing would wait for the reader too

    def _note_waiting(self) -> None:
        """Note since when it is the client who must go on; `_watch` and flow control see every change of that."""
        waits = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.flow.write_paused
        if not waits:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = self.loop.time()

    def _make_room(self) -> bool:
        """End the connection that waits for its client the longest, if there is one."""
        waiting = [
            (other._waiting_since, other)
            for other in self.connections
            if isinstance(other, Connection) and other is not self and other._waiting_since is not None
        ]
        if not waiting:
            return False
        _, longest = min(waiting, key=lambda pair: pair[0])
        self.connections.discard(longest)  # it is counted until its transport says so, in a later turn of the loop
        longest.transport.abort()
        return True


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(_TOO_MANY)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def connection_config(app: Any, *, keep_alive_s: int) -> Config:
    """uvicorn's settings for a server that is part of a larger program: no logging set-up, no signals, no lifespan."""
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,
    )
    config.load()
    return config
