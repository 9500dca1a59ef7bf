"""The client of the score worker: answers in, a reward or a named reason for each out.

A judge is somebody else's code, so nothing that it does is an error here: it may raise, lie, hang or take its process
with it, and every answer still gets a `Judgement`. A worker that does not answer in time is killed and started again;
one that cannot start is left alone for a while. One batch is under way at a time, so a kill never costs another
caller's batch. What is done with rewards, and when answers are judged, is the learner's affair.

A judge that is fitted to the box's ratings gets them anew whenever they, or the process, have changed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from edged.failure import WorkerLost
from edged.readiness import Readiness
from edged.records import Episode
from edged.underway import Underway
from engine import protocol

log = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_S = 3.0  # after the batch's time: the worker's own guard is quicker and tells more
GONE_S = 10.0  # in which a killed process is gone
HOLD_S = 60.0  # after a judge that could not start
GIVE_UP_AFTER = 2  # batches in a row that cost the process
MESSAGE_BYTES = 4 * 1024 * 1024  # of texts and tokens in one message; the link takes four times as much
FIT_RATINGS = 32  # rated answers in one message
FIT_TIMEOUT_S = 300.0  # for such a message: the base runs over every answer in it

WORKER_LOST = "judge_worker_lost"  # the process died over the batch
UNAVAILABLE = "judge_unavailable"  # no process could be had
UNSENDABLE = "judge_unsendable"  # the answer is too long for a message, or no valid text


class ScoreEngine(Protocol):
    """The score worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def want(self) -> None: ...

    def unwant(self) -> None: ...

    def kill(self, why: str) -> None: ...

    def send(self, message: protocol.Message) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgingRules:
    """The live keys of `[reward]`."""

    clip: float
    batch: int
    timeout_s: float
    fitted_ratings_min: int
    fitted_accuracy_min: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """reward: None with a reason (`engine.protocol.JudgeReason`, or one of this module's three). "judge_clipped" alone
    stands beside a reward."""

    episode_id: int
    reward: float | None
    reason: str | None


class _Unavailable(Exception):
    """No worker could be had."""


class _NotInTime(Exception):
    """The worker did not answer in time and is gone now."""


