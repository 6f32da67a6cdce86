"""Which device embedder and index take, and what a GPU without room does to them; here without a GPU.

The device `meta` stands for the GPU: torch makes tensors there, and nothing can be read from them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fakes import WordEmbedder
from inferscale.config import MemoryConfig
from inferscale.errors import EngineError, InvalidConfig
from inferscale.memory import Memory
from inferscale.retrieval import DeviceChoice, VectorIndex, devices
from inferscale.retrieval import index as index_module

GPU, CPU = torch.device("meta"), torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 90.00 MiB.\nGPU 0 has a total capacity of 140 GiB"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "inferscale")
    return caplog


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_free_gpu", lambda: GPU)


def with_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int | Exception) -> None:
    def mem_get_info() -> tuple[int, int]:
        if isinstance(free_bytes, Exception):
            raise free_bytes
        return free_bytes, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    empty = torch.empty

    def made(*size: int, device: Any) -> Any:
        return (
            SimpleNamespace(device=torch.device("cuda:0"))
            if device == "cuda"
            else empty(*size, device=device)
        )

    monkeypatch.setattr(torch, "empty", made)


def fail(device: torch.device) -> str:
    if device == GPU:
        raise torch.OutOfMemoryError(FULL)
    return str(device)


# --- the choice ----------------------------------------------------------------------------------


def test_auto_is_a_gpu_with_room(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    with_gpu(monkeypatch, devices.MIN_FREE_BYTES)
    assert DeviceChoice("auto").get() == torch.device("cuda:0")
    assert not log.messages


@pytest.mark.parametrize(
    ("free_bytes", "reason"),
    [
        (300 * 2**20, "only 300 MiB of free memory"),
        (
            RuntimeError("CUDA error: out of memory\nCompile with"),
            "cannot be used (CUDA error: out of memory)",
        ),
    ],
)
def test_auto_is_the_cpu_where_the_gpu_is_full(
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    free_bytes: int | Exception,
    reason: str,
) -> None:
    with_gpu(monkeypatch, free_bytes)
    choice = DeviceChoice("auto")
    assert choice.get() == choice.get() == CPU
    [message] = log.messages
    assert reason in message
    assert message.endswith("embedder and search index use the CPU.")


def test_auto_without_a_gpu_says_nothing(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceChoice("auto").get() == CPU
    assert not log.messages


def test_auto_leaves_a_gpu_that_fails(gpu: None, log: pytest.LogCaptureFixture) -> None:
    choice = DeviceChoice("auto")
    assert choice.run("the work", str) == "meta"
    assert choice.run("the work", fail) == "cpu"
    assert choice.run("other work", fail) == "cpu"
    assert choice.get() == CPU
    [message] = log.messages
    assert "the work failed on meta (CUDA out of memory. Tried to allocate 90.00 MiB.)" in message


def test_a_named_device_fails_with_one_clear_error() -> None:
    choice = DeviceChoice("meta")
    with pytest.raises(
        EngineError, match=r"embedder_device is 'meta', but the work failed there \(CUDA out of"
    ):
        choice.run("the work", fail)
    with pytest.raises(InvalidConfig, match="embedder_device is 'warp'"):
        DeviceChoice("warp").get()


def test_errors_that_are_no_devices_fault_are_left_alone(gpu: None) -> None:
    def wrong(device: torch.device) -> None:
        raise RuntimeError("The size of tensor a (3) must match")

    for name in ("auto", "meta", "cpu"):
        with pytest.raises(RuntimeError, match="The size"):
            DeviceChoice(name).run("the work", wrong)


# --- embedder and index --------------------------------------------------------------------------


def rows(count: int) -> tuple[range, list[int], np.ndarray]:
    vectors = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)
    return range(count), [id % 2 for id in range(count)], vectors


def test_an_index_that_cannot_grow_on_the_gpu_lies_on_the_cpu(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = index_module._grown

    def growing(table: Any, num_rows: int, reserved: int, dim: int, device: torch.device) -> Any:
        fail(device)
        return grown(table, num_rows, reserved, dim, device)

    monkeypatch.setattr(index_module, "_grown", growing)
    ids, codes, vectors = rows(5)
    index, expected = VectorIndex(4, "auto"), VectorIndex(4)
    index.add(ids, codes, vectors)
    expected.add(ids, codes, vectors)
    assert index.search(vectors[2], 3, [0]) == expected.search(vectors[2], 3, [0])
    with pytest.raises(EngineError, match="the search index failed there"):
        VectorIndex(4, "meta").add(ids, codes, vectors)


def test_an_index_moves_to_the_cpu_where_a_search_fails(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = index_module._searched

    def searching(table: Any, *arguments: Any) -> Any:
        fail(table.device)
        return searched(table, *arguments)

    monkeypatch.setattr(index_module, "_searched", searching)
    ids, codes, vectors = rows(5)
    index, expected = VectorIndex(4, "auto"), VectorIndex(4)
    for one in (index, expected):
        one.add(ids, codes, vectors)
    assert index._table is not None
    assert index._table.device == GPU
    copy = VectorIndex(4)
    copy.add(ids, codes, vectors)
    monkeypatch.setattr(index_module, "_moved", lambda table, device: copy._table)
    assert index.search(vectors[2], 3, [0]) == expected.search(vectors[2], 3, [0])
    assert index.remove([0, 4, 9]) == expected.remove([0, 4, 9]) == 2
    assert index.search(vectors[2], 3, [0, 1]) == expected.search(vectors[2], 3, [0, 1])


def test_the_index_follows_the_embedder(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """The embedder finds the GPU full, so that the index is not put there."""

    class Failing(WordEmbedder):
        def __init__(self, source: Path, device: DeviceChoice) -> None:
            super().__init__(name=source.name)
            self.choice = device

        def embed(self, texts: Any) -> Any:
            self.choice.run("the embedder", fail)
            return super().embed(texts)

    monkeypatch.setattr("inferscale.models.ensure_embedder", lambda progress: tmp_path / "words")
    monkeypatch.setattr("inferscale.retrieval.SentenceEmbedder", Failing)
    with Memory(MemoryConfig(tmp_path)) as memory:
        memory.add(["the cat", "the dog"], user_id="ana")
        assert memory.search("dog", user_id="ana")[0].fact.text == "the dog"
        assert memory._search._index is not None
        assert memory._search._index._table is not None
        assert memory._search._index._table.device == CPU
    assert len(log.messages) == 1
