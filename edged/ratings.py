"""Feedback as the API writes it: the store's book, and whoever wants to hear of new ratings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edged.records import Feedback, NewFeedback, Preference
from edged.refusal import Refused


class Book(Protocol):
    """The store's side (`edged.store.feedback`)."""

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]: ...

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[tuple[Feedback, bool] | Refused]: ...

    async def get(self, feedback_id: str) -> Feedback | None: ...

    async def list(
        self, *, completion_id: str | None, after: str | None, limit: int
    ) -> tuple[list[Feedback], bool]: ...

    async def prefer(self, preference: Preference) -> Preference: ...


class Ratings:
    """Implements `edged.api.ports.FeedbackBook`; `on_rated` and `on_preferred` are called after rows are on disk."""

    def __init__(
        self, book: Book, on_rated: Callable[[list[Feedback]], None], on_preferred: Callable[[], None]
    ) -> None:
        self._book = book
        self._on_rated = on_rated
        self._on_preferred = on_preferred
        self.get = book.get
        self.list = book.list

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]:
        stored, created = await self._book.add(feedback, idempotency_key=idempotency_key)
        if created:
            self._on_rated([stored])
        return stored, created

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[Feedback | Refused]:
        results = await self._book.add_many(feedback, idempotency_keys=idempotency_keys)
        self._on_rated([result[0] for result in results if not isinstance(result, Refused) and result[1]])
        return [result if isinstance(result, Refused) else result[0] for result in results]

    async def prefer(self, preference: Preference) -> Preference:
        stored = await self._book.prefer(preference)
        self._on_preferred()
        return stored
