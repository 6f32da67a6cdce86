"""A catalog under another key, or with one for the first time: an encrypted copy that takes its place.

    alone ──▶ copy, page by page under the new key ──▶ checked ──▶ renamed over the old one ──▶ old one zeroed

Killed before the rename, the old catalog is as it was; after it, the new one is whole. Whoever waits for the
old file meanwhile finds zeros, no catalog that it could go on writing to.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inferscale.catalog import drivers
from inferscale.catalog.copies import check_copy, sync
from inferscale.catalog.database import explained
from inferscale.catalog.migrations import check_version
from inferscale.encryption import EncryptionKey
from inferscale.errors import CatalogError

_BUSY = "SQLITE_BUSY"
_CHUNK = bytes(2**20)


def rekey_catalog(
    path: Path, key: EncryptionKey | None, new_key: EncryptionKey | None, before_swap: Callable[[], object]
) -> int:
    """Put the catalog under `new_key`; how many facts it holds. None: not encrypted.

    Nobody else may have the catalog open, this process neither; before_swap: called while nobody can, before
    anything is changed. Raises CatalogError where somebody has, WrongKey, NewerCatalog.
    """
    draft = path.with_name(f".{path.name}.rekey")
    with explained(path, key), _alone(path, key) as connection:
        draft.unlink(missing_ok=True)  # of a process that was killed
        old = os.open(path, os.O_RDWR)  # closed behind the connection: closing it drops SQLite's locks
        try:
            try:
                num_facts = _copy(connection, path, draft, new_key)
                before_swap()
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            sync(path.parent)
            _zero(old)
            connection.close()
        finally:
            os.close(old)
    return num_facts


@contextmanager
def _alone(path: Path, key: EncryptionKey | None) -> Iterator[sqlite3.Connection]:
    """A connection that no other has beside it: SQLite leaves WAL mode only where there is none."""
    connection = drivers.connect_sqlcipher(path, key, timeout=0, isolation_level=None)
    try:
        try:
            check_version(connection, str(path))
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")  # the lock stays
        except drivers.OPERATIONAL_ERRORS as error:
            if str(getattr(error, "sqlite_errorname", "")).startswith(_BUSY):
                raise CatalogError(
                    f"{path} is in use by another process. Stop all servers and commands that use the data "
                    "folder, and try again."
                ) from error
            raise
        yield connection
    finally:
        connection.close()


def _copy(connection: sqlite3.Connection, path: Path, draft: Path, new_key: EncryptionKey | None) -> int:
    """A whole copy on the disk, for its owner only."""
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    text = "" if new_key is None else drivers.key_text(new_key)
    connection.execute("ATTACH DATABASE ? AS copy KEY ?", (str(draft), text))
    connection.execute("PRAGMA copy.journal_mode = OFF")
    connection.execute("PRAGMA copy.synchronous = OFF")
    connection.execute("SELECT sqlcipher_export('copy')").fetchone()
    for name in ("application_id", "user_version"):
        value = int(connection.execute(f"PRAGMA main.{name}").fetchone()[0])
        connection.execute(f"PRAGMA copy.{name} = {value}")
    connection.execute("DETACH DATABASE copy")
    sync(draft)
    num_facts = int(connection.execute("SELECT count(*) FROM facts").fetchone()[0])
    if check_copy(draft, new_key) != num_facts:
        raise CatalogError(f"{path} could not be copied whole; nothing was changed. Is it damaged?")
    return num_facts


def _zero(descriptor: int) -> None:
    """Overwrite a file that has no name any more."""
    left = os.fstat(descriptor).st_size
    while left > 0:
        left -= os.write(descriptor, _CHUNK[:left])
    os.fsync(descriptor)
