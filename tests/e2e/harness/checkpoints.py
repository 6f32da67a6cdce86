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
    raise ValueError(f"unknown family {family!r}")


def make_adapter(base: Path, folder: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA adapter on a llama checkpoint, in PEFT's form, and beside it (`merged`) the model with it."""
    import json

    import transformers as hf
    from safetensors.torch import save_file

    path = folder / f"adapter-{seed}"
    if path.exists():
        return path
    model = hf.AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in targets:
            down = torch.randn(rank, module.in_features, generator=generator) * 0.1
            up = torch.randn(module.out_features, rank, generator=generator) * 0.1
            weights[f"base_model.model.{name}.lora_A.weight"] = down
            weights[f"base_model.model.{name}.lora_B.weight"] = up
            with torch.no_grad():
                module.weight += 2.0 * up @ down
    path.mkdir(parents=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (path / "adapter_config.json").write_text(
        json.dumps({**config, "task_type": "CAUSAL_LM", "bias": "none"})
    )
    model.save_pretrained(path / "merged")
    return path


def make_quantized(base: Path, folder: Path) -> Path:
    """The layers' weights of a checkpoint with a byte an element (compressed-tensors, W8A8)."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    path = folder / "quantized"
    shutil.copytree(base, path)
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
