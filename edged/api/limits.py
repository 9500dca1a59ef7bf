"""Limits on request bodies, which uvicorn does not have: how many bytes, and in what time.

The bytes are counted as they come, so a chunked body without a declared length meets the same limit. A body must be
complete within the read timeout. Streamed routes have no limit on the whole; only the wait for more is limited.
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
        await self._app(scope, _counted(receive, max_bytes, self._settings.read_timeout_s), send)


def _counted(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    deadline = asyncio.get_running_loop().time() + timeout_s
    received_bytes = 0
    complete = False

    async def limited() -> Message:
        nonlocal received_bytes, complete
        if complete:
            return await receive()  # from here on it tells of the client leaving, whenever that is
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise _too_slow(timeout_s) from None
        received_bytes += len(message.get("body", b""))
        if received_bytes > max_bytes:
            raise _too_large(max_bytes)
        complete = not message.get("more_body", False)
        return message

    return limited


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
