"""Runtime folders that servers left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from inferscale.runtime.folder_lock import FolderLock, remove_stale_runtime_dirs
from inferscale.runtime.secret import load_secret, open_runtime_dir


def left(parent: Path, name: str, age_s: float) -> Path:
    folder = open_runtime_dir(str(parent / name))
    load_secret(folder)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_only_old_folders_without_an_engine_go(tmp_path: Path) -> None:
    parent = tmp_path / "inferscale"
    old, young, running = left(parent, "old", 7200), left(parent, "young", 60), left(parent, "running", 7200)
    lock = FolderLock(running)
    os.utime(running, (time.time() - 7200,) * 2)
    other = left(parent, "other", 0)
    (other / "notes.txt").write_text("not ours")
    os.utime(other, (time.time() - 7200,) * 2)
    assert remove_stale_runtime_dirs(parent) == 1
    assert not old.exists()
    assert (young / "secret").exists()
    assert (running / "secret").exists()
    assert (other / "notes.txt").exists()
    lock.release()


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    assert remove_stale_runtime_dirs(tmp_path / "none") == 0
