"""Telling the trainer how much of the time it may take: a thin shell around `edged.learn.pace`.

The serve worker reports the gaps and first tokens of answers about once a second; a while without a report means that
nobody asks. Requests that wait for their first token are known at once, from whoever drives the answers. The trainer is
told when its share changes, and when it starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Protocol

from edged.learn import pace
from edged.learn.pace import Targets
from edged.ttft import FirstTokens
from engine import protocol

log = logging.getLogger(__name__)

QUIET_AFTER_S = 2.5  # without a report: they come once a second while answers run
SMALLEST_CHANGE = 1e-3

# Of the train worker. While it starts it loads the box and cannot rest, so nothing is concluded from that time.
Activity = Literal["idle", "starting", "training"]


class PacedTrainer(Protocol):
    """The train worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def send(self, message: protocol.Message) -> None: ...


class Pacing:
    """Lives on the event loop. share: what the trainer was told last."""

    def __init__(
        self, worker: PacedTrainer, *, activity: Callable[[], Activity], targets: Callable[[], Targets]
    ) -> None:
        self._worker = worker
        self._activity = activity
        self._targets = targets
        self._pace = pace.Pace()
        self._reported: Activity = "idle"
        self._somebody_waits = False
        self._quiet: asyncio.TimerHandle | None = None
        self._training_s: float | None = None
        self.share = 1.0

    def received(self, message: protocol.Message) -> bool:
        """Take a report of the serve worker; False if it is none."""
        if not isinstance(message, protocol.Decoding):
            return False
        activity = self._activity()
        if (
            activity == self._reported and activity != "starting"
        ):  # else what is reported is of two kinds, or of neither
            self._observe(message, activity == "training")
        self._reported = activity
        self._wait_for_quiet()
        self._tell()
        return True

    def waiting(self, requests: int) -> None:
        """So many requests wait for their first token now."""
        self._somebody_waits = requests > 0
        self._tell()

    def trainer_ready(self) -> None:
        """A new trainer begins with all of the time."""
        self.share = 1.0
        self._tell()

    def first_tokens(self) -> FirstTokens:
        """What is shown of them."""
        return FirstTokens(
            idle_s=self._pace.waits.quiet_median_s,
            training_s=self._training_s,
            inflation=self._pace.inflation,
            target=self._targets().ttft_inflation,
            share=self._pace.first_share,
        )

    def _observe(self, report: protocol.Decoding, is_training: bool) -> None:
        before = self._pace
        self._pace = pace.observe(before, report.gaps, report.firsts, is_training=is_training, targets=self._targets())
        latest = self._pace.waits.training_median_s
        self._training_s = self._training_s if latest is None else latest
        if self._pace.share != before.share:
            log.info("training may take %.0f%% of the time while answers run", 100 * self._pace.share)
        if self._pace.first_share != before.first_share:
            log.info(
                "first tokens took %.2f times as long while training: it may take %.0f%% of the time while somebody "
                "waits for one",
                self._pace.inflation,
                100 * self._pace.first_share,
            )

    def _wait_for_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = asyncio.get_running_loop().call_later(QUIET_AFTER_S, self._quieted)

    def _quieted(self) -> None:
        self._quiet = None
        self._tell()

    def _tell(self) -> None:
        share = pace.allowed(
            self._pace,
            answers_run=self._quiet is not None,
            somebody_waits=self._somebody_waits and self._activity() == "training",
        )
        if abs(share - self.share) < SMALLEST_CHANGE or not self._worker.is_ready:
            return
        self.share = share
        self._worker.send(protocol.Pace(share=share))
