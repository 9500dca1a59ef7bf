"""Telling the trainer how much of the time it may take: a thin shell around `edged.learn.pace`.

The serve worker reports the gaps of running answers about once a second; a while without a report means that nobody
asks. The trainer is told when its share changes, and when it starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from edged.learn import pace
from engine import protocol

log = logging.getLogger(__name__)

QUIET_AFTER_S = 2.5  # without a report: they come once a second while answers run
SMALLEST_CHANGE = 1e-3


class PacedTrainer(Protocol):
    """The train worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def send(self, message: protocol.Message) -> None: ...


class Pacing:
    """Lives on the event loop. share: what the trainer was told last."""

    def __init__(
        self, worker: PacedTrainer, *, is_training: Callable[[], bool], min_share: Callable[[], float]
    ) -> None:
        self._worker = worker
        self._is_training = is_training
        self._min_share = min_share
        self._pace = pace.Pace()
        self._was_training = False
        self._quiet: asyncio.TimerHandle | None = None
        self.share = 1.0

    def received(self, message: protocol.Message) -> bool:
        """Take a report of the serve worker; False if it is none."""
        if not isinstance(message, protocol.Decoding):
            return False
        is_training = self._is_training()
        if is_training == self._was_training:  # else the gaps are of both kinds
            before = self._pace.share
            self._pace = pace.observe(self._pace, message.gaps, is_training=is_training, min_share=self._min_share())
            if self._pace.share != before:
                log.info("training may take %.0f%% of the time while answers run", 100 * self._pace.share)
        self._was_training = is_training
        self._wait_for_quiet()
        self._tell(self._pace.share)
        return True

    def trainer_ready(self) -> None:
        """A new trainer begins with all of the time."""
        told, self.share = self.share, 1.0
        self._tell(told)

    def _wait_for_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = asyncio.get_running_loop().call_later(QUIET_AFTER_S, self._tell, 1.0)

    def _tell(self, share: float) -> None:
        if abs(share - self.share) < SMALLEST_CHANGE or not self._worker.is_ready:
            return
        self.share = share
        self._worker.send(protocol.Pace(share=share))
