"""Lanes: the trainer's threads, each running whole pieces of work on its own share of the cores.

A small model's products take microseconds, so splitting each of them over the cores spends the time in barriers, and
where a core is busy serving, every barrier waits for it. Lanes instead give each thread an episode or a micro-batch.
Results come back in the order of the work, so sums over them do not depend on which lane was faster, nor on how many
lanes there are as long as the threads of a lane are the same: a sum over a matrix is cut by the number of threads, and
each way of cutting it rounds differently. The thread that uses the lanes computes with a lane's number of threads too,
once it has called `match_thread`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from engine.protocol import TrainRole
from engine.train.pauses import Pauses

T = TypeVar("T")
R = TypeVar("R")

MAX_LANES = 4  # activations exist once a lane
# How long the caller waits before it looks for messages and says that it is alive: what a trainer is told of its pace
# has to be heard while somebody waits for a first token.
WAIT_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What has been used since the lanes exist. cpu_s: CPU time of the process. lanes_s: time in which a lane was at
    work, of all lanes together. moved_bytes: what came from other processes."""

    cpu_s: float
    lanes_s: float
    moved_bytes: int

    def since(self, before: Usage) -> Usage:
        """What was used from `before` to now."""
        return Usage(self.cpu_s - before.cpu_s, self.lanes_s - before.lanes_s, self.moved_bytes - before.moved_bytes)


class Lanes:
    """`threads` cores cut into at most `most` lanes; one lane on a GPU, which is parallel in itself."""

    def __init__(self, threads: int, device: torch.device, *, most: int = MAX_LANES) -> None:
        self.n_threads = threads
        self.n_lanes = 1 if device.type == "cuda" else max(1, min(threads, most))
        self._threads_a_lane = max(1, threads // self.n_lanes)
        self.pauses = Pauses()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            self.n_lanes, thread_name_prefix="lane", initializer=self.match_thread
        )

    def match_thread(self) -> None:
        """Let the calling thread compute with as many threads as a lane does, and so to the same bytes."""
        torch.set_num_threads(self._threads_a_lane)

    def map(self, work: Callable[[T], R], items: Iterable[T], tick: Callable[[], None]) -> list[R]:
        """`work` of every item, in order. `tick` is called in this thread while it waits; if it or any work raises,
        what has not begun is dropped, what runs is waited for, and the first exception is raised."""

        def paced(item: T) -> R:
            began = self.pauses.work_began()
            try:
                return work(item)
            finally:
                self.pauses.work_ended(began)

        futures = [self._pool.submit(paced, item) for item in items]
        try:
            results = []
            for future in futures:
                while not concurrent.futures.wait((future,), timeout=WAIT_S).done:
                    tick()
                results.append(future.result())
                tick()
            return results
        except BaseException:
            for future in futures:
                future.cancel()
            self.pauses.end_rests()
            concurrent.futures.wait(futures)
            raise

    def on(self, role: TrainRole | None, work: Callable[[], T]) -> Callable[[], T]:
        """Run `work` where `role` is (None: everywhere), which here is here and now; a call gives its result.

        Lanes of several processes (`engine.train.ranks.team`) run it in some of them only, and give its result to all.
        """
        result = work()
        return lambda: result

    def used(self) -> Usage:
        """By this process, so far."""
        return Usage(time.process_time(), self.pauses.worked_s, 0)

    def shares(self, used: Usage, wall_s: float) -> dict[str, float]:
        """`used` within `wall_s` seconds, as figures: `busy/cores`, the share of the threads' time that was CPU time;
        `busy/lanes`, the share of the lanes' time in which they were at work, which on a card is the time in which it
        had work; `bytes/between_ranks`.

        Lanes of several processes give the figures of all of them, and all of them have to ask.
        """
        return figures_of(used, wall_s * self.n_threads, wall_s * self.n_lanes)

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def figures_of(used: Usage, threads_s: float, lanes_s: float) -> dict[str, float]:
    """The figures of `Lanes.shares`, of the time of all threads and of all lanes, in seconds."""
    return {
        "busy/cores": used.cpu_s / threads_s,
        "busy/lanes": used.lanes_s / lanes_s,
        "bytes/between_ranks": float(used.moved_bytes),
    }
