"""One of the other ranks of an update: a process that runs the same job as the first one, and writes nothing.

It loads the base, joins the group, and carries out orders until there are no more. It ends with the process that has
started it, and with any error that is not a known way for an update to end: the first rank sees that it is gone.
"""

from __future__ import annotations

import collections
import logging
import os
import select
import time
from pathlib import Path
from typing import BinaryIO

from engine.fusion import compile_fusibles
from engine.protocol import Message, Pace, Score, Train
from engine.train.device import return_free_memory
from engine.train.job import compute, load_job
from engine.train.pauses import Pauses
from engine.train.ranks.freight import setback_of
from engine.train.ranks.group import Group
from engine.train.ranks.leader import lanes_threads, load_rank_base
from engine.train.ranks.orders import (
    BEAT_S,
    ENV_ORDERS_FD,
    ENV_SIGNS_FD,
    SIGN_BEAT,
    SIGN_DONE,
    SIGN_HERE,
    Join,
    read_order,
)
from engine.train.ranks.shards import Shards
from engine.train.ranks.team import Team
from engine.train.ranks.waiting import call_beside
from engine.train.scorer import Scorer
from engine.train.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class _Line:
    """The two pipes to the first rank. `pauses` of the lanes, once there are some, follow its pace."""

    def __init__(self, orders: BinaryIO, signs_fd: int) -> None:
        self._orders = orders
        self._signs_fd = signs_fd
        self._last = float("-inf")
        self._waiting: collections.deque[Message] = collections.deque()
        self.share = 1.0
        self.pauses: Pauses | None = None

    def next(self) -> Message | None:
        """The next order but for the pace; None at the end of them."""
        while not self._waiting:
            order = read_order(self._orders)
            if order is None:
                return None
            self._take(order)
        return self._waiting.popleft()

    def tick(self, *_: object) -> None:
        """Between pieces of work: give a sign, and take in what was ordered meanwhile."""
        now = time.monotonic()
        if now - self._last >= BEAT_S:
            self._last = now
            os.write(self._signs_fd, SIGN_BEAT)
        while select.select([self._orders], [], [], 0)[0]:
            order = read_order(self._orders)
            if order is None:
                return  # the first rank is gone, and the kernel is about to end this one
            self._take(order)

    def say(self, sign: bytes) -> None:
        os.write(self._signs_fd, sign)

    def _take(self, order: Message) -> None:
        if not isinstance(order, Pace):
            self._waiting.append(order)
        else:
            self.share = order.share
            if self.pauses is not None:
                self.pauses.set_share(order.share)


def run() -> None:
    """Carry out orders until there are no more."""
    with os.fdopen(int(os.environ[ENV_ORDERS_FD]), "rb", buffering=0) as orders:
        line = _Line(orders, int(os.environ[ENV_SIGNS_FD]))
        join = line.next()
        if not isinstance(join, Join):
            raise TypeError(f"a rank begins with Join, and got {type(join).__name__}")
        _carry_out(line, _join(join, line))


def _join(join: Join, line: _Line) -> Scorer:
    def load() -> Scorer:
        group = Group(Path(join.rendezvous), join.rank, join.plan.devices)
        shards = Shards(group) if join.plan.mode == "sharded" else None
        base = load_rank_base(join.start, join.plan.devices[join.rank], shards)
        team = Team(group, join.plan, lanes_threads(join.start, join.plan), line.tick, shards)
        return Scorer(base, join.start.lora.layers, team)

    if join.start.fuse:
        compile_fusibles()
    line.say(SIGN_HERE)
    scorer = call_beside(load, line.tick)
    line.pauses = scorer.lanes.pauses
    line.pauses.set_share(line.share)
    return scorer


def _carry_out(line: _Line, scorer: Scorer) -> None:
    while (order := line.next()) is not None:
        line.tick()
        try:
            match order:
                case Score():
                    scorer.score(order.episodes, order.reference, line.tick)
                case Train():
                    compute(load_job(Path(order.folder)), scorer, line.tick, lambda _: None, Stopwatch())
                case _:
                    raise TypeError(f"a rank does not take {type(order).__name__}")
        except Exception as error:
            if setback_of(error) is None:
                raise
            log.info("%s", error)  # the first rank has met the same, and reports it
        line.say(SIGN_DONE)
        return_free_memory(scorer.base.device)
