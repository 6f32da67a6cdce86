"""Bytes of a worker on their way down and up again."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from inferscale.config import PoolDtype
from inferscale.pool import lower as lower_module
from inferscale.pool.disk import DiskStore, format_name
from inferscale.pool.lower import LowerTiers
from inferscale.pool.moves import Int32Array
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.pool.tiers import Drop, Load, Save, TierAnswers, TierName
from inferscale.row_size import RowShape

KEY, OTHER = "ab" * 16, "cd" * 16
BOTH = ("host", "disk")
ROWS = np.array([5, 6, 7, 12], dtype=np.int32)
ELSEWHERE = np.array([20, 1, 2, 3], dtype=np.int32)


class Worker:
    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.bfloat16,
        pool_dtype: PoolDtype = "auto",
        device: str = "cpu",
    ) -> None:
        row_format = RowFormat(RowShape(((1, 4), (2, 4))), dtype, pool_dtype)
        self.slab = Slab(8, 4, row_format, torch.device(device))
        row_bytes = row_format.row_bytes
        self.store = DiskStore(folder, format_name("m", row_bytes, 1), 0, row_bytes)
        self.store.open()
        self.noted: list[tuple[list[int], list[int]]] = []
        self.lower = LowerTiers(self.slab, self.store, self.note)
        self.slab.data.copy_(torch.randint(1, 100, self.slab.data.shape))

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


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.bfloat16, "auto"),
        (torch.float16, "auto"),
        (torch.float32, "auto"),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "fp8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", BOTH)
def test_a_segment_comes_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, pool_dtype: PoolDtype, source: str
) -> None:
    worker = Worker(tmp_path, dtype, pool_dtype)
    saved = worker.slab.data[torch.from_numpy(ROWS).long()].clone()
    save = Save(KEY, ROWS.tobytes(), 40, BOTH, 3)  # type: ignore[arg-type]
    worker.lower.save([save])
    assert worker.answers() == TierAnswers(saved=save.answers())
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


def test_a_full_disk_costs_its_own_copy_only(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    save = Save(KEY, ROWS.tobytes(), 0, BOTH)
    with monkeypatch.context() as patched:
        patched.setattr(worker.store, "write", full)
        for _ in range(3):
            worker.lower.save([save])
            host, disk = save.answers()
            assert worker.answers() == TierAnswers(saved=[host], not_saved=[disk])
    assert set(worker.lower._pending_bytes.values()) == {0}
    assert caplog.text.count("not kept on disk") == 1
    worker.lower.load([Load(KEY, ELSEWHERE.tobytes(), "host")])
    assert worker.answers() == TierAnswers(loaded=[KEY])
    worker.lower.save([save])
    assert worker.answers() == TierAnswers(saved=save.answers())


def test_what_is_dropped_from_host_memory_is_overwritten(worker: Worker) -> None:
    """All of one order."""
    for key, rows in ((KEY, ROWS), (OTHER, ELSEWHERE)):
        worker.lower.save([Save(key, rows.tobytes(), 0, ("host",))])
    worker.lower._writer.submit(lambda: None).result()
    copies = [worker.lower._host[key].rows for key in (KEY, OTHER)]
    assert all(bool(rows.any()) for rows in copies)
    worker.lower.drop([Drop("host", (KEY, OTHER))])
    worker.lower._writer.submit(lambda: None).result()
    assert worker.lower._host == {}
    assert not any(bool(rows.any()) for rows in copies)


def test_more_than_the_disk_takes_is_not_kept_waiting(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_module, "_MAX_PENDING_BYTES", 10)
    save = Save(KEY, ROWS.tobytes(), 0, BOTH)
    worker.lower.save([save])
    assert worker.answers() == TierAnswers(not_saved=save.answers())


def test_what_fails_on_its_way_down_takes_no_room(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no pinned memory is left: what is saved later would be refused for ever."""

    def fails(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    save = Save(KEY, ROWS.tobytes(), 0, BOTH)
    with monkeypatch.context() as patched:
        patched.setattr(worker.lower, "_send", fails)
        worker.lower.save([save])
    assert worker.answers() == TierAnswers(not_saved=save.answers())
    assert set(worker.lower._pending_bytes.values()) == {0}


def test_a_removal_that_fails_is_logged(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(key: str) -> None:
        raise ValueError("no key")

    monkeypatch.setattr(worker.store, "remove", fails)
    worker.lower.drop([Drop("disk", (KEY,))])
    worker.lower.close()
    assert "could not be moved" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("source", BOTH)
def test_a_load_comes_behind_what_the_stream_of_the_engine_does(tmp_path: Path, source: TierName) -> None:
    """vLLM's stream is not the default one, and threads that read files have streams of their own."""
    worker = Worker(tmp_path, device="cuda")
    rows = torch.from_numpy(ELSEWHERE).long().cuda()
    saved = worker.slab.data[torch.from_numpy(ROWS).long().cuda()].clone()
    worker.lower.save([Save(KEY, ROWS.tobytes(), 0, BOTH)])
    worker.answers()
    for _ in range(4):  # both readers, so that memory is there: to allocate some waits for the device
        worker.lower.load([Load(KEY, ELSEWHERE.tobytes(), source)])
        worker.answers()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(2_000_000_000)  # about a second, in which the pages are still to be zeroed
        worker.slab.data.index_fill_(0, rows, 0)
        worker.lower.load([Load(KEY, ELSEWHERE.tobytes(), source)])
        assert worker.answers() == TierAnswers(loaded=[KEY])
    torch.cuda.synchronize()
    assert torch.equal(worker.slab.data[rows], saved)
    worker.lower.close()
