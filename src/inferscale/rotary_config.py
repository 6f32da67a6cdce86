"""A model's rotary embedding, read from its configuration, or refused by name.

The formulas follow `vllm/model_executor/layers/rotary_embedding` and transformers'
`modeling_rope_utils.py`, in float32 as there, so that both sides hold the same frequencies. The
pairing style is a property of the architecture that no configuration states and no cos/sin cache
shows: where the loaded model is at hand, pass its own (`interleaved=not rotary_emb.is_neox_style`).

Layers may differ: by their type (`rope_parameters` for each, or `rope_local_base_freq`), or because
some have no rotary embedding (`no_rope_layers` and its like, whose 1 means that there is one). Which
factors of longrope count is decided by the engine's longest context, once for all requests
(vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py); an engine that changes
them during a request must not be served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inferscale.errors import NotRelocatable
from inferscale.rope import SUPPORTED, Rotary

_INTERLEAVED = frozenset(
    {
        *("codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm"),
        *("glm4", "gptj", "helium", "llama4_text"),
    }
)
"""Model types whose pairs are (0,1), (2,3), …: vLLM's `is_neox_style=False`."""

_FIXED_THETA = {"gptj": 10000.0, "codegen": 10000.0}
"""Model types with a rotary base that their configuration does not state."""

_VARIANTS = {
    "dynamic": "dynamic NTK",
    "ntk": "NTK",
    "mrope": "mrope (multimodal sections)",
    "bailing_mrope": "mrope (multimodal sections)",
    "openpangu": "mrope (multimodal sections)",
    "proportional": "proportional",
    "fope": "FoPE (Fourier)",
    "mllama4": "2D vision",
}

_NOT_ROTARY = {
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "gpt2": "learned positions",
    "gpt_bigcode": "learned positions",
    "gpt_neo": "learned positions",
    "opt": "learned positions",
    "bert": "learned positions",
    "roberta": "learned positions",
}

_ONLY_SLIDING = frozenset({"afmoe", "cohere2"})
"""Model types whose sliding-window layers are rotated and whose others are not."""

_ONLY_SLIDING_IF_ANY = frozenset({"exaone4", "exaone_moe"})
"""The same, unless no layer has a sliding window: then all are rotated."""

_UNKNOWN_LAYERS_WITHOUT = frozenset({"cohere2_moe"})

_YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
_LONGROPE = ("longrope", "su")

_NORM_BEHIND = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl"})
"""Model types that multiply each element of a rotated key by a weight of its own."""

Parameters = dict[str, Any]
"""Of one layer: `rope_type`, `rope_theta` and what else its type needs."""


