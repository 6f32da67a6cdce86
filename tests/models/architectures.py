"""Architectures of the support matrix, each as a tiny random checkpoint in Hugging Face form.

A checkpoint is a transformers configuration with a few small layers and weights from a fixed seed. Random
weights of the usual size make attention nearly uniform, and then nothing would notice a key that is turned
wrongly: the weights here are larger, biases and norms are not at their initial constants, and the matrix
proves for every row that unmoved keys are seen (`model_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Architecture:
    """One row. name: of the row and of its checkpoint. served: models that people know. keys: what is special
    about positions and keys. kind: of the transformers configuration, `KindConfig`. changes: of its sizes.
    block_size: of vLLM's cache. max_model_len: its longest context. tested_by_default: also in the quick
    part. prefix_caching: of vLLM."""

    name: str
    served: str
    keys: str
    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    max_model_len: int = 2048
    tested_by_default: bool = False
    prefix_caching: bool = True

    def config(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.kind}Config")(**{**_SIZES, **self.changes})

    def write(self, folder: Path) -> Path:
        """Its checkpoint below `folder`, unless it is there."""
        path = folder / self.name
        if not (path / "config.json").exists():
            torch.manual_seed(7)
            model = _model_of(self.config())
            with torch.no_grad():
                _make_positions_matter(model)
            model.save_pretrained(path)
        return path


def _model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _make_positions_matter(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)

    def noise(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # zero at initialization: the bias would not be tested
            weight.copy_(noise(weight.shape) * 0.5)
        elif "norm" in name and weight.ndim <= 2:
            weight.mul_(1 + 0.3 * noise(weight.shape))
            if not bool(weight.any()):  # the norms of Gemma: their weight is what is added to 1
                weight.copy_(0.3 * noise(weight.shape))
        elif name.endswith("sinks"):
            weight.copy_(noise(weight.shape))
        elif weight.ndim >= 2 and not bool(weight.std() > 0.05):  # models that ignore initializer_range
            weight.copy_(noise(weight.shape) * 0.12)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.02 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.3 * pair for pair in range(pairs)],
    }


def _plain(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **more}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_PHI4_MINI = {"rope_parameters": _longrope(12), "original_max_position_embeddings": 1024}
_MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("Llama", "Llama 2, Falcon3, Yi, DeepSeek-LLM", "plain", "Llama"),
    Architecture(
        "Llama 3",
        "Llama 3.1, 3.2, 3.3",
        "llama3 scaling",
        "Llama",
        {"rope_parameters": _LLAMA3},
        None,
        2048,
        True,
    ),
    Architecture("Mistral", "Mistral 7B v0.3", "plain", "Mistral", {"sliding_window": None}),
    Architecture(
        "Mistral Nemo",
        "Mistral Nemo, Mistral Small",
        "head size is not hidden size / heads",
        "Mistral",
        {"sliding_window": None, "head_dim": 48},
    ),
    Architecture(
        "Mixtral", "Mixtral 8x7B", "experts", "Mixtral", {"num_local_experts": 4, "sliding_window": None}
    ),
    Architecture("Qwen2", "Qwen2, Qwen2.5", "bias on keys", "Qwen2"),
    Architecture("Qwen2, YaRN", "Qwen2.5 with long context", "YaRN", "Qwen2", {"rope_parameters": _YARN}),
    Architecture(
        "Qwen2 MoE", "Qwen1.5-MoE", "experts", "Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 64}
    ),
    Architecture("Qwen3", "Qwen3", "norm on keys", "Qwen3", {"head_dim": 64}),
    Architecture("Qwen3 MoE", "Qwen3-30B-A3B", "norm on keys, experts", "Qwen3Moe", {**_MOE, "head_dim": 32}),
    Architecture("Phi-3", "Phi-3, Phi-4 (14B)", "plain", "Phi3"),
    Architecture(
        "Phi-4-mini, short context",
        "Phi-3.5-mini, Phi-4-mini up to their original length",
        "longrope (short factors), partial",
        "Phi3",
        _PHI4_MINI,
        None,
        1024,
    ),
    Architecture(
        "Phi-4-mini",
        "Phi-3.5-mini, Phi-4-mini",
        "longrope (long factors), partial",
        "Phi3",
        _PHI4_MINI,
        None,
        2048,
        True,
    ),
    Architecture("Phi", "Phi-1.5, Phi-2", "partial, bias on keys", "Phi", {"partial_rotary_factor": 0.5}),
    Architecture(
        "SmolLM3",
        "SmolLM3",
        "every fourth layer without rotary",
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]},
        None,
        2048,
        True,
    ),
    Architecture(
        "GLM-4-0414",
        "GLM-4-9B-0414, GLM-4-32B",
        "interleaved, partial",
        "Glm4",
        {"head_dim": 32, "rope_parameters": _plain(partial_rotary_factor=0.5)},
    ),
    Architecture(
        "GLM-4",
        "glm-4-9b-hf",
        "interleaved, partial",
        "Glm",
        {"head_dim": 32, "rope_parameters": _plain(partial_rotary_factor=0.5)},
        tested_by_default=True,
    ),
    Architecture("OLMo", "OLMo 1", "plain", "Olmo"),
    Architecture("OLMo 2", "OLMo 2", "norm over all heads' keys", "Olmo2"),
    Architecture("OLMoE", "OLMoE", "norm on keys, experts", "Olmoe", _MOE),
    Architecture(
        "Granite",
        "Granite 3.x",
        "attention multiplier",
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    Architecture(
        "Granite MoE",
        "Granite 3.x MoE",
        "experts",
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "Gemma", "Gemma 1", "scaled embeddings", "Gemma", {"head_dim": 64, "tie_word_embeddings": True}
    ),
    Architecture(
        "StableLM",
        "StableLM 2",
        "partial",
        "StableLm",
        {"rope_parameters": _plain(partial_rotary_factor=0.25), "use_qkv_bias": True},
    ),
    Architecture(
        "Command R",
        "Command R, Command R+",
        "interleaved",
        "Cohere",
        {"use_qk_norm": True, "tie_word_embeddings": True},
    ),
    Architecture(
        "StarCoder2", "StarCoder2", "bias on keys", "Starcoder2", {"sliding_window": None, "use_bias": True}
    ),
    Architecture("Nemotron", "Nemotron-4, Minitron", "partial", "Nemotron", {"partial_rotary_factor": 0.5}),
    Architecture("ERNIE 4.5", "ERNIE 4.5", "interleaved", "Ernie4_5", {"head_dim": 32}),
    Architecture(
        "Seed-OSS", "Seed-OSS-36B", "bias on keys", "SeedOss", {"head_dim": 32, "attention_bias": True}
    ),
    Architecture("Arcee", "AFM-4.5B", "plain", "Arcee", {"head_dim": 32}),
    Architecture(
        "Apertus", "Apertus", "norm on keys, llama3 scaling", "Apertus", {"rope_parameters": _LLAMA3}
    ),
    Architecture(
        "HunYuan",
        "Hunyuan 0.5B to 7B",
        "norm on keys behind the rotation",
        "HunYuanDenseV1",
        {"head_dim": 32},
    ),
    Architecture(
        "DeepSeek V2",
        "DeepSeek-V2",
        "latent attention, DeepSeek YaRN",
        "DeepseekV2",
        {**_MLA, "q_lora_rank": None, "rope_parameters": _YARN},
    ),
    Architecture(
        "DeepSeek V3",
        "DeepSeek-V3, R1, Kimi K2",
        "latent attention",
        "DeepseekV3",
        {**_MLA, "q_lora_rank": 48, "n_group": 2, "n_routed_experts": 8, "topk_method": "noaux_tc"},
    ),
    Architecture(
        "Mistral, sliding window", "Mistral 7B v0.1", "sliding window", "Mistral", {"sliding_window": 160}
    ),
    Architecture(
        "Gemma 2",
        "Gemma 2",
        "every other layer has a sliding window",
        "Gemma2",
        {"head_dim": 32, "sliding_window": 160, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    Architecture(
        "Gemma 3",
        "Gemma 3",
        "sliding windows, two rotary bases",
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 160,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    Architecture(
        "Command R7B",
        "Command R7B, Command A",
        "interleaved, sliding windows, other layers without rotary",
        "Cohere2",
        {"sliding_window": 160, "num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    Architecture(
        "gpt-oss",
        "gpt-oss-20b, gpt-oss-120b",
        "sinks, sliding windows, YaRN",
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 160,
            "num_hidden_layers": 4,
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    Architecture(
        "Llama 4",
        "Llama 4 (text)",
        "interleaved, chunked attention, some layers without rotary",
        "Llama4Text",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "attention_chunk_size": 256,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Architecture(
        "OLMo 3",
        "OLMo 3",
        "sliding windows",
        "Olmo3",
        {"sliding_window": 160, "num_hidden_layers": 4},
    ),
    Architecture(
        "EXAONE 4",
        "EXAONE 4.0",
        "sliding windows, other layers without rotary",
        "Exaone4",
        {"sliding_window": 160, "num_hidden_layers": 4, "sliding_window_pattern": 4, "head_dim": 32},
    ),
    Architecture("GPT-2", "GPT-2", "learned positions", "GPT2", {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    Architecture("OPT", "OPT", "learned positions", "OPT", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    Architecture(
        "BLOOM", "BLOOM", "ALiBi", "Bloom", {"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}
    ),
    Architecture(
        "Granite 4 hybrid",
        "Granite 4.0 H",
        "state-space layers",
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
        prefix_caching=False,  # vLLM 0.32 cannot keep states of these layers on a CPU
    ),
)
