"""Rests between pieces of work, so that the trainer takes no more than its share of the time.

A lane that has worked for w seconds rests for w * (1 / share - 1) before its next piece. So whoever else needs the
machine has it to himself in between, within one piece of work of the share being lowered, and the share is kept however
long the pieces are. With a share of 1 there are no rests. A rest ends at once when the share is raised enough.

The share is set by the thread that talks to the daemon; lanes rest in their own. Cooperative: nothing is stopped in the
middle of a piece of work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pauses:
    """One for all lanes of a worker. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._share = 1.0
        self._n_ended = 0  # how often all rests were ended
        self._worked_s = 0.0
        self._own = threading.local()  # `worked_s`: of the piece of work that this thread has done last

    @property
    def share(self) -> float:
        return self._share

    @property
    def worked_s(self) -> float:
        """Seconds that pieces of work have taken so far, of all threads together."""
        return self._worked_s

    def set_share(self, share: float) -> None:
        """Take at most `share` of the time from now on, in (0, 1]."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share {share}: above 0 and up to 1")
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def end_rests(self) -> None:
        """Whoever rests now goes on: the work that it waits with is not wanted any more."""
        with self._changed:
            self._n_ended += 1
            self._changed.notify_all()

    def work_began(self) -> float:
        """Rest for what the last piece of this thread is owed; the time at which the next one begins."""
        worked_s: float = getattr(self._own, "worked_s", 0.0)
        began = self._clock()
        if worked_s > 0.0:
            with self._changed:
                n_ended = self._n_ended
                while n_ended == self._n_ended:
                    left_s = began + worked_s * (1.0 / self._share - 1.0) - self._clock()
                    if left_s <= 0.0:
                        break
                    self._changed.wait(left_s)
        return self._clock()

    def work_ended(self, began: float) -> None:
        """A piece of work that began then is done."""
        self._own.worked_s = worked_s = self._clock() - began
        with self._changed:
            self._worked_s += worked_s
