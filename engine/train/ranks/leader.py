"""The train worker as the first rank: which processes a job needs, and the scorer that works with them.

A job's plan says who does what. The other processes are started for the first job that needs them, stay for the next
ones with the same plan, and are ended by a job with another. One that is lost costs the job; the next starts fresh
ones. What was scored ahead is known to the processes that did it, so it is computed again after every such change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import torch

from engine.fault import EngineFault
from engine.models import Base, load_base
from engine.protocol import EpisodeScore, Pace, Score, StartTrain, Train, TrainPlan, TrainResult, TrainRole
from engine.train.device import choose_held, open_device, return_free_memory
from engine.train.job import JobFailed, load_job, run_job
from engine.train.lanes import Lanes
from engine.train.optimise import Tick
from engine.train.ranks.crew import SILENT_AFTER_S, Crew
from engine.train.ranks.group import Group, RankLost
from engine.train.ranks.shards import Shards, cut_base
from engine.train.ranks.team import Team
from engine.train.ranks.waiting import call_beside
from engine.train.scorer import Scorer
from engine.train.stopwatch import Stopwatch

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.002
SETTLE_S = 10.0  # from the first rank's end of an order to the last one's
ROLES: tuple[TrainRole, ...] = get_args(TrainRole)


def load_rank_base(start: StartTrain, device: str, shards: Shards | None) -> Base:
    """The base of one rank: whole on its device, or its part of it.

    Raises:
        EngineFault: it cannot be loaded; out_of_memory too.
    """
    opened = open_device(device)
    try:
        if shards is not None:
            whole = load_base(start.model_path, start.base_sha256, start.cache_folder, start.dtype, "cpu")
            return cut_base(whole, shards, opened)
        held = choose_held(start.base_weights, opened, start.model_path, start.dtype)
        log.info("the base is held %s on %s", held, opened)
        return load_base(start.model_path, start.base_sha256, start.cache_folder, start.dtype, str(opened), held)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EngineFault("out_of_memory", f"{start.model_path}: {error}") from error


def lanes_threads(start: StartTrain, plan: TrainPlan) -> int:
    """Threads of each rank."""
    return plan.threads or start.threads


def check_plan(plan: TrainPlan, device: str) -> None:
    """Raises EngineFault (bad_job) if the plan cannot be carried out by a train worker on `device`."""
    n = max(1, len(plan.devices))
    complaint = ""
    if plan.devices and plan.devices[0] != device:
        complaint = f"its first rank is on {plan.devices[0]}, this trainer on {device}"
    for role in ROLES:
        ranks = plan.of(role)
        if not ranks or sorted(set(ranks)) != list(ranks) or not 0 <= ranks[0] <= ranks[-1] < n:
            complaint = f"{role} = {list(ranks)}, expected rising ranks below {n}"
        elif plan.mode == "sharded" and len(ranks) != n:
            complaint = f"{role} = {list(ranks)}, but a cut base is used by all of its {n} ranks"
    if plan.actor[:1] != (0,):
        complaint = f"actor = {list(plan.actor)}, expected rank 0 first"
    if plan.micro_batch_tokens < 1:
        complaint = f"micro_batch_tokens = {plan.micro_batch_tokens}"
    if complaint:
        raise EngineFault("bad_job", f"the plan cannot be carried out: {complaint}")


class Leader:
    """Scores and trains with as many processes as the plan has. Used by the worker's main thread."""

    def __init__(self, start: StartTrain, *, silent_after_s: float = SILENT_AFTER_S) -> None:
        """Loads the base, if it is not cut. Raises EngineFault."""
        self.start = start
        self._silent_after_s = silent_after_s
        self._crew: Crew | None = None
        self._group: Group | None = None
        self._plan = TrainPlan()
        self._pace = Pace(share=1.0)
        self._watch: Callable[[], None] = lambda: None
        self._scorer: Scorer | None = None
        self._base: Base | None = None
        check_plan(start.plan, start.device)
        if start.plan.mode != "sharded":
            self._base = load_rank_base(start, start.device, None)
            self._scorer = self._alone(self._base)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the other ranks, if there are any now."""
        return () if self._crew is None else self._crew.pids

    def score(self, message: Score, tick: Callable[[], None]) -> list[EpisodeScore]:
        """Score ahead, with the ranks that there are, or those of the plan that the worker was started with.

        Raises:
            EngineFault: an adapter cannot be read. RankLost: another process is gone.
        """
        plan = self._plan if self._crew is not None else self.start.plan
        scorer = self._scorer_for(plan, tick)

        def score() -> list[EpisodeScore]:
            self._order(message)
            return scorer.score(message.episodes, message.reference, tick)

        return self._with_ranks(score, tick)

    def train(self, folder: Path, tick: Tick) -> TrainResult:
        """Run the job in `folder`. The stage `ranks` is the time until those that it needs are there.

        Raises JobFailed.
        """

        def wait() -> None:
            tick("ranks", 0, 0)

        clock = Stopwatch()
        job = load_job(folder)
        order = Train(job_id=job.job_id, folder=str(folder))
        try:
            scorer = self._scorer_for(job.plan, wait)
            clock.lap("ranks")
            result = self._with_ranks(
                lambda: run_job(folder, scorer, self.start.base_sha256, tick, lambda: self._order(order)), wait
            )
        except RankLost as lost:
            raise JobFailed("rank_lost", f"{folder}: {lost}") from lost
        except EngineFault as fault:
            raise JobFailed(fault.code, f"{folder}: {fault.message}") from fault
        return dataclasses.replace(result, seconds=result.seconds | clock.seconds)

    def pace(self, message: Pace) -> None:
        """Take the share of the time that `message` says from now on, in all processes."""
        self._pace = message
        if self._scorer is not None:
            self._scorer.lanes.pauses.set_share(message.share)
        if self._crew is not None:
            with contextlib.suppress(RankLost):  # whoever waits for the lost one next is told
                self._crew.pace(message)

    def return_free_memory(self) -> None:
        """Give the memory that nothing uses back to the system."""
        return_free_memory(torch.device(self.start.device))

    def close(self) -> None:
        """End the other processes."""
        if self._crew is None:
            return
        self._part()
        if self._scorer is not None:
            self._scorer.lanes.close()
        self._crew = self._group = self._scorer = None

    def _part(self) -> None:
        if self._crew is not None:
            self._crew.close()
        if self._group is not None:
            self._group.abandon()

    def _order(self, message: Score | Train) -> None:
        if self._crew is not None:
            self._crew.order(message)

    def _with_ranks(self, work: Callable[[], T], tick: Callable[[], None]) -> T:
        """`work`, after which the other ranks are where this one is, or ended."""
        try:
            result = work()
        except (JobFailed, EngineFault):
            self._settle(tick)
            raise
        except BaseException:
            self.close()
            raise
        self._settle(tick)
        return result

    def _settle(self, tick: Callable[[], None]) -> None:
        give_up_at = time.monotonic() + SETTLE_S
        try:
            while self._crew is not None and not self._crew.is_done():
                self._crew.check_alive()
                if time.monotonic() > give_up_at:
                    raise RankLost(f"a rank has not finished within {SETTLE_S:g} s of the first")
                tick()
                time.sleep(POLL_S)
        except RankLost as lost:
            log.warning("the other ranks are started again for the next job: %s", lost)
            self.close()

    def _scorer_for(self, plan: TrainPlan, tick: Callable[[], None]) -> Scorer:
        """Raises EngineFault, RankLost."""
        check_plan(plan, self.start.device)
        self._watch = tick
        if self._scorer is not None and _same_ranks(plan, self._plan) and self._is_whole():
            return self._scorer
        self.close()
        self._scorer = self._together(plan) if len(plan.devices) > 1 else self._alone(self._whole_base())
        self._plan = plan
        self.pace(self._pace)
        return self._scorer

    def _is_whole(self) -> bool:
        """Whether no rank was lost between two jobs, which costs neither of them."""
        try:
            if self._crew is not None:
                self._crew.check_alive()
        except RankLost as lost:
            log.warning("the other ranks are started again: %s", lost)
            return False
        return True

    def _alone(self, base: Base) -> Scorer:
        return Scorer(base, self.start.lora.layers, Lanes(self.start.threads, base.device))

    def _together(self, plan: TrainPlan) -> Scorer:
        start, crew = self.start, Crew(self.start, plan, self._silent_after_s)
        self._crew = crew

        def watch() -> None:
            try:
                crew.watch()
            except RankLost:
                self._part()  # what waits for the lost one in other threads ends by this
                raise
            self._watch()

        try:
            while not crew.is_here():
                watch()
                time.sleep(POLL_S)
            self._group = group = call_beside(lambda: Group(crew.rendezvous, 0, plan.devices), watch)
            shards = Shards(group) if plan.mode == "sharded" else None
            if shards is None:
                base = self._whole_base()
            else:
                self._base = self._scorer = None  # make room: the parts are cut from the file
                base = call_beside(lambda: load_rank_base(start, start.device, shards), watch)
        except BaseException:
            self.close()
            raise
        return Scorer(base, start.lora.layers, Team(group, plan, lanes_threads(start, plan), watch, shards))

    def _whole_base(self) -> Base:
        if self._base is None:
            self._base = load_rank_base(self.start, self.start.device, None)
        return self._base


def _same_ranks(plan: TrainPlan, other: TrainPlan) -> bool:
    """Whether the same processes carry both out."""
    if len(plan.devices) <= 1 or len(other.devices) <= 1:
        return len(plan.devices) <= 1 and len(other.devices) <= 1
    return dataclasses.replace(plan, micro_batch_tokens=1, halvings=0) == dataclasses.replace(
        other, micro_batch_tokens=1, halvings=0
    )
