"""Servers and one store: what one has captured another loads, bit by bit, until it is deleted anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from inferscale.connector.tiering import Tiering
from inferscale.pool import lower as lower_module
from inferscale.pool.lower import LowerTiers
from inferscale.pool.places import Place, open_place
from inferscale.pool.row_format import RowFormat
from inferscale.pool.segment_file import SegmentFile, format_name
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.shared_tier import SharedTier
from inferscale.pool.slab import Slab
from inferscale.pool.table import PageTable
from inferscale.pool.tiers import Drop, Tier
from inferscale.row_size import RowShape

KEY, OTHER = "ab" * 16, "cd" * 16
TOKENS, ORIGIN = 6, 33


class Server:
    """The scheduler side's tiering and one worker's bytes, without the steps of an engine between them."""

    def __init__(self, place: Place, *, host_bytes: int = 0, num_ranks: int = 1) -> None:
        row_format = RowFormat(RowShape(((1, 4), (2, 4))), torch.float32)
        self.slab = Slab(16, 4, row_format, torch.device("cpu"))
        self.table = PageTable(16, 4)
        file = SegmentFile(row_format.row_bytes)
        store = SharedStore(place, format_name("m", row_format.row_bytes, num_ranks), 0, file)
        self.tier = SharedTier(store)
        tiers = [Tier("host", host_bytes)] if host_bytes else []
        self.tiering = Tiering(
            self.table, tiers, lambda _, n: n * row_format.row_bytes, num_ranks, "always", shared=self.tier
        )
        self.lower = LowerTiers(self.slab, None, lambda rows, origins: None, store)

    def work(self, is_done: Callable[[], bool]) -> None:
        """Carry out what is ordered, until this holds."""
        for _ in range(1000):
            orders = self.tiering.take_orders()
            if orders is not None:
                self.lower.drop(orders.drops)
                self.lower.load(orders.loads)
                self.lower.save(orders.saves)
            answers = self.lower.take_answers()
            if answers is not None:
                self.tiering.complete(answers)
            if is_done():
                return
            time.sleep(0.005)
        raise AssertionError("it was not done")

    def capture(self, key: str = KEY, *, shared: bool = True) -> torch.Tensor:
        """Random rows, saved as those of a capture."""
        entry = self.table.reserve(key, TOKENS)
        assert entry is not None
        rows = torch.from_numpy(entry.rows.astype(np.int64))
        self.slab.data[rows] = torch.rand(TOKENS, self.slab.data.shape[1])
        self.tiering.save(entry, ORIGIN, "ana", shared=shared)
        self.table.commit(key)
        written = self.slab.data[rows].clone()
        self.work(lambda: not shared or self.tier.find(key, TOKENS) or self.tier.get(key) is None)
        return written

    def rows(self, key: str = KEY) -> torch.Tensor:
        entry = self.table.get(key)
        assert entry is not None
        return self.slab.data[torch.from_numpy(entry.rows.astype(np.int64))]

    def knows(self, key: str = KEY) -> bool:
        for _ in range(500):
            self.tiering.look_up([key])
            if not self.tier._asked:
                break
            time.sleep(0.01)
        return self.tiering.is_below(key)

    def load(self, key: str = KEY) -> bool:
        """Whether it is in the pool afterwards."""
        wait = self.tiering.prefetch([key], "ana")
        assert wait is not None
        self.work(lambda: self.tiering.is_over(wait))
        return self.table.is_resident(key)

    def close(self) -> None:
        self.lower.close()
        self.tiering.close()


@pytest.fixture
def make(tmp_path: Path):
    made: list[Server] = []

    def make(**options: int) -> Server:
        made.append(Server(open_place(str(tmp_path / "shared")), **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.parent.parent.name == "rank-0"]


@pytest.mark.parametrize("host_bytes", [0, 2**20])
def test_what_one_captured_another_loads(make: Callable[..., Server], host_bytes: int) -> None:
    one, other = make(), make(host_bytes=host_bytes)
    assert not other.knows(OTHER)
    written = one.capture()
    assert other.knows()
    assert other.load()
    assert torch.equal(other.rows(), written)
    assert other.slab.origins[other.table.get(KEY).rows.tolist()].tolist() == list(
        range(ORIGIN, ORIGIN + TOKENS)
    )
    assert other.tiering.stats()["cold_prefetched"] == 1
    if host_bytes:  # nearer the next time
        other.table.drop([KEY])
        assert other.tiering.find(KEY).name == "host"


def test_it_is_saved_once_and_only_what_is_shared(make: Callable[..., Server], tmp_path: Path) -> None:
    one, other = make(), make()
    one.capture()
    assert other.knows()
    other.capture(OTHER, shared=False)
    assert files(tmp_path) == [KEY]
    assert not one.knows(OTHER)


def test_a_deletion_on_one_server_takes_it_from_all(make: Callable[..., Server], tmp_path: Path) -> None:
    one, other, late = make(), make(), make()
    one.capture()
    assert other.knows()
    one.tiering.forget([KEY])
    one.work(lambda: files(tmp_path) == [])
    assert not other.load(), "is prefilled"
    assert other.tiering.stats()["tier_loads_failed"] == 1
    assert not other.tiering.is_below(KEY)
    late.capture()  # was planned before the deletion
    assert files(tmp_path) == []
    assert late.tier.get(KEY) is None


def test_damage_is_a_prefill_and_then_saved_anew(make: Callable[..., Server], tmp_path: Path) -> None:
    one, other, third = make(), make(), make()
    one.capture()
    assert other.knows()
    [path] = [path for path in tmp_path.rglob(KEY) if path.is_file()]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not other.load()
    assert files(tmp_path) == []
    written = other.capture()
    assert third.knows()
    assert third.load()
    assert torch.equal(third.rows(), written)


def test_what_one_rank_lacks_is_encoded_anew(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank's object is looked up. Were it found again at once, the fact would never be
    encoded, and each of its chats would wait for a load in vain."""
    one, other = make(), make()
    one.capture()
    assert other.knows()
    monkeypatch.setattr(SharedStore, "read", lambda *given: None)  # as of a rank that has no object
    assert not other.load()
    assert not other.knows()
    other.capture()
    assert other.tier.find(KEY, TOKENS)


