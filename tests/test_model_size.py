"""Sizes of models from their configuration and the headers of their weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inferscale.budget import ModelSize
from inferscale.model_size import file_bytes, model_size, parameters

LLAMA_31_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = {
    **LLAMA_31_8B,
    "vocab_size": 32000,
    "num_local_experts": 8,
}
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def folder_with(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA_31_8B, 8.03), (MIXTRAL_8X7B, 46.7), (SMOLLM2_135M, 0.1345)]
)
def test_parameters(config: dict[str, Any], billions: float) -> None:
    assert parameters(config) / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_folder_without_weights_is_estimated_from_its_configuration(tmp_path: Path) -> None:
    size = model_size(str(folder_with(tmp_path, LLAMA_31_8B)), {})
    assert size is not None
    assert size.weight_bytes == pytest.approx(16.06e9, rel=0.002)
    assert size[1:] == (2 * 32 * 8 * 128 * 2, 131072, False)


def test_arguments_of_the_engine_count(tmp_path: Path) -> None:
    folder = str(folder_with(tmp_path, LLAMA_31_8B))

    def size(**arguments: Any) -> ModelSize:
        found = model_size(folder, arguments)
        assert found is not None
        return found

    plain, full = size(), size(dtype="float32")
    assert (full.weight_bytes, full.token_bytes) == (2 * plain.weight_bytes, 2 * plain.token_bytes)  # type: ignore[operator]
    assert size(dtype=torch.float16) == size(dtype="half") == size(dtype="auto") == plain
    assert size(tensor_parallel_size=2).token_bytes == plain.token_bytes // 2
    assert size(tensor_parallel_size=16).token_bytes == plain.token_bytes // 8, "heads are not split further"
    assert size(max_model_len=4096)[2:] == (4096, True)
    assert size(max_model_len=-1)[2:] == (131072, False)
    assert size(quantization="fp8").weight_bytes == plain.weight_bytes // 4  # type: ignore[operator]
    assert size(hf_overrides={"num_hidden_layers": 16}).token_bytes == plain.token_bytes // 2


def test_files_are_read_by_their_headers(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        {**SMOLLM2_135M, "torch_dtype": "float32", "max_position_embeddings": 8192},
        a=torch.zeros(100, 10),
        b=torch.zeros(7, dtype=torch.bfloat16),
        scalar=torch.tensor(1, dtype=torch.int64),
    )
    assert file_bytes(folder, 2) == 2 * 1007 + 8
    assert file_bytes(folder, 4) == 4 * 1007 + 8
    assert file_bytes(folder, 2, is_quantized=True) == 4 * 1000 + 2 * 7 + 8
    size = model_size(str(folder), {})
    assert size == ModelSize(2 * 1007 + 8, 2 * 30 * 3 * 64 * 2, 8192)


def test_only_files_of_the_index_count(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SMOLLM2_135M)
    for name in ("model-1", "model-2", "consolidated"):
        save_file({name: torch.zeros(50, dtype=torch.float16)}, folder / f"{name}.safetensors")
    assert file_bytes(folder, 2) == 300
    weight_map = {"x": "model-1.safetensors", "y": "model-2.safetensors", "z": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert file_bytes(folder, 2) == 200


def test_the_language_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    size = model_size(str(folder_with(tmp_path, {"vision_config": {}, "text_config": LLAMA_31_8B})), {})
    assert size is not None
    assert size.token_bytes == 2**17


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"hidden_size": 0, "num_attention_heads": 0}', "{"])
def test_what_cannot_be_read_has_no_size(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert model_size(str(tmp_path), {}) is None


def test_models_that_are_not_there_have_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "model.gguf").write_text("GGUF")
    for model in (str(tmp_path), str(tmp_path / "model.gguf"), str(tmp_path / "none"), "nobody/nothing"):
        assert model_size(model, {}) is None


def test_damaged_weights_have_no_size(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**SMOLLM2_135M, "max_position_embeddings": 1})
    for content in (b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]"):
        (folder / "model.safetensors").write_bytes(content)
        assert model_size(str(folder), {}) is None
