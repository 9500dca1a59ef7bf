"""Stored completions: answers that who asked for them wanted to find again, with metadata that can be changed.

Every answer is recorded (`edged.store.episodes`); the table `stored` says which of them OpenAI's routes show. A
completion is its choices, in order. One that was cancelled is not shown: it is no answer. `caller` None: of anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import apsw

from edged.records import Caller, ShownCalls, StoredChoice
from edged.refusal import Refused
from edged.store import audit, blobs, episodes
from edged.store.database import Database
from edged.store.rows import Row, all_rows, first_row
from edged.store.tally import Tally

# The episodes by which completions are stored; the first value is `caller`.
_SHOWN = (
    " FROM stored AS s JOIN episodes AS head ON head.id = s.episode_id WHERE (?1 IS NULL OR head.caller = ?1)"
    " AND NOT EXISTS (SELECT 1 FROM episodes AS cut WHERE cut.completion_id = head.completion_id"
    " AND cut.finish_reason = 'cancelled')"
)


class StoredCompletions:
    """The book of stored completions. Writes return when the rows are on disk."""

    def __init__(self, database: Database, tally: Tally, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._tally = tally
        self._clock = clock

    async def get(self, completion_id: str, *, caller: str | None) -> list[StoredChoice]:
        """The choices; none if there is no such completion to be shown."""
        return await self._database.read(lambda connection: _choices(connection, completion_id, caller))

    async def page(
        self,
        *,
        caller: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[list[StoredChoice]], bool]:
        """Completions in the order in which they were recorded, and whether there are more.

        Args:
            after: the completion that the page before ended with.
            model, metadata: only those of this model, with all of these pairs.
        Raises Refused 404 `completion_not_found` if `after` names none.
        """
        beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
        query = (
            f"SELECT head.completion_id{_SHOWN} AND (?2 IS NULL OR head.model = ?2)"
            f" AND (?3 IS NULL OR s.episode_id {beyond} ?3)"
            " AND NOT EXISTS (SELECT 1 FROM json_each(?4) AS asked WHERE NOT EXISTS (SELECT 1"
            " FROM json_each(head.metadata) AS pair WHERE pair.key = asked.key AND pair.value = asked.value))"
            f" ORDER BY s.episode_id {order} LIMIT ?5"
        )

        def read(connection: apsw.Connection) -> tuple[list[list[StoredChoice]], bool]:
            place = None if after is None else _place(connection, after, caller)
            values: Row = (caller, model, place, blobs.to_json(dict(metadata)), limit + 1)
            ids = [row[0] for row in all_rows(connection, query, values)]
            return [_choices(connection, found, caller) for found in ids[:limit]], len(ids) > limit

        return await self._database.read(read)

    async def set_metadata(self, completion_id: str, metadata: Mapping[str, str]) -> None:
        """The metadata of every choice becomes `metadata`. One that is gone is passed over."""
        values: Row = (blobs.to_json(dict(metadata)), completion_id)

        def update(connection: apsw.Connection) -> None:
            connection.execute("UPDATE episodes SET metadata = ? WHERE completion_id = ?", values)

        await self._database.write(update)

    async def delete(self, completion_id: str, *, caller: Caller) -> int:
        """Remove its episodes with what was said of them, as `Episodes.delete_user` does; how many there were."""
        now = self._clock()

        def remove(connection: apsw.Connection) -> tuple[int, Tally]:
            removed = episodes.remove(connection, "completion_id", completion_id)
            detail = {"completion_id": completion_id, "episodes": removed}
            audit.record(connection, "delete_completion", detail, caller=caller, now=now)
            return removed, Tally.read(connection)

        removed, _ = await self._database.write(remove, lambda outcome: self._tally.replace(outcome[1]), scrubs=True)
        return removed


def _choices(connection: apsw.Connection, completion_id: str, caller: str | None) -> list[StoredChoice]:
    query = (
        f"SELECT shown.text, shown.calls, {episodes.COLUMNS} FROM episodes AS e"
        " LEFT JOIN shown ON shown.episode_id = e.id WHERE e.completion_id = ?2"
        f" AND EXISTS (SELECT 1{_SHOWN} AND head.completion_id = ?2) ORDER BY e.choice"
    )
    return [_to_choice(row) for row in all_rows(connection, query, (caller, completion_id))]


def _to_choice(row: Row) -> StoredChoice:
    text, calls, *columns = row
    shown = None if calls is None else ShownCalls(text=text, calls=tuple(blobs.from_json(calls)))
    return StoredChoice(episode=episodes.to_episode(tuple(columns)), shown=shown)


def _place(connection: apsw.Connection, completion_id: str, caller: str | None) -> int:
    row = first_row(connection, f"SELECT s.episode_id{_SHOWN} AND head.completion_id = ?2", (caller, completion_id))
    if row is None:
        raise Refused(404, "completion_not_found", f"no stored completion has the id {completion_id!r}", param="after")
    return int(row[0])
