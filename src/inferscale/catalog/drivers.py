"""Which SQLite opens a catalog: Python's own, or for an encrypted one SQLCipher (package `sqlcipher3`).

SQLCipher encrypts every page (AES-256-CBC, a random nonce a write) and authenticates it (HMAC-SHA512), in the
file, its log and its journals alike; temporary tables stay in memory. The key is given as it is, so that
opening costs no key derivation. Knows nothing of tables.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from inferscale.encryption import INSTALL, WAYS, EncryptionKey
from inferscale.errors import InvalidConfig, WrongKey

try:
    import sqlcipher3.dbapi2

    _sqlcipher: ModuleType | None = sqlcipher3.dbapi2
except ImportError:
    _sqlcipher = None

Errors = tuple[type[sqlite3.Error], ...]

ERRORS: Errors = (sqlite3.Error, *(() if _sqlcipher is None else (_sqlcipher.Error,)))
"""Of both: they have no common class."""
OPERATIONAL_ERRORS: Errors = (
    sqlite3.OperationalError,
    *(() if _sqlcipher is None else (_sqlcipher.OperationalError,)),
)


def connect(path: Path | str, key: EncryptionKey | None, **options: Any) -> sqlite3.Connection:
    """A connection of `sqlite3` or one just like it. options: of `sqlite3.connect`.

    Whether the key is right shows at the first read (SQLITE_NOTADB). Raises InvalidConfig where SQLCipher is
    not installed.
    """
    if key is None:
        plain: sqlite3.Connection = sqlite3.connect(path, **options)
        return plain
    return connect_sqlcipher(path, key, **options)


def connect_sqlcipher(path: Path | str, key: EncryptionKey | None, **options: Any) -> sqlite3.Connection:
    """SQLCipher's in any case: without a key it reads a file that is not encrypted, and can attach one that
    is."""
    if _sqlcipher is None:
        raise InvalidConfig(f"an encryption key is given, but SQLCipher is not installed. {INSTALL}")
    connection = cast(sqlite3.Connection, _sqlcipher.connect(path, **options))
    connection.execute("PRAGMA cipher_log_level = NONE")  # it writes to standard error of its own accord
    connection.execute("PRAGMA cipher_default_compatibility = 4")  # whatever later releases prefer
    if key is not None:
        connection.execute(f'PRAGMA key = "{key_text(key)}"')
    return connection


def key_text(key: EncryptionKey) -> str:
    """As SQLCipher takes a key that is no passphrase."""
    return f"x'{key.derived('catalog').hex()}'"


def unreadable(path: Path, key: EncryptionKey | None) -> WrongKey:
    """What to say where SQLite finds no database (SQLITE_NOTADB)."""
    if key is None:
        return WrongKey(
            f"{path} is encrypted, or not an SQLite database. Give its encryption key ({WAYS}), or choose "
            "another data folder."
        )
    if _is_plain(path):
        return WrongKey(
            f"{path} is not encrypted, and an encryption key is given. Leave the key out, or encrypt the "
            "data folder with `inferscale rekey`."
        )
    return WrongKey(
        f"{path} cannot be read with this encryption key. Give the one that it was encrypted with; if this "
        "is it, the file is damaged: restore it from a backup."
    )


def _is_plain(path: Path) -> bool:
    """Asked of SQLite: opening and closing the file here would drop the locks this process has on it."""
    try:
        connection = connect_sqlcipher(path, None)
        try:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        finally:
            connection.close()
    except ERRORS:
        return False
    return True
