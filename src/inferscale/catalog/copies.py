"""Copies of a whole catalog file: made while others read and write, and checked before they are used."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from inferscale.catalog import drivers
from inferscale.catalog.database import BUSY_TIMEOUT_S, explained
from inferscale.catalog.migrations import check_version
from inferscale.encryption import EncryptionKey
from inferscale.errors import CatalogError


def copy_catalog(source: Path, target: Path, key: EncryptionKey | None = None) -> int:
    """Copy a catalog, as it is at one moment, to a file that does not exist yet; how many facts it holds.

    One step of SQLite's backup API: a snapshot, so that writers go on beside it and do not make it begin
    anew. The copy is for its owner only, and on the disk when this returns. key: of an encrypted catalog, and
    of its copy. Raises CatalogError.
    """
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with explained(source, key):
        read, written = drivers.connect(source, key, timeout=BUSY_TIMEOUT_S), drivers.connect(target, key)
        try:
            check_version(read, str(source))
            read.backup(written, pages=-1)
            # A file that needs no log beside it: it travels alone.
            written.execute("PRAGMA journal_mode = DELETE")
            num_facts = int(written.execute("SELECT count(*) FROM facts").fetchone()[0])
        finally:
            written.close()
            read.close()
    return num_facts


def check_copy(path: Path, key: EncryptionKey | None = None) -> int:
    """How many facts a whole and undamaged catalog holds. Raises CatalogError, NewerCatalog, WrongKey."""
    with explained(path, key):
        connection = drivers.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", key, uri=True)
        try:
            check_version(connection, str(path))
            damage = _damage(connection)
            if damage is not None:
                raise CatalogError(f"{path} is damaged ({damage}); take another backup.")
            return int(connection.execute("SELECT count(*) FROM facts").fetchone()[0])
        finally:
            connection.close()


def check_key(path: Path, key: EncryptionKey | None) -> None:
    """Raises WrongKey where a catalog cannot be read with this key; CatalogError where not at all."""
    with explained(path, key):
        connection = drivers.connect(path, key, timeout=BUSY_TIMEOUT_S)
        try:
            check_version(connection, str(path))
        finally:
            connection.close()


def _damage(connection: sqlite3.Connection) -> str | None:
    """What SQLite finds wrong with the file, table by table; None where it is whole."""
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
    ).fetchall()
    for (table,) in tables:
        for (line,) in connection.execute(f'PRAGMA integrity_check("{table}")'):
            # SQLite 3.40 says so, by mistake, of every row of a table without rowids.
            if line != "ok" and not line.startswith("NULL value in "):
                return str(line)
    stray = connection.execute("PRAGMA foreign_key_check").fetchone()
    return None if stray is None else f"a row of {stray[0]} belongs to nothing"


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
