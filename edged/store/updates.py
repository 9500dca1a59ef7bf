"""Updates: planned, trained, judged; and what a verdict does to ratings and adapters, in one transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import apsw

from edged.records import LEFT_OUT, Caller, Live, PublishedAdapter, Update, UpdateOrigin, UpdateState, Verdict
from edged.store import blobs, feedback, lineage, practice, written
from edged.store.database import Database
from edged.store.errors import StoreError
from edged.store.lineage import Lineage
from edged.store.rows import Row, all_rows, first_row, single_row

_UPDATE = (
    "SELECT id, state, version, parent_version, seed, attempts, created_at, finished_at, verdict, reason, seconds,"
    " metrics, new_episode_ids, replay_episode_ids, practice_after IS NOT NULL FROM updates"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What a status shows of updates without I/O."""

    n_finished: int
    latest_finished: Update | None
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)


class Updates:
    """The book of updates. Writes return when the rows are on disk."""

    def __init__(self, database: Database, lineage: Lineage, snapshot: Snapshot) -> None:
        self._database = database
        self._lineage = lineage
        self._n_finished = snapshot.n_finished
        self._latest_finished = snapshot.latest_finished
        self._left_out = dict(snapshot.left_out)

    def count_finished(self) -> int:
        """Updates with a verdict, whichever it is. No I/O."""
        return self._n_finished

    def latest_finished(self) -> Update | None:
        """The update that got its verdict last. No I/O."""
        return self._latest_finished

    def left_out(self) -> dict[str, int]:
        """Reason -> answers that trainers could not use, over all finished updates. No I/O."""
        return dict(self._left_out)

    async def create(
        self,
        *,
        parent_version: int,
        seed: int,
        new_episode_ids: Sequence[int],
        replay_episode_ids: Sequence[int],
        new_feedback_ids: Sequence[str],
        now: float,
        new_written_ids: Sequence[int] = (),
        origin: UpdateOrigin = "ratings",
    ) -> Update:
        """Plan an update: its id, and the next version number with a candidate row, are taken at once.

        new_feedback_ids, new_written_ids: the ratings, and what people wrote, that count as used once the update is
            finished.
        origin: "practice" if the new episodes are practice answers, which are then used in the same way.
        Raises Refused 404 `adapter_not_found` for an unknown parent.
        """

        def insert(connection: apsw.Connection) -> Update:
            candidate = lineage.insert_candidate(
                connection, origin="trained", parent_version=parent_version, reason=None, now=now
            )
            connection.execute(
                "INSERT INTO updates (state, version, parent_version, seed, attempts, created_at, seconds, metrics,"
                " new_episode_ids, replay_episode_ids, new_feedback_ids, new_written_ids, practice_after)"
                " VALUES ('planned', ?, ?, ?, 0, ?, '{}', '{}', ?, ?, ?, ?, ?)",
                (
                    candidate.version,
                    parent_version,
                    seed,
                    now,
                    blobs.to_json(list(new_episode_ids)),
                    blobs.to_json(list(replay_episode_ids)),
                    blobs.to_json(list(new_feedback_ids)),
                    blobs.to_json(list(new_written_ids)),
                    practice.newest_rating(connection) if origin == "practice" else None,
                ),
            )
            return _get(connection, connection.last_insert_rowid())

        return await self._database.write(insert)

    async def set_state(self, update_id: int, state: UpdateState, attempts: int | None = None) -> Update:
        """Note how far an unfinished update is; `attempts` None leaves them. Raises StoreError: unknown or finished."""
        if state == "finished":
            raise StoreError(f"update {update_id}: only a verdict finishes an update")

        def update(connection: apsw.Connection) -> Update:
            connection.execute(
                "UPDATE updates SET state = ?, attempts = coalesce(?, attempts) WHERE id = ? AND state <> 'finished'",
                (state, attempts, update_id),
            )
            _require_changed(connection, update_id)
            return _get(connection, update_id)

        return await self._database.write(update)

    async def finish(
        self,
        update_id: int,
        *,
        verdict: Verdict,
        reason: str | None,
        seconds: dict[str, float],
        metrics: dict[str, float],
        now: float,
        publish: PublishedAdapter | None,
        caller: Caller,
    ) -> Update:
        """Give the verdict, with all that follows from it, at once.

        Published: the adapter is published and live. Any other verdict: the adapter is refused with `reason`. The new
        ratings are used, unless the update was skipped: then they wait for the next one.

        Args:
            publish: the adapter's files; set exactly if the verdict is "published".
        Raises:
            StoreError: unknown or finished update, or `publish` does not fit the verdict.
            Refused: 409 `pinned` while a version is pinned, 409 `live_changed` if the parent is no longer live.
        """
        if (publish is not None) != (verdict == "published"):
            raise StoreError(f"update {update_id}: verdict {verdict} and publish={publish} do not fit together")

        def update(connection: apsw.Connection) -> tuple[Update, Live | None]:
            _end(connection, update_id, verdict, reason, seconds, metrics, now)
            version, parent_version, feedback_ids, written_ids, episode_ids = single_row(
                connection,
                "SELECT version, parent_version, new_feedback_ids, new_written_ids, new_episode_ids FROM updates"
                " WHERE id = ?",
                (update_id,),
            )
            if verdict != "skipped":
                feedback.mark_used(connection, blobs.from_json(feedback_ids), update_id=update_id)
                written.mark_used(connection, blobs.from_json(written_ids), update_id=update_id)
                practice.mark_used(connection, blobs.from_json(episode_ids), update_id=update_id)
            live = None
            if publish is not None:
                lineage.require_live(connection, parent_version)
                live = lineage.publish_candidate(connection, version, publish, caller=caller, now=now)
            else:
                lineage.refuse_candidate(connection, version, reason or verdict, metrics)
            return _get(connection, update_id), live

        def adopt(outcome: tuple[Update, Live | None]) -> None:
            finished, live = outcome
            self._n_finished += 1
            self._latest_finished = finished
            for name, count in finished.metrics.items():
                if name.startswith(LEFT_OUT):
                    reason = name.removeprefix(LEFT_OUT)
                    self._left_out[reason] = self._left_out.get(reason, 0) + int(count)
            if live is not None and publish is not None:
                self._lineage.adopt(live, publish.folder)

        finished, _ = await self._database.write(update, adopt)
        return finished

    async def measured(self, update_id: int, seconds: dict[str, float], metrics: dict[str, float]) -> Update:
        """Lay figures that were known only after the verdict over those of a finished update."""

        def update(connection: apsw.Connection) -> Update:
            connection.execute(
                "UPDATE updates SET seconds = json_patch(seconds, ?), metrics = json_patch(metrics, ?) WHERE id = ?",
                (blobs.to_json(blobs.finite(seconds)), blobs.to_json(blobs.finite(metrics)), update_id),
            )
            return _get(connection, update_id)

        def adopt(measured: Update) -> None:
            if self._latest_finished is not None and self._latest_finished.id == measured.id:
                self._latest_finished = measured

        return await self._database.write(update, adopt)

    async def unfinished(self) -> list[Update]:
        """Updates without a verdict, oldest first: after a crash, the ones to take up again."""

        query = f"{_UPDATE} WHERE state <> 'finished' ORDER BY id"
        return await self._database.read(lambda connection: [_to_update(row) for row in all_rows(connection, query)])

    async def list(self, limit: int) -> list[Update]:
        """Newest first."""

        query = f"{_UPDATE} ORDER BY id DESC LIMIT ?"
        return await self._database.read(
            lambda connection: [_to_update(row) for row in all_rows(connection, query, (limit,))]
        )


