"""One HTTP connection: uvicorn's h11 protocol with what it lacks for a server that strangers can reach.

- It says who is at the other end (`edged.api.peer`).
- A request head must be complete in time, and so must the rest of a body that was refused; uvicorn would wait for ever.
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

SPARE_CONNECTIONS = 64  # beyond the limit, these many are still told so; further ones are dropped

_TOO_MANY = Refused(
    429, "too_many_connections", "the server has too many open connections; try again", retry_after_s=1.0
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """head_timeout_s: in which a request's head must be complete, and the rest of a refused body; asked each time."""

    max_connections: int
    head_timeout_s: Callable[[], float]


class Connection(H11Protocol):
    """uvicorn's protocol, one instance a connection."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits, shutdown: Shutdown) -> None:
        super().__init__(config=config, server_state=state, app_state={SHUTDOWN: shutdown})
        self._limits = limits
        self._impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self._limits.max_connections
        if over > SPARE_CONNECTIONS:
            transport.abort()
            return
        if over > 0:
            self.app = _turn_away
        self.app_state = {**self.app_state, PEER: peer_of_socket(transport.get_extra_info("socket"))}
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._refresh_date()
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large a head, and hang up."""
        if len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0):
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
            self._impatience = self.loop.call_later(self._limits.head_timeout_s(), self._give_up)

    def _unwatch(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _give_up(self) -> None:
        self._impatience = None
        self.transport.close()


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(_TOO_MANY)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def connection_config(app: Any, *, keep_alive_s: int, max_head_bytes: int) -> Config:
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
        h11_max_incomplete_event_size=max_head_bytes,
    )
    config.load()
    return config
