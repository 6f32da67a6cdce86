"""Segments on disk: one file each, found by its key, whole or not at all.

    FOLDER/FORMAT/rank-R/ab/abcdef…      FORMAT names model, sizes and version: nothing else fits

    magic and version │ key │ tokens │ bytes of a token │ position of the first token │ checksum │ rows

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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAGIC = b"IFSKV"
_HEADER = struct.Struct("<5sB32sIIi16s")
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


def format_name(model: str, token_bytes: int, num_ranks: int) -> str:
    """Name of the folder for segments that fit together. model: its fingerprint, dtype included."""
    text = f"{FORMAT_VERSION}\0{model}\0{token_bytes}\0{num_ranks}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class DiskStore:
    """Files of one rank. token_bytes: of a row. Safe from several threads for different keys."""

    def __init__(self, folder: Path, format: str, rank: int, token_bytes: int) -> None:
        self.folder = folder / format / f"rank-{rank}"
        self.token_bytes = token_bytes
        self._num_drafts = 0
        self._lock = threading.Lock()

    def of_rank(self, rank: int) -> DiskStore:
        """The files of another rank, in the same folder."""
        return DiskStore(self.folder.parent.parent, self.folder.parent.name, rank, self.token_bytes)

    def open(self) -> None:
        """Make the folder. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in (self.folder, self.folder.parent, self.folder.parent.parent):
            with suppress(PermissionError):
                part.chmod(0o700)

    def path_of(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def size_of(self, num_tokens: int) -> int:
        return _HEADER.size + num_tokens * self.token_bytes

    def write(self, key: str, rows: memoryview, origin: int) -> None:
        """Raises OSError; then nothing of it is there."""
        num_tokens = len(rows) // self.token_bytes
        path = self.path_of(key)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        with self._lock:
            self._num_drafts += 1
            draft = path.parent / f"{_DRAFT}{os.getpid()}-{self._num_drafts}"
        header = self._header(key, num_tokens, origin, rows)
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(rows)
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
                header = file.read(_HEADER.size)
                rows = bytearray(num_tokens * self.token_bytes)
                is_whole = file.readinto(rows) == len(rows) and not file.read(1)
            with suppress(OSError):
                os.utime(path)  # the next start knows what was used last
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("A segment on disk cannot be read: %s", error)
            return None
        origin = _HEADER.unpack(header)[5] if len(header) == _HEADER.size else 0
        if not is_whole or header != self._header(key, num_tokens, origin, memoryview(rows)):
            logger.warning("A segment on disk is damaged and removed; its fact is encoded anew")
            self.remove(key)
            return None
        return Stored(rows, origin)

    def remove(self, key: str) -> None:
        with suppress(OSError):
            self.path_of(key).unlink()

    def scan(self) -> Iterator[Listed]:
        """What is there, without reading it; drafts of a process that was killed are removed."""
        if not self.folder.is_dir():
            return
        for part in self.folder.iterdir():
            if not part.is_dir():
                continue
            for entry in os.scandir(part):
                size = entry.stat().st_size - _HEADER.size
                num_tokens, rest = divmod(size, self.token_bytes)
                if entry.name.startswith(_DRAFT) or rest or num_tokens <= 0:
                    with suppress(OSError):
                        Path(entry.path).unlink()
                    continue
                yield Listed(entry.name, num_tokens, entry.stat().st_size, entry.stat().st_mtime)

    def _header(self, key: str, num_tokens: int, origin: int, rows: memoryview) -> bytes:
        checksum = hashlib.blake2b(rows, digest_size=16)
        checksum.update(f"{key}\0{num_tokens}\0{origin}".encode())
        name = key.encode()[:32].ljust(32, b"\0")
        return _HEADER.pack(
            _MAGIC, FORMAT_VERSION, name, num_tokens, self.token_bytes, origin, checksum.digest()
        )