def read_snapshot(connection: apsw.Connection) -> Snapshot:
    """What is kept in memory, as the database has it."""
    (n_finished,) = single_row(connection, "SELECT count(*) FROM updates WHERE state = 'finished'")
    latest = first_row(connection, f"{_UPDATE} WHERE state = 'finished' ORDER BY finished_at DESC, id DESC LIMIT 1")
    left_out = all_rows(
        connection,
        "SELECT substr(key, ?1), CAST(sum(value) AS INTEGER) FROM updates, json_each(updates.metrics)"
        " WHERE state = 'finished' AND key LIKE ?2 GROUP BY key",
        (len(LEFT_OUT) + 1, LEFT_OUT + "%"),
    )
    return Snapshot(
        n_finished=n_finished,
        latest_finished=None if latest is None else _to_update(latest),
        left_out=dict(left_out),
    )


def _end(
    connection: apsw.Connection,
    update_id: int,
    verdict: Verdict,
    reason: str | None,
    seconds: dict[str, float],
    metrics: dict[str, float],
    now: float,
) -> None:
    """Write the verdict. Raises StoreError: unknown or finished."""
    connection.execute(
        "UPDATE updates SET state = 'finished', verdict = ?, reason = ?, seconds = ?, metrics = ?,"
        " finished_at = ? WHERE id = ? AND state <> 'finished'",
        (
            verdict,
            reason,
            blobs.to_json(blobs.finite(seconds)),
            blobs.to_json(blobs.finite(metrics)),
            now,
            update_id,
        ),
    )
    _require_changed(connection, update_id)


def _require_changed(connection: apsw.Connection, update_id: int) -> None:
    if not connection.changes():
        raise StoreError(f"update {update_id} does not exist or is finished already")


def _get(connection: apsw.Connection, update_id: int) -> Update:
    return _to_update(single_row(connection, f"{_UPDATE} WHERE id = ?", (update_id,)))


def _to_update(row: Row) -> Update:
    return Update(
        id=row[0],
        state=row[1],
        version=row[2],
        parent_version=row[3],
        seed=row[4],
        attempts=row[5],
        created_at=row[6],
        finished_at=row[7],
        verdict=row[8],
        reason=row[9],
        seconds=blobs.from_json(row[10]),
        metrics=blobs.from_json(row[11]),
        new_episode_ids=tuple(blobs.from_json(row[12])),
        replay_episode_ids=tuple(blobs.from_json(row[13])),
        origin="practice" if row[14] else "ratings",
    )
