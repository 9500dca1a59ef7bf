"""The shell around `edged.learn.practice`: it asks, samples, has judged and makes updates while the box is idle.

Everything that a round has come to is in the store before the next step begins. Prompts are those of users' newest
answers and, if the operator has a file, its lines. An answer is recorded as the box's own; a prompt whose user was
removed meanwhile leaves no trace. A request of a user ends sampling in the same turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from edged.failure import JobRefused, WorkerLost
from edged.learn import practice
from edged.learn.job import group_of
from edged.learn.judging import Judgement, item_of
from edged.learn.ports import PracticeBook
from edged.records import Episode, PracticeCounts, PracticePrompt
from engine import protocol

log = logging.getLogger(__name__)

PROMPTS_KNOWN = 256  # of users, that a round draws from
PROMPT_CHARS = 8192  # of a line of the operator's file
PROMPTS_FILE_BYTES = 2**22
INTERRUPTED = "interrupted"


class Sampler(Protocol):
    """The serve worker as practice sees it (`edged.serve.sampling`)."""

    async def sample(self, prompt: PracticePrompt, *, n: int, max_tokens: int, seed: int) -> list[Episode]:
        """Raises JobRefused, WorkerLost, and `interrupted` of the owner's choice."""
        ...

    def interrupt(self) -> None: ...


class Judge(Protocol):
    """The score worker as practice sees it (`edged.learn.judging`)."""

    async def prepare(self) -> str | None: ...

    async def judge(self, items: Sequence[protocol.JudgeItem]) -> list[Judgement]: ...

    def rated(self) -> None: ...

    def rest(self) -> None: ...


