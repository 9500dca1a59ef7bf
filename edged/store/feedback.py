"""Feedback: rows in the order they came, and which ratings wait for an update.

A row stays as it was written, until its user is removed. Which rows of a choice count, and what became of the choice,
is kept by `edged.store.superseding`.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import apsw

from edged.records import Feedback, NewFeedback, Preference, RatedChoice
from edged.refusal import Refused
from edged.store import blobs, superseding, written
from edged.store.database import Database
from edged.store.rows import SHAPED_BY, Row, all_rows, first_row, single_row
from edged.store.tally import Tally

COLUMNS = (
    "f.id, e.completion_id, e.choice, f.rating, f.correction, f.reason, f.user, f.tags, f.source, f.caller,"
    " f.created_at, f.replaces"
)
N_COLUMNS = 12
# The same with the correction that counts, which may stand in another row than the rating that does.
COUNTING_COLUMNS = COLUMNS.replace(
    "f.correction",
    "(SELECT c.correction FROM feedback AS c WHERE c.episode_id = e.id AND c.correction IS NOT NULL"
    " ORDER BY c.seq DESC LIMIT 1)",
)

_FEEDBACK = f"SELECT {COLUMNS} FROM feedback AS f JOIN episodes AS e ON e.id = f.episode_id"

_RATED_CHOICE = (
    "SELECT e.id, f.id, f.rating, f.created_at, e.version, e.base_sha256, e.temperature, e.top_p, e.top_k, e.n_tokens,"
    f" e.logprobs_complete, r.used_by, {SHAPED_BY}, e.completion_id"
    " FROM ratings AS r JOIN feedback AS f ON f.seq = r.feedback_seq JOIN episodes AS e ON e.id = r.episode_id"
)

# Nobody has seen the answers of practice, so nobody rates them.
_SHOWN = "NOT EXISTS (SELECT 1 FROM practice AS p WHERE p.episode_id = e.id)"


class FeedbackRows:
    """The book of feedback. Writes return when the rows are on disk."""

    def __init__(self, database: Database, tally: Tally, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._tally = tally
        self._clock = clock

    def counts(self) -> tuple[int, int]:
        """Feedback rows, and choices that are rated. No I/O."""
        return self._tally.feedback, self._tally.ratings

    def drop_counts(self) -> dict[str, int]:
        """Reason -> feedback rows that no update can use. No I/O."""
        return dict(self._tally.drops)

    async def add(self, feedback: NewFeedback, *, idempotency_key: str | None) -> tuple[Feedback, bool]:
        """The stored row, and False if an earlier call by this caller with the same key and body already made it.

        Raises Refused: 404 `completion_not_found`, 409 `idempotency_conflict`.
        """
        now = self._clock()

        def insert(connection: apsw.Connection) -> tuple[Feedback, bool, int]:
            return _insert(connection, feedback, idempotency_key, now=now)

        stored, is_new, _ = await self._database.write(insert, lambda outcome: self._count([outcome]))
        return stored, is_new

    async def add_many(
        self, feedback: Sequence[NewFeedback], *, idempotency_keys: Sequence[str | None] = ()
    ) -> list[tuple[Feedback, bool] | Refused]:
        """One result per item, in order: the row and whether it is new. A refused item does not stop the others. One
        commit for all.

        `idempotency_keys` is empty or as long as `feedback`.
        """
        items = list(zip(feedback, idempotency_keys or [None] * len(feedback), strict=True))
        now = self._clock()

        def insert(connection: apsw.Connection) -> list[tuple[Feedback, bool, int] | Refused]:
            outcomes: list[tuple[Feedback, bool, int] | Refused] = []
            for item, key in items:
                try:
                    outcomes.append(_insert(connection, item, key, now=now))
                except Refused as refusal:  # raised before anything of the item was written
                    outcomes.append(refusal)
            return outcomes

        def count(outcomes: list[tuple[Feedback, bool, int] | Refused]) -> None:
            self._count([outcome for outcome in outcomes if not isinstance(outcome, Refused)])

        outcomes = await self._database.write(insert, count)
        return [outcome if isinstance(outcome, Refused) else outcome[:2] for outcome in outcomes]

    async def get(self, feedback_id: str) -> Feedback | None:
        def read(connection: apsw.Connection) -> Feedback | None:
            row = first_row(connection, f"{_FEEDBACK} WHERE f.id = ?", (feedback_id,))
            return None if row is None else to_feedback(row)

        return await self._database.read(read)

    async def prefer(self, preference: Preference) -> Preference:
        """Store a pair; an empty id is filled in."""
        stored = preference if preference.id else dataclasses.replace(preference, id=_new_id("pref"))

        def insert(connection: apsw.Connection) -> None:
            connection.execute(
                "INSERT INTO preferences (id, messages, chosen, rejected, user, caller, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id,
                    blobs.to_json(stored.messages),
                    stored.chosen,
                    stored.rejected,
                    stored.user,
                    stored.caller,
                    stored.created_at,
                ),
            )
            written.insert_pair(connection, stored.id)

        await self._database.write(insert)
        return stored

    async def unused_rated(self, limit: int, *, base_sha256: str | None = None) -> list[RatedChoice]:
        """Choices that wait for their first update, by the time of the rating that counts, oldest first.

        base_sha256: only those sampled on this base model; None: on any.
        """
        return await self._rated_choices(
            f"{_RATED_CHOICE} WHERE r.state = 'fresh' AND (?1 IS NULL OR e.base_sha256 = ?1)"
            " ORDER BY r.feedback_seq LIMIT ?2",
            base_sha256,
            limit,
        )

    async def count_unused_elsewhere(self, base_sha256: str) -> int:
        """How many choices wait for their first update that were sampled on another base model than this."""
        query = (
            "SELECT count(*) FROM ratings AS r JOIN episodes AS e ON e.id = r.episode_id"
            " WHERE r.state = 'fresh' AND e.base_sha256 <> ?"
        )
        return await self._database.read(lambda connection: int(single_row(connection, query, (base_sha256,))[0]))

    async def used_rated(
        self, versions: Collection[int] | None, limit: int, *, base_sha256: str | None = None
    ) -> list[RatedChoice]:
        """Choices that a finished update has used as new and that are still rated, newest rating first.

        Args:
            versions: only those sampled by one of these adapter versions; None: by any.
            base_sha256: only those sampled on this base model; None: on any.
        """
        return await self._rated_choices(
            f"{_RATED_CHOICE} WHERE r.state = 'used'"
            " AND (?1 IS NULL OR r.version IN (SELECT value FROM json_each(?1))) AND f.rating IS NOT NULL"
            " AND (?2 IS NULL OR e.base_sha256 = ?2) ORDER BY r.feedback_seq DESC LIMIT ?3",
            None if versions is None else blobs.to_json(sorted(versions)),
            base_sha256,
            limit,
        )

    async def drop(self, drops: Iterable[tuple[str, str]]) -> None:
        """Take ratings out of planning: (feedback id, reason). Those that are not fresh, or gone, are passed over."""
        pairs = list(drops)

        def insert(connection: apsw.Connection) -> dict[str, int]:
            dropped: dict[str, int] = {}
            for feedback_id, reason in pairs:
                connection.execute(
                    "UPDATE ratings SET state = 'dropped' WHERE state = 'fresh'"
                    " AND feedback_seq = (SELECT seq FROM feedback WHERE id = ?)",
                    (feedback_id,),
                )
                if connection.changes():
                    connection.execute(
                        "INSERT INTO drops (feedback_seq, reason) SELECT seq, ? FROM feedback WHERE id = ?",
                        (reason, feedback_id),
                    )
                    dropped[reason] = dropped.get(reason, 0) + 1
            return dropped

        def count(dropped: dict[str, int]) -> None:
            for reason, number in dropped.items():
                self._tally.drops[reason] = self._tally.drops.get(reason, 0) + number

        await self._database.write(insert, count)

    async def _rated_choices(self, query: str, *values: int | str | None) -> list[RatedChoice]:
        return await self._database.read(
            lambda connection: [_to_rated_choice(row) for row in all_rows(connection, query, values)]
        )

    def _count(self, outcomes: Iterable[tuple[Feedback, bool, int]]) -> None:
        for _, is_new, ratings_change in outcomes:
            self._tally.feedback += is_new
            self._tally.ratings += ratings_change

    async def list(self, *, completion_id: str | None, after: str | None, limit: int) -> tuple[list[Feedback], bool]:
        """Oldest first, and whether there are more. Raises Refused 404 `feedback_not_found` if `after` names no row."""
        return await self._database.read(lambda connection: _page(connection, completion_id, after, limit))


def mark_used(connection: apsw.Connection, feedback_ids: Iterable[str], *, update_id: int) -> None:
    """The choices of these feedback rows have been trained on as new, by `update_id`. For good."""
    connection.executemany(
        "UPDATE ratings SET state = 'used', used_by = ? WHERE state <> 'used'"
        " AND episode_id = (SELECT episode_id FROM feedback WHERE id = ?)",
        [(update_id, feedback_id) for feedback_id in feedback_ids],
    )


def to_feedback(row: Row) -> Feedback:
    """A row of COLUMNS as a record."""
    return Feedback(
        id=row[0],
        completion_id=row[1],
        choice=row[2],
        rating=row[3],
        correction=row[4],
        reason=row[5],
        user=row[6],
        tags=tuple(blobs.from_json(row[7])),
        source=row[8],
        caller=row[9],
        created_at=row[10],
        replaces=row[11],
    )


def _to_rated_choice(row: Row) -> RatedChoice:
    return RatedChoice(
        episode_id=row[0],
        feedback_id=row[1],
        rating=row[2],
        rated_at=row[3],
        version=row[4],
        base_sha256=row[5],
        temperature=row[6],
        top_p=row[7],
        top_k=row[8],
        n_tokens=row[9],
        logprobs_complete=bool(row[10]),
        used_by=row[11],
        shaped_by=row[12],
        group=row[13],
    )


def _page(
    connection: apsw.Connection, completion_id: str | None, after: str | None, limit: int
) -> tuple[list[Feedback], bool]:
    after_seq = 0
    if after is not None:
        row = first_row(connection, "SELECT seq FROM feedback WHERE id = ?", (after,))
        if row is None:
            raise Refused(404, "feedback_not_found", f"no feedback has the id {after!r}", param="after")
        after_seq = row[0]
    values: Row = (after_seq,)
    query = f"{_FEEDBACK} WHERE f.seq > ?"
    if completion_id is not None:
        # The unary plus keeps the planner from walking all feedback in order to find that of one completion.
        query, values = f"{_FEEDBACK} WHERE +f.seq > ? AND e.completion_id = ?", (after_seq, completion_id)
    rows = all_rows(connection, f"{query} ORDER BY f.seq LIMIT ?", (*values, limit + 1))
    return [to_feedback(row) for row in rows[:limit]], len(rows) > limit


def _insert(
    connection: apsw.Connection, new: NewFeedback, key: str | None, *, now: float
) -> tuple[Feedback, bool, int]:
    """The stored row, whether this call made it, and by how much the number of rated choices changed."""
    if key is not None:
        earlier = first_row(connection, f"{_FEEDBACK} WHERE f.caller = ? AND f.idempotency_key = ?", (new.caller, key))
        if earlier is not None:
            return _repeated(to_feedback(earlier), new, key), False, 0
    episode = first_row(
        connection,
        f"SELECT id, version FROM episodes AS e WHERE completion_id = ? AND choice = ? AND {_SHOWN}",
        (new.completion_id, new.choice),
    )
    if episode is None:
        raise _not_found(connection, new)
    episode_id, version = episode
    rates, corrects = new.rating is not None, new.correction is not None
    stored = Feedback(
        id=_new_id("fb"),
        completion_id=new.completion_id,
        choice=new.choice,
        rating=None if new.rating is None else float(new.rating),
        correction=new.correction,
        reason=new.reason,
        user=new.user,
        tags=new.tags,
        source=new.source,
        caller=new.caller,
        created_at=now,
        replaces=superseding.replaced(connection, episode_id, None, rates=rates, corrects=corrects),
    )
    seq = _append(connection, stored, episode_id, key)
    if corrects:
        written.insert_correction(connection, seq)
    return stored, True, superseding.count_in(connection, episode_id, seq, version=version, rates=rates)


def _append(connection: apsw.Connection, stored: Feedback, episode_id: int, key: str | None) -> int:
    """Write the row; its place in the order."""
    connection.execute(
        "INSERT INTO feedback (id, episode_id, rating, correction, reason, user, tags, source, caller, created_at,"
        " replaces, idempotency_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            stored.id,
            episode_id,
            stored.rating,
            stored.correction,
            stored.reason,
            stored.user,
            blobs.to_json(stored.tags),
            stored.source,
            stored.caller,
            stored.created_at,
            stored.replaces,
            key,
        ),
    )
    return connection.last_insert_rowid()


def _repeated(earlier: Feedback, new: NewFeedback, key: str) -> Feedback:
    same = (
        (earlier.completion_id, earlier.choice, earlier.rating, earlier.correction, earlier.reason, earlier.user)
        == (new.completion_id, new.choice, new.rating, new.correction, new.reason, new.user)
    ) and (earlier.tags, earlier.source) == (new.tags, new.source)
    if not same:
        raise Refused(
            409,
            "idempotency_conflict",
            f"Idempotency-Key {key!r} was used before with another body; use a new key for new feedback",
        )
    return earlier


def _not_found(connection: apsw.Connection, new: NewFeedback) -> Refused:
    query = f"SELECT count(*) FROM episodes AS e WHERE completion_id = ? AND {_SHOWN}"
    (n_choices,) = single_row(connection, query, (new.completion_id,))
    if n_choices:
        message = f"completion {new.completion_id!r} has {n_choices} choices, none with the number {new.choice}"
        return Refused(404, "completion_not_found", message, param="choice")
    message = (
        f"no completion has the id {new.completion_id!r}; use the `id` of a chat or text completion of this daemon"
    )
    return Refused(404, "completion_not_found", message, param="completion_id")


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
