"""Answers: the client of the serve worker.

Turns a checked request into a Generate message, and the worker's messages into the events of an answer. An episode is
on disk before its `Ended` event goes out. Each answer is driven by its own task, which does not depend on its reader:
if the reader goes away the work is cancelled on the worker and what was sampled is still recorded.

If the worker dies before anything of an answer was shown, the request is run again on the next one; after that the
answer ends with a refusal `answer_interrupted`. Of an answer that is not streamed nothing is shown or recorded before
all of it is there, so it can always be run again. Requests wait while the worker starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from edged.answer import AnswerEvent, Ask, Ended, Piece, Started, Usage, fingerprint_of, shown_reason
from edged.records import Episode, ShownCalls
from edged.refusal import Refused
from edged.serve import admission, translation
from edged.serve.delivery import Delivery, Lost
from edged.serve.translation import Serving
from engine import protocol

RUNS_MAX = 3  # a request that has killed the worker this often is not given to it again
SEQUENCE_S_GUESS = 5.0
SEQUENCE_S_WEIGHT = 0.1  # of the newest answer in the running mean


class Engine(Protocol):
    """The serve worker as this module sees it."""

    @property
    def is_ready(self) -> bool: ...

    def send(self, message: protocol.Message) -> None: ...


class EpisodeSink(Protocol):
    """Where finished choices are recorded."""

    async def add(self, episode: Episode, *, store: bool = False, shown: ShownCalls | None = None) -> int:
        """The id of the episode, once it is on disk. store: as of `Ask`; shown: if so, and it calls tools."""
        ...


class Answers:
    """Every answer under way. Lives on the event loop; `received`, `ready` and `down` are called by its owner."""

    def __init__(
        self,
        serving: Serving,
        limits: Callable[[], admission.Limits],
        default_max_tokens: Callable[[], int],
        queue_timeout_s: Callable[[], float],
        engine: Engine,
        episodes: EpisodeSink,
        on_episode: Callable[[int, Episode], None],
        on_load: Callable[[], None] = lambda: None,
        on_waiting: Callable[[int], None] = lambda _requests: None,
    ) -> None:
        """on_load: called when an answer has come or gone, before the worker hears of one that has come.

        on_waiting: called with how many answers have no text yet, whenever that may have changed.
        """
        self._serving = serving
        self._limits = limits
        self._default_max_tokens = default_max_tokens
        self._queue_timeout_s = queue_timeout_s
        self._engine = engine
        self._episodes = episodes
        self._on_episode = on_episode
        self._on_load = on_load
        self._on_waiting = on_waiting
        self._ready = asyncio.Event()
        self._answers: dict[str, Delivery] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._sequence_s = SEQUENCE_S_GUESS
        self._closed: str | None = None
        self.finished_total = 0
        self.failed_total = 0
        self.refused_total = 0
        self.rerun_total = 0
        self.completion_tokens_total = 0

    @property
    def active(self) -> int:
        """Sequences that run or wait."""
        return sum(answer.ask.n for answer in self._answers.values())

    @property
    def queued(self) -> int:
        """Of those, the ones beyond the worker's slots."""
        return max(0, self.active - self._limits().slots)

    def counters(self) -> dict[str, int]:
        """What has happened since the start."""
        return {
            "finished_total": self.finished_total,
            "failed_total": self.failed_total,
            "refused_total": self.refused_total,
            "rerun_total": self.rerun_total,
            "completion_tokens_total": self.completion_tokens_total,
        }

    def fingerprint(self, version: int) -> str:
        return fingerprint_of(self._serving.base_sha256, version)

    def is_running(self, completion_id: str) -> bool:
        return completion_id in self._answers

    async def ask(self, ask: Ask) -> AsyncIterator[AnswerEvent]:
        """The events of one answer (see `edged.answer`). Closing the iterator early cancels it.

        Raises:
            Refused: 429 `too_many_requests` or `queue_timeout`, 503 `shutting_down` or `engine_unavailable`, 400 for
                what the engine refuses, 503 `answer_interrupted` when the engine died in the middle of the answer.
        """
        self._admit(ask)
        answer = Delivery(ask)
        self._answers[ask.completion_id] = answer
        self._idle.clear()
        self._load_changed()
        task = asyncio.create_task(self._drive(answer), name=f"answer {ask.completion_id}")
        answer.task = task
        task.add_done_callback(_forget)
        try:
            while (event := await answer.events.get()) is not None:
                yield event
            await asyncio.wait({task})
            if task.cancelled():  # by `cancel_all`
                raise self._shutting_down()
            task.result()
        finally:
            if not task.done():
                answer.abandoned = True
                self._send(protocol.Cancel(request_id=ask.completion_id))

    async def drained(self) -> None:
        """Returns once no answer is under way."""
        await self._idle.wait()

    def close(self, why: str) -> None:
        """Take no new request; the ones under way go on."""
        self._closed = why

    def cancel_all(self) -> None:
        """End every answer under way with what it has."""
        for answer in self._answers.values():
            self._send(protocol.Cancel(request_id=answer.ask.completion_id))
            if not self._engine.is_ready and answer.task is not None:
                answer.task.cancel()

    def ready(self) -> None:
        """A worker is ready."""
        self._ready.set()

    def down(self) -> None:
        """The worker is gone, with everything that it ran."""
        self._ready.clear()
        for answer in self._answers.values():
            if answer.sent:
                answer.inbox.put_nowait(Lost())

    def received(self, message: protocol.Message) -> bool:
        """Take a message of the serve worker; False if it does not belong to an answer."""
        match message:
            case (
                protocol.Begun()
                | protocol.Chunk()
                | protocol.Called()
                | protocol.ChoiceDone()
                | protocol.RequestDone()
                | protocol.RequestFailed()
            ):
                answer = self._answers.get(message.request_id)
                if answer is not None:
                    answer.inbox.put_nowait(message)
                return True
            case _:
                return False

    def _admit(self, ask: Ask) -> None:
        if self._closed is not None:
            self.refused_total += 1
            raise self._shutting_down()
        limits = self._limits()
        if ask.n > limits.slots + limits.max_queue:
            self.refused_total += 1
            most = limits.slots + limits.max_queue
            raise Refused(400, "too_many_choices", f"n is {ask.n}; this server takes {most} at most", param="n")
        own = sum(answer.ask.n for answer in self._answers.values() if answer.ask.payer == ask.payer)
        full = admission.admit(limits, under_way=self.active, own=own, asked=ask.n, sequence_s=self._sequence_s)
        if full is not None:
            self.refused_total += 1
            what = f"{own} sequences of this user" if full.own else f"{self.active} sequences"
            raise Refused(
                429,
                "too_many_requests",
                f"{what} are under way or waiting; try again in {full.retry_after_s:.0f} s",
                retry_after_s=full.retry_after_s,
            )

    def _shutting_down(self) -> Refused:
        return Refused(503, "shutting_down", self._closed or "the answer was given up", retry_after_s=10.0)

    def _send(self, message: protocol.Message) -> None:
        if self._engine.is_ready:
            self._engine.send(message)

    async def _drive(self, answer: Delivery) -> None:
        try:
            while not await self._run(answer):
                self.rerun_total += 1
            self.finished_total += 1
        except BaseException as error:
            self.failed_total += not _is_mistake(error)
            if answer.sent:
                self._send(protocol.Cancel(request_id=answer.ask.completion_id))
            raise
        finally:
            del self._answers[answer.ask.completion_id]
            if not self._answers:
                self._idle.set()
            answer.events.put_nowait(None)
            self._load_changed()

    def _load_changed(self) -> None:
        self._on_load()
        self._count_waiting()

    def _count_waiting(self) -> None:
        self._on_waiting(sum(not answer.started for answer in self._answers.values()))

    async def _run(self, answer: Delivery) -> bool:
        """One run on one worker; False if the worker died before anything was shown."""
        await self._until_ready(answer)
        if answer.abandoned:
            return True
        answer.runs += 1
        left_s = answer.waits_no_longer_than(self._queue_timeout_s())
        try:
            self._engine.send(translation.generate(answer.ask, self._default_max_tokens(), left_s))
        except protocol.WireError as error:  # a body within its limit can be longer on the link, in small messages say
            why = f"the request cannot be handed to the engine: {error}; send less at once"
            raise Refused(400, "not_sendable", why) from error
        answer.sent = True
        while True:
            message = await answer.inbox.get()
            match message:
                case Lost():
                    answer.sent = False
                    if not answer.is_out and answer.runs < RUNS_MAX:
                        answer.forget()
                        self._count_waiting()
                        return False
                    raise Refused(
                        503,
                        "answer_interrupted",
                        f"the engine stopped in the middle of {answer.ask.completion_id}; ask again",
                        retry_after_s=1.0,
                    )
                case protocol.RequestFailed():
                    answer.sent = False
                    raise translation.refusal(answer.ask, message, free_in_s=self._free_in_s())
                case protocol.RequestDone():
                    await self._record(answer, answer.whole)
                    self._finish(answer, message)
                    return True
                case _:
                    await self._show(answer, message)

    async def _until_ready(self, answer: Delivery) -> None:
        left_s = answer.waits_no_longer_than(self._queue_timeout_s())
        is_impatient = left_s is not None and left_s < self._serving.wait_s
        try:
            async with asyncio.timeout(left_s if is_impatient else self._serving.wait_s):
                await self._ready.wait()
        except TimeoutError:
            if is_impatient:
                raise translation.too_late(self._free_in_s()) from None
            raise Refused(
                503, "engine_unavailable", "the serve worker does not start; see the log", retry_after_s=5.0
            ) from None

    def _free_in_s(self) -> float:
        """When the queue is expected to be over."""
        return admission.until_free_s(self._limits(), places=self.queued, sequence_s=self._sequence_s)

    async def _show(self, answer: Delivery, message: protocol.Message) -> None:
        match message:
            case protocol.Begun():
                answer.version = message.version
                answer.prompt_ids = message.prompt_ids
            case protocol.Chunk():
                if message.text or message.tokens:
                    self._start(answer)
                    tokens = tuple(translation.token_entry(token) for token in message.tokens)
                    answer.tell(Piece(choice=message.choice, text=message.text, tokens=tokens))
            case protocol.Called():
                self._start(answer)
                call = translation.call_entry(message.call)
                answer.tell(Piece(choice=message.choice, text="", tokens=(), calls=(call,)))
            case protocol.ChoiceDone():
                if answer.ask.stream:
                    await self._record(answer, [message])
                else:
                    answer.whole.append(message)

    async def _record(self, answer: Delivery, choices: Sequence[protocol.ChoiceDone]) -> None:
        """Put finished choices on disk, together, and say that they ended."""
        episodes = [
            translation.episode(
                answer.ask,
                choice,
                serving=self._serving,
                version=answer.version,
                prompt_ids=answer.prompt_ids,
                created_at=answer.created_at,
            )
            for choice in choices
        ]
        ids = await asyncio.gather(
            *(
                self._episodes.add(episode, store=answer.ask.store, shown=answer.shown_calls(episode.choice))
                for episode in episodes
            )
        )
        self._start(answer)
        for episode_id, episode, choice in zip(ids, episodes, choices, strict=True):
            self._on_episode(episode_id, episode)
            answer.tell(
                Ended(choice=choice.choice, finish_reason=shown_reason(choice.finish_reason, n_calls=choice.calls))
            )

    def _start(self, answer: Delivery) -> None:
        if not answer.started:
            answer.started = True
            self._count_waiting()
            answer.tell(
                Started(
                    version=answer.version, fingerprint=self.fingerprint(answer.version), created_at=answer.created_at
                )
            )

    def _finish(self, answer: Delivery, done: protocol.RequestDone) -> None:
        self.completion_tokens_total += done.completion_tokens
        self._sequence_s += SEQUENCE_S_WEIGHT * (done.prefill_s + done.decode_s - self._sequence_s)
        answer.tell(
            Usage(
                prompt_tokens=done.prompt_tokens,
                cached_tokens=done.cached_tokens,
                completion_tokens=done.completion_tokens,
            )
        )
        answer.let_out()


def _is_mistake(error: BaseException) -> bool:
    """Whether the client asked for what cannot be done: such an answer never began, so it did not break off."""
    return isinstance(error, Refused) and error.status < 500


def _forget(task: asyncio.Task[None]) -> None:
    """The reader gets the outcome by awaiting; an abandoned answer has no reader, and that is no mistake."""
    if not task.cancelled():
        task.exception()