class Judging:
    """Lives on the event loop; `ready`, `down`, `fault` and `received` are called by its owner.

    judged: answers judged so far. reasons: how many of them got which reason. detail: the newest failure, for people.
    report: what the fitted judge is worth, once it was fitted.
    """

    def __init__(
        self,
        engine: ScoreEngine,
        *,
        rules: Callable[[], JudgingRules],
        start_timeout_s: float,
        ratings: Callable[[], Awaitable[Sequence[protocol.RatedTokens]]] | None = None,
    ) -> None:
        """ratings: the rated answers of the box; given if, and only if, the judge is one that is fitted to them."""
        self._engine = engine
        self._rules = rules
        self._start_timeout_s = start_timeout_s
        self._ratings = ratings
        self._stale = True
        self._one_batch = asyncio.Lock()
        self._underway = Underway(engine, "score")
        self._numbers = itertools.count(1)
        self._readiness = Readiness(engine)
        self._gone = asyncio.Event()
        self._is_leaving = False  # the process was killed and may still look ready
        self._held_until = 0.0
        self._held_why = ""
        self.judged = 0
        self.reasons: collections.Counter[str] = collections.Counter()
        self.detail = ""
        self.report: protocol.FitReport | None = None

    async def prepare(self) -> str | None:
        """Start the judge and, if it is a fitted one, fit it. None if it can be asked now, else why not, for people."""
        async with self._one_batch:
            try:
                await self._start()
                await self._fit()
            except (_Unavailable, _NotInTime, WorkerLost) as error:
                self.detail = str(error)
                return str(error)
        return self.report.why if self.report is not None and not self.report.used else None

    async def judge(self, items: Sequence[protocol.JudgeItem]) -> list[Judgement]:
        """A judgement on every item, in their order. Starts the worker if need be.

        Cancellation ends the worker, which may be in the middle of a batch; the next call starts a fresh one.
        """
        judgements: list[Judgement] = []
        async with self._one_batch:
            costly = 0
            for group in cut(items, self._rules().batch, _item_bytes):
                if costly >= GIVE_UP_AFTER:
                    found = _all(group, UNAVAILABLE)
                else:
                    found, cost_the_process = await self._judge_group(group)
                    costly = costly + 1 if cost_the_process else 0
                judgements += found
        self.judged += len(judgements)
        self.reasons.update(judgement.reason for judgement in judgements if judgement.reason is not None)
        return judgements

    def rated(self) -> None:
        """There are new ratings, or some are gone: a fitted judge is fitted again before it judges next."""
        self._stale = True

    def rest(self) -> None:
        """Nothing to judge for now: the worker ends. The next call starts it again."""
        self._engine.unwant()

    def ready(self) -> None:
        """A worker is ready, so an earlier one is gone."""
        self._is_leaving = False
        self._gone.set()
        self._readiness.ready()

    def fault(self, fault: protocol.Fault) -> None:
        """The worker said that it cannot do its role."""
        self._readiness.fault(fault)

    def down(self) -> None:
        """The worker is gone, and with it what was fitted."""
        self._stale = True
        self._is_leaving = False
        self._readiness.down()
        self._gone.set()
        self._underway.lose()

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the score worker; False if it is neither Judged nor Fitted."""
        match message:
            case protocol.Judged() | protocol.Fitted():
                if isinstance(message, protocol.Judged) and message.stuck:
                    self._end("its judge did not come back from a batch")
                self._underway.answer(message.job_id, message)
                return True
            case _:
                return False

    async def _judge_group(self, group: Sequence[protocol.JudgeItem]) -> tuple[list[Judgement], bool]:
        """Judgements on one batch, and whether it cost the process (or none could be had)."""
        rules = self._rules()
        try:
            await self._start()
            await self._fit()
            job_id = f"judge-{next(self._numbers)}"
            message = protocol.Judge(job_id=job_id, items=tuple(group), timeout_s=rules.timeout_s, clip=rules.clip)
            answer = await self._call(job_id, message, rules.timeout_s + GRACE_S)
        except _Unavailable as error:
            return self._failed(group, UNAVAILABLE, str(error)), True
        except _NotInTime as error:
            return self._failed(group, "judge_timeout", str(error)), True
        except WorkerLost as error:
            return self._failed(group, WORKER_LOST, str(error)), True
        except protocol.WireError as error:
            return self._failed(group, UNSENDABLE, str(error)), False
        if not isinstance(answer, protocol.Judged) or not len(answer.rewards) == len(answer.reasons) == len(group):
            self._end("answered a batch with something else than its rewards")
            return self._failed(group, WORKER_LOST, f"the score worker answered {type(answer).__name__}"), True
        self.detail = answer.detail or self.detail
        judgements = [
            Judgement(episode_id=item.episode_id, reward=reward, reason=reason)
            for item, reward, reason in zip(group, answer.rewards, answer.reasons, strict=True)
        ]
        return judgements, answer.stuck

    def _failed(self, group: Sequence[protocol.JudgeItem], reason: str, detail: str) -> list[Judgement]:
        log.warning("%d answers could not be judged (%s): %s", len(group), reason, detail)
        self.detail = detail
        return _all(group, reason)

    async def _start(self) -> None:
        """Returns once the worker is ready. Raises _Unavailable."""
        await self._until_gone()
        now = asyncio.get_running_loop().time()
        if now < self._held_until:
            raise _Unavailable(f"{self._held_why}; next try in {self._held_until - now:.0f} s")
        try:
            fault = await self._readiness.start(self._start_timeout_s)
        except TimeoutError:
            raise self._hold(f"the judge was not ready within {self._start_timeout_s:g} s") from None
        if fault is not None:
            raise self._hold(fault.message)

    def _hold(self, why: str) -> _Unavailable:
        """Leave a judge that does not start alone for a while."""
        self._held_until, self._held_why = asyncio.get_running_loop().time() + HOLD_S, why
        self._engine.unwant()
        return _Unavailable(why)

    async def _fit(self) -> None:
        """Give a fitted judge the ratings as they are now. Raises _NotInTime, WorkerLost."""
        if self._ratings is None or not self._stale:
            return
        rules = self._rules()
        self._stale = False  # set again by what happens meanwhile
        try:
            ratings = await self._ratings()
            parts = list(cut(ratings, FIT_RATINGS, _rating_bytes)) or [[]]
            for number, part in enumerate(parts, start=1):
                job_id = f"fit-{next(self._numbers)}"
                message = protocol.Fit(
                    job_id=job_id,
                    ratings=tuple(part),
                    fresh=number == 1,
                    more=number < len(parts),
                    accuracy_min=rules.fitted_accuracy_min,
                    ratings_min=rules.fitted_ratings_min,
                )
                answer = await self._call(job_id, message, FIT_TIMEOUT_S)
        except BaseException:
            self._stale = True
            raise
        if not isinstance(answer, protocol.Fitted):
            raise WorkerLost(f"the score worker answered Fit with {type(answer).__name__}")
        if self.report is None or answer.report.used != self.report.used:
            log.info("the fitted judge: %s", answer.report.why)
        self.report = answer.report

    async def _call(self, job_id: str, message: protocol.Message, timeout_s: float) -> protocol.Message:
        """The worker's answer. Raises _NotInTime, WorkerLost, WireError; ends the worker if it is not waited for."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._underway.call(job_id, message)
        except TimeoutError:
            why = f"did not answer within {timeout_s:g} s"
            self._end(why)
            raise _NotInTime(f"the judge {why}") from None
        except asyncio.CancelledError:
            self._end("nobody waits for its batch any more")
            raise

    def _end(self, why: str) -> None:
        """Kill the process. Until the kernel reports its end it looks ready, and takes no job."""
        self._is_leaving = True
        self._gone.clear()
        self._engine.kill(why)

    async def _until_gone(self) -> None:
        """Returns once a process that was killed has left."""
        for _ in range(2):
            if not self._is_leaving:
                return
            try:
                async with asyncio.timeout(GONE_S):
                    await self._gone.wait()
            except TimeoutError:
                self._engine.kill(f"has not ended within {GONE_S:g} s")
        self._is_leaving = False  # nothing more can be done about it here


