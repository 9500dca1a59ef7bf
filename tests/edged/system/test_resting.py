"""Workers are put to sleep and woken by what their users do."""

from __future__ import annotations

import asyncio

from edged.system.resting import Resting, Sleeper


class Worker:
    """Ready as soon as it is wanted, if `starts`."""

    def __init__(self, *, starts: bool = True) -> None:
        self.starts = starts
        self.is_ready = True
        self.asked: list[str] = []

    def want(self) -> None:
        self.asked.append("want")
        self.is_ready = self.starts

    def unwant(self) -> None:
        self.asked.append("unwant")
        self.is_ready = False


class Box:
    """One worker that may rest after 10 s, on a clock that the test turns."""

    def __init__(self, *, starts: bool = True) -> None:
        self.now_s, self.in_use, self.changes = 0.0, False, 0
        self.worker = Worker(starts=starts)
        self.resting = Resting(self._changed, clock=lambda: self.now_s)
        self.resting.add(
            Sleeper(name="serve", worker=self.worker, in_use=lambda: self.in_use, keep_warm_s=lambda: 10.0)
        )

    def _changed(self) -> None:
        self.changes += 1

    def look(self, now_s: float) -> None:
        self.now_s = now_s
        self.resting.look()


def test_a_worker_without_work_is_ended_and_comes_back_for_the_next_request() -> None:
    box = Box()
    box.look(9.0)
    assert (box.worker.asked, box.resting.is_asleep("serve")) == ([], False)
    box.look(10.0)
    assert (box.worker.asked, box.resting.is_asleep("serve")) == (["unwant"], True)
    box.look(11.0)
    assert box.worker.asked == ["unwant"]
    box.resting.used("serve")
    assert (box.worker.asked, box.resting.is_asleep("serve")) == (["unwant", "want"], False)
    assert box.changes == 2


def test_a_worker_in_use_stays() -> None:
    box = Box()
    box.in_use = True
    box.look(100.0)
    box.in_use = False
    box.look(109.0)
    assert box.worker.asked == []


def test_a_worker_that_is_not_ready_is_left_to_those_who_start_it() -> None:
    box = Box()
    box.worker.is_ready = False
    box.look(100.0)
    assert (box.worker.asked, box.resting.is_asleep("serve")) == ([], False)


def test_who_needs_it_waits_until_it_is_ready_or_the_time_is_over() -> None:
    box = Box()
    box.look(10.0)
    asyncio.run(box.resting.awake("serve", within_s=60.0))
    assert box.worker.is_ready
    slow = Box(starts=False)
    slow.look(10.0)
    asyncio.run(slow.resting.awake("serve", within_s=0.1))
    assert (slow.worker.asked, slow.worker.is_ready) == (["unwant", "want"], False)