def test_a_store_that_fails_costs_copies_only(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = make(host_bytes=2**20)

    def fail(*given: object) -> bool:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(SharedStore, "write", fail)
        one.capture()
    assert one.tier.get(KEY) is None
    assert one.tiering.find(KEY).name == "host"
    assert "not kept in the shared store: gone" in caplog.text
    one.capture(OTHER)
    assert "kept in the shared store again" in caplog.text
    assert one.tier.find(OTHER, TOKENS)


def test_a_store_that_is_slow_takes_nothing_from_other_tiers(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More waits for it than may wait, and host memory is given its copies all the same."""
    one = make(host_bytes=2**20)
    go_on, write = threading.Event(), SharedStore.write

    def slow(store: SharedStore, key: str, rows: memoryview, origin: int) -> bool:
        assert go_on.wait(10)
        return write(store, key, rows, origin)

    monkeypatch.setattr(SharedStore, "write", slow)
    monkeypatch.setattr(lower_module, "_MAX_PENDING_BYTES", TOKENS * one.slab.format.row_bytes)
    for key in (KEY, OTHER):
        entry = one.table.reserve(key, TOKENS)
        assert entry is not None
        one.tiering.save(entry, ORIGIN, "ana", shared=True)
        one.work(lambda key=key: one.tiering.tiers[0].find(key, TOKENS))
    go_on.set()
    one.work(lambda: one.tier.find(KEY, TOKENS))
    assert one.tier.get(OTHER) is None
    assert set(one.lower._pending_bytes.values()) == {0}


def test_what_leaves_host_memory_is_shared_whole(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are given the same rows, and those that leave host memory are overwritten."""
    one, other = make(host_bytes=2**20), make()
    write, left = SharedStore.write, []

    def late(store: SharedStore, key: str, rows: memoryview, origin: int) -> bool:
        one.lower._writer.submit(lambda: None).result()
        left.append(one.lower._host[key].rows)
        one.lower.drop([Drop("host", (key,))])
        one.lower._writer.submit(lambda: None).result()
        assert one.lower._host == {}
        return write(store, key, rows, origin)

    with monkeypatch.context() as patch:
        patch.setattr(SharedStore, "write", late)
        written = one.capture()
    assert other.knows()
    assert other.load()
    assert torch.equal(other.rows(), written)
    one.close()
    assert [bool(rows.any()) for rows in left] == [False]


def test_after_a_reset_the_shared_ones_stay_and_are_not_used(
    make: Callable[..., Server], tmp_path: Path
) -> None:
    """vLLM resets where the weights change: what lies there is of the old ones."""
    one, other = make(host_bytes=2**20), make()
    one.capture()
    one.table.clear()
    one.tiering.clear()
    one.work(lambda: len(one.tiering.tiers[0]) == 0)
    assert not one.knows()
    one.capture(OTHER)
    assert files(tmp_path) == [KEY]
    assert other.knows()
    one.tiering.forget([KEY])  # a deletion still is one
    one.work(lambda: files(tmp_path) == [])