def item_of(episode: Episode) -> protocol.JudgeItem:
    """What a judge sees of a stored episode."""
    messages = episode.messages or []
    return protocol.JudgeItem(
        episode_id=episode.id,
        messages=tuple(protocol.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages),
        prompt=episode.prompt,
        answer=episode.text,
        finish_reason=episode.finish_reason,
        metadata=episode.metadata,
        prompt_ids=episode.prompt_ids,
        completion_ids=episode.completion_ids,
    )


def cut(things: Sequence[T], most: int, n_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """`things` in their order, in groups of at most `most` and, but for single ones, MESSAGE_BYTES."""
    group: list[T] = []
    group_bytes = 0
    for thing in things:
        size = n_bytes(thing)
        if group and (len(group) == most or group_bytes + size > MESSAGE_BYTES):
            yield group
            group, group_bytes = [], 0
        group.append(thing)
        group_bytes += size
    if group:
        yield group


def _item_bytes(item: protocol.JudgeItem) -> int:
    """About what the item takes in a message, rather more: a character 4 bytes at most, a token 5."""
    texts = [item.answer, item.prompt or "", *item.metadata, *item.metadata.values()]
    texts += [message.content for message in item.messages]
    return 4 * sum(map(len, texts)) + 5 * (len(item.prompt_ids) + len(item.completion_ids))


def _rating_bytes(rating: protocol.RatedTokens) -> int:
    return 5 * (len(rating.prompt_ids) + len(rating.completion_ids))


def _all(group: Sequence[protocol.JudgeItem], reason: str) -> list[Judgement]:
    return [Judgement(episode_id=item.episode_id, reward=None, reason=reason) for item in group]
