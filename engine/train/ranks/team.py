"""Lanes over several processes: a map is shared by the ranks that work on it, and a role's work is done by its ranks.

Every rank runs the same program on the same job, and so makes the same calls here in the same order. `map` deals the
items out in turn, and gives all of its ranks all results, in the order of the items. `on` runs a piece of work in the
ranks of a role and not in the others, which go on; whoever calls for its result later waits for it. So what the ranks
of two roles have been given runs at the same time.

What fails in one rank in one of the known ways (`freight.setback_of`) fails in all of them, at the same place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from engine.protocol import TrainPlan, TrainRole
from engine.train.lanes import MAX_LANES, Lanes, Usage, figures_of
from engine.train.ranks.freight import Setback, pack, setback_of, unpack
from engine.train.ranks.group import Group
from engine.train.ranks.shards import Shards
from engine.train.ranks.waiting import call_beside

T = TypeVar("T")
R = TypeVar("R")


class Team(Lanes):
    """The lanes of one rank, and what it shares with the others. Used by one thread."""

    def __init__(
        self, group: Group, plan: TrainPlan, threads: int, watch: Callable[[], None], shards: Shards | None = None
    ) -> None:
        """
        Args:
            threads: of this rank.
            watch: called at least every WAIT_S while this rank waits for another; raises RankLost to end the wait.
            shards: what holds the base, if it is cut. Its parts are fetched by one lane at a time.
        """
        self._device = torch.device(plan.devices[group.rank])
        super().__init__(threads, self._device, most=MAX_LANES if shards is None else 1)
        self._group = group
        self._plan = plan
        self._watch = watch
        self._shards = shards
        self._everyone = tuple(range(group.n_ranks))
        self._working = self._everyone  # the ranks that share the next map

    def map(self, work: Callable[[T], R], items: Iterable[T], tick: Callable[[], None]) -> list[R]:
        """As `Lanes.map`; the items are shared with the other ranks that have this work."""
        todo = list(items)
        n = len(self._working)
        if n == 1 or not todo:
            return super().map(work, todo, tick)
        mine = todo[self._working.index(self._group.rank) :: n]

        def watching() -> None:
            self._watch()
            tick()

        own = self._guarded(lambda: super(Team, self).map(work, mine, watching))
        if self._shards is not None:
            self._talk(self._shards.serve_others)
        among = self._working
        boxes = self._talk(lambda: self._group.swap(pack(own), among))
        results: list[Any] = [
            own if rank == self._group.rank else unpack(box, self._device)
            for rank, box in zip(among, boxes, strict=True)
        ]
        for one in results:
            _result_of(one)
        return [results[i % n][i // n] for i in range(len(todo))]

    def on(self, role: TrainRole | None, work: Callable[[], T]) -> Callable[[], T]:
        """As `Lanes.on`. The result must be one that can cross (`freight`), unless `role` is everywhere."""
        ranks = self._everyone if role is None else self._plan.of(role)
        outcome: Any = None
        if self._group.rank in ranks:
            before, self._working = self._working, ranks
            try:
                outcome = self._guarded(work)
            finally:
                self._working = before

        def result() -> T:
            found: T = _result_of(self._spread(ranks, outcome))
            return found

        return result

    def used(self) -> Usage:
        """By this rank, so far."""
        return dataclasses.replace(super().used(), moved_bytes=self._group.received_bytes)

    def shares(self, used: Usage, wall_s: float) -> dict[str, float]:
        """As `Lanes.shares`, of all ranks; bytes count once for each rank that they came to."""
        own = (used.cpu_s * 1e6, used.lanes_s * 1e6, used.moved_bytes, self.n_threads, self.n_lanes)
        cpu_us, lanes_us, moved, threads, lanes = (self._sum(int(number)) for number in own)
        return figures_of(Usage(cpu_us / 1e6, lanes_us / 1e6, moved), wall_s * threads, wall_s * lanes)

    def _sum(self, number: int) -> int:
        return sum(self._talk(lambda: self._group.numbers(number)))

    def _spread(self, ranks: tuple[int, ...], outcome: Any) -> Any:
        if len(ranks) == len(self._everyone):
            return outcome
        source = ranks[0]
        data = pack(outcome) if self._group.rank == source else None
        box = self._talk(lambda: self._group.broadcast(data, source))
        return outcome if self._group.rank in ranks else unpack(box, self._device)

    def _guarded(self, work: Callable[[], T]) -> T | Setback:
        try:
            return work()
        except Exception as error:
            setback = setback_of(error)
            if setback is None:
                raise
            return setback

    def _talk(self, call: Callable[[], T]) -> T:
        return call_beside(call, self._watch)


def _result_of(outcome: Any) -> Any:
    if isinstance(outcome, Setback):
        raise outcome.exception()
    return outcome
