"""KV on disk of other formats: of another model, dtype, version of InferScale or encryption key.

Each has a folder of its own beside those of others, and an engine reads one of them. A deletion names keys
of that one only, so in the others KV of deleted facts would stay, and plain KV where encryption was switched
on: what no running engine uses goes.
"""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import suppress
from pathlib import Path

from inferscale.errors import EngineError
from inferscale.runtime.folder_lock import LOCK_NAME, FolderLock

logger = logging.getLogger(__name__)

_ASIDE = ".unused-"


def remove_unused(used: Path) -> int:
    """Remove the files of formats beside `used` that no engine has locked; of how many formats. What else is
    there stays, and so does what cannot be removed, with a warning."""
    removed = 0
    _remove_aside(used.parent)  # what a process that was killed left
    for folder in used.parent.iterdir():
        try:
            if folder != used and _is_format(folder):
                removed += _put_aside(folder)
        except EngineError:  # of an engine that runs
            continue
        except OSError as error:
            logger.warning("KV on disk of another format cannot be removed: %s", error)
    _remove_aside(used.parent)
    if removed:
        logger.warning(
            "KV on disk of %s was removed: it is of another model, pool_dtype, number of workers, "
            "encryption key or version of the files. Its facts are encoded anew when they are needed.",
            "another format" if removed == 1 else f"{removed} other formats",
        )
    return removed


def _put_aside(folder: Path) -> bool:
    """Take the files out of use; whether there were any. The folder stays: an engine may just begin to use
    it."""
    lock = FolderLock(folder)
    try:
        ranks = [part for part in folder.iterdir() if part.name != LOCK_NAME]
        for rank in ranks:
            rank.rename(folder.parent / f"{_ASIDE}{folder.name}-{rank.name}")
    finally:
        lock.release()
    return bool(ranks)


def _remove_aside(parent: Path) -> None:
    for folder in parent.glob(f"{_ASIDE}*"):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:  # another engine that starts removes it too
            continue
        except OSError as error:
            logger.warning("KV on disk of another format cannot be removed: %s", error)


def _is_format(folder: Path) -> bool:
    """Whether it is one of ours: the folder that holds them is of the operator's choice."""
    if not re.fullmatch("[0-9a-f]{32}", folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    with suppress(OSError):
        return all(re.fullmatch(rf"rank-\d+|{re.escape(LOCK_NAME)}", part.name) for part in folder.iterdir())
    return False
