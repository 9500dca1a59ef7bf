"""Adapter versions: where each came from, what became of it, and which one is live.

Versions rise for ever: they come from a counter of their own, so a number is never given twice, not even after a row is
gone. Version 0 is the base and always published. Each change of what is served adds a row to the live history; the
newest row is what is served, and its pin is all that is ever changed in it. A version that goes live has no verdict
(`edged.swap`) until something speaks for or against it. The functions with a connection are parts of larger
transactions (`edged.store.updates`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import apsw

from edged import swap
from edged.records import Adapter, AdapterOrigin, Caller, DeepVerdict, Live, PublishedAdapter, WatchVerdict
from edged.refusal import Refused
from edged.store import anchors, audit, blobs
from edged.store.database import Database
from edged.store.rows import Row, all_rows, first_row, single_row

_ADAPTER = (
    "SELECT version, parent_version, origin, state, created_at, sha256, folder, reason, kept, metrics, verdict,"
    " verdict_reason, collected_at, deep FROM adapters"
)
_LIVE = (
    "SELECT h.version, h.since, h.why, h.caller, h.pinned, h.reason, a.verdict"
    " FROM live_history AS h JOIN adapters AS a ON a.version = h.version"
)

_AUDITED = {"promoted": "promote", "rolled_back": "rollback"}


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What is needed without I/O: the live version and the folders of all published ones."""

    live: Live
    folders: dict[int, str | None]


