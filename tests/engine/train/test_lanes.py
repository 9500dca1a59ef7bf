"""Lanes: the order of results, what a failure does, and sums that do not depend on which thread made them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from engine.train.lanes import Lanes

CPU = torch.device("cpu")


def silent() -> None:
    """Nothing to say while waiting."""


@pytest.mark.parametrize("threads_before", [1, 2, 3])
def test_the_calling_thread_sums_to_the_same_bytes_as_a_lane_whatever_it_had_before(threads_before: int) -> None:
    numbers = torch.Generator().manual_seed(0)
    features, slope = torch.randn(1501, 578, generator=numbers), torch.randn(1501, generator=numbers)
    lanes = Lanes(2, CPU)
    (in_a_lane,) = lanes.map(lambda _: slope @ features, [0], silent)
    seen: list[torch.Tensor] = []

    def call() -> None:
        torch.set_num_threads(threads_before)
        lanes.match_thread()
        seen.append(slope @ features)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    lanes.close()
    assert torch.equal(seen[0], in_a_lane)


def test_results_come_in_the_order_of_the_work() -> None:
    lanes = Lanes(3, CPU)
    held = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            held.wait(10)
        else:
            held.set()
        return item * item

    assert lanes.map(work, range(6), silent) == [0, 1, 4, 9, 16, 25]
    lanes.close()


def test_the_first_failure_is_raised_and_what_had_not_begun_never_runs() -> None:
    lanes = Lanes(1, CPU)
    ran: list[int] = []

    def work(item: int) -> None:
        ran.append(item)
        if item == 1:
            raise ValueError("item 1")
        if item == 2:
            time.sleep(0.5)  # far longer than the caller needs to hear of the failure

    with pytest.raises(ValueError, match="item 1"):
        lanes.map(work, range(100), silent)
    assert len(ran) < 100
    assert lanes.map(lambda item: item, [7], silent) == [7]
    lanes.close()