def rotary_from_config(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    interleaved: bool | None = None,
    layers: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> Rotary:
    """Read a model's rotary embedding from its configuration.

    config: a Hugging Face configuration as a dict; `text_config` inside is used where there is
    one. Both forms are read: `rope_parameters`, and `rope_theta` with `rope_scaling`. head_dim:
    elements of one key head. interleaved: the pairing style, where the caller knows it; by default
    that of the model type, and half-split for types not known to be interleaved. layers: numbers in the
    model of the layers that have a cache, by default all. max_tokens: the engine's longest context, which
    longrope depends on.

    Raises NotRelocatable, naming the variant, for everything that is not in `SUPPORTED`.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and text:
        config = text
    _refuse(config)
    if layers is None:
        layers = range(int(config.get("num_hidden_layers") or 1))
    of_layers = [_parameters_of(config, layer) for layer in layers]
    rotated = [params for params in of_layers if params is not None]
    if not rotated:
        raise _refusal("no")
    sizes = {_rotary_dim(config, params, head_dim) for params in rotated}
    if len(sizes) > 1:
        raise _refusal(f"by-layer partial rotary ({sorted(sizes)} of {head_dim} elements)")
    rotary_dim = sizes.pop()
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise _refusal(f"partial rotary ({rotary_dim} of {head_dim} elements)")
    rows = [
        torch.zeros(rotary_dim // 2) if params is None else _frequencies(params, rotary_dim, max_tokens)
        for params in of_layers
    ]
    is_alike = all(torch.equal(row, rows[0]) for row in rows)
    inv_freq = (rows[0] if is_alike else torch.stack(rows)).to(torch.float64)
    if interleaved is None:
        interleaved = str(config.get("model_type", "")) in _INTERLEAVED
    return Rotary(inv_freq, head_dim, rotary_dim, interleaved)


def decided_by_context(config: Mapping[str, Any], max_tokens: int) -> str:
    """What the engine's longest context decides of keys: engines that differ here cannot read each other's.
    Empty for all but longrope."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and text:
        config = text
    given = _given(config)
    by_type = [value for value in given.values() if isinstance(value, Mapping)]
    longest = [
        _is_long(params, max_tokens)
        for params in (_completed(config, one) for one in (given, *by_type))
        if str(params.get("rope_type")) in _LONGROPE and "original_max_position_embeddings" in params
    ]
    return f"longrope {longest}" if longest else ""


def _frequencies(params: Parameters, rotary_dim: int, max_tokens: int | None) -> Tensor:
    """float32 [rotary_dim / 2], on the CPU like the engines, so that they agree to the last bit."""
    kind, theta = str(params.get("rope_type", "default")), float(params["rope_theta"])
    steps = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    inv_freq = 1.0 / steps
    try:
        if kind == "linear":
            return inv_freq / float(params["factor"])
        if kind == "llama3":
            return _llama3(inv_freq, params)
        if kind in _YARN:
            return _yarn(theta, rotary_dim, params)
        if kind in _LONGROPE:
            return 1.0 / (_longrope_factors(params, max_tokens) * steps)
    except KeyError as error:
        raise NotRelocatable(
            f"the {kind} rotary embedding lacks the parameter {error} in the model's configuration."
        ) from error
    return inv_freq


def _parameters_of(config: Mapping[str, Any], layer: int) -> Parameters | None:
    """Of one layer; None where it has no rotary embedding."""
    layer_type = _layer_type(config, layer)
    if not _is_rotated(config, layer, layer_type):
        return None
    given = _given(config)
    by_type = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    if by_type:
        if layer_type not in by_type:
            raise _refusal(f"per-layer-type (none of {sorted(by_type)} is that of layer {layer})")
        given = dict(by_type[str(layer_type)])
    local = config.get("rope_local_base_freq")
    if local is not None and not by_type:
        if layer_type is None:
            raise _refusal("per-layer-type (rope_local_base_freq without layer_types)")
        if layer_type == "sliding_attention":
            given = {"rope_theta": local}
    params = _completed(config, given)
    _refuse_variant(params)
    return params


def _given(config: Mapping[str, Any]) -> Parameters:
    """One dict from either form of configuration; dicts by layer type stay inside it."""
    given: Parameters = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if isinstance(value, Mapping):
            given.update(value)
    return given


def _completed(config: Mapping[str, Any], given: Mapping[str, Any]) -> Parameters:
    """With what the configuration says elsewhere, without None."""
    params = dict(given)
    if "rope_type" not in params and "type" in params:
        params["rope_type"] = params["type"]
    if params.get("rope_theta") is None:
        for name in ("rope_theta", "rotary_emb_base"):
            if config.get(name) is not None:
                params["rope_theta"] = config[name]
    if params.get("rope_theta") is None and config.get("model_type") in _FIXED_THETA:
        params["rope_theta"] = _FIXED_THETA[config["model_type"]]
    # As transformers does: the configuration's own value first (Phi-3), the maximum last.
    name = "original_max_position_embeddings"
    original = config.get(name) or params.get(name) or config.get("max_position_embeddings")
    if original is not None:
        params[name] = original
    return {name: value for name, value in params.items() if value is not None}


def _layer_type(config: Mapping[str, Any], layer: int) -> str | None:
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or not types:
        return None
    return str(_at(types, layer, "layer_types"))


def _is_rotated(config: Mapping[str, Any], layer: int, layer_type: str | None) -> bool:
    model_type = str(config.get("model_type", ""))
    for name in ("no_rope_layers", "use_rope_layers"):
        flags = config.get(name)
        if isinstance(flags, Sequence) and flags:
            return bool(_at(flags, layer, name))
    if model_type in _ONLY_SLIDING:
        return layer_type == "sliding_attention"
    if model_type in _ONLY_SLIDING_IF_ANY and "sliding_attention" in (config.get("layer_types") or ()):
        return layer_type == "sliding_attention"
    if (
        model_type in (*_UNKNOWN_LAYERS_WITHOUT, "llama4", "llama4_text")
        or config.get("no_rope_layer_interval")
        or config.get("nope_layer_interval")
    ):
        raise _refusal("only on some layers, it is not said which (NoPE on others)")
    return True


def _at(values: Sequence[Any], layer: int, name: str) -> Any:
    if layer >= len(values):
        raise _refusal(f"for layer {layer} unknown ({name} has {len(values)} entries)")
    return values[layer]


def _rotary_dim(config: Mapping[str, Any], params: Mapping[str, Any], head_dim: int) -> int:
    if config.get("kv_lora_rank"):  # latent attention: a part of the key of its own
        return int(config.get("qk_rope_head_dim") or 0)
    if params.get("rope_dim"):
        return int(params["rope_dim"])
    fractions = [params.get("partial_rotary_factor")]
    fractions += [config.get(n) for n in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")]
    for fraction in fractions:
        if fraction is not None:
            return int(head_dim * float(fraction))
    return int(config.get("rotary_dim") or head_dim)


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise NotRelocatable for whatever cannot be moved in any layer, naming it."""
    model_type = str(config.get("model_type", ""))
    position_type = config.get("position_embedding_type")
    alibi = config.get("alibi") or (config.get("attn_config") or {}).get("alibi")
    if alibi or position_type == "alibi":
        raise _refusal("ALiBi instead of")
    if model_type in _NOT_ROTARY:
        raise _refusal(f"{_NOT_ROTARY[model_type]} instead of")
    if position_type is not None and position_type not in ("rope", "rotary"):
        raise _refusal(f"positions of type {position_type!r} instead of")
    for name in ("local_rope_theta", "global_rope_theta"):
        if config.get(name) is not None:
            raise _refusal(f"per-layer-type ({name})")
    if model_type in _NORM_BEHIND:
        raise _refusal("a norm with weights behind its")
    if config.get("index_topk"):
        raise _refusal("sparse latent-attention (an indexer with keys of its own)")
    if config.get("dual_chunk_attention_config"):
        raise _refusal("dual chunk")


def _refuse_variant(params: Parameters) -> None:
    """The same for what a layer's own parameters say."""
    if params.get("mrope_section") or params.get("xdrope_section"):
        raise _refusal(_VARIANTS["mrope"])
    if params.get("use_fope"):
        raise _refusal(_VARIANTS["fope"])
    kind = str(params.get("rope_type", "default"))
    if kind not in ("default", "linear", "llama3", *_YARN, *_LONGROPE):
        raise _refusal(_VARIANTS.get(kind, f"unknown {kind!r}"))
    if params.get("rope_theta") is None:
        raise _refusal("no (the configuration has no rope_theta)")
    if not isinstance(params["rope_theta"], (int, float)):
        raise _refusal("by-layer (rope_theta is a list)")


def _refusal(variant: str) -> NotRelocatable:
    return NotRelocatable(
        f"this model has {variant} rotary embeddings; its keys cannot be moved to another position. "
        f"Supported are {SUPPORTED}. Serve this model with its memory as text (--injection-path none), or "
        "without the InferScale connector."
    )


def _llama3(inv_freq: Tensor, params: Mapping[str, Any]) -> Tensor:
    factor, original = float(params["factor"]), params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wave_len = 2 * math.pi / inv_freq
    smooth = (original / wave_len - low) / (high - low) if low != high else torch.zeros_like(inv_freq)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wave_len > original / low, inv_freq / factor, between)
    return torch.where(wave_len < original / high, inv_freq, scaled)


def _longrope_factors(params: Mapping[str, Any], max_tokens: int | None) -> Tensor:
    if max_tokens is None:
        raise _refusal("longrope (whose factors depend on the engine's longest context, which is not known)")
    name = "long_factor" if _is_long(params, max_tokens) else "short_factor"
    return torch.tensor(params[name], dtype=torch.float32)


def _is_long(params: Mapping[str, Any], max_tokens: int) -> bool:
    return max_tokens > int(params["original_max_position_embeddings"])


def _yarn(theta: float, rotary_dim: int, params: Mapping[str, Any]) -> Tensor:
    factor, original = float(params["factor"]), params["original_max_position_embeddings"]

    def correction_dim(num_rotations: float) -> float:
        return (rotary_dim * math.log(original / (num_rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = correction_dim(params.get("beta_fast") or 32)
    high = correction_dim(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # as in the reference: no division by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    pos_freqs = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    keep = 1 - ramp
    return (1.0 / (factor * pos_freqs)) * (1 - keep) + (1.0 / pos_freqs) * keep
