"""Backup of a data folder while it is used, and restoring one into an empty folder.

A backup is a folder, or a tar file, with the catalog and what is needed to check it:

    catalog.sqlite3     texts, vectors, histories, and which passes encode which facts
    backup.json         format, time, number of facts, SHA-256 of the catalog

The catalog of an encrypted folder is encrypted in a backup as well, with the same key; `backup.json` is not.
KV is not in it: it is made again from the texts. What is deleted later is still in a backup. A target gets
its name when it is whole; a backup that is killed leaves a folder `.NAME.….partial`, which can be removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from inferscale.catalog import CATALOG_FILE
from inferscale.catalog.copies import check_copy, copy_catalog, sync
from inferscale.encryption import WAYS, EncryptionKey
from inferscale.errors import CatalogError, InvalidInput, WrongKey

FORMAT = 1
MANIFEST = "backup.json"
_CHUNK_BYTES = 2**20
_MAX_MANIFEST_BYTES = 2**16


class Copied(NamedTuple):
    """What a backup holds, or what was restored."""

    path: Path
    num_facts: int
    size_bytes: int


def backup(data_dir: Path, target: Path, key: EncryptionKey | None = None) -> Copied:
    """Write a backup to `target`, which must not exist: a tar file where it ends in .tar, else a folder.

    May be called while servers use the folder; the copy is of one moment. key: of an encrypted folder, and of
    the backup. Raises InvalidInput for a folder without memory or a target that exists, CatalogError where it
    cannot be read or written.
    """
    source = data_dir / CATALOG_FILE
    if not source.is_file():
        raise InvalidInput(f"{data_dir} holds no memory ({CATALOG_FILE}); give the data folder of one.")
    if target.name.endswith((".tar.gz", ".tgz", ".tar.xz", ".tar.zst")):
        raise InvalidInput(f"the target is {target}; allowed are a name that ends in .tar, and a folder.")
    if target.exists():
        raise InvalidInput(f"{target} exists; give a name that does not, or remove it first.")
    with _written(f"the backup {target} cannot be written"), _draft_folder(target) as draft:
        num_facts = copy_catalog(source, draft / CATALOG_FILE, key)
        about = {
            "format": FORMAT,
            "created_at": time.time(),
            "facts": num_facts,
            "encrypted": key is not None,
            "sha256": _sha256(draft / CATALOG_FILE),
        }
        _write_private(draft / MANIFEST, json.dumps(about, indent=1).encode())
        size_bytes = (draft / CATALOG_FILE).stat().st_size
        if target.suffix == ".tar":
            packed = _pack(draft)
            os.link(packed, target)  # unlike a rename it replaces nothing
        else:
            sync(draft / CATALOG_FILE)
            draft.rename(target)
        sync(target.parent)
    return Copied(target, num_facts, size_bytes)


def restore(source: Path, data_dir: Path, key: EncryptionKey | None = None) -> Copied:
    """Put a backup into `data_dir`, which must be empty or not exist.

    The catalog is checked first, and stands in the folder only when it is whole. key: of an encrypted backup,
    and of the folder. Raises InvalidInput for a source that is no backup or a folder that is not empty,
    CatalogError for a damaged one, NewerCatalog, WrongKey.
    """
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise InvalidInput(f"{data_dir} is not empty; restore into a new data folder.")
    if not source.exists():
        raise InvalidInput(f"{source} does not exist; give what `inferscale backup` wrote.")
    with _written(f"{data_dir} cannot be written"):
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        data_dir.chmod(0o700)
        descriptor, name = tempfile.mkstemp(dir=data_dir, prefix=f".{CATALOG_FILE}-")
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                about = _unpack(source, file)
            if _sha256(draft) != about.get("sha256"):
                raise CatalogError(f"{source} is damaged: its checksum is another. Take another backup.")
            _check_key(source, bool(about.get("encrypted")), key)
            num_facts = check_copy(draft, key)
            sync(draft)
            os.link(draft, data_dir / CATALOG_FILE)
            sync(data_dir)
        finally:
            draft.unlink()
    return Copied(data_dir, num_facts, (data_dir / CATALOG_FILE).stat().st_size)


def _check_key(source: Path, is_encrypted: bool, key: EncryptionKey | None) -> None:
    if is_encrypted and key is None:
        raise WrongKey(f"{source} is encrypted. Give its encryption key ({WAYS}).")
    if key is not None and not is_encrypted:
        raise WrongKey(
            f"{source} is not encrypted, and an encryption key is given. Leave the key out; "
            "`inferscale rekey` encrypts the data folder afterwards."
        )


@contextmanager
def _draft_folder(target: Path) -> Iterator[Path]:
    """A private folder beside the target, removed at the end unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _pack(folder: Path) -> Path:
    """A tar file in the folder with the two files of a backup."""
    packed = folder / "packed"
    with (
        _private_file(packed) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in (MANIFEST, CATALOG_FILE):
            info = tar.gettarinfo(str(folder / name), arcname=name)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            with (folder / name).open("rb") as content:
                tar.addfile(info, content)
    sync(packed)
    return packed


def _unpack(source: Path, catalog: IO[bytes]) -> dict[str, Any]:
    """Copy the catalog of a backup and return its manifest. Nothing else of a tar file is read."""
    try:
        if source.is_dir():
            about = (source / MANIFEST).read_bytes()
            with (source / CATALOG_FILE).open("rb") as content:
                shutil.copyfileobj(content, catalog, _CHUNK_BYTES)
        else:
            with tarfile.open(source, mode="r:") as tar:
                about = _member(tar, MANIFEST).read(_MAX_MANIFEST_BYTES)
                shutil.copyfileobj(_member(tar, CATALOG_FILE), catalog, _CHUNK_BYTES)
        read = json.loads(about)
    except (FileNotFoundError, KeyError, tarfile.TarError, ValueError) as error:
        raise InvalidInput(
            f"{source} is no backup ({error}); give what `inferscale backup` wrote."
        ) from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise InvalidInput(
            f"{source} has the format {read.get('format') if isinstance(read, dict) else None}; this "
            f"InferScale reads {FORMAT}. Use the InferScale that wrote it."
        )
    return read


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    content = tar.extractfile(name)
    if content is None:
        raise KeyError(f"{name} is no file")
    return content


def _private_file(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def _write_private(path: Path, content: bytes) -> None:
    with _private_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _written(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CatalogError(f"{what}: {error.strerror}. Free some space, or choose another place.") from error
