"""Tiny random checkpoints, the same in every run, in Hugging Face form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512
MAX_POSITIONS = 4096

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "mistral")


def make_checkpoint(family: str, folder: Path) -> Path:
    """Write the checkpoint of `family` below `folder`, unless it is there."""
    path = folder / family
    if path.exists():
        return path
    torch.manual_seed(7)
    model = _build(family)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):  # zero at initialization: the bias would not be tested
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
            elif name.endswith("norm.weight"):
                weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path)
    return path


def _build(family: str) -> Any:
    import transformers as hf

    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES))
    if family == "llama3":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_SCALING))
    if family == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_SIZES))
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**_SIZES, "head_dim": 64}))
    if family == "mistral":
        return hf.MistralForCausalLM(
            hf.MistralConfig(**{**_SIZES, "num_key_value_heads": 4}, sliding_window=None)
        )
    if family == "mistral_sliding":
        return hf.MistralForCausalLM(hf.MistralConfig(**_SIZES, sliding_window=160))
    raise ValueError(f"unknown family {family!r}")
