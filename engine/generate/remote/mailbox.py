"""From threads to the loop: what they have to say, and a descriptor that wakes whoever sleeps on it."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts; one takes. `descriptor` can be read while something is there."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self.descriptor, 1)

    def take_all(self) -> list[T]:
        """Everything that is there, in order."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return []
        items: list[T] = []
        while not self._items.empty():
            items.append(self._items.get())
        return items
