"""Shapes of public models: a `config.json` is enough to run one with random weights.

Times depend on a model's shape, not on what its weights say. The values are those of the configs
that the models' publishers put beside their weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferscale.config import PoolDtype
from inferscale.errors import InvalidInput
from inferscale.model_size import kv_shape
from inferscale.row_size import RowShape

Config = dict[str, Any]

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

SHAPES: dict[str, Config] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "mistral-7b-v0.3": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2.5-7b": {
        **_LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "qwen3-14b": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "max_window_layers": 40,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}


def model_folder(shape: str) -> Path:
    """Folder with the `config.json` of a shape: a name of `SHAPES`, a folder, or a config's path.

    Raises InvalidInput for anything else.
    """
    if shape in SHAPES:
        return _write(shape, json.dumps(SHAPES[shape], indent=1))
    path = Path(shape)
    if (path / "config.json").is_file():
        return path
    if path.is_file() and path.suffix == ".json":
        if path.name == "config.json":
            return path.parent
        return _write(path.stem, path.read_text(encoding="utf-8"))
    raise InvalidInput(
        f"the shape is {shape!r}; give {', '.join(SHAPES)}, a folder with config.json, or the path of "
        "a model's config as JSON."
    )


def read_config(folder: Path) -> Config | None:
    """The `config.json` of a folder; None where there is none. Raises InvalidInput for a damaged one."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is no JSON: {error}.") from error
    return dict(config)


def token_size_bytes(
    config: Mapping[str, Any], dtype: str | None = None, pool_dtype: PoolDtype = "auto"
) -> int:
    """KV of one token in all layers, as a pool keeps it. dtype: of the engine, where not the config's."""
    shape = kv_shape(config)
    row = RowShape(((shape.heads, shape.head_dim),) * shape.layers)
    return row.row_bytes(pool_dtype, 4 if dtype == "float32" else 2)


def _write(name: str, text: str) -> Path:
    """`config.json` in a folder of this name and content in the cache."""
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "inferscale" / "shapes" / digest / name
    target = folder / "config.json"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"config.json.{os.getpid()}"
        partial.write_text(text, encoding="utf-8")
        shutil.move(partial, target)
    return folder
