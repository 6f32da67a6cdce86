"""Segments on disk: whole, private, or gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferscale.pool.disk import DiskStore, format_name

KEY = "ab" * 16
OTHER = "cd" * 16


def make(folder: Path, token_bytes: int = 8, rank: int = 0) -> DiskStore:
    store = DiskStore(folder, format_name("model", token_bytes, 1), rank, token_bytes)
    store.open()
    return store


def write(store: DiskStore, key: str = KEY, num_tokens: int = 5, origin: int = 7) -> bytes:
    rows = os.urandom(num_tokens * store.token_bytes)
    store.write(key, memoryview(rows), origin)
    return rows


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = make(tmp_path)
    rows = write(store)
    stored = store.read(KEY, 5)
    assert stored is not None
    assert (bytes(stored.rows), stored.origin) == (rows, 7)
    assert store.read(OTHER, 5) is None
    [found] = store.scan()
    assert (found.key, found.num_tokens, found.size_bytes) == (KEY, 5, store.size_of(5))


def test_it_is_there_after_a_restart_for_the_same_model_only(tmp_path: Path) -> None:
    write(make(tmp_path))
    assert make(tmp_path).read(KEY, 5) is not None
    assert make(tmp_path, rank=1).read(KEY, 5) is None
    assert make(tmp_path, token_bytes=4).read(KEY, 10) is None
    assert len({format_name("a", 8, 1), format_name("b", 8, 1), format_name("a", 8, 2)}) == 3


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    store = make(tmp_path)
    for place in range(store.size_of(2)):
        write(store, num_tokens=2)
        path = store.path_of(KEY)
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert store.read(KEY, 2) is None, f"byte {place}"
        assert not path.exists()


@pytest.mark.parametrize("change", [b"", b"x", -1, -30])
def test_a_file_of_another_length_is_no_segment(tmp_path: Path, change: bytes | int) -> None:
    store = make(tmp_path)
    write(store)
    path = store.path_of(KEY)
    data = path.read_bytes()
    path.write_bytes(data[:change] if isinstance(change, int) else change and data + change)
    assert store.read(KEY, 5) is None
    assert not path.exists()


def test_another_segment_under_this_name_is_none(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store, OTHER)
    store.path_of(KEY).parent.mkdir()
    store.path_of(OTHER).rename(store.path_of(KEY))
    assert store.read(KEY, 5) is None


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    store = make(tmp_path / "kv")
    write(store)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_scan_removes_what_is_no_segment(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store)
    part = store.path_of(KEY).parent
    (part / ".draft-1-1").write_bytes(b"half")
    (part / "stray").write_bytes(b"x" * 3)
    assert [found.key for found in store.scan()] == [KEY]
    assert [path.name for path in part.iterdir()] == [KEY]


def test_a_scan_passes_over_what_it_cannot_use(tmp_path: Path) -> None:
    """A start must not fail for what somebody put there, and reads nothing through a link."""
    store = make(tmp_path)
    write(store)
    outside = tmp_path / "outside"
    outside.write_bytes(store.path_of(KEY).read_bytes())
    part = store.path_of(KEY).parent
    (part / (KEY[:2] + "link")).symlink_to(outside)
    (part / (KEY[:2] + "dangling")).symlink_to(tmp_path / "nowhere")
    (part / os.fsdecode(KEY[:2].encode() + b"\xff")).write_bytes(outside.read_bytes())
    (part / "elsewhere").write_bytes(outside.read_bytes())
    (part / (KEY[:2] + "folder")).mkdir()
    os.mkfifo(part / (KEY[:2] + "pipe"))
    (store.folder / "zz").symlink_to(part)
    (store.folder / "file").write_bytes(b"x")
    assert [found.key for found in store.scan()] == [KEY]
    assert outside.exists()
    assert sorted(path.name for path in part.iterdir()) == sorted([KEY, KEY[:2] + "folder"])


def test_a_file_that_cannot_be_removed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path)
    store.path_of(KEY).mkdir(parents=True)
    store.remove(KEY)
    assert "cannot be removed" in caplog.text


def test_removing_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store)
    store.remove(KEY)
    store.remove(KEY)
    assert list(store.scan()) == []


WRITER = """
import os, sys
from pathlib import Path
from inferscale.pool.disk import DiskStore, format_name
store = DiskStore(Path(sys.argv[1]), format_name("model", 8, 1), 0, 8)
store.open()
print("open", flush=True)
for number in range(10**6):
    store.write(f"{number:032x}", memoryview(os.urandom(80000)), number)
"""


def test_a_writer_that_is_killed_leaves_whole_segments_only(tmp_path: Path) -> None:
    store = make(tmp_path)
    for number in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 * (number + 1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = list(store.scan())
        assert found
        for file in found:
            assert store.read(file.key, file.num_tokens) is not None
        drafts = list(store.folder.rglob(".draft-*"))
        assert drafts == []
