"""One context and its scheduler, kept in step: what the scheduler plans is what the context does."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from engine.generate.backend import Adapter, Context, Row
from engine.generate.scheduler import Admitted, Copy, Forget, Piece, Scheduler


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """The logits row after token `index` of piece `key`: float32[V], valid until the context's next step."""

    key: Hashable
    index: int
    row: Row


class Decoder:
    """Evaluates pieces on one context, under the adapter that is set on it."""

    def __init__(self, context: Context, scheduler: Scheduler) -> None:
        self._context = context
        self._scheduler = scheduler

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def set_adapter(self, adapter: Adapter | None) -> None:
        """Change the adapter and forget every sequence. Nothing may be running."""
        self._scheduler.forget_all()
        self._context.set_adapter(adapter)

    def step(self, prompt_tokens: int) -> tuple[tuple[Admitted, ...], list[Evaluated]]:
        """Admit what fits and evaluate one step.

        Raises:
            DecodeFailed: nothing on this context can go on; call `abandon`.
        """
        step = self._scheduler.plan(prompt_tokens)
        for move in step.moves:
            match move:
                case Copy(source, target, n_tokens):
                    self._context.copy(source, target, n_tokens)
                case Forget(sequence):
                    self._context.forget(sequence)
        if not step.entries:
            return step.admitted, []
        rows = self._context.decode(step.entries)
        evaluated = [Evaluated(of.key, of.index, row) for of, row in zip(step.rows, rows, strict=True)]
        return step.admitted, evaluated

    def abandon(self) -> list[Piece]:
        """Drop all running pieces and clear the memory; the queued ones are returned, in order."""
        queued = self._scheduler.withdraw(lambda _piece: True)
        for key in self._scheduler.active_keys():
            self._scheduler.finish(key)
        self._scheduler.forget_all()
        self._context.clear()
        return queued
