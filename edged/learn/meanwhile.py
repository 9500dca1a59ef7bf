"""Something small that is done again whenever there is news, while something large is under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def meanwhile(news: asyncio.Event, small: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do `small` at once and after each `news`, which is cleared before, until the block is left.

    The block does not depend on it: what it raises is logged, and it is not done again.
    """

    async def again() -> None:
        while True:
            news.clear()
            await small()
            await news.wait()

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            log.error("what was to be kept up to date is not", exc_info=error)
