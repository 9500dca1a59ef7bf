"""Limits on request bodies, which uvicorn does not have: how many bytes, in what time, and how many bytes of all.

The bytes are counted as they come, so a chunked body without a declared length meets the same limit. A body must be
complete within the read timeout. What bodies that are still coming hold beyond their first `FREE_BYTES` is counted
together, so many clients that stop in the middle cannot fill the memory, and small requests go through all the same.
Streamed routes have no limit on the whole; only the wait for more is limited.
Refusing does not close the connection: the rest of the body is thrown away as it comes (within the limits of
`edged.api.connection`), because a client that is cut off while it sends would never read the refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edged.refusal import Refused

FREE_BYTES = 64 * 1024  # of each body; all connections together hold 32 MiB of these at most
HELD_BYTES_MAX = 32 * 2**20  # of all unfinished bodies together, beyond that


class BodySettings(Protocol):
    """What the body limits read of `[api]`, at each request."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def read_timeout_s(self) -> float: ...


class BodyLimits:
    """The layer. `settings` is read at each request, so that a reload takes effect."""

    def __init__(self, app: ASGIApp, settings: BodySettings, streamed_paths: Collection[str]) -> None:
        self._app = app
        self._settings = settings
        self._streamed_paths = streamed_paths
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._streamed_paths:
            await self._app(scope, _patient(receive, self._settings.read_timeout_s), send)
            return
        max_bytes = self._settings.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        body = _Body(self, receive, max_bytes, self._settings.read_timeout_s)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.let_go()

    def hold(self, n_bytes: int, most: int) -> None:
        """Count bytes of an unfinished body; negative ones are let go. Raises Refused 429 above `most`."""
        if n_bytes > 0 and self._held_bytes + n_bytes > most:
            raise Refused(429, "too_many_bytes", "too many large requests are arriving; try again", retry_after_s=1.0)
        self._held_bytes += n_bytes


class _Body:
    """One body on its way."""

    def __init__(self, limits: BodyLimits, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._limits = limits
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._received_bytes = 0
        self._held_bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # from here on it tells of the client leaving, whenever that is
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(self._timeout_s) from None
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._complete = not message.get("more_body", False)
        if self._complete:
            self.let_go()
        else:
            self._hold(self._received_bytes - FREE_BYTES)
        return message

    def let_go(self) -> None:
        """It is whole, or nobody waits for it any more."""
        self._hold(0)

    def _hold(self, n_bytes: int) -> None:
        n_bytes = max(0, n_bytes)
        # A limit that the operator has set must be met by a body of that size.
        self._limits.hold(n_bytes - self._held_bytes, max(HELD_BYTES_MAX, 2 * self._max_bytes))
        self._held_bytes = n_bytes


def _patient(receive: Receive, timeout_s: float) -> Receive:
    complete = False

    async def limited() -> Message:
        nonlocal complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise _too_slow(timeout_s) from None
        complete = not message.get("more_body", False)
        return message

    return limited


def _too_large(max_bytes: int) -> Refused:
    return Refused(413, "body_too_large", f"the body is larger than {max_bytes} bytes; send less at once")


def _too_slow(timeout_s: float) -> Refused:
    return Refused(408, "request_timeout", f"the body did not arrive within {timeout_s:g} s; send it again")
