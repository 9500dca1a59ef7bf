"""Jobs that a worker has been given and has not answered: one future each, by job id.

Used by the client of each worker. Knows no particular message; a worker that dies ends all of them with `WorkerLost`,
and nothing is known of what it did. There is no time limit: a worker that hangs sends no beats and is killed, and one
that beats will answer.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from edged.failure import WorkerDown, WorkerLost
from engine import protocol


class Recipient(Protocol):
    """A worker as far as giving it jobs goes."""

    @property
    def is_ready(self) -> bool: ...

    def send(self, message: protocol.Message) -> None: ...


class Underway:
    """Lives on the event loop. `name` is the worker's, for messages: "serve", "train"."""

    def __init__(self, recipient: Recipient, name: str) -> None:
        self._recipient = recipient
        self._name = name
        self._futures: dict[str, asyncio.Future[protocol.Message]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._futures

    def begin(self, job_id: str, message: protocol.Message) -> asyncio.Future[protocol.Message]:
        """Give the worker a job; its answer, or `WorkerLost` if it dies. Cancelling the future gives the answer up.

        Raises WorkerDown: it does not run, and has got nothing.
        """
        if not self._recipient.is_ready:
            raise WorkerDown(f"the {self._name} worker is not running")
        future: asyncio.Future[protocol.Message] = asyncio.get_running_loop().create_future()
        self._futures[job_id] = future
        try:
            self._recipient.send(message)
        except BaseException:
            del self._futures[job_id]
            raise
        return future

    async def call(self, job_id: str, message: protocol.Message) -> protocol.Message:
        """Give the worker a job and wait for its answer. Raises WorkerDown, WorkerLost."""
        try:
            return await self.begin(job_id, message)
        finally:
            self._futures.pop(job_id, None)

    def answer(self, job_id: str, message: protocol.Message) -> None:
        """The worker has answered. An answer that nobody waits for any more is dropped."""
        future = self._futures.pop(job_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    def lose(self) -> None:
        """The worker is gone."""
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(WorkerLost(f"the {self._name} worker died"))
