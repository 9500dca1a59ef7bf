"""How many episodes and ratings there are, kept in memory so that a status costs no query.

Loaded once at the start. After that, each write that changes a count returns the change, and the change is applied when
it is committed, on the event loop; so a reader on the event loop always sees the counts of some commit.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import apsw

from edged.store.rows import all_rows, single_row


@dataclasses.dataclass(slots=True)
class Tally:
    """episodes: rows, without those of practice. feedback: rows. ratings: choices that are rated.
    drops: reason -> feedback rows."""

    episodes: int
    feedback: int
    ratings: int
    drops: dict[str, int]

    @classmethod
    def read(cls, connection: apsw.Connection) -> Self:
        """Count everything in the database."""
        episodes, feedback, ratings = single_row(
            connection,
            "SELECT (SELECT count(*) FROM episodes) - (SELECT count(*) FROM practice), (SELECT count(*) FROM feedback),"
            " (SELECT count(*) FROM ratings JOIN feedback ON seq = feedback_seq WHERE rating IS NOT NULL)",
        )
        drops: dict[str, int] = dict(all_rows(connection, "SELECT reason, count(*) FROM drops GROUP BY reason"))
        return cls(episodes=episodes, feedback=feedback, ratings=ratings, drops=drops)

    def replace(self, other: Tally) -> None:
        """Take over every count of `other`."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(other, field.name))
