"""Recorded answers as the API sees them: the store's book, and whoever else holds copies of what is removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from edged.records import Caller, Episode, EpisodeOrigin, EpisodeScore, Feedback, StoredChoice


class Book(Protocol):
    """The store's side (`edged.store.episodes`)."""

    async def list(
        self, *, after: int, limit: int, version: int | None, rated: bool | None, origin: EpisodeOrigin = "user"
    ) -> list[tuple[Episode, Feedback | None, EpisodeScore | None]]: ...

    async def delete_user(self, user: str, *, caller: Caller) -> int: ...


class RecordedAnswers:
    """Implements `edged.api.ports.EpisodeBook`; `forget` is awaited after rows are removed, before anyone is told."""

    def __init__(self, book: Book, forget: Callable[[], Awaitable[None]]) -> None:
        self._book = book
        self._forget = forget
        self.list = book.list

    async def delete_user(self, user: str, *, caller: Caller) -> int:
        removed = await self._book.delete_user(user, caller=caller)
        await self._forget()
        return removed


class CompletionBook(Protocol):
    """The store's side of stored completions (`edged.store.completions`)."""

    async def get(self, completion_id: str, *, caller: str | None) -> list[StoredChoice]: ...

    async def page(
        self,
        *,
        caller: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[list[StoredChoice]], bool]: ...

    async def set_metadata(self, completion_id: str, metadata: Mapping[str, str]) -> None: ...

    async def delete(self, completion_id: str, *, caller: Caller) -> int: ...


class RecordedCompletions:
    """Implements `edged.api.ports.CompletionBook`; `forget` as of `RecordedAnswers`."""

    def __init__(self, book: CompletionBook, forget: Callable[[], Awaitable[None]]) -> None:
        self._book = book
        self._forget = forget
        self.get = book.get
        self.page = book.page
        self.set_metadata = book.set_metadata

    async def delete(self, completion_id: str, *, caller: Caller) -> int:
        removed = await self._book.delete(completion_id, caller=caller)
        await self._forget()
        return removed
