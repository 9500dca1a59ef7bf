"""What of one answer has been made, and what of it has gone out to its reader. No decision is made here.

Events and finished choices of an answer that is not streamed are held back until its end, so that it can be run again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from edged.answer import AnswerEvent, Ask, Piece
from edged.records import ShownCalls
from engine import protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The worker that ran this answer is gone."""


class Delivery:
    """An answer under way. `sent`: a worker has it. `held`, `whole`: events and finished choices that are held back.
    `arrived`: monotonic."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.created_at = time.time()
        self.arrived = time.monotonic()
        self.events: asyncio.Queue[AnswerEvent | None] = asyncio.Queue()
        self.inbox: asyncio.Queue[protocol.Message | Lost] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.version = 0
        self.prompt_ids: tuple[int, ...] = ()
        self.runs = 0
        self.sent = False
        self.started = False
        self.whole: list[protocol.ChoiceDone] = []
        self.held: list[AnswerEvent] = []
        self.abandoned = False
        self._shown: dict[int, ShownCalls] = {}

    def waits_no_longer_than(self, queue_timeout_s: float) -> float | None:
        """Seconds for which it may still wait for a slot, 0 at least; None once it has had one.

        Args:
            queue_timeout_s: the longest wait of any request; its own may be shorter.
        """
        if self.prompt_ids:
            return None
        own_s = queue_timeout_s if self.ask.queue_timeout_s is None else self.ask.queue_timeout_s
        return max(0.0, self.arrived + min(own_s, queue_timeout_s) - time.monotonic())

    @property
    def is_out(self) -> bool:
        """Whether its reader has got something of it: it can then not be run again."""
        return self.started and self.ask.stream

    def tell(self, event: AnswerEvent) -> None:
        """Pass an event on, at once or at the end."""
        if isinstance(event, Piece) and self.ask.store and self.ask.tools is not None:
            before = self._shown.get(event.choice, ShownCalls(text="", calls=()))
            self._shown[event.choice] = ShownCalls(text=before.text + event.text, calls=before.calls + event.calls)
        if self.ask.stream:
            self.events.put_nowait(event)
        else:
            self.held.append(event)

    def shown_calls(self, choice: int) -> ShownCalls | None:
        """How a choice that calls tools is shown, for one who wants to find it again; else None."""
        shown = self._shown.get(choice)
        return shown if shown is not None and shown.calls else None

    def let_out(self) -> None:
        """The answer is whole: everything that was held back goes out."""
        for event in self.held:
            self.events.put_nowait(event)
        self.held.clear()

    def forget(self) -> None:
        """Be as if nothing had been made of it yet."""
        self.started = False
        self.whole.clear()
        self.held.clear()
        self._shown.clear()
