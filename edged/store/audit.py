"""Who did what: appended in the same transaction as the deed, never changed.

`record` is for the other modules of the store, inside their own writes; `Audit` reads, and notes deeds that leave no
other row (pause, resume, train).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import apsw

from edged.records import AuditEntry, Caller
from edged.store import blobs
from edged.store.database import Database
from edged.store.rows import all_rows


def record(
    connection: apsw.Connection, action: str, detail: dict[str, Any], *, caller: Caller, now: float
) -> AuditEntry:
    """Append an entry as part of the transaction that `connection` is in."""
    connection.execute(
        "INSERT INTO audit (at, caller, action, detail) VALUES (?, ?, ?, ?)",
        (now, caller.name, action, blobs.to_json(detail)),
    )
    return AuditEntry(seq=connection.last_insert_rowid(), at=now, caller=caller.name, action=action, detail=detail)


class Audit:
    """The book of who did what. Rows are only ever added."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def add(self, action: str, detail: dict[str, Any], *, caller: Caller) -> AuditEntry:
        now = self._clock()
        return await self._database.write(lambda connection: record(connection, action, detail, caller=caller, now=now))

    async def list(self, limit: int) -> list[AuditEntry]:
        """Newest first."""

        return await self._database.read(lambda connection: _newest(connection, limit))


def _newest(connection: apsw.Connection, limit: int) -> list[AuditEntry]:
    rows = all_rows(connection, "SELECT seq, at, caller, action, detail FROM audit ORDER BY seq DESC LIMIT ?", (limit,))
    return [
        AuditEntry(seq=seq, at=at, caller=caller, action=action, detail=blobs.from_json(detail))
        for seq, at, caller, action, detail in rows
    ]
