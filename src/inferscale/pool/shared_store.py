"""Segments in a place that several servers share: one object each, under its key.

    LOCATION/FORMAT/rank-R/ab/abcdef…     as on disk (`pool/segment_file`); FORMAT names model, sizes, version
    LOCATION/FORMAT/gone/ab/abcdef…       a mark: this key was deleted, and when

A key names its content, so servers that save the same segment write the same, and nobody has to lock
anything. A deletion wins over a save that runs beside it on another server: the mark is put before the
object is removed, and whoever saves looks for the mark once its object is there, and takes it back. So the
mark is seen, or the removal sees the object. It holds for an hour; in that time nothing is saved under the
key, which is then encoded where it is needed. What does not agree with its checksum or name is removed and
counts as missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from inferscale.pool.places import Place
from inferscale.pool.segment_file import SegmentFile, Stored

logger = logging.getLogger(__name__)

MARK_HOLDS_S = 3600.0
PARTS = tuple(f"{number:02x}" for number in range(256))
"""First letters of names: objects lie in so many folders."""
_GONE = "gone"
_OWNER = "catalog"


class SharedStore:
    """Objects of one rank. Safe from several threads and on several machines. Methods raise OSError."""

    def __init__(self, place: Place, format: str, rank: int, file: SegmentFile) -> None:
        self._place = place
        self._format = format
        self._rank = rank
        self._file = file

    def size_of(self, num_tokens: int) -> int:
        return self._file.size_of(num_tokens)

    def write(self, key: str, rows: memoryview, origin: int) -> bool:
        """Whether the segment is there now: it was saved, or had been by another. Not where it is deleted."""
        path = self._path(key)
        if self._is_gone(key):
            return False
        if self._place.size_of(path) != self.size_of(len(rows) // self._file.token_bytes):
            header, content = self._file.packed(key, origin, rows)
            self._place.put(path, header, content)
        if self._is_gone(key):
            self._place.remove(path)
            return False
        return True

    def read(self, key: str, num_tokens: int) -> Stored | None:
        """The segment; None, and the object is removed, where it is not whole or not what it should be."""
        content = self._place.get(self._path(key))
        if content is None:
            return None
        header = bytes(content[: self._file.header_bytes])
        is_whole = len(content) == self.size_of(num_tokens)
        stored = self._file.unpacked(key, header, content[self._file.header_bytes :]) if is_whole else None
        if stored is None:
            logger.warning("A shared segment is damaged and removed; its fact is encoded anew")
            self._place.remove(self._path(key))
        return stored

    def num_tokens(self, key: str) -> int | None:
        """Of the segment with this key, by the size of its object; None where there is none."""
        size = self._place.size_of(self._path(key))
        return None if size is None else self._file.tokens_in(size)

    def remove(self, key: str, *, for_good: bool) -> None:
        """for_good: its fact is deleted, and what another server saves meanwhile is to go as well."""
        if for_good:
            self._place.put(self._mark(key), b"", memoryview(str(time.time()).encode()))
        self._place.remove(self._path(key))

    def keys(self, part: str) -> Iterator[str]:
        """Of the objects in one of the `PARTS`. Marks that hold no more are removed on the way."""
        for found in list(self._place.names(f"{self._format}/{_GONE}/{part}")):
            path = f"{self._format}/{_GONE}/{part}/{found.name}"
            if not self._holds(path):
                self._place.remove(path)
        for found in self._place.names(f"{self._format}/rank-{self._rank}/{part}"):
            key = self._file.key_of(found.name)
            if key is not None:
                yield key

    def belongs_to(self, catalog: str) -> bool:
        """Whether what lies there is of this catalog: the first one to say so has it."""
        path = f"{self._format}/{_OWNER}"
        owner = self._place.get(path)
        if owner is None:
            self._place.put(path, b"", memoryview(catalog.encode()))
            owner = self._place.get(path)
        return owner is not None and bytes(owner) == catalog.encode()

    def _is_gone(self, key: str) -> bool:
        return self._holds(self._mark(key))

    def _holds(self, path: str) -> bool:
        mark = self._place.get(path)
        if mark is None:
            return False
        try:
            return time.time() - float(mark) < MARK_HOLDS_S
        except ValueError:
            return False

    def _path(self, key: str) -> str:
        name = self._file.name_of(key)
        return f"{self._format}/rank-{self._rank}/{name[:2]}/{name}"

    def _mark(self, key: str) -> str:
        name = self._file.name_of(key)
        return f"{self._format}/{_GONE}/{name[:2]}/{name}"
