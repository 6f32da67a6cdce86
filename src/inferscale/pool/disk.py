"""Segments on disk: one file each, found by its key, whole or not at all.

    FOLDER/FORMAT/rank-R/ab/abcdef…      FORMAT names model, sizes and version: nothing else fits

A file is written under another name and renamed, so a process that is killed leaves no half segment. What
does not agree with its checksum, its name or the sizes (`pool/segment_file`) is removed and counts as
missing. The folder and all files are for their owner only. Knows neither torch nor what the bytes mean.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inferscale.pool.sealing import Sealing
from inferscale.pool.segment_file import SegmentFile, Stored, format_name

__all__ = ["DiskStore", "Listed", "Stored", "format_name"]

logger = logging.getLogger(__name__)

_DRAFT = ".draft-"


class Listed(NamedTuple):
    """A file that was found, by its name and size alone."""

    key: str
    num_tokens: int
    size_bytes: int
    used_s: float


class DiskStore:
    """Files of one rank. token_bytes: of a row. sealing: encrypts them, where they are to be.

    Safe from several threads for different keys.
    """

    def __init__(
        self, folder: Path, format: str, rank: int, token_bytes: int, sealing: Sealing | None = None
    ) -> None:
        self.folder = folder / format / f"rank-{rank}"
        self.token_bytes = token_bytes
        self._file = SegmentFile(token_bytes, sealing)
        self._num_drafts = 0
        self._lock = threading.Lock()

    def of_rank(self, rank: int) -> DiskStore:
        """The files of another rank, in the same folder."""
        folder, format = self.folder.parent.parent, self.folder.parent.name
        return DiskStore(folder, format, rank, self.token_bytes, self._file.sealing)

    def open(self) -> None:
        """Make the folder, or note on it that it is used. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(self.folder.parent)
        for part in (self.folder, self.folder.parent, self.folder.parent.parent):
            with suppress(PermissionError):
                part.chmod(0o700)

    def path_of(self, key: str) -> Path:
        name = self._file.name_of(key)
        return self.folder / name[:2] / name

    def size_of(self, num_tokens: int) -> int:
        return self._file.size_of(num_tokens)

    def write(self, key: str, rows: memoryview, origin: int) -> None:
        """Raises OSError; then nothing of it is there."""
        path = self.path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock:
            self._num_drafts += 1
            draft = path.parent / f"{_DRAFT}{os.getpid()}-{self._num_drafts}"
        try:
            header, content = self._file.packed(key, origin, rows)
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
                header = file.read(self._file.header_bytes)
                rows = bytearray(num_tokens * self.token_bytes)
                is_whole = file.readinto(rows) == len(rows) and not file.read(1)
            with suppress(OSError):
                os.utime(path)  # the next start knows what was used last
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("A segment on disk cannot be read: %s", error)
            return None
        stored = self._file.unpacked(key, header, rows) if is_whole else None
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
            num_tokens = self._file.tokens_in(about.st_size)
            is_named = entry.name[:2] == part and entry.name.isascii() and not entry.name.startswith(_DRAFT)
            if is_named and entry.is_file(follow_symlinks=False) and num_tokens is not None:
                key = self._file.key_of(entry.name)
                if key is not None:
                    return Listed(key, num_tokens, about.st_size, about.st_mtime)
            Path(entry.path).unlink()
        return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("KV on disk cannot be listed: %s", error)
        return []
