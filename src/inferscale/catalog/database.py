"""The catalog in an SQLite file: opening, permissions, transactions, errors in plain words.

One connection behind a lock serves all threads of a process; WAL mode and immediate write
transactions serve several processes on one folder. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inferscale.catalog import drivers
from inferscale.catalog.conditions import prepare
from inferscale.catalog.migrations import VECTORS_NEXT, check_version, migrate
from inferscale.catalog.sql import ChangeToken
from inferscale.encryption import EncryptionKey
from inferscale.errors import CatalogError, InvalidInput

BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for another process that writes."""

_ADVICE = {
    "SQLITE_BUSY": f"Another process has been writing for more than {BUSY_TIMEOUT_S:.0f} s; try again.",
    "SQLITE_LOCKED": "Another process is using it; try again.",
    "SQLITE_FULL": "The disk is full; nothing of this call was stored. Free some space and try again.",
    "SQLITE_IOERR": "The disk reports an error; nothing of this call was stored.",
    "SQLITE_READONLY": "It is read-only; make it writable or choose another data folder.",
    "SQLITE_CANTOPEN": "It cannot be opened; check the folder's permissions or choose another data folder.",
    "SQLITE_CORRUPT": "The file is damaged; restore it from a backup.",
}


class SqliteDatabase:
    """`Database` in one SQLite file.

    key: of an encrypted one; what is made is encrypted with it.
    """

    def __init__(self, path: Path, key: EncryptionKey | None = None) -> None:
        self.path = path
        self._key = key
        self._handle: _Handle | None = None
        self._opening = threading.Lock()
        self._closed = False

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def option(self) -> str:
        return f"--data-dir {self.path.parent}"

    @contextmanager
    def read(self) -> Iterator[SqliteConnection]:
        """One consistent snapshot for everything that is read inside."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[SqliteConnection]:
        """One write transaction: all of it is stored, or on any exception nothing.

        Raises CatalogError where the file cannot be written.
        """
        handle = self._open_handle()
        with handle.lock:
            with self._transaction("BEGIN IMMEDIATE") as connection:
                yield connection
            handle.own_writes += 1

    def change_token(self) -> ChangeToken:
        handle = self._open_handle()
        with handle.lock, explained(self.path, self._key):
            data_version = int(handle.connection.execute("PRAGMA data_version").fetchone()[0])
            return ChangeToken(data_version, handle.own_writes)

    def empty_log(self) -> None:
        """Take what was written over into the main file and empty the log, where nobody else is reading.

        The log (`-wal`) holds pages as they were before a deletion until it is written over some day.
        Where another process reads just now nobody waits: the next transaction tries again.
        """
        handle = self._handle
        if handle is None:
            return
        with handle.lock, suppress(*drivers.ERRORS):
            handle.empties_log = True
            try:
                handle.connection.execute("PRAGMA busy_timeout = 0")
                busy, *_ = handle.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                handle.empties_log = bool(busy)
            finally:
                handle.connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")

    def close(self) -> None:
        """Close the file; any later use is a CatalogError. May be called twice."""
        with self._opening:
            self._closed = True
            handle, self._handle = self._handle, None
        if handle is not None and handle.process == os.getpid():
            with handle.lock:
                handle.connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[SqliteConnection]:
        handle = self._open_handle()
        with handle.lock, explained(self.path, self._key):
            connection = handle.connection
            connection.execute(begin)
            try:
                yield handle.ours
                connection.execute("COMMIT")
            except BaseException:
                # SQLite ends the transaction by itself after some errors (disk full, input/output).
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            if handle.empties_log:
                self.empty_log()

    def _open_handle(self) -> _Handle:
        handle = self._handle
        if handle is None:
            with self._opening:
                if self._closed:
                    raise CatalogError(f"{self.path} was closed; open a new Memory on its folder.")
                if self._handle is None:
                    with explained(self.path, self._key):
                        self._handle = _Handle(_open(self.path, self._key))
                handle = self._handle
        if handle.process != os.getpid():
            # SQLite's file locks do not survive a fork: both processes would believe to hold them.
            raise CatalogError(
                f"{self.path} was opened before this process was forked. Open Memory after the fork, "
                "or start processes with the 'spawn' method."
            )
        return handle


@contextmanager
def explained(path: Path, key: EncryptionKey | None = None) -> Iterator[None]:
    """SQLite's errors as ours, with advice; those of texts that cannot be stored as InvalidInput.

    key: that the file is read with.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text {error.object[max(0, error.start - 20) : error.end + 20]!r} holds half of a "
            "surrogate pair, which is not valid Unicode and cannot be stored. Repair or remove it."
        ) from error
    except drivers.ERRORS as error:
        # An extended name such as SQLITE_IOERR_WRITE begins with the primary one.
        name = "_".join(str(getattr(error, "sqlite_errorname", "")).split("_")[:2])
        if name == "SQLITE_NOTADB":
            raise drivers.unreadable(path, key) from error
        raise CatalogError(f"{path}: {error}. {_ADVICE.get(name, '')}".rstrip()) from error


