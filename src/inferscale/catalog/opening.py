"""Which database holds the catalog of a data folder: a file in it, or PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from inferscale.catalog.database import SqliteDatabase
from inferscale.catalog.sql import Database
from inferscale.encryption import EncryptionKey
from inferscale.errors import InvalidConfig, InvalidInput

CATALOG_FILE = "catalog.sqlite3"


def open_database(data_dir: str | Path, key: EncryptionKey | None = None, url: str | None = None) -> Database:
    """url: of a PostgreSQL database. Without one the catalog is a file of the folder.

    Nothing is connected yet. Raises InvalidConfig for a URL that cannot be used, or beside a key.
    """
    if url is None:
        return SqliteDatabase(Path(data_dir) / CATALOG_FILE, key)
    if key is not None:
        raise InvalidConfig(
            "an encryption key is given, and a catalog in PostgreSQL, which InferScale does not encrypt. "
            "Leave the key out and encrypt the server's disks, or leave the catalog's URL out."
        )
    try:
        from inferscale.catalog.postgres.database import PostgresDatabase
    except ImportError as error:
        raise InvalidConfig(
            "a catalog in PostgreSQL needs psycopg, which is not installed. Run: "
            "pip install 'inferscale[postgres]'"
        ) from error
    return PostgresDatabase(url)


def open_existing(data_dir: Path, key: EncryptionKey | None = None, url: str | None = None) -> Database:
    """The same; raises InvalidInput for a folder without a catalog."""
    if url is None and not (data_dir / CATALOG_FILE).is_file():
        raise InvalidInput(f"{data_dir} holds no memory ({CATALOG_FILE}); give the data folder of one.")
    return open_database(data_dir, key, url)
