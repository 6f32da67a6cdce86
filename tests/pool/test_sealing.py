"""Encrypted segments on disk: unreadable, whole, and gone where a bit of them is another."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from inferscale.encryption import EncryptionKey
from inferscale.pool.disk import DiskStore, format_name
from inferscale.pool.sealing import Sealing

KEY = "ab" * 16
OTHER = "cd" * 16
SECRET = EncryptionKey(b"s" * 32)


def make(folder: Path, secret: EncryptionKey = SECRET, format: str | None = None, rank: int = 0) -> DiskStore:
    sealing = Sealing(secret)
    store = DiskStore(folder, format or format_name("model", 8, 1, sealing), rank, 8, sealing)
    store.open()
    return store


def write(store: DiskStore, key: str = KEY, num_tokens: int = 5, origin: int = 7) -> bytes:
    rows = os.urandom(num_tokens * store.token_bytes)
    store.write(key, memoryview(rows), origin)
    return rows


def test_what_was_written_is_read_with_the_key_only(tmp_path: Path) -> None:
    rows = write(make(tmp_path))
    stored = make(tmp_path).read(KEY, 5)
    assert stored is not None
    assert (bytes(stored.rows), stored.origin) == (rows, 7)
    other = EncryptionKey(b"o" * 32)
    assert make(tmp_path, other).read(KEY, 5) is None
    forced = make(tmp_path, other, make(tmp_path).folder.parent.name)  # the same folder with another key
    name = Sealing(SECRET).name_of(KEY)
    taken_for = Sealing(other).key_of(name)
    assert taken_for is not None
    assert taken_for != KEY
    assert forced.read(taken_for, 5) is None
    assert make(tmp_path).read(KEY, 5) is None  # it did not authenticate, so it was removed


def test_no_file_holds_rows_or_keys(tmp_path: Path) -> None:
    store = make(tmp_path)
    rows = write(store)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 1
    content = found[0].read_bytes()
    for piece in (rows[:8], rows[8:16], KEY.encode(), bytes.fromhex(KEY)):
        assert piece not in content
    assert KEY not in str(found[0])
    assert len(content) == store.size_of(5)


def test_the_same_rows_are_never_the_same_bytes(tmp_path: Path) -> None:
    store = make(tmp_path)
    content = set()
    for _ in range(3):
        store.write(KEY, memoryview(bytes(40)), 0)
        content.add(store.path_of(KEY).read_bytes()[-40:])
    assert len(content) == 3


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


def test_another_segment_under_this_name_is_none(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store, OTHER)
    path = store.path_of(KEY)
    path.parent.mkdir(exist_ok=True)
    data = bytearray(store.path_of(OTHER).read_bytes())
    # Even with the name of the other in its header: each segment has a key of its own.
    data[6:38] = path.name.encode()
    path.write_bytes(data)
    assert store.read(KEY, 5) is None


@pytest.mark.parametrize("change", [-1, -30])
def test_a_file_of_another_length_is_no_segment(tmp_path: Path, change: int) -> None:
    store = make(tmp_path)
    write(store)
    path = store.path_of(KEY)
    path.write_bytes(path.read_bytes()[:change])
    assert store.read(KEY, 5) is None
    assert not path.exists()


def test_a_scan_gives_keys_and_removes_what_is_no_segment(tmp_path: Path) -> None:
    store = make(tmp_path)
    write(store)
    write(store, OTHER, 2)
    part = store.path_of(KEY).parent
    (part / ".draft-1-1").write_bytes(b"half")
    (part / "stray").write_bytes(bytes(store.size_of(1)))
    assert {(found.key, found.num_tokens) for found in store.scan()} == {(KEY, 5), (OTHER, 2)}
    assert store.path_of(KEY).parent.joinpath("stray").exists() is False
    assert {found.key for found in store.of_rank(0).scan()} == {KEY, OTHER}


def test_a_file_that_is_not_encrypted_is_none_beside_a_key(tmp_path: Path) -> None:
    sealed = make(tmp_path)
    plain = DiskStore(tmp_path, sealed.folder.parent.name, 0, 8)
    name = sealed.path_of(KEY).name
    plain.write(name, memoryview(bytes(40)), 0)
    assert sealed.read(KEY, 5) is None
    assert format_name("model", 8, 1) != format_name("model", 8, 1, Sealing(SECRET))


def test_names_are_those_of_keys_only() -> None:
    sealing = Sealing(SECRET)
    assert sealing.key_of(sealing.name_of(KEY)) == KEY
    assert [sealing.key_of(name) for name in ("", "lock", KEY.upper(), KEY + "0", KEY + "\n")] == [None] * 5
    with pytest.raises(ValueError, match="32 hex digits"):
        sealing.name_of("fact")


def test_the_header_tells_the_size_only(tmp_path: Path) -> None:
    """The position of a segment and its length are in the clear, as the size of a file is."""
    store = make(tmp_path)
    write(store, num_tokens=3, origin=11)
    magic, version, name, tokens, size, origin = struct.unpack_from(
        "<5sB32sIIi", store.path_of(KEY).read_bytes()
    )
    assert (magic, version, tokens, size, origin) == (b"IFSKV", 2, 3, 8, 11)
    assert name.decode() == store.path_of(KEY).name
