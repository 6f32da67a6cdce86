"""Segments on disk: one file each, found by its key, whole or not at all.

    FOLDER/FORMAT/rank-R/ab/abcdef…      FORMAT names model, sizes and version: nothing else fits

    magic and version │ key │ tokens │ bytes of a token │ position of the first token │ checksum │ rows

With an encryption key (`pool/sealing`) the version is 2, the key, which is the file's name, and the rows are
encrypted, the checksum is the tag of AES-GCM, and a nonce stands behind it. The header is authenticated too.

A file is written under another name and renamed, so a process that is killed leaves no half segment. What
does not agree with its checksum, its name or the sizes is removed and counts as missing. The folder and
all files are for their owner only. Knows bytes only, neither torch nor what they mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inferscale.pool.sealing import NONCE_BYTES, TAG_BYTES, Sealing

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SEALED_VERSION = 2
_MAGIC = b"IFSKV"
_ABOUT = struct.Struct("<5sB32sIIi")
_CHECKSUM_BYTES = TAG_BYTES
_CHECKED_BYTES = _ABOUT.size + _CHECKSUM_BYTES
_DRAFT = ".draft-"


class Stored(NamedTuple):
    """A segment as it was saved. rows: bytes of all tokens; origin: position of its first token."""

    rows: bytearray
    origin: int


class Listed(NamedTuple):
    """A file that was found, by its name and size alone."""

    key: str
    num_tokens: int
    size_bytes: int
    used_s: float


def format_name(model: str, token_bytes: int, num_ranks: int, sealing: Sealing | None = None) -> str:
    """Name of the folder for segments that fit together. model: its fingerprint, dtype included."""
    version = FORMAT_VERSION if sealing is None else f"{SEALED_VERSION} {sealing.id}"
    text = f"{version}\0{model}\0{token_bytes}\0{num_ranks}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class DiskStore:
    """Files of one rank. token_bytes: of a row. sealing: encrypts them, where they are to be.

    Safe from several threads for different keys.
    """

    def __init__(
        self, folder: Path, format: str, rank: int, token_bytes: int, sealing: Sealing | None = None
    ) -> None:
        self.folder = folder / format / f"rank-{rank}"
        self.token_bytes = token_bytes
        self._sealing = sealing
        self._header_bytes = _CHECKED_BYTES + (0 if sealing is None else NONCE_BYTES)
        self._num_drafts = 0
        self._lock = threading.Lock()

    def of_rank(self, rank: int) -> DiskStore:
        """The files of another rank, in the same folder."""
        folder, format = self.folder.parent.parent, self.folder.parent.name
        return DiskStore(folder, format, rank, self.token_bytes, self._sealing)

    def open(self) -> None:
        """Make the folder, or note on it that it is used. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(self.folder.parent)
        for part in (self.folder, self.folder.parent, self.folder.parent.parent):
            with suppress(PermissionError):
                part.chmod(0o700)

    def path_of(self, key: str) -> Path:
        name = key if self._sealing is None else self._sealing.name_of(key)
        return self.folder / name[:2] / name

    def size_of(self, num_tokens: int) -> int:
        return self._header_bytes + num_tokens * self.token_bytes

    def write(self, key: str, rows: memoryview, origin: int) -> None:
        """Raises OSError; then nothing of it is there."""
        path = self.path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock:
            self._num_drafts += 1
            draft = path.parent / f"{_DRAFT}{os.getpid()}-{self._num_drafts}"
        try:
            header, content = self._packed(key, path.name, origin, rows)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(content)
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise

    def read(self, key: str, num_tokens: int) -> Stored | None:
        """The segment; None, and the file is removed, where it is not whole or not what it should be."""
        path = self.path_of(key)
        try:
            with path.open("rb") as file:
                header = file.read(self._header_bytes)
                rows = bytearray(num_tokens * self.token_bytes)
                is_whole = file.readinto(rows) == len(rows) and not file.read(1)
            with suppress(OSError):
                os.utime(path)  # the next start knows what was used last
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("A segment on disk cannot be read: %s", error)
            return None
        stored = self._unpacked(key, path.name, header, rows) if is_whole else None
        if stored is None:
            logger.warning("A segment on disk is damaged and removed; its fact is encoded anew")
            self.remove(key)
        return stored

    def remove(self, key: str) -> None:
        try:
            self.path_of(key).unlink(missing_ok=True)
        except OSError as error:  # what was forgotten is still there: its operator has to know
            logger.warning("A segment on disk cannot be removed: %s", error)

    def scan(self) -> Iterator[Listed]:
        """What is there, without reading it; drafts of a process that was killed, and what else is no
        segment, are removed. A folder that cannot be read is passed over."""
        for part in _entries(self.folder):
            if part.is_dir(follow_symlinks=False):
                for entry in _entries(Path(part.path)):
                    found = self._listed(entry, part.name)
                    if found is not None:
                        yield found

    def _listed(self, entry: os.DirEntry[str], part: str) -> Listed | None:
        """The segment of a file; None, and it is removed, where it is none."""
        with suppress(OSError):
            about = entry.stat(follow_symlinks=False)
            num_tokens, rest = divmod(about.st_size - self._header_bytes, self.token_bytes)
            is_named = entry.name[:2] == part and entry.name.isascii() and not entry.name.startswith(_DRAFT)
            if is_named and entry.is_file(follow_symlinks=False) and num_tokens > 0 and not rest:
                key = entry.name if self._sealing is None else self._sealing.key_of(entry.name)
                if key is not None:
                    return Listed(key, num_tokens, about.st_size, about.st_mtime)
            Path(entry.path).unlink()
        return None

    def _packed(self, key: str, name: str, origin: int, rows: memoryview) -> tuple[bytes, memoryview]:
        """Header and content of a file. name: that it stands under."""
        num_tokens = len(rows) // self.token_bytes
        about = self._about(name, num_tokens, origin)
        if self._sealing is None:
            return about + _checksum(key, num_tokens, origin, rows), rows
        nonce, sealed = self._sealing.seal(key, rows, about)
        content = memoryview(sealed)
        return about + sealed[-TAG_BYTES:] + nonce, content[:-TAG_BYTES]

    def _unpacked(self, key: str, name: str, header: bytes, content: bytearray) -> Stored | None:
        """What a file holds; None where it is not what was packed under this key and name."""
        if len(header) < self._header_bytes:
            return None
        num_tokens = len(content) // self.token_bytes
        origin = int(_ABOUT.unpack_from(header)[5])
        about, checksum = header[: _ABOUT.size], header[_ABOUT.size : _CHECKED_BYTES]
        if about != self._about(name, num_tokens, origin):
            return None
        if self._sealing is None:
            is_right = checksum == _checksum(key, num_tokens, origin, memoryview(content))
            return Stored(content, origin) if is_right else None
        rows = self._sealing.open(key, header[_CHECKED_BYTES:], content + checksum, about)
        return None if rows is None else Stored(rows, origin)

    def _about(self, name: str, num_tokens: int, origin: int) -> bytes:
        version = FORMAT_VERSION if self._sealing is None else SEALED_VERSION
        stored_name = name.encode()[:32].ljust(32, b"\0")
        return _ABOUT.pack(_MAGIC, version, stored_name, num_tokens, self.token_bytes, origin)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("KV on disk cannot be listed: %s", error)
        return []


def _checksum(key: str, num_tokens: int, origin: int, rows: memoryview) -> bytes:
    """Against damage, not forgery: CRC-32 of the rows, since a load waits for it."""
    text = f"{zlib.crc32(rows)}\0{key}\0{num_tokens}\0{origin}"
    return hashlib.blake2b(text.encode(), digest_size=_CHECKSUM_BYTES).digest()
