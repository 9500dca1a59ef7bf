"""Group commit, isolation of writes from each other, and failures of the disk."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from edged.store import database as database_module
from edged.store.database import Database, require_sqlite
from edged.store.errors import StoreError

ROOT = Path(__file__).parents[3]


def run(path: Path, scenario: Callable[[Database], Awaitable[Any]]) -> Any:
    async def opened() -> Any:
        database = await Database.open(path)
        try:
            return await scenario(database)
        finally:
            await database.close()

    return asyncio.run(opened())


def note(text: str) -> Callable[[apsw.Connection], None]:
    def insert(connection: apsw.Connection) -> None:
        connection.execute("INSERT INTO audit (at, caller, action, detail) VALUES (0, '', ?, '')", (text,))

    return insert


def notes(connection: apsw.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT action FROM audit ORDER BY seq")]


class Gate:
    """A write that holds the writer thread until it is opened, so that what is queued meanwhile forms one group."""

    def __init__(self) -> None:
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, connection: apsw.Connection) -> None:
        self._is_reached.set()
        assert self._is_open.wait(60)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._is_reached.wait, 60)

    def open(self) -> None:
        self._is_open.set()


async def queued_together(database: Database, writes: Sequence[Awaitable[Any]]) -> list[Any]:
    """The outcomes of `writes`, which form one group."""
    gate = Gate()
    held = asyncio.create_task(database.write(gate))
    await gate.reached()
    tasks = [asyncio.ensure_future(write) for write in writes]
    for _ in range(3):
        await asyncio.sleep(0)
    gate.open()
    await held
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_writes_that_wait_share_one_commit(tmp_path: Path) -> None:
    commits: list[int] = []

    def count_commits(connection: apsw.Connection) -> None:
        def committing() -> bool:
            commits.append(1)
            return False

        connection.set_commit_hook(committing)

    async def scenario(database: Database) -> None:
        await database.write(count_commits)
        before = len(commits)
        await queued_together(database, [database.write(note(str(i))) for i in range(64)])
        assert len(commits) - before == 1 + 1  # the gate's own, and one for all 64
        assert await database.read(notes) == [str(i) for i in range(64)]

    run(tmp_path / "edged.db", scenario)


def test_a_failing_write_is_undone_whole_and_hurts_no_other(tmp_path: Path) -> None:
    def half(connection: apsw.Connection) -> None:
        note("half")(connection)
        raise ZeroDivisionError("stop")

    def constraint(connection: apsw.Connection) -> None:
        note("dropped too")(connection)
        connection.execute("INSERT INTO counters VALUES ('version', 1)")

    async def scenario(database: Database) -> None:
        writes = [database.write(write) for write in (note("a"), half, constraint, note("b"))]
        first, second, third, fourth = await queued_together(database, writes)
        assert (first, fourth) == (None, None)
        assert isinstance(second, ZeroDivisionError)
        assert isinstance(third, StoreError)
        assert "UNIQUE constraint failed" in str(third)
        assert await database.read(notes) == ["a", "b"]

    run(tmp_path / "edged.db", scenario)


def test_on_commit_runs_in_the_order_of_the_writes_also_when_the_caller_is_gone(tmp_path: Path) -> None:
    seen: list[int] = []

    async def scenario(database: Database) -> None:
        gate = Gate()
        held = asyncio.create_task(database.write(gate))
        await gate.reached()
        tasks = [asyncio.create_task(database.write(lambda _, i=i: i, seen.append)) for i in range(5)]  # type: ignore[misc]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[2].cancel()
        gate.open()
        await held
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[2], asyncio.CancelledError)
        assert [outcome for outcome in outcomes if isinstance(outcome, int)] == [0, 1, 3, 4]

    run(tmp_path / "edged.db", scenario)
    assert seen == [0, 1, 2, 3, 4]


def test_an_on_commit_that_fails_is_logged_and_keeps_no_caller_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(database: Database) -> None:
        outcomes = await queued_together(
            database, [database.write(lambda _: 0, lambda zero: 1 // zero), database.write(lambda _: 1)]
        )
        assert outcomes == [0, 1]

    run(tmp_path / "edged.db", scenario)
    assert "ZeroDivisionError" in caplog.text


def test_more_writes_than_may_wait_all_get_done(tmp_path: Path) -> None:
    n = database_module.WAITING_MAX + 100

    async def scenario(database: Database) -> None:
        await queued_together(database, [database.write(note(str(i))) for i in range(n)])
        assert len(await database.read(notes)) == n

    run(tmp_path / "edged.db", scenario)


def test_a_read_cannot_write(tmp_path: Path) -> None:
    async def scenario(database: Database) -> None:
        with pytest.raises(StoreError, match="could not be read"):
            await database.read(note("x"))
        assert await database.read(notes) == []

    run(tmp_path / "edged.db", scenario)


def test_a_read_sees_one_snapshot_while_writes_go_on(tmp_path: Path) -> None:
    async def scenario(database: Database) -> None:
        first_look, second_look = threading.Event(), threading.Event()

        def twice(connection: apsw.Connection) -> tuple[list[str], list[str]]:
            before = notes(connection)
            first_look.set()
            assert second_look.wait(60)
            return before, notes(connection)

        reading = asyncio.create_task(database.read(twice))
        await asyncio.to_thread(first_look.wait, 60)
        await database.write(note("meanwhile"))
        second_look.set()
        assert await reading == ([], [])
        assert await database.read(notes) == ["meanwhile"]

    run(tmp_path / "edged.db", scenario)


def test_close_finishes_what_is_queued_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = await Database.open(tmp_path / "edged.db")
        tasks = [asyncio.create_task(database.write(note(str(i)))) for i in range(50)]
        await asyncio.sleep(0)
        await database.close()
        assert all(task.done() for task in tasks)
        with pytest.raises(StoreError, match="closed"):
            await database.write(note("late"))
        with pytest.raises(StoreError, match="closed"):
            await database.read(notes)
        await database.close()

    asyncio.run(scenario())
    assert [entry.name for entry in tmp_path.iterdir()] == ["edged.db"]
    assert len(run(tmp_path / "edged.db", lambda database: database.read(notes))) == 50


def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    async def scenario(database: Database) -> None:
        await database.write(note("private"))
        for name in ("edged.db", "edged.db-wal"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600

    run(tmp_path / "edged.db", scenario)


def test_a_full_database_fails_the_write_and_stays_usable(tmp_path: Path) -> None:
    def limit(pages: int) -> Callable[[apsw.Connection], object]:
        return lambda connection: connection.pragma("max_page_count", pages)

    async def scenario(database: Database) -> None:
        await database.write(note("before"))
        n_pages = await database.read(lambda connection: connection.pragma("page_count"))
        await database.write(limit(n_pages))
        with pytest.raises(StoreError, match=r"edged\.db could not be written: the disk is full; free some space"):
            await database.write(note("x" * 100_000))
        await database.write(limit(n_pages + 1000))
        await database.write(note("after"))
        assert await database.read(notes) == ["before", "after"]

    run(tmp_path / "edged.db", scenario)


# Runs in a child: a limit on the size of files makes the log's write fail at COMMIT, as a full disk does.
_FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from edged.store.database import Database
from edged.store.errors import StoreError

def note(text):
    return lambda c: c.execute("INSERT INTO audit (at, caller, action, detail) VALUES (0, '', ?, '')", (text,)) and None

async def main():
    database = await Database.open(Path(sys.argv[1]))
    await database.write(note("before"))
    size = Path(sys.argv[1] + "-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
    group = [database.write(note("x" * 4000 + str(i))) for i in range(50)]
    for outcome in await asyncio.gather(*group, return_exceptions=True):
        assert isinstance(outcome, StoreError), outcome
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await database.write(note("after"))
    rows = await database.read(lambda c: [row[0] for row in c.execute("SELECT action FROM audit")])
    assert rows == ["before", "after"], [row[:10] for row in rows]
    await database.close()
    print("usable")

asyncio.run(main())
"""


