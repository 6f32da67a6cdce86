"""Encryption of a data folder that exists: turned on, given another key, turned off."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from inferscale.catalog import CATALOG_FILE
from inferscale.catalog.rekey import rekey_catalog
from inferscale.config import KV_FOLDER
from inferscale.encryption import EncryptionKey
from inferscale.errors import CatalogError, EngineError, InvalidInput
from inferscale.runtime.folder_lock import FolderLock


class Rekeyed(NamedTuple):
    path: Path
    num_facts: int
    is_encrypted: bool


def rekey(data_dir: Path, key: EncryptionKey | None, new_key: EncryptionKey | None) -> Rekeyed:
    """Put a folder under `new_key`; None: it is not encrypted. KV on disk is removed: it is made again.

    Needs room for a second catalog, and that nobody uses the folder, this process neither. Killed, it leaves
    the folder with the old key or with the new one. Raises InvalidInput for a folder without memory,
    WrongKey, CatalogError where it is in use.
    """
    path = data_dir / CATALOG_FILE
    if not path.is_file():
        raise InvalidInput(f"{data_dir} holds no memory ({CATALOG_FILE}); give the data folder of one.")
    if key is None and new_key is None:
        raise InvalidInput("neither a key nor a new key was given; there is nothing to change.")
    try:
        num_facts = rekey_catalog(path, key, new_key, lambda: _remove_kv(data_dir / KV_FOLDER))
    except OSError as error:
        raise CatalogError(f"{data_dir} cannot be written: {error.strerror}. Free some space.") from error
    return Rekeyed(data_dir, num_facts, new_key is not None)


def _remove_kv(folder: Path) -> None:
    """Unless an engine uses it."""
    if not folder.is_dir():
        return
    with ExitStack() as locks:
        for part in filter(Path.is_dir, folder.iterdir()):
            try:
                locks.callback(FolderLock(part).release)
            except EngineError as error:
                raise CatalogError(f"an engine uses the KV in {folder}. Stop it, and try again.") from error
        shutil.rmtree(folder)