class SqliteConnection:
    """`Connection` over one of SQLite."""

    filters_in_sql = True

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        prepare(connection)

    def insert(self, sql: str, values: Sequence[Any], column: str) -> int:
        number = self.execute(sql, values).lastrowid
        assert number is not None
        return number

    def insert_all(self, sql: str, rows: Sequence[Sequence[Any]], column: str) -> list[int]:
        return [self.insert(sql, values, column) for values in rows]

    def tables(self) -> dict[str, set[str]]:
        found = self.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' "
            "ORDER BY name"
        ).fetchall()
        return {name: {row[1] for row in self.execute(f'PRAGMA table_info("{name}")')} for (name,) in found}

    def rename_tables(self, *renamed: tuple[str, str]) -> None:
        # Names of tables in other tables' triggers stay as they are written.
        self.execute("PRAGMA legacy_alter_table = ON")
        try:
            for old, new in renamed:
                self.execute(f"ALTER TABLE {old} RENAME TO {new}")
        finally:
            self.execute("PRAGMA legacy_alter_table = OFF")

    def make_vectors_next(self) -> None:
        self.execute(VECTORS_NEXT)


class _Handle:
    """A connection, the lock that guards it, and the process that may use it.

    empties_log: after the next transaction; at first since a process that was killed may have deleted.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.ours = SqliteConnection(connection)
        self.lock = threading.RLock()
        self.process = os.getpid()
        self.own_writes = 0
        self.empties_log = True


def _open(path: Path, key: EncryptionKey | None) -> sqlite3.Connection:
    _make_private(path)
    connection = drivers.connect(
        path, key, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        check_version(connection, str(path))
        _use_wal(connection, path)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        # Freed pages are overwritten, so that deleted text does not stay in the file.
        connection.execute("PRAGMA secure_delete = ON")
        migrate(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Switch to WAL. SQLite does not wait for its lock here, so two first openers need a retry."""
    deadline_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            break
        except drivers.OPERATIONAL_ERRORS as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise CatalogError(
            f"{path} cannot be used in WAL mode (SQLite answers {mode!r}): the file system lacks shared "
            "memory, as network drives do. Choose a data folder on a local disk."
        )


def _make_private(path: Path) -> None:
    """Make folder and file for the owner only (0700, 0600).

    SQLite gives `-wal` and `-shm` the mode of the main file. A folder that already holds other
    things keeps its mode: it may be shared on purpose, and the files in it are private anyway.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(folder.iterdir()):
            with suppress(PermissionError):
                folder.chmod(0o700)
        if not path.exists():
            _create_private(path)
        for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            with suppress(FileNotFoundError):
                if stat.S_IMODE(file.stat().st_mode) != 0o600:
                    file.chmod(0o600)
    except OSError as error:
        raise CatalogError(
            f"the data folder {folder} cannot be used: {error.strerror}. "
            "Make it writable for you, or choose another with data_dir or $INFERSCALE_HOME."
        ) from error


def _create_private(path: Path) -> None:
    """Create an empty file with mode 0600, unless another process or thread just did.

    The file gets its name only after it is closed: closing any descriptor of a database drops all
    POSIX locks that this process holds on it (https://sqlite.org/howtocorrupt.html, 2.2).
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        Path(draft).unlink()
