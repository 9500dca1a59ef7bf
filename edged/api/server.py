"""Serves the application on listening sockets, inside the daemon's own event loop.

uvicorn's HTTP protocol does the talking; its server is not used: it installs signal handlers, wakes up ten times a
second and cannot tell running streams that it stops. This one wakes up for connections only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from edged.api.connection import Connection, ConnectionLimits, connection_config
from edged.api.listen import BACKLOG, Listener
from edged.api.peer import Shutdown

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
KEEP_ALIVE_S = 30
MAX_HEAD_BYTES = 64 * 1024
CUT_GRACE_S = 1.0  # for requests to say that they were cut, before their tasks are cancelled
POLL_S = 0.02  # while draining only


class HttpServer:
    """Owns its listeners from `start` on; `drain` closes everything and can be called once."""

    def __init__(
        self,
        app: ASGIApp,
        listeners: Sequence[Listener],
        *,
        patience_s: Callable[[], float],
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._listeners = listeners
        self._config = connection_config(app, keep_alive_s=KEEP_ALIVE_S)
        self._limits = ConnectionLimits(
            max_connections=max_connections, max_head_bytes=MAX_HEAD_BYTES, patience_s=patience_s
        )
        self._state = ServerState()
        self._shutdown = Shutdown(closing=asyncio.Event(), cut=asyncio.Event())
        self._servers: list[asyncio.Server] = []

    @property
    def addresses(self) -> list[str]:
        """As clients name them; a port 0 of the configuration is the real one here."""
        return [listener.address for listener in self._listeners]

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            listener.sock.setblocking(False)
            if listener.sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._connection, sock=listener.sock, backlog=BACKLOG)
            else:
                server = await loop.create_server(self._connection, sock=listener.sock, backlog=BACKLOG)
            self._servers.append(server)
            logger.info("listening on %s", listener.address)

    async def drain(self, within_s: float) -> None:
        """Stop accepting, let running requests finish within `within_s`, cut the others, and close everything."""
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            listener.close()
        self._shutdown.closing.set()
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._finished(within_s):
            logger.info("cutting %d requests that still run", len(self._state.tasks))
            self._shutdown.cut.set()
            await self._finished(CUT_GRACE_S)
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=CUT_GRACE_S)
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _connection(self) -> Connection:
        return Connection(self._config, self._state, self._limits, self._shutdown)

    async def _finished(self, within_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + within_s
        while self._state.tasks:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True
