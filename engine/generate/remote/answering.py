"""Requests on a server: checked here, sampled there, a stream for each choice, and made records here.

The server batches; `slots` bounds how many sequences it is asked for at once, and whose turn is next is decided as it
is for an engine in this process (`engine.generate.fairness`). A request is bound to the version that is live when its
first choice gets a slot, and every choice of it is asked for under that version's name.

Streams are read by threads of their own, which touch nothing here: they put what they read into a mailbox, and `take`
is called by the loop. What comes of a stream that was cut off is dropped by its number.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

from engine.fault import EngineFault
from engine.generate.answer import Answer, Choice
from engine.generate.asking import Asking, Refused
from engine.generate.fairness import FairQueue, Service
from engine.generate.remote.mailbox import Mailbox
from engine.generate.remote.meaning import Meaning
from engine.generate.remote.server import Asked, Drawn, Finished, Server
from engine.generate.remote.transport import ServerGone, ServerRefused, Stream, Transport
from engine.generate.sampling import Sampled
from engine.generate.swap import Swap
from engine.protocol import Begun, Cancel, FirstToken, Generate, Message, RequestFailed, Sampling, Tokenise

log = logging.getLogger(__name__)

SEED_BITS = 31


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """What a stream's thread has to say. item: None at its end; an exception if it broke."""

    number: int
    item: Drawn | Finished | ServerGone | ServerRefused | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A choice without a slot."""

    key: tuple[str, int]
    user: str
    sampling: Sampling
    seed: int
    room: int


@dataclasses.dataclass(slots=True)
class _Running:
    """A choice with a slot."""

    key: tuple[str, int]
    user: str
    stream: Stream
    sampling: Sampling


class Answering:
    """All requests of this worker. `send` takes the messages; `ended` is told when a request left a context."""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        meaning: Meaning,
        asking: Asking,
        swap: Swap,
        mailbox: Mailbox[News],
        *,
        slots: int,
        end_ids: frozenset[int],
        piece_of: Callable[[int], bytes],
        name_of: Callable[[int], str | None],
        send: Callable[[Message], None],
        ended: Callable[[int], None],
        began: Callable[[FirstToken], None],
    ) -> None:
        """name_of: what a version is called on the server; None: the base. began: hears of each first token."""
        self._server = server
        self._transport = transport
        self._meaning = meaning
        self._asking = asking
        self._swap = swap
        self._mailbox = mailbox
        self._slots = slots
        self._end_ids = end_ids
        self._piece_of = piece_of
        self._name_of = name_of
        self._send = send
        self._ended = ended
        self._began = began
        self._deadlines: list[tuple[float, str]] = []  # a heap of when a request must have begun, monotonic
        self._answers: dict[str, Answer] = {}
        self._service = Service()
        self._queue: FairQueue[_Waiting] = FairQueue(self._service)
        self._running: dict[int, _Running] = {}
        self._n_streams = 0

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    def generate(self, message: Generate) -> None:
        """Queue a request, or send why it cannot be done."""
        if message.request_id in self._answers:
            log.error("request %s is under way already; the second one is ignored", message.request_id)
            return
        arrived_at = time.monotonic()
        try:
            accepted = self._asking.check(message)
            context = None if message.version is None else self._context_of(message.version)
        except Refused as refused:
            self._send(refused.as_message(message.request_id))
            return
        sampling, room = accepted.sampling, accepted.room
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(SEED_BITS)
        choices = tuple(
            Choice(sampling, seed=seed, index=index, room=room, calls=calls)
            for index, calls in enumerate(accepted.calls)
        )
        beside = len(self._answers)
        answer = Answer(message.request_id, accepted.prompt_ids, choices, arrived_at=arrived_at, beside=beside)
        self._answers[message.request_id] = answer
        if message.queue_timeout_s is not None:
            heapq.heappush(self._deadlines, (arrived_at + message.queue_timeout_s, message.request_id))
        if context is not None:
            self._bind(answer, context)
        for choice in choices:
            key = (message.request_id, choice.index)
            self._queue.push(_Waiting(key, message.user, sampling, (seed + choice.index) % 2**SEED_BITS, room))
        self._admit()

    def until_deadline_s(self) -> float:
        """Seconds until `give_up_the_late` may have something to do."""
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else math.inf

    def give_up_the_late(self) -> None:
        """What has not begun by its deadline is not begun any more."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, request_id = heapq.heappop(self._deadlines)
            answer = self._answers.get(request_id)
            if answer is not None and answer.context is None:
                self._drop(answer)
                reason = "no slot was free in time for it"
                self._send(RequestFailed(request_id=request_id, code="queue_timeout", message=reason))
                self._forget(answer)

    def tokenise(self, message: Tokenise) -> None:
        """Send the tokens of a written answer, or why it has none."""
        try:
            self._send(self._asking.tokenise(message))
        except Refused as refused:
            self._send(refused.as_message(message.request_id))

    def cancel(self, message: Cancel) -> None:
        """End a request where it is; a request that is over already is none of our business."""
        answer = self._answers.get(message.request_id)
        if answer is not None:
            self._cancel(answer)
            self._admit()

    def cancel_all(self) -> None:
        for answer in list(self._answers.values()):
            self._cancel(answer)

    def take(self, news: News) -> None:
        """Something came of a stream. Raises EngineFault (server_unreachable, adapter_lost)."""
        running = self._running.get(news.number)
        if running is None:  # it was cut off, and this was on its way
            return
        answer = self._answers[running.key[0]]
        choice = answer.choices[running.key[1]]
        match news.item:
            case Drawn() as drawn:
                self._token(news.number, answer, choice, drawn)
            case Finished() as finished:
                self._finished(news.number, answer, choice, finished)
            case None:
                self._fail(answer, f"{self._server.name} ended the stream without saying why")
            case ServerRefused() as refused:
                self._check_adapter(answer, refused)
                self._fail(answer, f"{self._server.name} refused: {refused}")
            case ServerGone() as gone:
                self._check_server(gone)
                self._fail(answer, str(gone))
        self._admit()

    def _token(self, number: int, answer: Answer, choice: Choice, drawn: Drawn) -> None:
        answer.cached_tokens = max(answer.cached_tokens, drawn.cached_tokens)
        if (first := answer.note_token(time.monotonic())) is not None:
            self._began(first)
        running = self._running[number]
        self._service.sample(running.user)
        behaviour, raw = self._meaning.split(drawn.told, running.sampling)
        sampled = Sampled(drawn.id, behaviour, raw, drawn.top, told=drawn.told)
        text, tokens = choice.take(sampled, self._piece_of, is_eos=drawn.id in self._end_ids)
        for message in answer.messages(choice, text, tokens):
            self._send(message)
        if choice.finish_reason is not None:
            self._over(number, answer, choice)

    def _finished(self, number: int, answer: Answer, choice: Choice, finished: Finished) -> None:
        if finished.reason == "abort":
            self._fail(answer, f"{self._server.name} gave the answer up")
            return
        text, tokens = choice.end(finished.reason)
        for message in answer.messages(choice, text, tokens):
            self._send(message)
        self._over(number, answer, choice)

    def _over(self, number: int, answer: Answer, choice: Choice) -> None:
        self._release(number)
        self._send(choice.done(answer.request_id))
        self._close_if_done(answer)

    def _admit(self) -> None:
        """Give free slots to whose turn it is."""
        while len(self._running) < self._slots and (waiting := self._queue.head()) is not None:
            answer = self._answers[waiting.key[0]]
            if answer.context is None:
                self._bind(answer, self._swap.begin())
            self._queue.admit(waiting, len(answer.prompt_ids))
            self._start(answer, waiting)

    def _start(self, answer: Answer, waiting: _Waiting) -> None:
        assert answer.context is not None
        self._n_streams += 1
        number, stream = self._n_streams, self._transport.stream()
        asked = Asked(
            prompt_ids=answer.prompt_ids,
            adapter=self._name_of(self._swap.version(answer.context)),
            sampling=waiting.sampling,
            seed=waiting.seed,
            max_tokens=waiting.room,
            top=waiting.sampling.top_logprobs if waiting.sampling.logprobs else 0,
            end_ids=tuple(sorted(self._end_ids)),
        )
        self._running[number] = _Running(waiting.key, waiting.user, stream, waiting.sampling)
        threading.Thread(target=self._read, args=(number, stream, asked), name=f"stream {number}", daemon=True).start()

    def _read(self, number: int, stream: Stream, asked: Asked) -> None:
        """A thread's whole life."""
        try:
            for item in self._server.draw(stream, asked):
                self._mailbox.put(News(number, item))
            self._mailbox.put(News(number, None))
        except (ServerGone, ServerRefused) as error:
            self._mailbox.put(News(number, error))
        except Exception as error:  # what the server sent is in no way what it sends
            log.exception("stream %d", number)
            self._mailbox.put(News(number, ServerRefused(500, f"its stream cannot be read: {error}")))

    def _context_of(self, version: int) -> int:
        context = self._swap.begin_on(version)
        if context is None:
            raise Refused("not_resident", f"version {version} is in no context, or has to make way; stage it first")
        return context

    def _bind(self, answer: Answer, context: int) -> None:
        answer.begin(context, cached_tokens=0, now=time.monotonic())
        version = self._swap.version(context)
        self._send(Begun(request_id=answer.request_id, version=version, prompt_ids=answer.prompt_ids))

    def _cancel(self, answer: Answer) -> None:
        if answer.context is None:
            self._bind(answer, self._swap.begin())  # every answer begins before it ends
        self._drop(answer)
        for choice in answer.choices:
            if choice.finish_reason is None:
                text, tokens = choice.cancel()
                for message in answer.messages(choice, text, tokens):
                    self._send(message)
                self._send(choice.done(answer.request_id))
        self._close_if_done(answer)

    def _drop(self, answer: Answer) -> None:
        """Take its choices out of the queue, and cut its streams off."""
        self._queue.withdraw(lambda waiting: waiting.key[0] == answer.request_id)
        for number, running in list(self._running.items()):
            if running.key[0] == answer.request_id:
                self._release(number)

    def _release(self, number: int) -> None:
        """The slot of a stream is free; if the server still samples, it stops."""
        running = self._running.pop(number)
        running.stream.abort()
        self._service.leave(running.user)

    def _close_if_done(self, answer: Answer) -> None:
        if answer.is_done:
            self._send(answer.done(time.monotonic()))
            self._forget(answer)

    def _fail(self, answer: Answer, message: str) -> None:
        log.error("request %s failed: %s", answer.request_id, message)
        self._drop(answer)
        self._send(RequestFailed(request_id=answer.request_id, code="engine_error", message=message))
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        del self._answers[answer.request_id]
        if answer.context is not None:
            self._ended(answer.context)

    def _check_adapter(self, answer: Answer, refused: ServerRefused) -> None:
        """A server that was started again has forgotten its adapters. Blocks for seconds, and is rare."""
        name = None if answer.context is None else self._name_of(self._swap.version(answer.context))
        if name is None or refused.status not in (400, 404):
            return
        try:
            known = self._server.loaded(quickly=True)
        except (ServerGone, ServerRefused) as error:
            raise EngineFault("server_unreachable", str(error)) from error
        if name in known:
            return
        raise EngineFault(
            "adapter_lost", f"{self._server.name} no longer has the adapter {name}; was it started again?"
        )

    def _check_server(self, gone: ServerGone) -> None:
        """Whether it is the server that is gone, and not one connection of it. Blocks for seconds, and is rare."""
        try:
            self._server.loaded(quickly=True)
        except (ServerGone, ServerRefused) as error:
            raise EngineFault("server_unreachable", f"{self._server.name} is gone: {error}") from gone
