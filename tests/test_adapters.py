"""Adapters are told apart by what they are, never by their names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale import adapters
from inferscale.adapters import model_with_adapter


def adapter(folder: Path, weights: bytes, config: bytes = b"{}") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_the_content_counts_and_the_place_does_not(tmp_path: Path) -> None:
    same = [adapter(tmp_path / name, b"weights") for name in ("a", "b")]
    others = [adapter(tmp_path / "c", b"Weights"), adapter(tmp_path / "d", b"weights", b'{"r": 8}')]
    models = [model_with_adapter("m", "name", 1, path) for path in [*same, *others]]
    assert models[0] == models[1]
    assert len(set(models)) == 3
    assert all(model is not None and model.startswith("m+lora ") for model in models)
    assert model_with_adapter("other", "name", 1, same[0]) != models[0]


@pytest.mark.parametrize("at", [0, 70_000, 8_388_607, 9_999_999])
def test_large_weights_are_read_in_pieces(tmp_path: Path, at: int) -> None:
    """Of a file that is a little larger than all pieces, they leave few bytes out: its ends never."""
    size = 10_000_000
    assert size > adapters._PIECES * adapters._PIECE_BYTES
    plain, changed = bytearray(size), bytearray(size)
    changed[at : at + 20_000] = b"x" * len(changed[at : at + 20_000])
    paths = [adapter(tmp_path / name, bytes(data)) for name, data in (("a", plain), ("b", changed))]
    assert model_with_adapter("m", "n", 1, paths[0]) != model_with_adapter("m", "n", 1, paths[1])


def test_files_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "gone"), str(tmp_path / "empty"), "owner/unknown", "no name of a hub!"):
        assert model_with_adapter("m", "n", 1, path) is None


def test_a_number_keeps_its_content(tmp_path: Path) -> None:
    """The engine has loaded the weights that were there: what stands there later has another number."""
    path = adapter(tmp_path / "a", b"one")
    first = model_with_adapter("m", "n", 1, path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"two")
    assert model_with_adapter("m", "n", 1, path) == first
    assert model_with_adapter("m", "n", 2, path) != first


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise PermissionError(f"no: {path}")

    path = adapter(tmp_path / "a", b"one")
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert model_with_adapter("m", "unreadable", 1, path) is None
    monkeypatch.undo()
    assert model_with_adapter("m", "unreadable", 1, path) is not None
