"""Work that ends with its client, and server-sent events.

A request's work is cancelled as soon as its client is gone, or when a stopping server has waited long enough. uvicorn
alone would let the work of a vanished client run to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edged.api.errors import INTERNAL, error_body
from edged.api.peer import shutdown_of
from edged.refusal import Refused, refusal_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHUTTING_DOWN = Refused(503, "shutting_down", "the server is stopping; ask again shortly", retry_after_s=5.0)


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when there is nobody to give it to.

    The request's body must have been read. Raises ClientDisconnect, Refused 503, and what `work` raises.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_leaves(receive))
    cut = asyncio.create_task(shutdown_of(scope).cut.wait())
    try:
        await asyncio.wait({working, leaving, cut}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise SHUTTING_DOWN if cut.done() else ClientDisconnect()
    finally:
        await _end(working, leaving, cut)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, Refused | ClientDisconnect):
            logger.debug("a request's task ended with %r", result)


def sse_data(data: Any) -> bytes:
    """One server-sent event with JSON data and no name, as OpenAI's streams have them."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def sse_event(name: str, data: Any) -> bytes:
    """One named server-sent event."""
    return b"event: " + name.encode() + b"\n" + sse_data(data)


class EventStream(Response):
    """A stream of server-sent events, one `frame` each; the generator is closed when the client leaves.

    Once it has begun, a failure can only be told inside the stream: as a last event in the shape of an error.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status_code=200, headers={"cache-control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(scope, receive, self._pump(send))
        except ClientDisconnect:
            return
        except Refused as refused:
            await _send_frame(send, sse_data(error_body(refused)))
        except Exception as error:
            logger.exception("%s failed in the middle of its stream", scope["path"])
            await _send_frame(send, sse_data(error_body(refusal_of(error) or INTERNAL)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._frames):
            async for frame in self._frames:
                await _send_frame(send, frame)


async def _send_frame(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