class Trainer(Protocol):
    """Who makes updates (`edged.learn.learner`)."""

    async def practise(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PracticeSettings:
    """`[practice]`, as it is now. prompts_file: "" for none. at_once: groups that are sampled together.

    rules: without the number of prompts in the file, which is looked at in each round.
    """

    rules: practice.Rules
    group_size: int
    max_tokens: int
    prompts_file: str
    at_once: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a status shows."""

    state: practice.PracticeState
    why: str
    counts: PracticeCounts


class Practising:
    """`users` when a request has come or gone; `changed` when anything else may let practice begin or end."""

    def __init__(
        self,
        *,
        settings: Callable[[], PracticeSettings],
        blocked: Callable[[], str],
        book: PracticeBook,
        sampler: Sampler,
        interrupted: type[Exception],
        judge: Judge,
        trainer: Trainer,
        base_sha256: str,
        on_change: Callable[[], None],
    ) -> None:
        """blocked: why practice may not begin, besides users; "" if it may. interrupted: what `sampler` raises."""
        self._settings = settings
        self._blocked = blocked
        self._book = book
        self._sampler = sampler
        self._interrupted = interrupted
        self._judge = judge
        self._trainer = trainer
        self._base_sha256 = base_sha256
        self._on_change = on_change
        self._awake = asyncio.Event()
        self._stepped_at = time.monotonic()
        self._state = practice.State(quiet_since=self._stepped_at)
        self._job: asyncio.Task[str] | None = None
        self._counts = PracticeCounts()
        self._file_prompts: tuple[str, ...] = ()
        self._shown: practice.PracticeState = "waiting"

    def view(self) -> View:
        """Where practice stands. No I/O."""
        state, why = practice.describe(self._state, time.monotonic(), self._rules())
        return View(state=state, why=why, counts=self._counts)

    def users(self, active: int) -> None:
        """So many requests are under way."""
        self._hear(practice.Users(active))

    def rated(self) -> None:
        """A person has rated."""
        self._judge.rated()
        self._hear(practice.Rated())

    def removed(self) -> None:
        """Answers, prompts and ratings of a user are gone."""
        self._judge.rated()
        self._hear(practice.Changed())

    def reloaded(self) -> None:
        """There are other settings."""
        self._hear(practice.Changed())

    def changed(self) -> None:
        """The learner or a worker has changed."""
        self._awake.set()

    def asked(self) -> None:
        """There may be another prompt."""
        if not self._counts.prompts:
            self._hear(practice.Changed())

    async def run(self) -> None:
        """Until cancelled."""
        self._state = practice.State(users=self._state.users, blocked=self._state.blocked, quiet_since=time.monotonic())
        self._counts = await self._book.counts(self._base_sha256)
        try:
            while True:
                self._awake.clear()
                if self._job is not None and self._job.done():
                    await self._finish(self._job)
                self._step(practice.Blocked(self._blocked()))
                self._show()
                await self._sleep()
        finally:
            if self._job is not None:
                self._job.cancel()
                self._job = None

    async def _finish(self, job: asyncio.Task[str]) -> None:
        self._job = None
        trouble = job.result()
        self._counts = await self._book.counts(self._base_sha256)
        if trouble:
            log.warning("practice: %s", trouble)
        self._step(practice.Done(self._counts, trouble))

    async def _sleep(self) -> None:
        wake_at = practice.wake_at(self._state, self._stepped_at, self._rules())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wake_at is None else wake_at - time.monotonic()):
                await self._awake.wait()

    def _show(self) -> None:
        state = self.view().state
        if state != self._shown:
            log.info("practice: %s -> %s", self._shown, state)
            self._shown = state
            self._on_change()

    def _rules(self) -> practice.Rules:
        return dataclasses.replace(self._settings().rules, prompts=len(self._file_prompts))

    def _hear(self, event: practice.Event) -> None:
        self._step(event)
        self._awake.set()

    def _step(self, event: practice.Event) -> None:
        self._stepped_at = time.monotonic()
        self._state, actions = practice.step(self._state, event, self._stepped_at, self._rules())
        for action in actions:
            self._act(action)

    def _act(self, action: practice.Action) -> None:
        match action:
            case practice.Interrupt():
                self._sampler.interrupt()
            case practice.Rest():
                self._judge.rest()
            case practice.Count():
                self._begin("count", self._count())
            case practice.Prepare():
                self._begin("prepare", self._prepare())
            case practice.Sample(groups, fresh):
                self._begin("sample", self._sample(groups, fresh))
            case practice.Judge():
                self._begin("judge", self._have_judged())
            case practice.Train():
                self._begin("train", self._train())

    def _begin(self, name: str, work: Coroutine[Any, Any, str]) -> None:
        self._job = asyncio.create_task(work, name=f"practice {name}")
        self._job.add_done_callback(lambda _: self._awake.set())

    # ------------------------------------------------------------------------------ the actions; each tells its trouble

    async def _count(self) -> str:
        """The operator's prompts; `_finish` counts what is in the store."""
        path = self._settings().prompts_file
        self._file_prompts = ()
        if path:
            try:
                self._file_prompts = await asyncio.to_thread(read_prompts, Path(path))
            except (OSError, UnicodeDecodeError) as error:
                await self._book.fail("prompts_file")
                return f"practice.prompts_file cannot be read: {path}: {error}"
        return ""

    async def _prepare(self) -> str:
        return await self._judge.prepare() or ""

    async def _sample(self, groups: int, fresh: bool) -> str:
        settings = self._settings()
        if fresh:
            await self._book.begin_round()
        prompts = await self._book.prompts(PROMPTS_KNOWN, self._base_sha256)
        prompts += [_of_operator(text) for text in self._file_prompts]
        seed = settings.seed + self._counts.answers  # rises with every group, and survives restarts
        drawn = practice.draw(prompts, groups, seed)
        outcomes: list[str] = []
        for start in range(0, len(drawn), settings.at_once):
            if self._state.leaving:
                return ""
            together = drawn[start : start + settings.at_once]
            outcomes += await asyncio.gather(
                *[self._sample_group(prompt, settings, seed + start + number) for number, prompt in enumerate(together)]
            )
        if INTERRUPTED in outcomes:
            return ""
        return outcomes[0] if outcomes and all(outcomes) else ""

    async def _sample_group(self, prompt: PracticePrompt, settings: PracticeSettings, seed: int) -> str:
        """Sample the answers to one prompt and store them; why there are none."""
        try:
            answers = await self._sampler.sample(
                prompt, n=settings.group_size, max_tokens=settings.max_tokens, seed=seed % 2**31
            )
        except self._interrupted:
            return INTERRUPTED
        except JobRefused as refused:
            await self._book.fail("prompt_refused")
            return f"the engine does not answer a prompt of practice: {refused}"
        except WorkerLost as lost:
            await self._book.fail("sampler_lost")
            return f"nothing could be sampled: {lost}"
        await self._book.add_group(answers, prompt_of=prompt.prompt_of, answers_to=group_of(answers[0]))
        return ""

    async def _have_judged(self) -> str:
        answers = await self._book.unjudged(self._base_sha256)
        judgements = await self._judge.judge([item_of(answer) for answer in answers])
        rewards = [(judgement.episode_id, judgement.reward, judgement.reason) for judgement in judgements]
        await self._book.set_rewards(rewards, now=time.time())
        reasons = [reason for _, reward, reason in rewards if reward is None]
        return f"the judge rewarded no answer ({reasons[0]})" if rewards and len(reasons) == len(rewards) else ""

    async def _train(self) -> str:
        return "" if await self._trainer.practise() else "no update could be made of what was judged"


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, one a line; empty lines, and what a line has beyond PROMPT_CHARS, do not count. Blocking.

    Raises OSError, also for what is no file or one beyond PROMPTS_FILE_BYTES; UnicodeDecodeError.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    if found.st_size > PROMPTS_FILE_BYTES:
        raise OSError(f"{found.st_size:,} bytes, at most {PROMPTS_FILE_BYTES:,}")
    lines = [line.strip()[:PROMPT_CHARS] for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(dict.fromkeys(line for line in lines if line))


def _of_operator(text: str) -> PracticePrompt:
    return PracticePrompt(prompt_of=None, messages=[{"role": "user", "content": text}], prompt=None)
