"""What people wrote: preferred pairs and corrections, with the serving engine's tokens, and what became of them.

A row of the table `written` comes with the preference or the correction, in its transaction, and waits: first for
tokens, then for an update. fresh -> used (by a finished update; for good) or dropped. A correction waits only while the
answer has no newer one. Tokens belong to a base model: a pair gets new ones for another base, a
correction waits with the answer that it corrects until that answer's base is served again.

The prompt and the rejected answer of a correction are the episode's own ids; only what was written is tokenised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import apsw

from edged.records import Written, WrittenCounts, WrittenText, WrittenTokens
from edged.store import blobs
from edged.store.database import Database
from edged.store.rows import Row, all_rows

_SOURCES = (
    " FROM written AS w LEFT JOIN preferences AS p ON p.id = w.preference_id"
    " LEFT JOIN feedback AS f ON f.seq = w.feedback_seq LEFT JOIN episodes AS e ON e.id = f.episode_id"
)
# All pairs, and the newest correction of each answer.
_COUNTS = (
    "(w.kind = 'pair' OR NOT EXISTS (SELECT 1 FROM feedback AS newer WHERE newer.episode_id = f.episode_id"
    " AND newer.seq > f.seq AND newer.correction IS NOT NULL))"
)
_WRITTEN = (
    "SELECT w.id, w.kind, coalesce(p.created_at, f.created_at),"
    " w.kind = 'pair' OR (e.n_tokens > 0 AND e.completion_ids <> w.chosen_ids), w.used_by" + _SOURCES
)


class WrittenRows:
    """The book of what people wrote. Writes return when the rows are on disk."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def untokenised(self, limit: int, base_sha256: str) -> list[WrittenText]:
        """What waits and has no tokens of this base model, oldest first."""
        query = (
            "SELECT w.id, w.kind, p.messages, e.prompt_ids, coalesce(p.chosen, f.correction), p.rejected" + _SOURCES
        ) + (
            f" WHERE w.state = 'fresh' AND {_COUNTS} AND w.base_sha256 IS NOT ?1"
            " AND (w.kind = 'pair' OR e.base_sha256 = ?1) ORDER BY w.id LIMIT ?2"
        )
        return await self._database.read(
            lambda connection: [_to_text(row) for row in all_rows(connection, query, (base_sha256, limit))]
        )

    async def set_tokens(
        self,
        written_id: int,
        *,
        base_sha256: str,
        prompt_ids: Sequence[int],
        chosen_ids: Sequence[int],
        rejected_ids: Sequence[int],
    ) -> None:
        """Keep the tokens; prompt and rejected answer only of a pair. One that is gone is passed over."""
        values = (base_sha256, *map(blobs.pack_ids, (prompt_ids, chosen_ids, rejected_ids)), written_id)

        def update(connection: apsw.Connection) -> None:
            connection.execute(
                "UPDATE written SET base_sha256 = ?1, chosen_ids = ?3,"
                " prompt_ids = iif(kind = 'pair', ?2, NULL), rejected_ids = iif(kind = 'pair', ?4, NULL)"
                " WHERE id = ?5 AND state = 'fresh'",
                values,
            )

        await self._database.write(update)

    async def unused_written(self, limit: int, base_sha256: str) -> list[Written]:
        """What has tokens of this base model and waits for its first update, oldest first."""
        query = f"{_WRITTEN} WHERE w.state = 'fresh' AND {_COUNTS} AND w.base_sha256 = ? ORDER BY w.id LIMIT ?"
        return await self._written(query, base_sha256, limit)

    async def used_written(self, limit: int, base_sha256: str) -> list[Written]:
        """What a finished update has used and still counts, newest first."""
        query = f"{_WRITTEN} WHERE w.state = 'used' AND {_COUNTS} AND w.base_sha256 = ? ORDER BY w.id DESC LIMIT ?"
        return await self._written(query, base_sha256, limit)

    async def tokens(self, ids: Sequence[int]) -> list[WrittenTokens]:
        """The tokens of these, in the order asked; those that do not exist (any more) are left out."""
        query = (
            "SELECT w.id, w.kind, coalesce(w.prompt_ids, e.prompt_ids), w.chosen_ids,"
            " coalesce(w.rejected_ids, e.completion_ids) FROM json_each(?) AS asked JOIN written AS w"
            " ON w.id = asked.value LEFT JOIN feedback AS f ON f.seq = w.feedback_seq"
            " LEFT JOIN episodes AS e ON e.id = f.episode_id WHERE w.chosen_ids IS NOT NULL ORDER BY asked.key"
        )
        values = (blobs.to_json([*ids]),)
        return await self._database.read(
            lambda connection: [_to_tokens(row) for row in all_rows(connection, query, values)]
        )

    async def drop_written(self, drops: Iterable[tuple[int, str]]) -> None:
        """Never train on these: (id, reason). Those that are not fresh, or gone, are passed over."""
        values = [(reason, written_id) for written_id, reason in drops]

        def update(connection: apsw.Connection) -> None:
            connection.executemany(
                "UPDATE written SET state = 'dropped', reason = ? WHERE id = ? AND state = 'fresh'", values
            )

        await self._database.write(update)

    async def counts(self) -> WrittenCounts:
        """How many wait, were used and were dropped."""
        query = (
            "SELECT w.kind, w.state, w.reason, count(*) FROM written AS w"
            " LEFT JOIN feedback AS f ON f.seq = w.feedback_seq"
            f" WHERE w.state <> 'fresh' OR {_COUNTS} GROUP BY 1, 2, 3"
        )
        return to_counts(await self._database.read(lambda connection: all_rows(connection, query)))

    async def _written(self, query: str, base_sha256: str, limit: int) -> list[Written]:
        return await self._database.read(
            lambda connection: [_to_written(row) for row in all_rows(connection, query, (base_sha256, limit))]
        )


