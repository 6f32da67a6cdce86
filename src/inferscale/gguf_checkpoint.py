"""Turns a GGUF file of a llama-type model with a GPT-2-style tokenizer into a Hugging Face checkpoint.

Quantized weights are dequantized and stored as bfloat16. Four things get lost or changed when a
model becomes a GGUF file, and are put back here:

- llama.cpp stores the rows of the query and key matrices interleaved; Hugging Face's rotary code
  wants the two halves of each head apart.
- The pre-tokenizer is only named. `smollm` splits digits, then works on bytes with the GPT-2 regex.
- `rope_theta` is written beside `rope_parameters`: older readers know only the former and would
  fall back to 10,000 in silence.
- Norm epsilon and theta are float32 in the file (9.9999997e-06 for 1e-05).

Knows nothing of where the file came from. Needs `gguf`, `tokenizers`, `safetensors` and `torch`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscale.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_CONTROL_TOKEN = 3
"""Value of `tokenizer.ggml.token_type` for a token that text never produces."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(gguf_path: Path, out: Path) -> None:
    """Write config, generation config, tokenizer and weights of `gguf_path` into the folder `out`.

    Raises EngineError for an architecture, tokenizer or tensor that this converter does not know.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _refuse_unknown(fields, gguf_path)
    out.mkdir(parents=True, exist_ok=True)
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_json(out / "config.json", hf_config(fields, tied))
    _write_json(out / "generation_config.json", _token_ids(fields))
    _write_tokenizer(fields, out)
    _write_weights(reader, fields, out)


def hf_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """`config.json` for the GGUF metadata `fields`."""
    hidden_size = fields["llama.embedding_length"]
    num_heads = fields["llama.attention.head_count"]
    theta = _short_float(fields.get("llama.rope.freq_base", 10_000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "head_dim": hidden_size // num_heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "num_hidden_layers": fields["llama.block_count"],
        "rms_norm_eps": _short_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        **_token_ids(fields),
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of the GGUF metadata `fields`, control tokens included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _control_tokens(fields)]
    )
    return tokenizer


def _refuse_unknown(fields: dict[str, Any], path: Path) -> None:
    for name, known in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(name) != known:
            raise EngineError(
                f"{path.name} has {name} {fields.get(name)!r}; this converter knows {known!r} only. "
                "Use a checkpoint in Hugging Face form instead."
            )
    if any(name.startswith("llama.rope.scaling.") for name in fields):
        raise EngineError(
            f"{path.name} uses rotary scaling, which this converter does not know. "
            "Use a checkpoint in Hugging Face form instead."
        )


def _write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    build_tokenizer(fields).save(str(out / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    control = _control_tokens(fields)
    ids = _token_ids(fields)
    named = {
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)],
    }
    special = {"content": "", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _write_json(
        out / "tokenizer_config.json",
        {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(tokens.index(token)): {**special, "content": token, "special": True} for token in control
            },
            "chat_template": fields.get("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
        },
    )
    _write_json(out / "special_tokens_map.json", named)


def _write_weights(reader: GGUFReader, fields: dict[str, Any], out: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    num_heads = fields["llama.attention.head_count"]
    num_kv_heads = fields.get("llama.attention.head_count_kv", num_heads)
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(".attn_q.weight"):
            array = _halves_apart(array, num_heads)
        elif tensor.name.endswith(".attn_k.weight"):
            array = _halves_apart(array, num_kv_heads)
        weights[_hf_name(tensor.name)] = torch.tensor(array, dtype=torch.bfloat16)
    path = out / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by the owner only


def _halves_apart(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from (0, d/2, 1, d/2 + 1, …) to (0, 1, 2, …). Shape [heads * dim, hidden]."""
    rows, columns = weight.shape
    split = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise EngineError(
            f"the GGUF file has a tensor {name!r}, which a plain llama-type model does not have. "
            "Use a checkpoint in Hugging Face form instead."
        )
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _control_tokens(fields: dict[str, Any]) -> list[str]:
    types = fields["tokenizer.ggml.token_type"]
    return [
        t for t, kind in zip(fields["tokenizer.ggml.tokens"], types, strict=True) if kind == _CONTROL_TOKEN
    ]


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", eos),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
    }


def _short_float(value: float) -> float:
    """The decimal number that a float32 was made from: 9.9999997e-06 → 1e-05."""
    return float(f"{value:.6g}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
