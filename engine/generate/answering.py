"""Requests on the two contexts: admits, decodes, samples and sends. The Generate half of the serve role's protocol.

Each `step` evaluates one step of the live and, while it drains, of the other context, so both advance at the same
pace. A request is bound to the live context when its first choice gets a slot, and stays there. One that names a
version is bound to the context of that version at once.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from engine.generate.answer import Answer, Choice
from engine.generate.asking import Asking, Grammars, Refused
from engine.generate.backend import DecodeFailed, Model
from engine.generate.decoder import Decoder, Evaluated
from engine.generate.prompt import Prompts
from engine.generate.sampling import ConstraintFailed, NotFinite
from engine.generate.scheduler import Admitted, Piece
from engine.generate.swap import Swap
from engine.protocol import Begun, Cancel, FirstToken, Generate, Message, RequestFailed, Tokenise

log = logging.getLogger(__name__)

# Prompt tokens evaluated in one step: few while answers run, so that they do not stall; more when nobody waits.
PROMPT_TOKENS_BUSY = 32
PROMPT_TOKENS_ALONE = 128

_SEED_BITS = 31

Key = tuple[str, int]  # request id, choice


class Answering:
    """All requests of this worker. `send` takes the messages; `ended` is told when a request left a context, `began`
    when it got its first token."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        decoders: Sequence[Decoder],
        swap: Swap,
        *,
        context_tokens: int,
        send: Callable[[Message], None],
        ended: Callable[[int], None],
        began: Callable[[FirstToken], None],
        grammars: Grammars | None = None,
    ) -> None:
        """context_tokens: the cells of a context. grammars: None where the engine cannot hold answers to one."""
        self._model = model
        self._asking = Asking(
            model,
            prompts,
            context_tokens=context_tokens,
            trained_tokens=model.n_ctx_train_tokens,
            grammars=grammars,
        )
        self._decoders = decoders
        self._swap = swap
        self._send = send
        self._ended = ended
        self._began = began
        self._answers: dict[str, Answer] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap of when a request must have begun, monotonic

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    @property
    def is_decoding(self) -> bool:
        """Whether a request has a slot: whether anything waits for the next step."""
        return any(answer.context is not None for answer in self._answers.values())

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
        seed = message.sampling.seed if message.sampling.seed is not None else secrets.randbits(_SEED_BITS)
        prompt_ids = accepted.prompt_ids
        choices = tuple(
            Choice(
                accepted.sampling,
                seed=seed,
                index=index,
                room=accepted.room,
                prompt_ids=prompt_ids,
                constraint=held_to,
                calls=calls,
            )
            for index, (held_to, calls) in enumerate(zip(accepted.held_to, accepted.calls, strict=True))
        )
        answer = Answer(message.request_id, prompt_ids, choices, arrived_at=arrived_at, beside=len(self._answers))
        self._answers[message.request_id] = answer
        if message.queue_timeout_s is not None:
            heapq.heappush(self._deadlines, (arrived_at + message.queue_timeout_s, message.request_id))
        if context is not None:
            self._bind(answer, context, 0)
        scheduler = self._decoders[self._swap.live if context is None else context].scheduler
        for choice in choices:
            key: Key = (message.request_id, choice.index)
            last = len(prompt_ids) - 1
            scheduler.submit(Piece(key, prompt_ids, last, accepted.room, user=message.user, group=message.request_id))

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

    def cancel_all(self) -> None:
        for answer in list(self._answers.values()):
            self._cancel(answer)

    def reroute(self) -> None:
        """The live context changed: what waits for its first slot waits there now."""
        live = self._swap.live
        moved = self._decoders[1 - live].scheduler.withdraw(lambda piece: self._of(piece.key).context is None)
        for piece in moved:
            self._decoders[live].scheduler.submit(piece)

    def step(self) -> int:
        """One decode step of each context that has answers; how many of these got a token."""
        self._give_up_the_late()
        alone, n_tokens = not self.is_decoding, 0
        for context, decoder in enumerate(self._decoders):
            if self._swap.role(context) not in ("live", "draining") or not decoder.scheduler.has_work:
                continue
            try:
                admitted, evaluated = decoder.step(PROMPT_TOKENS_ALONE if alone else PROMPT_TOKENS_BUSY)
            except DecodeFailed as error:
                self._fail_context(context, str(error))
                continue
            for item in admitted:
                self._begin(context, item)
            now = time.monotonic()
            n_tokens += len(evaluated)
            for row in evaluated:
                self._take(decoder, row, now)
        return n_tokens

    def _give_up_the_late(self) -> None:
        """What has not begun by its deadline is not begun any more."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            _, request_id = heapq.heappop(self._deadlines)
            answer = self._answers.get(request_id)
            if answer is not None and answer.context is None:
                self._drop(answer)
                reason = "no slot was free in time for it"
                self._send(RequestFailed(request_id=request_id, code="queue_timeout", message=reason))
                self._forget(answer)

    def _context_of(self, version: int) -> int:
        """Where a request on `version` has begun. The last check of a request: it must not be refused after this."""
        context = self._swap.begin_on(version)
        if context is None:
            raise Refused("not_resident", f"version {version} is in no context, or has to make way; stage it first")
        return context

    def _of(self, key: object) -> Answer:
        assert isinstance(key, tuple)
        return self._answers[key[0]]

    def _begin(self, context: int, admitted: Admitted) -> None:
        answer = self._of(admitted.key)
        if answer.context is None:
            self._bind(answer, self._swap.begin(), admitted.n_cached)
        assert answer.context == context

    def _bind(self, answer: Answer, context: int, n_cached: int) -> None:
        answer.begin(context, cached_tokens=n_cached, now=time.monotonic())
        version = self._swap.version(context)
        self._send(Begun(request_id=answer.request_id, version=version, prompt_ids=answer.prompt_ids))

    def _take(self, decoder: Decoder, item: Evaluated, now: float) -> None:
        assert isinstance(item.key, tuple)
        answer = self._answers.get(item.key[0])
        if answer is None:  # another choice of it failed in this very step
            return
        choice = answer.choices[item.key[1]]
        try:
            sampled = choice.sampler.draw(item.row)
        except NotFinite as error:
            self._fail(answer, "engine_error", str(error))
            return
        except ConstraintFailed as error:
            self._fail(answer, "bad_response_format" if choice.calls is None else "bad_tools", str(error))
            return
        if (first := answer.note_token(now)) is not None:
            self._began(first)
        text, tokens = choice.take(sampled, self._model.piece, is_eos=sampled.id in self._model.eos_ids)
        for message in answer.messages(choice, text, tokens):
            self._send(message)
        if choice.finish_reason is None:
            decoder.scheduler.append(item.key, sampled.id)
            return
        decoder.scheduler.finish(item.key)
        self._send(choice.done(answer.request_id))
        self._close_if_done(answer)

    def _cancel(self, answer: Answer) -> None:
        if answer.context is None:
            self._bind(
                answer, self._swap.begin(), 0
            )  # every answer begins before it ends, also one that had no slot yet
        self._drop(answer)
        for choice in answer.choices:
            if choice.finish_reason is None:
                text, tokens = choice.cancel()
                for message in answer.messages(choice, text, tokens):
                    self._send(message)
                self._send(choice.done(answer.request_id))
        self._close_if_done(answer)

    def _drop(self, answer: Answer) -> None:
        """Take its pieces out of the scheduler."""
        scheduler = self._decoders[self._swap.live if answer.context is None else answer.context].scheduler
        keys = {(answer.request_id, choice.index) for choice in answer.choices}
        scheduler.withdraw(lambda piece: piece.key in keys)
        for key in scheduler.active_keys():
            if key in keys:
                scheduler.finish(key)

    def _close_if_done(self, answer: Answer) -> None:
        if answer.is_done:
            self._send(answer.done(time.monotonic()))
            self._forget(answer)

    def _fail(self, answer: Answer, code: str, message: str) -> None:
        log.error("request %s failed: %s", answer.request_id, message)
        self._drop(answer)
        self._send(RequestFailed(request_id=answer.request_id, code=code, message=message))
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        del self._answers[answer.request_id]
        if answer.context is not None:
            self._ended(answer.context)

    def _fail_context(self, context: int, message: str) -> None:
        """llama.cpp took no batch: what runs there cannot go on, what has not begun can."""
        decoder = self._decoders[context]
        running = {key[0] for key in decoder.scheduler.active_keys() if isinstance(key, tuple)}
        queued = decoder.abandon()
        for answer in list(self._answers.values()):
            if answer.request_id in running or answer.context == context:
                self._fail(answer, "engine_error", message)
        for piece in queued:
            if isinstance(piece.key, tuple) and piece.key[0] in self._answers:
                decoder.scheduler.submit(piece)
