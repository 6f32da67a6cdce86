"""A store of segments that several servers use at once, in a folder, in S3 and in fsspec's own memory."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferscale.encryption import read_key
from inferscale.errors import InvalidConfig
from inferscale.pool import shared_store, shared_tier
from inferscale.pool.places import FolderPlace, Place, open_place, shown
from inferscale.pool.sealing import Sealing
from inferscale.pool.segment_file import SegmentFile
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.shared_tier import SharedTier
from inferscale.pool.tiers import Copy

TOKEN_BYTES = 8
KEY, OTHER = "ab" * 16, "cd" * 16
ROWS = memoryview(bytes(range(4 * TOKEN_BYTES)))

MakeStore = Callable[[], SharedStore]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A server that speaks S3, and the URL of a bucket there."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-word")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="shared")
        yield "s3://shared"
    server.stop()


@pytest.fixture(params=["folder", "s3", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "shared")
    name = uuid.uuid4().hex
    return f"memory://{name}" if request.param == "memory" else f"{request.getfixturevalue('s3')}/{name}"


@pytest.fixture
def make(location: str) -> MakeStore:
    """One server's store; each call is another server."""
    return lambda: store_in(open_place(location))


def store_in(place: Place, sealing: Sealing | None = None) -> SharedStore:
    return SharedStore(place, "format", 0, SegmentFile(TOKEN_BYTES, sealing))


def object_of(location: str) -> tuple[Place, str]:
    return open_place(location), f"format/rank-0/{KEY[:2]}/{KEY}"


def test_what_one_saves_another_reads(make: MakeStore) -> None:
    one, other = make(), make()
    assert other.num_tokens(KEY) is None
    assert other.read(KEY, 4) is None
    assert one.write(KEY, ROWS, 7)
    assert other.num_tokens(KEY) == 4
    stored = other.read(KEY, 4)
    assert stored is not None
    assert (bytes(stored.rows), stored.origin) == (bytes(ROWS), 7)
    assert other.write(KEY, ROWS, 7), "there already"
    assert list(other.keys(KEY[:2])) == [KEY]
    assert list(other.keys("00")) == []
    other.remove(KEY, for_good=False)
    assert one.read(KEY, 4) is None
    other.remove(KEY, for_good=False)  # of what is not there: nothing


def test_damage_is_found_and_removed(make: MakeStore, location: str) -> None:
    store = make()
    place, path = object_of(location)
    store.write(KEY, ROWS, 7)
    whole = place.get(path)
    assert whole is not None
    for damaged in (
        whole[:-1],
        whole + b"x",
        whole[:-1] + bytes([whole[-1] ^ 1]),
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:10],
        b"",
    ):
        place.put(path, b"", memoryview(bytes(damaged)))
        assert store.read(KEY, 4) is None
        assert place.get(path) is None
    moved = f"format/rank-0/{OTHER[:2]}/{OTHER}"
    place.put(moved, b"", memoryview(bytes(whole)))
    assert store.read(OTHER, 4) is None, "another key's bytes"


