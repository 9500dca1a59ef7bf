"""Rests between pieces of work: how long they are, and that nothing waits longer than it must."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.train.lanes import Lanes
from engine.train.pauses import Pauses


class Clock:
    """A clock that stands still unless somebody waits for it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.rested_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        assert timeout is not None
        made.now_s += timeout
        made.rested_s += timeout
        return False

    monkeypatch.setattr(threading.Condition, "wait", wait)
    return made


def work(pauses: Pauses, clock: Clock, seconds: float) -> None:
    began = pauses.work_began()
    clock.now_s += seconds
    pauses.work_ended(began)


def test_with_all_of_the_time_nothing_rests(clock: Clock) -> None:
    pauses = Pauses(clock)
    for _ in range(5):
        work(pauses, clock, 2.0)
    assert clock.rested_s == 0.0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_is_kept_however_long_the_pieces_are(clock: Clock, share: float) -> None:
    pauses = Pauses(clock)
    pauses.set_share(share)
    began_s = clock.now_s
    pieces = [0.01, 3.0, 0.5, 0.5]
    for seconds in pieces:
        work(pauses, clock, seconds)
    pauses.work_began()
    assert sum(pieces) / (clock.now_s - began_s) == pytest.approx(share)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        Pauses().set_share(share)


def resting(lanes: Lanes) -> threading.Thread:
    """A thread that maps two pieces of work, of which the second rests for minutes first."""
    lanes.pauses.set_share(1e-4)

    def run() -> None:
        lanes.map(lambda seconds: time.sleep(seconds), [0.05, 0.0], lambda: None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_rest_ends_as_soon_as_the_share_is_raised() -> None:
    lanes = Lanes(1, torch.device("cpu"))
    thread = resting(lanes)
    thread.join(0.2)
    assert thread.is_alive()
    lanes.pauses.set_share(1.0)
    thread.join(60)
    assert not thread.is_alive()
    lanes.close()


def test_work_that_is_not_wanted_any_more_is_not_rested_for() -> None:
    lanes = Lanes(1, torch.device("cpu"))
    lanes.pauses.set_share(1e-4)

    def fails(seconds: float) -> None:
        time.sleep(seconds)
        if seconds:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        lanes.map(fails, [0.05, 0.0, 0.0], lambda: None)
    assert lanes.pauses.share == 1e-4
    lanes.close()


def test_results_do_not_wait_for_the_rest_behind_them() -> None:
    lanes = Lanes(1, torch.device("cpu"))
    lanes.pauses.set_share(1e-4)
    assert lanes.map(lambda x: (time.sleep(0.02), x)[1], [7], lambda: None) == [7]
    lanes.pauses.end_rests()
    lanes.close()
