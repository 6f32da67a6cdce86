"""Where a shared store's objects lie: a folder that all servers mount, or what fsspec reaches, such as S3.

An object is put as a whole: nobody reads half of one, except where a remote file system has neither rename
nor single uploads, and then its checksum tells. Knows paths and bytes only.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from inferscale.errors import InvalidConfig

_DRAFT = ".draft-"
_DRAFT_LASTS_S = 86400.0
"""What is older was left by a process that was killed."""


class Found(NamedTuple):
    """An object in a folder, by its name alone."""

    name: str
    size_bytes: int


class Place(Protocol):
    """Paths are relative, with slashes. Every method may raise OSError. Safe from several threads."""

    def put(self, path: str, header: bytes, content: memoryview) -> None:
        """Write an object, or replace it."""
        ...

    def get(self, path: str) -> bytearray | None: ...

    def size_of(self, path: str) -> int | None: ...

    def remove(self, path: str) -> None:
        """Nothing where it is not there."""
        ...

    def names(self, folder: str) -> Iterator[Found]: ...


def open_place(location: str) -> Place:
    """Of a folder's path, or a URL of fsspec. Raises InvalidConfig where it cannot be used."""
    try:
        path = location.removeprefix("file://")
        place = FsspecPlace(location) if "://" in path else FolderPlace(Path(path))
        place.put("probe", b"", memoryview(b"ok"))
    except ImportError as error:
        raise InvalidConfig(
            f"cold_location {shown(location)} needs a package that is not installed: {error}. For s3:// run: "
            "pip install 'inferscale[s3]'"
        ) from error
    except Exception as error:
        raise InvalidConfig(
            f"cold_location {shown(location)} cannot be used: {error}. Name a folder or bucket that can be "
            "written to."
        ) from error
    return place


def shown(location: str) -> str:
    """For people: without a password."""
    if "://" not in location:
        return location
    parts = urlsplit(location)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class FolderPlace:
    """A local or mounted folder. Objects are written aside and renamed, for their owner only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_drafts = 0
        self._lock = threading.Lock()
        # Of nobody else: a process may have several places in one folder, and containers the same number.
        self._writer = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def put(self, path: str, header: bytes, content: memoryview) -> None:
        target = self._root / path
        self._make(target.parent)
        with self._lock:
            self._num_drafts += 1
            draft = target.parent / f"{_DRAFT}{self._writer}-{self._num_drafts}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                file.write(content)
            draft.replace(target)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise

    def _make(self, folder: Path) -> None:
        """With those above it, for their owner only."""
        if not folder.is_dir():
            if folder != self._root:
                self._make(folder.parent)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, path: str) -> bytearray | None:
        try:
            with (self._root / path).open("rb") as file:
                content = bytearray(os.fstat(file.fileno()).st_size)
                num_read = file.readinto(content)
        except FileNotFoundError:
            return None
        return content[:num_read]

    def size_of(self, path: str) -> int | None:
        try:
            return (self._root / path).stat().st_size
        except FileNotFoundError:
            return None

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def names(self, folder: str) -> Iterator[Found]:
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                if not entry.name.startswith(_DRAFT):
                    yield Found(entry.name, entry.stat(follow_symlinks=False).st_size)
                elif time.time() - entry.stat(follow_symlinks=False).st_mtime > _DRAFT_LASTS_S:
                    self.remove(f"{folder}/{entry.name}")


class FsspecPlace:
    """Any location of fsspec. Its options come from the environment (FSSPEC_S3_ENDPOINT_URL, AWS_…)."""

    def __init__(self, url: str) -> None:
        import fsspec

        # What is listed or looked up is not remembered: other servers write there too.
        self._files: Any
        self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._root = str(root).rstrip("/")

    def put(self, path: str, header: bytes, content: memoryview) -> None:
        self._files.pipe_file(self._path(path), b"".join((header, content)))

    def get(self, path: str) -> bytearray | None:
        try:
            return bytearray(self._files.cat_file(self._path(path)))
        except FileNotFoundError:
            return None

    def size_of(self, path: str) -> int | None:
        try:
            return int(self._files.info(self._path(path))["size"])
        except FileNotFoundError:
            return None

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(path))

    def names(self, folder: str) -> Iterator[Found]:
        with suppress(FileNotFoundError):
            for found in self._files.ls(self._path(folder), detail=True, refresh=True):
                if found["type"] == "file":
                    yield Found(str(found["name"]).rpartition("/")[2], int(found["size"]))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"
