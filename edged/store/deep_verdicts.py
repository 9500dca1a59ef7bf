"""What the deep gate found of a version, kept with it in the lineage."""

from __future__ import annotations

import dataclasses

import apsw

from edged.records import DeepVerdict
from edged.store import blobs, lineage
from edged.store.database import Database


class DeepVerdicts:
    """Writes return when the row is on disk; `edged.store.lineage` reads it with the version."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def keep(self, version: int, verdict: DeepVerdict, metrics: dict[str, float]) -> None:
        """The verdict in the place of an earlier one, and its figures over those that the version has."""
        text = blobs.to_json(dataclasses.asdict(verdict))

        def update(connection: apsw.Connection) -> None:
            connection.execute("UPDATE adapters SET deep = ? WHERE version = ?", (text, version))
            lineage.merge_metrics(connection, version, metrics)

        await self._database.write(update)
