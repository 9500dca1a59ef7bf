"""The other processes of an update, as the first rank sees them: started, told what to do, watched, and ended.

A process that dies, or gives no sign for `silent_after_s` while it has something to do, is lost, and all of them with
it: what they share is not worth keeping one by one. Blocking nowhere but in `close`, which kills.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from engine.protocol import Message, Pace, StartTrain, TrainPlan
from engine.train.ranks.group import RankLost
from engine.train.ranks.orders import ENV_ORDERS_FD, ENV_SIGNS_FD, SIGN_DONE, SIGN_HERE, Join, write_order
from engine.worker import ENV_DAEMON_PID

SILENT_AFTER_S = 60.0
START_WITHIN_S = 300.0  # until it is about to join: the interpreter, torch, and nothing to beat with meanwhile
# A rank that has finished while the first one still waits for it: they have lost step with one another.
OUT_OF_STEP_S = 5.0
RENDEZVOUS_FILE = "rendezvous"


class _Rank:
    """One process and its pipes. is_here: it is about to join the others. n_done: orders that it has carried out."""

    def __init__(self, rank: int) -> None:
        orders_read, orders_write = os.pipe()
        signs_read, signs_write = os.pipe()
        environment = os.environ | {
            ENV_ORDERS_FD: str(orders_read),
            ENV_SIGNS_FD: str(signs_write),
            ENV_DAEMON_PID: str(os.getpid()),
        }
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.worker", "rank"],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(orders_read, signs_write),
            )
        except BaseException:
            os.close(orders_write)
            os.close(signs_read)
            raise
        finally:
            os.close(orders_read)
            os.close(signs_write)
        os.set_blocking(signs_read, False)
        self.rank = rank
        self.orders: BinaryIO = os.fdopen(orders_write, "wb", buffering=0)
        self.signs: BinaryIO = os.fdopen(signs_read, "rb", buffering=0)
        self.is_here = False
        self.n_done = 0
        self.done_at = self.heard_at = time.monotonic()

    def listen(self) -> None:
        """Take in the signs that have come."""
        signs = self.signs.read(4096)  # None: nothing came
        if signs:
            self.heard_at = time.monotonic()
            self.is_here = self.is_here or SIGN_HERE in signs
        if signs and (n_done := signs.count(SIGN_DONE)):
            self.n_done += n_done
            self.done_at = self.heard_at

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.orders.close()
        self.signs.close()


class Crew:
    """Ranks 1 and up of `plan`. The thread that makes it must outlive it: the kernel ties the processes to it."""

    def __init__(self, start: StartTrain, plan: TrainPlan, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._silent_after_s = silent_after_s
        Path(start.cache_folder).mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=start.cache_folder)
        self._n_orders = 0
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, len(plan.devices)):
                self._ranks.append(_Rank(rank))
                join = Join(rank=rank, start=start, plan=plan, rendezvous=str(self.rendezvous))
                self._write(self._ranks[-1], join)
        except BaseException:
            self.close()
            raise

    @property
    def rendezvous(self) -> Path:
        """File by which the ranks find one another."""
        return Path(self._folder.name) / RENDEZVOUS_FILE

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(one.process.pid for one in self._ranks)

    def order(self, message: Message) -> None:
        """Give every rank something to do. Raises RankLost."""
        self._n_orders += 1
        now = time.monotonic()
        for one in self._ranks:
            one.heard_at = now
            self._write(one, message)

    def pace(self, message: Pace) -> None:
        """Let every rank rest between pieces of work, also in the middle of what it does. Raises RankLost."""
        for one in self._ranks:
            self._write(one, message)

    def check_alive(self) -> None:
        """Raises RankLost if a rank is dead."""
        for one in self._ranks:
            if (status := one.process.poll()) is not None:
                raise RankLost(f"rank {one.rank} (process {one.process.pid}) has ended with status {status}")

    def watch(self) -> None:
        """While there is something to do: raises RankLost if a rank is dead, silent, or has gone on without others."""
        self.check_alive()
        for one in self._ranks:
            one.listen()
            now = time.monotonic()
            if self._n_orders and one.n_done >= self._n_orders:
                if now - one.done_at > OUT_OF_STEP_S:
                    raise RankLost(f"rank {one.rank} has finished while others wait for it")
                continue
            limit_s = self._silent_after_s if one.is_here else START_WITHIN_S
            if now - one.heard_at > limit_s:
                raise RankLost(f"rank {one.rank} gives no sign for {limit_s:g} s")

    def is_here(self) -> bool:
        """Whether every rank has started and waits for the others."""
        for one in self._ranks:
            one.listen()
        return all(one.is_here for one in self._ranks)

    def is_done(self) -> bool:
        """Whether every rank has carried out what it was told."""
        for one in self._ranks:
            one.listen()
        return all(one.n_done >= self._n_orders for one in self._ranks)

    def close(self) -> None:
        """End every process. Does nothing the second time."""
        ranks, self._ranks = self._ranks, []
        for one in ranks:
            one.end()
        self._folder.cleanup()

    def _write(self, one: _Rank, message: Message) -> None:
        try:
            write_order(one.orders, message)
        except BrokenPipeError as error:
            raise RankLost(f"rank {one.rank} (process {one.process.pid}) is gone") from error