def test_a_commit_that_fails_fails_its_whole_group_and_keeps_what_was_there(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path / "edged.db")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.stdout == "usable\n", child.stderr


def test_an_sqlite_with_the_wal_reset_bug_is_refused() -> None:
    with pytest.raises(StoreError, match=r"SQLite 3\.51\.2 has the WAL-reset bug"):
        require_sqlite("3.51.2")
    require_sqlite("3.51.3")
    require_sqlite("3.54.1")


def leave_open(path: Path) -> None:
    """A database that a killed process left behind, with its log."""
    code = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from edged.store.database import Database\n"
        "async def main():\n"
        "    database = await Database.open(Path(sys.argv[1]))\n"
        "    insert = \"INSERT INTO audit (at, caller, action, detail) VALUES (0, '', hex(randomblob(9000)), '')\"\n"
        "    for _ in range(20):\n"
        "        await database.write(lambda c: c.execute(insert) and None)\n"
        "    await database.write(lambda c: None)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=300)
    assert child.returncode == -signal.SIGKILL


def test_a_file_that_was_not_closed_is_checked_and_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "edged.db"
    leave_open(path)
    caplog.set_level("INFO")
    assert len(run(path, lambda database: database.read(notes))) == 20
    assert "was not closed cleanly" in caplog.text
    caplog.clear()
    run(path, lambda database: database.read(notes))
    assert caplog.text == ""


def test_a_damaged_file_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "edged.db"
    run(path, lambda database: asyncio.gather(*[database.write(note("x" * 9000)) for _ in range(50)]))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(3 * 4096))
    path.with_name("edged.db-wal").touch()
    with pytest.raises(StoreError, match="damaged"):
        run(path, lambda database: database.read(notes))


@pytest.mark.parametrize("content", [b"no database at all" * 300, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "edged.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"edged\.db could not be opened: .* no database .* move the file away"):
        run(path, lambda database: database.read(notes))
    assert path.read_bytes() == content


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"could not be opened: .*No such file"):
        run(tmp_path / "none" / "edged.db", lambda database: database.read(notes))


def test_opening_and_closing_leaks_no_file(tmp_path: Path) -> None:
    run(tmp_path / "edged.db", lambda database: database.read(notes))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(tmp_path / "edged.db", lambda database: database.read(notes))
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_reader_from_outside_keeps_in_the_log_goes_at_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_MS", 20)
    log = tmp_path / "edged.db-wal"

    async def scenario(database: Database) -> None:
        await database.write(note("a secret"))
        backup = apsw.Connection(str(tmp_path / "edged.db"))
        backup.execute("BEGIN")
        assert notes(backup) == ["a secret"]
        await database.write(lambda writer: writer.execute("DELETE FROM audit") and None, scrubs=True)
        assert b"a secret" in log.read_bytes()
        assert "still in edged.db-wal: another program holds it locked" in caplog.text
        backup.close()
        await database.write(note("x"))
        assert log.read_bytes() == b""
        assert await database.read(notes) == ["x"]

    run(tmp_path / "edged.db", scenario)
