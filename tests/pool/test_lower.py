"""Bytes of a worker on their way down and up again."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from inferscale.pool import lower as lower_module
from inferscale.pool.disk import DiskStore, format_name
from inferscale.pool.lower import LowerTiers
from inferscale.pool.moves import Int32Array
from inferscale.pool.slab import RowShape, Slab
from inferscale.pool.tiers import Drop, Load, Save, TierAnswers

KEY, OTHER = "ab" * 16, "cd" * 16
BOTH = ("host", "disk")
ROWS = np.array([5, 6, 7, 12], dtype=np.int32)
ELSEWHERE = np.array([20, 1, 2, 3], dtype=np.int32)


class Worker:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.slab = Slab(8, 4, RowShape(((1, 4), (2, 4))), dtype, torch.device("cpu"))
        row_bytes = self.slab.shape.num_elements * self.slab.data.element_size()
        self.store = DiskStore(folder, format_name("m", row_bytes, 1), 0, row_bytes)
        self.store.open()
        self.noted: list[tuple[list[int], list[int]]] = []
        self.lower = LowerTiers(self.slab, self.store, self.note)
        self.slab.data.copy_(torch.randn(self.slab.data.shape).to(dtype))

    def note(self, rows: Int32Array, positions: Int32Array) -> None:
        self.noted.append((rows.tolist(), positions.tolist()))

    def answers(self) -> TierAnswers:
        """When one has come."""
        for _ in range(500):
            found = self.lower.take_answers()
            if found is not None:
                return found
            time.sleep(0.01)
        raise AssertionError("nothing was answered")


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("source", BOTH)
def test_a_segment_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype, source: str) -> None:
    worker = Worker(tmp_path, dtype)
    saved = worker.slab.data[torch.from_numpy(ROWS).long()].clone()
    worker.lower.save([Save(KEY, ROWS.tobytes(), 40, BOTH)])  # type: ignore[arg-type]
    assert worker.answers() == TierAnswers(saved=[KEY])
    worker.slab.data.zero_()
    worker.lower.load([Load(KEY, ELSEWHERE.tobytes(), source)])  # type: ignore[arg-type]
    assert worker.answers() == TierAnswers(loaded=[KEY])
    loaded = worker.slab.data[torch.from_numpy(ELSEWHERE).long()]
    assert torch.equal(loaded.view(torch.uint8), saved.view(torch.uint8))
    assert worker.slab.origins[torch.from_numpy(ELSEWHERE).long()].tolist() == [40, 41, 42, 43]
    assert worker.noted == [(ELSEWHERE.tolist(), [40, 41, 42, 43])]
    untouched = torch.ones(len(worker.slab.data), dtype=torch.bool)
    untouched[torch.from_numpy(ELSEWHERE).long()] = False
    assert not worker.slab.data[untouched].any()
    worker.lower.close()


def test_what_is_saved_is_as_it_was_at_that_moment(worker: Worker) -> None:
    expected = worker.slab.data[torch.from_numpy(ROWS).long()].clone()
    worker.lower.save([Save(KEY, ROWS.tobytes(), 0, BOTH)])
    worker.slab.data.zero_()  # the pages were given away at once
    worker.answers()
    worker.lower.load([Load(KEY, ROWS.tobytes(), "disk")])
    worker.answers()
    assert torch.equal(worker.slab.data[torch.from_numpy(ROWS).long()], expected)


def test_what_is_not_there_or_damaged_is_answered_so(worker: Worker) -> None:
    worker.lower.save([Save(KEY, ROWS.tobytes(), 0, ("disk",))])
    worker.answers()
    path = worker.store.path_of(KEY)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for load in (Load(KEY, ROWS.tobytes(), "disk"), Load(KEY, ROWS.tobytes(), "host")):
        worker.lower.load([load])
        assert worker.answers() == TierAnswers(not_loaded=[KEY])


def test_a_drop_that_follows_a_save_wins(worker: Worker) -> None:
    for _ in range(20):
        worker.lower.save([Save(KEY, ROWS.tobytes(), 0, BOTH)])
        worker.lower.drop([Drop("disk", (KEY, OTHER)), Drop("host", (KEY, OTHER))])
        worker.answers()
    worker.lower.close()
    assert not worker.store.path_of(KEY).exists()
    assert worker.lower._host == {}


def test_a_load_from_disk_may_stay_in_host_memory(worker: Worker) -> None:
    worker.lower.save([Save(KEY, ROWS.tobytes(), 3, ("disk",))])
    worker.answers()
    worker.lower.load([Load(KEY, ROWS.tobytes(), "disk", keep=True)])
    worker.answers()
    worker.store.remove(KEY)
    worker.lower.load([Load(KEY, ELSEWHERE.tobytes(), "host")])
    assert worker.answers() == TierAnswers(loaded=[KEY])


def test_a_full_disk_costs_the_copy_only(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker.store, "write", full)
    worker.lower.save([Save(KEY, ROWS.tobytes(), 0, BOTH)])
    assert worker.answers() == TierAnswers(not_saved=[KEY])
    assert worker.lower._pending_bytes == 0


def test_more_than_the_disk_takes_is_not_kept_waiting(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_module, "_MAX_PENDING_BYTES", 10)
    worker.lower.save([Save(KEY, ROWS.tobytes(), 0, BOTH)])
    assert worker.answers() == TierAnswers(not_saved=[KEY])
