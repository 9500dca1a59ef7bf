"""Feedback on its way to the store: who hears of it, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from edged.ratings import Ratings
from edged.records import Feedback, NewFeedback, Preference
from edged.refusal import Refused

NEW = NewFeedback(
    completion_id="c1",
    choice=0,
    rating=1.0,
    correction=None,
    reason=None,
    user=None,
    tags=(),
    source="api",
    caller="uid:1000",
)


def stored(number: int) -> Feedback:
    return Feedback(
        id=f"fb-{number}",
        completion_id="c1",
        choice=0,
        rating=1.0,
        correction=None,
        reason=None,
        user=None,
        tags=(),
        source="api",
        caller="uid:1000",
        created_at=1.0,
        replaces=None,
    )


class LightBook:
    """A book that notes when rows are on disk; `known`: the next row was there already."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.known = False

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]:
        await asyncio.sleep(0)
        self.log.append("on disk")
        return stored(1), not self.known

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[tuple[Feedback, bool] | Refused]:
        await asyncio.sleep(0)
        self.log.append("on disk")
        refused = Refused(404, "completion_not_found", "no such completion")
        return [(stored(1), True), refused, (stored(2), True), (stored(3), False)]

    async def get(self, feedback_id: str) -> Feedback | None:
        return stored(1)

    async def list(self, *, completion_id: str | None, after: str | None, limit: int) -> tuple[list[Feedback], bool]:
        return [stored(1)], False

    async def prefer(self, preference: Preference) -> Preference:
        await asyncio.sleep(0)
        self.log.append("on disk")
        return preference


def make() -> tuple[Ratings, LightBook]:
    book = LightBook()
    told = Ratings(
        book,
        lambda rows: book.log.append("told " + " ".join(row.id for row in rows)),
        lambda: book.log.append("told of a pair"),
    )
    return told, book


def test_a_rating_is_told_after_it_is_on_disk() -> None:
    ratings, book = make()
    assert asyncio.run(ratings.add(NEW, idempotency_key=None)) == (stored(1), True)
    assert book.log == ["on disk", "told fb-1"]


def test_a_repeated_request_is_not_told_again() -> None:
    ratings, book = make()
    book.known = True
    assert asyncio.run(ratings.add(NEW, idempotency_key="k")) == (stored(1), False)
    assert book.log == ["on disk"]


def test_of_many_only_the_accepted_ones_that_are_new_are_told() -> None:
    ratings, book = make()
    results = asyncio.run(ratings.add_many([NEW] * 4))
    assert [result if isinstance(result, Feedback) else None for result in results] == [
        stored(1), None, stored(2), stored(3)
    ]  # fmt: skip
    assert book.log == ["on disk", "told fb-1 fb-2"]


def test_reading_goes_to_the_book() -> None:
    ratings, _ = make()
    assert asyncio.run(ratings.get("fb-1")) == stored(1)
    assert asyncio.run(ratings.list(completion_id=None, after=None, limit=10)) == ([stored(1)], False)


def test_a_preference_is_told_after_it_is_on_disk() -> None:
    ratings, book = make()
    pair = Preference(id="p", messages=[], chosen="a", rejected="b", user=None, caller="uid:1000", created_at=1.0)
    assert asyncio.run(ratings.prefer(pair)) == pair
    assert book.log == ["on disk", "told of a pair"]
