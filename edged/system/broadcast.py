"""Events to many readers: each has its own bounded queue, and a slow one loses its oldest events, never others'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

QUEUE_EVENTS = 256

Event = tuple[str, dict[str, Any]]


class Broadcast:
    """Lives on one event loop; `publish` never waits."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Event | None]] = set()
        self._closed = False

    def publish(self, name: str, data: dict[str, Any]) -> None:
        for queue in self._queues:
            self._put(queue, (name, data))

    async def subscribe(self) -> AsyncIterator[Event]:
        """Every event from now on, until `close` or until the iterator is closed."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_EVENTS)
        if self._closed:
            return
        self._queues.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

    def close(self) -> None:
        """End every subscription; a second call does nothing."""
        self._closed = True
        for queue in self._queues:
            self._put(queue, None)

    def _put(self, queue: asyncio.Queue[Event | None], event: Event | None) -> None:
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(event)