def insert_pair(connection: apsw.Connection, preference_id: str) -> None:
    """A stored preference waits for tokens."""
    connection.execute("INSERT INTO written (kind, preference_id) VALUES ('pair', ?)", (preference_id,))


def insert_correction(connection: apsw.Connection, feedback_seq: int) -> None:
    """The correction of a stored feedback row waits for tokens."""
    connection.execute("INSERT INTO written (kind, feedback_seq) VALUES ('correction', ?)", (feedback_seq,))


def mark_used(connection: apsw.Connection, ids: Iterable[int], *, update_id: int) -> None:
    """These have been trained on as new, by `update_id`. For good."""
    connection.executemany(
        "UPDATE written SET state = 'used', used_by = ? WHERE id = ? AND state = 'fresh'",
        [(update_id, written_id) for written_id in ids],
    )


def to_counts(rows: Iterable[Row]) -> WrittenCounts:
    """Rows of (kind, state, reason, number) summed up."""
    numbers: dict[tuple[str, str], int] = {}
    dropped: dict[str, int] = {}
    for kind, state, reason, number in rows:
        numbers[kind, state] = numbers.get((kind, state), 0) + number
        if state == "dropped":
            dropped[reason] = dropped.get(reason, 0) + number
    return WrittenCounts(
        pairs_waiting=numbers.get(("pair", "fresh"), 0),
        pairs_used=numbers.get(("pair", "used"), 0),
        corrections_waiting=numbers.get(("correction", "fresh"), 0),
        corrections_used=numbers.get(("correction", "used"), 0),
        dropped=dropped,
    )


def _to_text(row: Row) -> WrittenText:
    return WrittenText(
        id=row[0],
        kind=row[1],
        messages=None if row[2] is None else blobs.from_json(row[2]),
        prompt_tokens=0 if row[3] is None else len(blobs.unpack_ids(row[3])),
        chosen=row[4],
        rejected=row[5],
    )


def _to_written(row: Row) -> Written:
    return Written(id=row[0], kind=row[1], written_at=row[2], differs=bool(row[3]), used_by=row[4])


def _to_tokens(row: Row) -> WrittenTokens:
    prompt_ids, chosen_ids, rejected_ids = map(blobs.unpack_ids, row[2:5])
    return WrittenTokens(
        id=row[0], kind=row[1], prompt_ids=prompt_ids, chosen_ids=chosen_ids, rejected_ids=rejected_ids
    )
