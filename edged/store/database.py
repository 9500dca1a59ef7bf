"""The SQLite file: one thread that writes, a few that read, and commits that many writers share.

`write` queues a function; the writer thread takes all that wait, runs each in a savepoint of its own inside ONE
transaction, commits once (WAL, synchronous=FULL: on disk, also after a power cut), and only then tells the callers, in
the order of the queue. So a function that fails hurts no other, and 64 callers cost one fsync. If the commit itself
fails (disk full), every write of the group fails with StoreError and none of it is kept; the database stays usable.

Knows nothing of tables. Used from one event loop: the one that ran `open`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import apsw

from edged.store import schema
from edged.store.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The first release without the WAL-reset bug (https://sqlite.org/wal.html#walresetbug), which can corrupt a file that
# two connections write or checkpoint at once.
SQLITE_MIN = (3, 51, 3)

# Another program that holds the write lock (a backup, a shell) is waited for this long.
BUSY_TIMEOUT_MS = 5000

# Writes that may wait; further callers wait in `write`, which slows the clients instead of filling the memory.
WAITING_MAX = 4096

# Writes in one transaction: bounds the time that the first of them waits for the last.
GROUP_MAX = 512

WAL_SIZE_LIMIT_BYTES = 16 * 2**20


@dataclasses.dataclass(slots=True, eq=False)
class _Write(Generic[T]):
    """A queued write and, once it ran, its outcome."""

    run: Callable[[apsw.Connection], T]
    on_commit: Callable[[T], None] | None
    scrubs: bool
    done: asyncio.Future[T]
    result: T | None = None
    error: BaseException | None = None


class Database:
    """An open database. Build it with `open`."""

    def __init__(self, path: Path, writer: apsw.Connection, readers: list[apsw.Connection]) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._room = asyncio.Semaphore(WAITING_MAX)
        self._waiting: deque[_Write[Any]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._log_holds_removed = False
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._idle_readers: queue.SimpleQueue[apsw.Connection] = queue.SimpleQueue()
        for reader in readers:
            self._idle_readers.put(reader)
        self._n_readers = len(readers)
        self._read_threads = ThreadPoolExecutor(len(readers), thread_name_prefix="store-reader")
        self._thread.start()

    @classmethod
    async def open(cls, path: Path, *, readers: int = 2) -> Self:
        """Open or create the file, check it if it was not closed cleanly, and bring its schema up to date.

        Raises StoreError: SQLite too old, file unreadable, damaged, of a newer edged or of another program.
        """
        writer, reader_connections = await asyncio.to_thread(_open_connections, path, readers)
        return cls(path, writer, reader_connections)

    async def write(
        self,
        run: Callable[[apsw.Connection], T],
        on_commit: Callable[[T], None] | None = None,
        *,
        scrubs: bool = False,
    ) -> T:
        """Run `run` in the writer thread and return its result once it is on disk.

        Args:
            run: makes its changes with the connection it gets; an exception undoes them and is raised here. It runs
                inside a transaction that others share, so it must neither begin nor end one.
            on_commit: called with the result on the event loop, in the order of the commits, also if the caller of
                `write` is gone by then: the place to keep snapshots in memory up to date. An exception in it is logged.
            scrubs: the write-ahead log, which holds older copies of what `run` removed, is emptied before this returns.
                While another program reads the file that cannot be: then it is logged, and tried after each commit.
        Raises:
            StoreError: the database failed, or is closed; nothing of this write was kept.
        Cancellation: the write happens all the same.
        """
        await self._room.acquire()
        job = _Write(run, on_commit, scrubs, self._loop.create_future())
        with self._wake:
            if self._is_closing:
                self._room.release()
                raise StoreError(f"{self._path.name} is closed")
            self._waiting.append(job)
            self._wake.notify()
        done: asyncio.Future[T] = job.done
        return await done

    async def read(self, run: Callable[[apsw.Connection], T]) -> T:
        """Run `run` in a reader thread on one consistent snapshot, which holds every write acknowledged before.

        Raises StoreError if the database failed or is closed.
        """
        if self._is_closing:
            raise StoreError(f"{self._path.name} is closed")
        return await self._loop.run_in_executor(self._read_threads, self._read, run)

    async def close(self) -> None:
        """Finish every queued write and read, then close the file. Idempotent."""
        if self._is_closing:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.join()
        self._read_threads.shutdown()
        for _ in range(self._n_readers):
            self._idle_readers.get().close()
        with contextlib.suppress(apsw.Error):  # statistics for the query planner: nice to have
            self._writer.pragma("optimize")
        self._writer.close()  # the last connection: moves the log into the file and removes it

    def _read(self, run: Callable[[apsw.Connection], T]) -> T:
        connection = self._idle_readers.get()
        try:
            with connection:
                result = run(connection)
        except apsw.Error as error:
            raise self._translated("read", error) from error
        finally:
            self._idle_readers.put(connection)
        return result

    # ---------------------------------------------------------------------------------------------- writer thread

    def _write_loop(self) -> None:
        while group := self._take():
            try:
                self._commit(group)
            except apsw.Error as error:
                self._roll_back()
                for job in group:
                    job.error = self._translated("written", error)
            except Exception as error:  # thread edge: whatever it was, no caller may be left waiting
                logger.exception("the store's writer failed on a group of %d writes", len(group))
                self._roll_back()
                for job in group:
                    job.error = StoreError(f"{self._path.name} could not be written: {error!r}")
            self._scrub(group)
            self._loop.call_soon_threadsafe(self._settle, group)

    def _take(self) -> list[_Write[Any]]:
        """All writes that wait, up to GROUP_MAX; none once the database is closing and empty."""
        with self._wake:
            while not self._waiting and not self._is_closing:
                self._wake.wait()
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP_MAX))]

    def _commit(self, group: list[_Write[Any]]) -> None:
        execute = self._writer.execute
        execute("BEGIN IMMEDIATE")
        for job in group:
            execute("SAVEPOINT job")
            try:
                job.result = job.run(self._writer)
            except Exception as error:
                if not self._writer.in_transaction:  # SQLite gave the whole group up (some I/O errors do that)
                    raise
                job.error = self._translated("written", error) if isinstance(error, apsw.Error) else error
                execute("ROLLBACK TO job")
            execute("RELEASE job")
        execute("COMMIT")

    def _roll_back(self) -> None:
        with contextlib.suppress(apsw.Error):
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")

    def _scrub(self, group: list[_Write[Any]]) -> None:
        """Empty the log if it holds what this group, or one before it, has removed."""
        is_new = any(job.scrubs and job.error is None for job in group)
        if not (is_new or self._log_holds_removed):
            return
        try:
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS if is_new else 0)
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._log_holds_removed = False
        except apsw.Error as error:
            if is_new:
                logger.warning("what was removed is still in %s-wal: %s", self._path.name, _explain(error))
            self._log_holds_removed = True
        finally:
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)

    def _translated(self, verb: str, error: apsw.Error) -> StoreError:
        translated = StoreError(f"{self._path.name} could not be {verb}: {_explain(error)}")
        translated.__cause__ = error
        return translated

    # --------------------------------------------------------------------------------------------------- event loop

    def _settle(self, group: list[_Write[Any]]) -> None:
        for job in group:
            self._room.release()
            if job.error is None and job.on_commit is not None:
                try:
                    job.on_commit(job.result)
                except (
                    Exception
                ):  # the row is on disk: neither this caller nor the others of the group may wait for ever
                    logger.exception("a snapshot of the store could not follow a commit")
            if job.done.cancelled():
                continue
            if job.error is None:
                job.done.set_result(job.result)
            else:
                job.done.set_exception(job.error)


def require_sqlite(version: str) -> None:
    """Raise StoreError if SQLite `version` ("3.54.1") may corrupt a database that is used by several connections."""
    if tuple(int(part) for part in version.split(".")) < SQLITE_MIN:
        needed = ".".join(map(str, SQLITE_MIN))
        raise StoreError(
            f"SQLite {version} has the WAL-reset bug, which can corrupt data; install an apsw with {needed}"
        )


def _open_connections(path: Path, readers: int) -> tuple[apsw.Connection, list[apsw.Connection]]:
    require_sqlite(apsw.sqlite_lib_version())
    was_left_open = path.with_name(path.name + "-wal").exists()
    opened: list[apsw.Connection] = []
    try:
        _create_private(path)
        writer = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        opened.append(writer)
        _set_up(writer)
        schema.check(writer)
        if writer.pragma("journal_mode", "wal") != "wal":
            raise StoreError(f"{path}: its file system cannot hold a write-ahead log; use a local disk")
        if was_left_open:
            _check_integrity(writer, path)
        schema.migrate(writer)
        for _ in range(readers):
            reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
            opened.append(reader)
            _set_up(reader)
            reader.pragma("query_only", True)
    except (apsw.Error, OSError, StoreError) as error:
        for connection in reversed(opened):
            connection.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} could not be opened: {_explain(error)}") from error
    return writer, opened[1:]


def _create_private(path: Path) -> None:
    """The file holds what people wrote: only its owner may read it (SQLite gives the log the same mode)."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _set_up(connection: apsw.Connection) -> None:
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.pragma("synchronous", "full")
    connection.pragma("foreign_keys", True)
    connection.pragma("secure_delete", True)  # what a person had removed is overwritten; of the log see _scrub
    connection.pragma("trusted_schema", False)
    connection.pragma("temp_store", "memory")
    connection.pragma("journal_size_limit", WAL_SIZE_LIMIT_BYTES)


def _check_integrity(connection: apsw.Connection, path: Path) -> None:
    logger.info("%s was not closed cleanly; checking it", path.name)
    findings = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
    if findings != ["ok"]:
        raise StoreError(f"{path} is damaged ({'; '.join(findings)}); restore a backup, or move the file away")


def _explain(error: Exception) -> str:
    match error:
        case apsw.FullError():
            return "the disk is full; free some space"
        case apsw.BusyError():
            return "another program holds it locked; end that program"
        case apsw.CorruptError() | apsw.NotADBError():
            return f"it is damaged or no database ({error}); restore a backup, or move the file away"
        case apsw.IOError():
            return f"the disk failed or is full ({error})"
        case _:
            return str(error)