class Lineage:
    """The book of adapter versions. Writes return when the rows are on disk."""

    def __init__(self, database: Database, snapshot: Snapshot, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._live = snapshot.live
        self._folders = dict(snapshot.folders)
        self._clock = clock

    def live(self) -> Live:
        """What is served. No I/O."""
        return self._live

    def expect(self, if_live: int | None) -> Live:
        """What is served. Raises Refused 409 `live_changed` if that is not `if_live`; None takes any. No I/O."""
        return _expected(self._live, if_live)

    def folder(self, version: int) -> str:
        """The name under `adapters/` of a published version's folder. No I/O.

        Raises Refused: 404 `adapter_not_found` (unknown, or not published), 409 `no_files`.
        """
        if version not in self._folders:
            raise Refused(404, "adapter_not_found", f"no published adapter has the version {version}")
        folder = self._folders[version]
        if folder is None:
            raise Refused(
                409, "no_files", f"version {version} has no adapter files" + (": it is the base" * (not version))
            )
        return folder

    async def history(self, limit: int) -> list[Live]:
        """What was live, newest first; the first is what is live now."""
        query = f"{_LIVE} ORDER BY seq DESC LIMIT ?"
        return await self._database.read(
            lambda connection: [_to_live(row) for row in all_rows(connection, query, (limit,))]
        )

    async def list(self) -> list[Adapter]:
        """All versions, in order."""
        return await self._database.read(
            lambda connection: [_to_adapter(row) for row in all_rows(connection, f"{_ADAPTER} ORDER BY version")]
        )

    async def get(self, version: int) -> Adapter:
        """Raises Refused 404 `adapter_not_found`."""
        return await self._database.read(lambda connection: _get(connection, version))

    async def newest_version(self) -> int:
        """The highest version number given so far; 0 if there was none."""

        def read(connection: apsw.Connection) -> int:
            (version,) = single_row(connection, "SELECT value FROM counters WHERE name = 'version'")
            return int(version)

        return await self._database.read(read)

    async def parents(self) -> dict[int, int | None]:
        """Published version -> the version that it was made from, None if it names none."""
        query = "SELECT version, parent_version FROM adapters WHERE state = 'published'"
        return await self._database.read(lambda connection: dict(all_rows(connection, query)))

    async def skip_versions(self, used: int) -> None:
        """Give no version up to `used` any more: folders with these numbers lie on the disk."""

        def raise_counter(connection: apsw.Connection) -> None:
            connection.execute("UPDATE counters SET value = max(value, ?) WHERE name = 'version'", (used,))

        await self._database.write(raise_counter)

    async def set_metrics(self, version: int, metrics: dict[str, float]) -> None:
        """Lay `metrics` over those of the version."""
        await self._database.write(lambda connection: merge_metrics(connection, version, metrics))

    async def add_candidate(self, *, origin: AdapterOrigin, parent_version: int | None, caller: Caller) -> Adapter:
        """A new version for an adapter that comes from elsewhere. Its `reason` says who brought it."""
        now = self._clock()

        def insert(connection: apsw.Connection) -> Adapter:
            adapter = insert_candidate(
                connection, origin=origin, parent_version=parent_version, reason=f"by {caller.name}", now=now
            )
            audit.record(connection, "import", {"version": adapter.version, "origin": origin}, caller=caller, now=now)
            return adapter

        return await self._database.write(insert)

    async def publish(
        self, version: int, published: PublishedAdapter, *, caller: Caller, if_live: int | None = None
    ) -> Live:
        """Make a candidate published and live. Raises Refused: 409 `live_changed`, and as `publish_candidate` does."""
        now = self._clock()

        def publish(connection: apsw.Connection) -> Live:
            require_live(connection, if_live)
            return publish_candidate(connection, version, published, caller=caller, now=now)

        return await self._database.write(publish, lambda live: self.adopt(live, published.folder))

    async def refuse(self, version: int, reason: str, *, metrics: dict[str, float] | None = None) -> Adapter:
        """Give a candidate up. Raises Refused: 404 `adapter_not_found`, 409 `not_a_candidate`."""

        def update(connection: apsw.Connection) -> Adapter:
            refuse_candidate(connection, version, reason, metrics or {})
            return _get(connection, version)

        return await self._database.write(update)

    async def set_live(
        self,
        version: int,
        *,
        why: str,
        caller: Caller,
        if_live: int | None,
        now: float,
        pinned: bool | None = None,
        reason: str | None = None,
    ) -> Live:
        """Append to the live history.

        Args:
            why: "promoted" or "rolled_back"; the audit shows it.
            if_live: only if this version is live now.
            now: Unix seconds.
            reason: of a rollback: what speaks against the version that is live, and becomes its verdict; None: nothing.
            pinned: whether `version` is pinned from now on. None: it is not, and this is refused while another one is.
        Raises:
            Refused: 409 `live_changed`, 409 `pinned`, 404 `adapter_not_found`, 409 `adapter_refused`,
                409 `adapter_not_published`.
        """

        def insert(connection: apsw.Connection) -> Live:
            live = require_live(connection, if_live)
            if pinned is None:
                _require_unpinned(live, version)
            adapter = _get(connection, version)
            if adapter.state == "refused":
                raise Refused(
                    409, "adapter_refused", f"adapter {version} was refused ({adapter.reason}) and cannot be served"
                )
            if adapter.state == "candidate":
                raise Refused(
                    409, "adapter_not_published", f"adapter {version} is still a candidate; wait for its verdict"
                )
            if version and adapter.folder is None:
                raise Refused(409, "no_files", f"version {version} has no adapter files: they were collected")
            detail: dict[str, Any] = {"version": version, "from": live.version}
            if reason is not None:
                detail["reason"] = reason
                _set_verdict(connection, live.version, "rolled_back", reason)
            audit.record(connection, _AUDITED[why], detail, caller=caller, now=now)
            return _append_live(connection, version, why, caller, pinned=bool(pinned), now=now, reason=reason)

        return await self._database.write(insert, self.adopt)

    async def hold(self, version: int, reason: str) -> Live:
        """The live version has stood its watch. Raises Refused: 409 `live_changed`."""

        def update(connection: apsw.Connection) -> Live:
            require_live(connection, version)
            _set_verdict(connection, version, "kept", reason)
            return _read_live(connection)

        return await self._database.write(update, self.adopt)

    async def set_pinned(self, pinned: bool, *, version: int, if_live: int | None, caller: Caller) -> Live:
        """Pin or unpin the live version. `since` stays.

        Raises Refused: 409 `live_changed`; 404 `adapter_not_found`; 409 `not_live` if `version` is not the live one.
        """
        now = self._clock()

        def update(connection: apsw.Connection) -> Live:
            live = require_live(connection, if_live)
            _get(connection, version)
            if live.version != version:
                raise Refused(409, "not_live", f"version {version} is not live, {live.version} is; promote it first")
            connection.execute(
                "UPDATE live_history SET pinned = ? WHERE seq = (SELECT max(seq) FROM live_history)", (pinned,)
            )
            audit.record(connection, "pin" if pinned else "unpin", {"version": version}, caller=caller, now=now)
            return dataclasses.replace(live, pinned=pinned)

        return await self._database.write(update, self.adopt)

    async def set_kept(self, kept: bool, *, version: int, caller: Caller, if_live: int | None = None) -> Adapter:
        """Protect a version's files from collection, or no longer. Raises Refused: 404 `adapter_not_found`, 409
        `live_changed`, 409 `base_is_kept`."""
        now = self._clock()

        def update(connection: apsw.Connection) -> Adapter:
            require_live(connection, if_live)
            adapter = _get(connection, version)
            if version == 0 and not kept:
                raise Refused(409, "base_is_kept", "version 0 is the base and always kept")
            if not kept and anchors.is_anchor(connection, version):
                raise Refused(409, "is_reference", f"version {version} is the reference of the KL penalty and is kept")
            connection.execute("UPDATE adapters SET kept = ? WHERE version = ?", (kept, version))
            audit.record(connection, "keep" if kept else "unkeep", {"version": version}, caller=caller, now=now)
            return dataclasses.replace(adapter, kept=kept)

        return await self._database.write(update)

    async def collect(self, version: int, *, caller: Caller) -> None:
        """Let go of a version's files, which may be removed when this returns. Raises Refused: 409 `in_use` if it is
        live, kept, or what an unfinished update starts from; 404 `adapter_not_found`, 409 `no_files`."""
        now = self._clock()

        def update(connection: apsw.Connection) -> None:
            adapter = _get(connection, version)
            if adapter.folder is None:
                raise Refused(409, "no_files", f"version {version} has no adapter files")
            query = "SELECT 1 FROM updates WHERE state <> 'finished' AND parent_version = ?"
            is_parent = first_row(connection, query, (version,)) is not None
            if adapter.kept or is_parent or _read_live(connection).version == version:
                raise Refused(409, "in_use", f"version {version} is live, kept, or what an update starts from")
            connection.execute("UPDATE adapters SET folder = NULL, collected_at = ? WHERE version = ?", (now, version))
            audit.record(connection, "collect", {"version": version}, caller=caller, now=now)

        def forget(_: None) -> None:
            self._folders[version] = None

        await self._database.write(update, forget)

    def adopt(self, live: Live, folder: str | None = None) -> None:
        """A commit changed what is live; `folder` is set if the version is new."""
        self._live = live
        if folder is not None:
            self._folders[live.version] = folder


def read_snapshot(connection: apsw.Connection) -> Snapshot:
    """What is kept in memory, as the database has it."""
    folders = all_rows(connection, "SELECT version, folder FROM adapters WHERE state = 'published'")
    return Snapshot(live=_read_live(connection), folders=dict(folders))


def insert_candidate(
    connection: apsw.Connection, *, origin: AdapterOrigin, parent_version: int | None, reason: str | None, now: float
) -> Adapter:
    """A candidate with the next version number. Raises Refused 404 `adapter_not_found` for an unknown parent."""
    if parent_version is not None:
        _get(connection, parent_version)
    (version,) = single_row(connection, "UPDATE counters SET value = value + 1 WHERE name = 'version' RETURNING value")
    connection.execute(
        "INSERT INTO adapters (version, parent_version, origin, state, created_at, reason, kept, metrics)"
        " VALUES (?, ?, ?, 'candidate', ?, ?, 0, '{}')",
        (version, parent_version, origin, now, reason),
    )
    return _get(connection, version)


def publish_candidate(
    connection: apsw.Connection, version: int, published: PublishedAdapter, *, caller: Caller, now: float
) -> Live:
    """Make a candidate published and live.

    Raises Refused: 404 `adapter_not_found`, 409 `not_a_candidate`, 409 `pinned` while another version is pinned.
    """
    _require_candidate(connection, version)
    live = _read_live(connection)
    _require_unpinned(live, version)
    connection.execute(
        "UPDATE adapters SET state = 'published', sha256 = ?, folder = ? WHERE version = ?",
        (published.sha256, published.folder, version),
    )
    merge_metrics(connection, version, published.metrics)
    return _append_live(connection, version, "published", caller, pinned=False, now=now)


def refuse_candidate(connection: apsw.Connection, version: int, reason: str, metrics: dict[str, float]) -> None:
    """Raises Refused: 404 `adapter_not_found`, 409 `not_a_candidate`."""
    _require_candidate(connection, version)
    connection.execute("UPDATE adapters SET state = 'refused', reason = ? WHERE version = ?", (reason, version))
    merge_metrics(connection, version, metrics)


def merge_metrics(connection: apsw.Connection, version: int, metrics: dict[str, float]) -> None:
    """Lay `metrics` over those that the version has; numbers that are not finite are left out."""
    connection.execute(
        "UPDATE adapters SET metrics = json_patch(metrics, ?) WHERE version = ?",
        (blobs.to_json(blobs.finite(metrics)), version),
    )


def _append_live(
    connection: apsw.Connection,
    version: int,
    why: str,
    caller: Caller,
    *,
    pinned: bool,
    now: float,
    reason: str | None = None,
) -> Live:
    before, adapter = _read_live(connection), _get(connection, version)
    if before.verdict is None and before.version != version:
        is_child = (adapter.origin, adapter.parent_version) == ("trained", before.version) and why == "published"
        reason_kept = f"version {version} " + ("was trained on top of it" if is_child else "took its place")
        _set_verdict(connection, before.version, "kept", reason_kept)
    # What a rollback leads to keeps the verdict that it is the better one; anything else is watched from now on.
    connection.execute(
        "UPDATE adapters SET verdict = NULL, verdict_reason = NULL WHERE version = ?"
        " AND NOT (? = 'rolled_back' AND verdict IS 'kept')",
        (version, why),
    )
    connection.execute(
        "INSERT INTO live_history (version, since, why, caller, pinned, reason) VALUES (?, ?, ?, ?, ?, ?)",
        (version, now, why, caller.name, pinned, reason),
    )
    return _read_live(connection)


def _set_verdict(connection: apsw.Connection, version: int, verdict: WatchVerdict, reason: str) -> None:
    """What became of the live version. Raises SwapError if it cannot become that."""
    stage = swap.stage_of(_get(connection, version).verdict, serving=True)
    swap.after(stage, "held" if verdict == "kept" else "rolled_back")
    connection.execute(
        "UPDATE adapters SET verdict = ?, verdict_reason = ? WHERE version = ?", (verdict, reason, version)
    )


def _read_live(connection: apsw.Connection) -> Live:
    return _to_live(single_row(connection, f"{_LIVE} ORDER BY seq DESC LIMIT 1"))


def require_live(connection: apsw.Connection, if_live: int | None) -> Live:
    """What is live. Raises Refused 409 `live_changed` if that is not `if_live`; None takes any."""
    return _expected(_read_live(connection), if_live)


def _expected(live: Live, if_live: int | None) -> Live:
    if if_live is not None and live.version != if_live:
        message = f"version {live.version} is live, not {if_live}; look at what changed before you repeat this"
        raise Refused(409, "live_changed", message, param="if_live")
    return live


def _require_unpinned(live: Live, version: int) -> None:
    if live.pinned:
        raise Refused(409, "pinned", f"version {live.version} is pinned; unpin it before version {version} goes live")


def _get(connection: apsw.Connection, version: int) -> Adapter:
    row = first_row(connection, f"{_ADAPTER} WHERE version = ?", (version,))
    if row is None:
        raise Refused(404, "adapter_not_found", f"no adapter has the version {version}")
    return _to_adapter(row)


def _require_candidate(connection: apsw.Connection, version: int) -> None:
    state = _get(connection, version).state
    if state != "candidate":
        raise Refused(409, "not_a_candidate", f"adapter {version} is {state} already")


def _to_adapter(row: Row) -> Adapter:
    return Adapter(
        version=row[0],
        parent_version=row[1],
        origin=row[2],
        state=row[3],
        created_at=row[4],
        sha256=row[5],
        folder=row[6],
        reason=row[7],
        kept=bool(row[8]),
        metrics=blobs.from_json(row[9]),
        verdict=row[10],
        verdict_reason=row[11],
        collected_at=row[12],
        deep=None if row[13] is None else DeepVerdict(**blobs.from_json(row[13])),
    )


def _to_live(row: Row) -> Live:
    return Live(
        version=row[0], since=row[1], why=row[2], caller=row[3], pinned=bool(row[4]), reason=row[5], verdict=row[6]
    )
