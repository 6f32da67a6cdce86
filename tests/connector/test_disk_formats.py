"""KV on disk of formats that nobody uses goes; what an engine uses, and what is not ours, stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inferscale.connector.disk_formats import remove_unused
from inferscale.pool.disk import DiskStore
from inferscale.runtime.folder_lock import FolderLock

KEY = "ab" * 16
USED, OTHER, OLD, RUNNING = (f"{number:032x}" for number in range(4))


def store(folder: Path, format: str) -> DiskStore:
    made = DiskStore(folder, format, 0, 4)
    made.open()
    made.write(KEY, memoryview(bytes(8)), 0)
    return made


def test_what_no_engine_uses_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A deletion names keys of one format: nothing else would remove what another has of a deleted fact."""
    used, other, old, running = (store(tmp_path, name) for name in (USED, OTHER, OLD, RUNNING))
    lock = FolderLock(running.folder.parent)
    left = tmp_path / f".unused-{OTHER}-rank-0"  # by a process that was killed
    left.mkdir()
    (left / "ab").touch()
    assert remove_unused(used.folder.parent) == 2
    assert "KV on disk of 2 other formats was removed" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    lock.release()
    there = [kept.read(KEY, 2) is not None for kept in (used, other, old, running)]
    assert there == [True, False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == [USED, OTHER, OLD, RUNNING]
    assert remove_unused(used.folder.parent) == 1, "its engine has ended"
    assert "KV on disk of another format was removed" in caplog.text
    caplog.clear()
    assert remove_unused(used.folder.parent) == 0
    assert not caplog.records


def test_what_cannot_be_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    used, _ = store(tmp_path, USED), store(tmp_path, OTHER)
    monkeypatch.setattr(shutil, "rmtree", fails)
    remove_unused(used.folder.parent)
    assert "cannot be removed: [Errno 13] Permission denied" in caplog.text


def test_an_engine_that_just_begins_finds_its_folder(tmp_path: Path) -> None:
    used, other = store(tmp_path, USED), store(tmp_path, OTHER)  # open, and not locked yet
    remove_unused(used.folder.parent)
    lock = FolderLock(other.folder.parent)
    other.write(KEY, memoryview(bytes(8)), 0)
    assert other.read(KEY, 2) is not None
    lock.release()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "photos" / "rank-0").mkdir(parents=True)
    (tmp_path / f"{9:032x}" / "other").mkdir(parents=True)
    (tmp_path / f"{8:032x}").touch()
    (tmp_path / f"{7:032x}").symlink_to(store(tmp_path / "elsewhere", OLD).folder.parent)
    before = sorted(tmp_path.rglob("*"))
    assert remove_unused(tmp_path / USED) == 0
    assert sorted(tmp_path.rglob("*")) == before
