"""A refusal at start-up crosses from the engine's process to the front end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscale.connector import compat
from inferscale.errors import InferScaleError, PoolTooLarge
from inferscale.runtime.refusal import REFUSAL_NAME, read_refusal, recorded


def test_a_refusal_is_recorded_and_read_as_its_own_class(tmp_path: Path) -> None:
    assert read_refusal(tmp_path) is None
    with pytest.raises(PoolTooLarge), recorded(tmp_path):
        raise PoolTooLarge("5 bytes are free")
    error = read_refusal(tmp_path)
    assert type(error) is PoolTooLarge
    assert str(error) == "5 bytes are free"


def test_other_errors_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(KeyError), recorded(tmp_path):
        raise KeyError("x")
    assert not (tmp_path / REFUSAL_NAME).exists()


def test_a_folder_that_is_gone_hides_nothing(tmp_path: Path) -> None:
    with pytest.raises(PoolTooLarge), recorded(tmp_path / "gone"):
        raise PoolTooLarge("x")


@pytest.mark.parametrize("name", ["os", "annotations", "NoSuchError", "InvalidInput"])
def test_only_our_errors_are_made_from_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / REFUSAL_NAME).write_text(json.dumps({"error": name, "message": "m"}))
    error = read_refusal(tmp_path)
    assert isinstance(error, InferScaleError)
    assert str(error) == "m"


def test_free_memory_respects_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(compat, "_CGROUP", tmp_path)
    unlimited = compat.free_bytes(torch.device("cpu"))
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert compat.free_bytes(torch.device("cpu")) == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert compat.free_bytes(torch.device("cpu")) == pytest.approx(unlimited, rel=0.2)
