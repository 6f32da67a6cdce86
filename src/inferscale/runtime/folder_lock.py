"""Which engine a runtime folder belongs to: a lock on a file in it, held by the scheduler side.

The lock ends with the process that holds it, so a folder left by a crash can be used again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from inferscale.errors import EngineError
from inferscale.runtime.refusal import REFUSAL_NAME
from inferscale.runtime.residency import SOCKET_NAME
from inferscale.runtime.secret import SECRET_NAME

logger = logging.getLogger(__name__)

LOCK_NAME = "engine.lock"


class FolderLock:
    """Held from its making until `release`; EngineError where another engine holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._file: int | None = _lock(self._path)

    def release(self) -> None:
        """Remove the lock file and let others have the folder. May be called twice."""
        if self._file is None:
            return
        file, self._file = self._file, None
        self._path.unlink(missing_ok=True)
        os.close(file)

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            os.close(file)  # an engine that was dropped without `shutdown`


def remove_runtime_dir(folder: Path) -> None:
    """Remove what an engine and its front end left in `folder`, and the folder if nothing else is in it.

    Does nothing but remove a refusal where a running engine holds the folder: then it is not ours any more.
    """
    (folder / REFUSAL_NAME).unlink(missing_ok=True)
    if not folder.exists():
        return
    try:
        lock = FolderLock(folder)
    except EngineError:
        logger.info("The runtime folder %s belongs to a running engine and stays", folder)
        return
    for name in (SECRET_NAME, SOCKET_NAME):
        (folder / name).unlink(missing_ok=True)
    lock.release()
    with suppress(OSError):  # other files are in it, or another engine has just opened it
        folder.rmdir()


def remove_stale_runtime_dirs(parent: Path, older_than_s: float = 3600.0) -> int:
    """Remove the folders in `parent` that servers left which did not stop by themselves; returns how many.

    Younger ones stay: somebody may be about to start in one, and has not locked it yet.
    """
    removed = 0
    for folder in parent.iterdir() if parent.is_dir() else ():
        try:
            info = folder.lstat()
            if not folder.is_dir() or folder.is_symlink() or info.st_uid != os.getuid():
                continue
            if time.time() - info.st_mtime < older_than_s:
                continue
            remove_runtime_dir(folder)
        except OSError as error:
            logger.info("The runtime folder %s stays: %s", folder, error)
            continue
        removed += not folder.exists()
    return removed


def _lock(path: Path) -> int:
    """Descriptor of the lock file, locked; it is made anew where its holder removed it meanwhile."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise EngineError(
                f"The runtime folder {path.parent} is in use by another engine (process {holder}). Set "
                "runtime_dir to a folder of its own for each engine, or leave it out, or stop that engine."
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                os.ftruncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
                return file
        os.close(file)
