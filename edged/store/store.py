"""The store as a whole: one database file, and a book for each kind of record.

Every write returns only when its rows are on disk. What a status shows (live version, counts, the latest update, valid
keys) is kept in memory and follows the commits. Used from the event loop that opened it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import apsw

from edged.records import Anchor, ApiKey
from edged.store import anchors, keys, lineage, updates
from edged.store.anchors import Anchors
from edged.store.audit import Audit
from edged.store.completions import StoredCompletions
from edged.store.database import Database
from edged.store.deep_verdicts import DeepVerdicts
from edged.store.episodes import Episodes
from edged.store.feedback import FeedbackRows
from edged.store.held_out import HeldOut
from edged.store.keys import KeyRing
from edged.store.lineage import Lineage
from edged.store.practice import Practice
from edged.store.tally import Tally
from edged.store.updates import Updates
from edged.store.written import WrittenRows


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshots:
    tally: Tally
    lineage: lineage.Snapshot
    updates: updates.Snapshot
    valid_keys: dict[bytes, ApiKey]
    any_keys: bool
    anchor: Anchor | None


class Store:
    """An open store. Build it with `open`."""

    def __init__(self, database: Database, snapshots: _Snapshots, clock: Callable[[], float]) -> None:
        self._database = database
        self.episodes = Episodes(database, snapshots.tally, clock=clock)
        self.completions = StoredCompletions(database, snapshots.tally, clock=clock)
        self.feedback = FeedbackRows(database, snapshots.tally, clock=clock)
        self.written = WrittenRows(database)
        self.practice = Practice(database)
        self.held_out = HeldOut(database)
        self.deep_verdicts = DeepVerdicts(database)
        self.lineage = Lineage(database, snapshots.lineage, clock=clock)
        self.updates = Updates(database, self.lineage, snapshots.updates)
        self.anchors = Anchors(database, snapshots.anchor)
        self.keys = KeyRing(database, snapshots.valid_keys, any_keys=snapshots.any_keys, clock=clock)
        self.audit = Audit(database, clock=clock)

    @classmethod
    async def open(cls, path: Path, *, readers: int = 2, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the database at `path`. Raises StoreError; see `Database.open`.

        Args:
            readers: connections, and threads, that read.
            clock: Unix seconds, for rows whose time the caller does not give.
        """
        database = await Database.open(path, readers=readers)
        try:
            return cls(database, await database.read(_read_snapshots), clock)
        except BaseException:
            await database.close()
            raise

    async def close(self) -> None:
        """Finish what is queued and close the file. Idempotent."""
        await self._database.close()


def _read_snapshots(connection: apsw.Connection) -> _Snapshots:
    return _Snapshots(
        tally=Tally.read(connection),
        lineage=lineage.read_snapshot(connection),
        updates=updates.read_snapshot(connection),
        valid_keys=keys.read_valid(connection),
        any_keys=keys.read_any(connection),
        anchor=anchors.read_latest(connection),
    )
