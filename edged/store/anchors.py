"""Which version the KL reference moved to, and the ratings that speak for a version.

An anchor is kept: its files are never collected while it is the reference (`edged.store.lineage` sees to it). The
newest row is the one that counts; whether it is in force is decided by who knows the settings.
"""

from __future__ import annotations

import apsw

from edged.records import Anchor, Caller
from edged.store import audit
from edged.store.database import Database
from edged.store.rows import Row, all_rows, first_row, single_row

_COLUMNS = "version, since, ratings, mean_rating, before, configured, base_sha256"


class Anchors:
    """The book of anchors. Writes return when the rows are on disk."""

    def __init__(self, database: Database, latest: Anchor | None) -> None:
        self._database = database
        self._latest = latest

    def latest(self) -> Anchor | None:
        """The newest one. No I/O."""
        return self._latest

    async def ratings_of(self, version: int, base_sha256: str) -> tuple[int, float]:
        """How many answers of `version` on this base are rated, and their mean rating (0.0 if none is)."""
        query = (
            "SELECT count(*), coalesce(avg(f.rating), 0.0) FROM ratings AS r"
            " JOIN feedback AS f ON f.seq = r.feedback_seq JOIN episodes AS e ON e.id = r.episode_id"
            " WHERE r.version = ? AND f.rating IS NOT NULL AND e.base_sha256 = ?"
        )

        def read(connection: apsw.Connection) -> tuple[int, float]:
            number, mean = single_row(connection, query, (version, base_sha256))
            return int(number), float(mean)

        return await self._database.read(read)

    async def counts_of(self, version: int, base_sha256: str, *, since: float = 0.0) -> dict[float, int]:
        """Rating -> how many answers of `version` on this base have it. since: only ratings that came then or later."""
        query = (
            "SELECT f.rating, count(*) FROM ratings AS r"
            " JOIN feedback AS f ON f.seq = r.feedback_seq JOIN episodes AS e ON e.id = r.episode_id"
            " WHERE r.version = ? AND f.rating IS NOT NULL AND f.created_at >= ? AND e.base_sha256 = ?"
            " GROUP BY f.rating"
        )
        return await self._database.read(
            lambda connection: {
                float(rating): int(count)
                for rating, count in all_rows(connection, query, (version, since, base_sha256))
            }
        )

    async def move(self, anchor: Anchor, *, caller: Caller) -> None:
        """Make `anchor` the newest one, and keep its version."""

        def insert(connection: apsw.Connection) -> None:
            connection.execute(
                f"INSERT INTO anchors ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    anchor.version,
                    anchor.since,
                    anchor.ratings,
                    anchor.mean_rating,
                    anchor.before,
                    anchor.configured,
                    anchor.base_sha256,
                ),
            )
            connection.execute("UPDATE adapters SET kept = 1 WHERE version = ?", (anchor.version,))
            detail = {"version": anchor.version, "before": anchor.before, "ratings": anchor.ratings}
            audit.record(connection, "anchor", detail, caller=caller, now=anchor.since)

        def adopt(_: None) -> None:
            self._latest = anchor

        await self._database.write(insert, adopt)


def read_latest(connection: apsw.Connection) -> Anchor | None:
    """The newest anchor."""
    row = first_row(connection, f"SELECT {_COLUMNS} FROM anchors ORDER BY seq DESC LIMIT 1")
    return None if row is None else _to_anchor(row)


def is_anchor(connection: apsw.Connection, version: int) -> bool:
    """Whether the newest anchor is `version`."""
    latest = read_latest(connection)
    return latest is not None and latest.version == version


def _to_anchor(row: Row) -> Anchor:
    return Anchor(
        version=row[0],
        since=row[1],
        ratings=row[2],
        mean_rating=row[3],
        before=row[4],
        configured=row[5],
        base_sha256=row[6],
    )