def test_a_deletion_wins_over_a_save(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the two comes first, and also where the deletion comes while the object is put."""
    saver, deleter = make(), make()
    saver.write(KEY, ROWS, 7)
    deleter.remove(KEY, for_good=True)
    assert not saver.write(KEY, ROWS, 7)
    assert saver.read(KEY, 4) is None
    deleter_of_other = make()
    put = saver._place.put

    def put_late(path: str, header: bytes, content: memoryview) -> None:
        deleter_of_other.remove(OTHER, for_good=True)  # finds nothing to remove yet
        put(path, header, content)

    monkeypatch.setattr(saver._place, "put", put_late)
    assert not saver.write(OTHER, ROWS, 7)
    monkeypatch.undo()
    assert saver.read(OTHER, 4) is None


def test_a_mark_holds_for_a_while_only(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    store.remove(KEY, for_good=True)
    assert not store.write(KEY, ROWS, 7)
    assert list(store.keys(KEY[:2])) == []
    monkeypatch.setattr(shared_store, "MARK_HOLDS_S", 0.0)
    assert store.write(KEY, ROWS, 7), "the same was said again"
    assert list(store.keys(KEY[:2])) == [KEY]
    assert list(store._place.names(f"format/gone/{KEY[:2]}")) == []


def test_many_servers_at_once(make: MakeStore) -> None:
    """Savers and readers of one key, and who deletes it: whole or nothing is read, and nothing is left."""
    stores = [make() for _ in range(4)]
    seen: set[bytes] = set()
    done = threading.Event()

    def work(store: SharedStore) -> None:
        while not done.is_set():
            store.write(KEY, ROWS, 7)
            stored = store.read(KEY, 4)
            seen.add(b"" if stored is None else bytes(stored.rows))

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    make().remove(KEY, for_good=True)
    time.sleep(0.1)
    done.set()
    for thread in threads:
        thread.join()
    assert seen <= {b"", bytes(ROWS)}
    assert make().read(KEY, 4) is None


def test_encrypted_it_tells_nothing(location: str) -> None:
    key = read_key("5a" * 32, "here")
    place = open_place(location)
    store = store_in(place, Sealing(key))
    store.write(KEY, ROWS, 7)
    name = Sealing(key).name_of(KEY)
    content = place.get(f"format/rank-0/{name[:2]}/{name}")
    assert content is not None
    assert bytes(ROWS) not in bytes(content)
    assert list(store.keys(name[:2])) == [KEY]
    stored = store_in(place, Sealing(key)).read(KEY, 4)
    assert stored is not None
    assert bytes(stored.rows) == bytes(ROWS)


def test_it_belongs_to_one_catalog(make: MakeStore) -> None:
    assert make().belongs_to("one")
    assert make().belongs_to("one")
    assert not make().belongs_to("another")


def test_a_folder_is_its_owners(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "shared")
    store_in(place).write(KEY, ROWS, 7)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "shared").rglob("*")}
    assert modes == {0o700, 0o600}
    assert not list((tmp_path / "shared").rglob(".draft*"))


def test_drafts_of_a_process_that_was_killed_go(tmp_path: Path) -> None:
    """They hold KV, and no deletion names them."""
    store = store_in(FolderPlace(tmp_path))
    store.write(KEY, ROWS, 7)
    folder = tmp_path / "format" / "rank-0" / KEY[:2]
    for name in ("old", "new"):
        (folder / f".draft-{name}").write_bytes(b"x")
    os.utime(folder / ".draft-old", (0, 0))
    assert list(store.keys(KEY[:2])) == [KEY]
    assert sorted(path.name for path in folder.iterdir()) == [".draft-new", KEY]


def test_what_cannot_be_used_is_refused(tmp_path: Path, s3: str) -> None:
    (tmp_path / "file").write_text("x")
    for bad in (str(tmp_path / "file" / "below"), "nonsense://x", "s3://no-such-bucket/x"):
        with pytest.raises(InvalidConfig, match="cold_location"):
            open_place(bad)
    assert shown("ftp://user:s3cret@host/x") == "ftp://host/x"


# --- what one engine knows of it -------------------------------------------------------------------


@pytest.fixture
def tier(make: MakeStore) -> Iterator[SharedTier]:
    tier = SharedTier(make())
    yield tier
    tier.close()


def known(tier: SharedTier, key: str = KEY) -> bool:
    """Once it was looked up, however long that takes."""
    for _ in range(500):
        tier.look_up([key])
        if not tier._asked:
            break
        time.sleep(0.01)
    return tier.find(key, 4)


def test_what_others_saved_is_found_when_it_is_asked_for(tier: SharedTier, make: MakeStore) -> None:
    assert not tier.find(KEY, 4)
    make().write(KEY, ROWS, 7)
    assert known(tier)
    assert not tier.find(KEY, 5)
    copy = tier.get(KEY)
    assert copy is not None
    assert (copy.num_tokens, tier.used_bytes, len(tier)) == (4, copy.size_bytes, 1)


def test_what_is_missing_is_not_asked_for_all_the_time(
    tier: SharedTier, make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not known(tier)
    make().write(KEY, ROWS, 7)
    assert not known(tier)
    monkeypatch.setattr(shared_tier, "MISSED_FOR_S", 0.0)
    assert known(tier)


def test_it_knows_a_bounded_number(tier: SharedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tier, "MAX_KNOWN", 3)
    for number in range(6):
        assert tier.admit(Copy(f"k{number}", 4, 100, "")) == []
        tier.ready(f"k{number}")
        tier.use("k0")
    assert len(tier) == 3
    assert tier.get("k0") is not None, "was used last"
    assert tier.used_bytes == 300


def test_switched_off_nothing_is_found_or_saved(tier: SharedTier, make: MakeStore) -> None:
    make().write(KEY, ROWS, 7)
    assert known(tier)
    tier.switch_off()
    assert not known(tier)
    assert tier.admit(Copy(OTHER, 4, 100, "")) is None


def test_a_store_that_fails_or_is_slow_holds_up_nobody(
    tier: SharedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str) -> int | None:
        raise OSError("gone")

    monkeypatch.setattr(tier._store, "num_tokens", fail)
    assert not known(tier)
    release = threading.Event()
    monkeypatch.setattr(shared_tier, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(tier._store, "num_tokens", lambda key: 4 if release.wait(30) else None)
    tier.look_up([OTHER])
    assert not tier.find(OTHER, 4)
    monkeypatch.setattr(shared_tier, "LOOK_UP_S", 30.0)
    start_s = time.monotonic()
    tier.look_up(["ef" * 16])
    assert time.monotonic() - start_s < 10, "others do not wait for a store that is late already"
    release.set()
    assert known(tier, OTHER)
    for _ in range(500):
        if not tier._asked:
            break
        time.sleep(0.01)
    tier.look_up(["01" * 16])
    assert tier.find("01" * 16, 4), "it is not late any more, so that it is waited for"
