"""How large a model is, from its configuration and the headers of its weight files; nothing is loaded.

For dividing memory before an engine starts (`budget`). These are estimates, on the low side where the
files do not tell: what fits must not be refused. Knows neither vLLM nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.budget import MIN_CACHE_TOKENS, ModelSize

_ITEM_BYTES = {
    "float64": 8, "double": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
}  # fmt: skip
_STORED_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32}
_STORED_BITS |= {"I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100_000_000


def model_size(model: str, engine_args: Mapping[str, Any]) -> ModelSize | None:
    """Sizes of a model for one worker of an engine with these arguments of `vllm.LLM`.

    model: a folder, or a hub name whose files are in the local cache or can be had. None where the
    configuration cannot be read or is of another form, such as that of a GGUF file.
    """
    folder = _folder_of(model, engine_args.get("revision"))
    if folder is None:
        return None
    try:
        return _size(_config_of(folder, engine_args), folder, engine_args)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


def model_kv_shape(model: str) -> KvShape | None:
    """What a model keeps of a token, all workers together. model, None: as in `model_size`."""
    folder = _folder_of(model, None)
    if folder is None:
        return None
    try:
        return kv_shape(_config_of(folder, {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


def _config_of(folder: Path, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    overrides = engine_args.get("hf_overrides")
    return config | dict(overrides) if isinstance(overrides, Mapping) else config


class KvShape(NamedTuple):
    """What a model keeps of each token: 2 · layers · heads · head_dim elements."""

    layers: int
    heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim


def kv_shape(config: Mapping[str, Any], ranks: int = 1) -> KvShape:
    """Of one of so many workers. Raises KeyError for a configuration of another form."""
    text = config.get("text_config") or config
    heads = text["num_attention_heads"]
    kv_heads = max(1, (text.get("num_key_value_heads") or heads) // ranks)
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return KvShape(text["num_hidden_layers"], kv_heads, head_dim)


def _size(config: Mapping[str, Any], folder: Path, engine_args: Mapping[str, Any]) -> ModelSize:
    text = config.get("text_config") or config
    ranks = int(engine_args.get("tensor_parallel_size") or 1)
    item_bytes = _item_bytes(engine_args.get("dtype", "auto"), config, text)
    kv_item = _ITEM_BYTES.get(_dtype_name(engine_args.get("kv_cache_dtype", "auto")), item_bytes)
    weights = file_bytes(folder, item_bytes, is_quantized="quantization_config" in config)
    if weights is None:
        weights = item_bytes * parameters(text)
        if "quantization_config" in config:
            weights //= 4
    if engine_args.get("quantization") and "quantization_config" not in config:
        weights //= 4  # quantized while it is loaded, to four bits at the least
    given = engine_args.get("max_model_len")
    is_given = isinstance(given, int) and given > 0
    return ModelSize(
        weights // ranks,
        kv_shape(config, ranks).elements * kv_item,
        int(given)
        if isinstance(given, int) and is_given
        else int(text.get("max_position_embeddings") or MIN_CACHE_TOKENS),
        is_given,
    )


def parameters(config: Mapping[str, Any]) -> int:
    """Parameters of a decoder with gated feed-forward layers or experts, from its configuration."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    experts = next(
        (
            config[name]
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if config.get(name)
        ),
        0,
    )
    width = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
    feed_forward = 3 * hidden * width * max(1, experts)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(config["num_hidden_layers"] * (attention + feed_forward) + embeddings)


def file_bytes(folder: Path, item_bytes: int, *, is_quantized: bool = False) -> int | None:
    """Bytes that the folder's safetensors take once loaded; None where there are none.

    item_bytes: of the dtype that they are loaded in; quantized ones keep their own.
    """
    files = list(_weight_files(folder))
    if not files:
        return None
    total = 0
    for path in files:
        for tensor in _header(path).values():
            bits = _STORED_BITS.get(tensor["dtype"], 8)
            if tensor["dtype"] in _FLOATS and not is_quantized:
                bits = 8 * item_bytes
            total += math.prod(tensor["shape"]) * bits // 8
    return total


def _weight_files(folder: Path) -> Iterable[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # a folder may hold a second copy under other names
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [path for name in names if (path := folder / name).is_file()]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Name → dtype and shape, from the JSON at the start of the file (safetensors' own format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _item_bytes(dtype: object, config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Bytes of one weight; vLLM loads float32 checkpoints in half precision unless told otherwise."""
    name = _dtype_name(dtype)
    if name in _ITEM_BYTES:
        return _ITEM_BYTES[name]
    stored = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return min(2, _ITEM_BYTES.get(_dtype_name(stored), 2))


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _folder_of(model: str, revision: object) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists():
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        named = revision if isinstance(revision, str) else None
        return Path(hf_hub_download(model, "config.json", revision=named)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return None
