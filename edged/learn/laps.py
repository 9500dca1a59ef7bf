"""Where the time of an update goes, as the daemon sees it: seconds by stage, each moment in one of them.

start       the trainer is started           train       it trains; `train/...` are the parts of that
gate        the candidate is proved          publish     files and verdict are put on disk
swap        until new requests run on it     wait        for a worker that is not free
retry       attempts that came to nothing    total       all of these
queue       from the last rating to the beginning; with it, once a version is live, `rating_to_live`
train/wait  until the trainer begins, which may still be scoring; and the way there and back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

SUMS = ("train", "total", "rating_to_live")


class Laps:
    """Runs from the moment that it is made. seconds: what is known so far; every sum is that of its parts."""

    def __init__(self, queue_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """queue_s: since the last rating came; None if no rating did."""
        self.seconds: dict[str, float] = {"total": 0.0} | ({} if queue_s is None else {"queue": queue_s})
        self._clock = clock
        self._last = clock()

    def lap(self, stage: str) -> None:
        """What has passed since the last lap belongs to `stage`."""
        now = self._clock()
        self._add(stage, now - self._last)
        self._last = now

    def trained(self, stages: Mapping[str, float]) -> None:
        """A lap of training, of which the trainer itself tells these parts."""
        before = self.seconds.get("train", 0.0)
        self.lap("train")
        self._cut(stages, self.seconds["train"] - before)

    def trained_before(self, stages: Mapping[str, float]) -> None:
        """The training was done before the daemon was started again; the time in between is nobody's."""
        self.lap("wait")
        self._add("train", sum(stages.values()))
        self._cut(stages, sum(stages.values()))

    def live(self) -> None:
        """The end: new requests run on what was trained."""
        if "queue" in self.seconds:
            self.seconds["rating_to_live"] = self.seconds["queue"] + self.seconds["total"]

    def _add(self, stage: str, seconds: float) -> None:
        for name in (stage, "total"):
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _cut(self, stages: Mapping[str, float], whole_s: float) -> None:
        parts = dict(stages) | {"wait": whole_s - sum(stages.values())}
        for stage, seconds in parts.items():
            self.seconds[f"train/{stage}"] = self.seconds.get(f"train/{stage}", 0.0) + seconds


def parts_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """What adds up to `total`, with `queue` to `rating_to_live`: all that is no sum of others."""
    return {stage: value for stage, value in seconds.items() if stage not in SUMS}
