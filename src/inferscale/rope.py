"""Where a key is rotated from and to: rotary frequencies and the relocation of keys.

A rotary embedding turns the pair of key elements j at position p by the angle p * inv_freq[j].
Turning it further by (new - old) * inv_freq[j] gives the key of the new position, so keys can be
kept free of their serving position and moved when they are injected. That holds for every variant
whose frequencies depend neither on the position, nor on the length of the sequence, nor on the
layer: plain, linear, llama3-scaled and YaRN, partial rotary, half-split and interleaved pairs.
Everything else is refused by name.

YaRN's magnitude (mscale, attention_factor) multiplies cos and sin by one constant: a cached key is
m * R(p) k. Rotations are linear, R(d) (m * R(p) k) = m * R(p + d) k, so the constant stays in the
key and plays no role in moving it.

The formulas follow `vllm/model_executor/layers/rotary_embedding` and transformers'
`modeling_rope_utils.py`, in float32 as there, so that both sides hold the same frequencies. This
module knows neither vLLM nor a paged cache. The pairing style is a property of the architecture
that no configuration states and no cos/sin cache shows: where the loaded model is at hand, pass
its own (`interleaved=not rotary_emb.is_neox_style`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inferscale.errors import NotRelocatable

SUPPORTED = (
    "plain rotary, linear scaling, llama3 scaling and YaRN, each with full or partial rotary, "
    "half-split or interleaved"
)

_INTERLEAVED = frozenset({"cohere", "codegen", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium"})
"""Model types whose pairs are (0,1), (2,3), …: vLLM's `is_neox_style=False` on ordinary attention."""

_FIXED_THETA = {"gptj": 10000.0, "codegen": 10000.0}
"""Model types with a rotary base that their configuration does not state."""

_VARIANTS = {
    "dynamic": "dynamic NTK",
    "ntk": "NTK",
    "longrope": "longrope",
    "su": "longrope",
    "mrope": "mrope (multimodal sections)",
    "bailing_mrope": "mrope (multimodal sections)",
    "openpangu": "mrope (multimodal sections)",
    "proportional": "proportional",
    "fope": "FoPE (Fourier)",
    "deepseek_yarn": "DeepSeek YaRN on latent attention",
    "deepseek_llama_scaling": "DeepSeek scaling on latent attention",
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

_SOME_LAYERS_WITHOUT = frozenset({"afmoe", "cohere2", "cohere2_moe", "llama4", "llama4_text"})
"""Model types where some layers have no rotary embedding, whatever the configuration says."""


class CosSin(NamedTuple):
    """cos and sin of rotary angles, each float32 [n, rotary_dim / 2], without any magnitude."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one model.

    inv_freq: float64 [rotary_dim / 2], radians per position; the values are those of the engine's
    float32. head_dim, rotary_dim: elements of a key head, and how many of them (the first ones)
    are rotated. interleaved: pairs are (0,1), (2,3), …; otherwise (0, rotary_dim/2), (1, …), ….
    """

    inv_freq: Tensor
    head_dim: int
    rotary_dim: int
    interleaved: bool

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise NotRelocatable(
                f"{self.rotary_dim} of {self.head_dim} elements of a key head would be rotated; it must be "
                "an even number from 2 to the size of the head."
            )
        assert self.inv_freq.shape == (self.rotary_dim // 2,)

    def cos_sin(self, positions: Tensor) -> CosSin:
        """cos and sin of the angles at `positions`, any integer tensor [n]; negative is allowed.

        The angle is formed in float64, so that it is exact to float32 at any position.
        """
        angles = torch.outer(positions.to(torch.float64), self.inv_freq.to(positions.device))
        return CosSin(angles.cos().to(torch.float32), angles.sin().to(torch.float32))

    def check_against_cache(self, cache: Tensor, *, is_neox_style: bool | None = None) -> None:
        """Check the frequencies, and the style where given, against the engine's own.

        cache: `cos_sin_cache` of the engine's rotary module, float [max_pos, rotary_dim], rows of
        cos then sin, all multiplied by one constant (YaRN's magnitude). is_neox_style: that
        module's attribute; a cache does not show which elements form a pair.

        The deviation in angle allowed at a position covers the rounding of the cache's dtype and
        of float32 frequencies and angles, which grows with the angle. Raises NotRelocatable.
        """
        if is_neox_style is not None and is_neox_style == self.interleaved:
            raise NotRelocatable(
                f"the engine pairs key elements {_style(not is_neox_style)}, but this rotary embedding was "
                f"read as {_style(self.interleaved)}; build it with interleaved={not is_neox_style}."
            )
        if cache.shape[1:] != (self.rotary_dim,) or not cache.numel() or not cache.is_floating_point():
            raise NotRelocatable(
                f"the engine's cos/sin cache is {cache.dtype} {list(cache.shape)}; expected is a "
                f"floating-point cache [positions, {self.rotary_dim}]. Supported are {SUPPORTED}."
            )
        positions = _spread(cache.shape[0]).to(cache.device)
        cos, sin = cache[positions].to(torch.float64).chunk(2, dim=-1)
        magnitude = torch.hypot(cos, sin)
        angles = torch.outer(positions.to(torch.float64), self.inv_freq.to(cache.device))
        eps = torch.finfo(cache.dtype).eps
        typical = magnitude.median()
        if not bool(typical > 0) or bool(((magnitude - typical).abs() > 4 * eps * typical).any()):
            raise NotRelocatable(
                "the entries of the engine's cos/sin cache do not share one magnitude, so they are no plain "
                f"rotation. Supported are {SUPPORTED}."
            )
        across = (cos * angles.sin() - sin * angles.cos()).abs() / magnitude
        along = (cos * angles.cos() + sin * angles.sin()) / magnitude
        excess = across - (2 * eps + 2**-21 * angles)
        excess = torch.where(along > 0, excess, 1.0)
        if bool((excess > 0).any()):
            row, pair = divmod(int(excess.argmax()), self.rotary_dim // 2)
            raise NotRelocatable(
                "the engine's cos/sin cache differs from the frequencies of the model's configuration, most "
                f"of all at position {int(positions[row])}, pair {pair}. This rotary variant is unknown. "
                f"Supported are {SUPPORTED}."
            )


def rotary_from_config(
    config: Mapping[str, Any], head_dim: int, *, interleaved: bool | None = None
) -> Rotary:
    """Read a model's rotary embedding from its configuration.

    config: a Hugging Face configuration as a dict; `text_config` inside is used where there is
    one. Both forms are read: `rope_parameters`, and `rope_theta` with `rope_scaling`. head_dim:
    elements of one key head. interleaved: the pairing style, where the caller knows it; by default
    that of the model type, and half-split for types not known to be interleaved.

    Raises NotRelocatable, naming the variant, for everything that is not in `SUPPORTED`.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and text:
        config = text
    params = _rope_parameters(config)
    _refuse(config, params)
    rotary_dim = _rotary_dim(config, params, head_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise _refusal(f"partial rotary ({rotary_dim} of {head_dim} elements)")
    kind = str(params.get("rope_type", "default"))
    theta = float(params["rope_theta"])
    # In float32 on the CPU, like the engines, so that the frequencies agree to the last bit.
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
    try:
        if kind == "linear":
            inv_freq = inv_freq / float(params["factor"])
        elif kind == "llama3":
            inv_freq = _llama3(inv_freq, params)
        elif kind == "yarn":
            inv_freq = _yarn(theta, rotary_dim, params)
    except KeyError as error:
        raise NotRelocatable(
            f"the {kind} rotary embedding lacks the parameter {error} in the model's configuration."
        ) from error
    if interleaved is None:
        interleaved = str(config.get("model_type", "")) in _INTERLEAVED
    return Rotary(inv_freq.to(torch.float64), head_dim, rotary_dim, interleaved)


def delta_cos_sin(deltas: Tensor, rotary: Rotary) -> CosSin:
    """cos and sin for moving keys by `deltas`: integers [n] → float32 [n, rotary_dim / 2] each.

    The tokens of a segment stand together and share one delta, so each run is computed once. Deltas on the
    CPU avoid a synchronization with the GPU.
    """
    distinct, inverse = torch.unique_consecutive(deltas, return_inverse=True)
    cos, sin = rotary.cos_sin(distinct)
    return CosSin(cos[inverse], sin[inverse])


def relocate(keys: Tensor, deltas: Tensor, rotary: Rotary) -> Tensor:
    """Move keys to other positions; a new tensor, `keys` is left alone.

    keys: [..., n, heads, head_dim], for example [layers, n, heads, head_dim], any floating dtype.
    deltas: integers [n], new position minus old position, shared by all leading dimensions.

    The rotation runs in float32 and is rounded once to the dtype of `keys`. Rows with delta 0 and
    the elements behind `rotary_dim` keep their bits.
    """
    assert deltas.shape == keys.shape[-3:-2], (deltas.shape, keys.shape)
    cos, sin = delta_cos_sin(deltas, rotary)
    moved = rotate(keys, cos.to(keys.device), sin.to(keys.device), rotary)
    return torch.where((deltas == 0).to(keys.device)[:, None, None], keys, moved)


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys [..., n, heads, head_dim] by the angles of cos and sin, float32 [n, rotary_dim / 2].

    In float32, rounded once to the dtype of `keys`. No branch depends on values: it compiles.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = keys[..., : rotary.rotary_dim].to(torch.float32)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        result = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((result.to(keys.dtype), keys[..., rotary.rotary_dim :]), dim=-1)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """One dict from either form of configuration, without None; per-layer dicts stay inside it."""
    params: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if isinstance(given, Mapping):
            params.update(given)
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


def _rotary_dim(config: Mapping[str, Any], params: Mapping[str, Any], head_dim: int) -> int:
    if params.get("rope_dim"):
        return int(params["rope_dim"])
    fractions = [params.get("partial_rotary_factor")]
    fractions += [config.get(n) for n in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")]
    for fraction in fractions:
        if fraction is not None:
            return int(head_dim * float(fraction))
    return int(config.get("rotary_dim") or head_dim)


def _refuse(config: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Raise NotRelocatable for whatever cannot be moved, naming it."""
    model_type = str(config.get("model_type", ""))
    position_type = config.get("position_embedding_type")
    alibi = config.get("alibi") or (config.get("attn_config") or {}).get("alibi")
    if alibi or position_type == "alibi":
        raise _refusal("ALiBi instead of")
    if model_type in _NOT_ROTARY:
        raise _refusal(f"{_NOT_ROTARY[model_type]} instead of")
    if position_type is not None and position_type not in ("rope", "rotary"):
        raise _refusal(f"positions of type {position_type!r} instead of")
    if any(isinstance(value, Mapping) for value in params.values()):
        raise _refusal("per-layer-type")
    for name in ("rope_local_base_freq", "local_rope_theta", "global_rope_theta"):
        if config.get(name) is not None:
            raise _refusal(f"per-layer-type ({name})")
    if _has_layers_without(config, model_type):
        raise _refusal("only on some layers (NoPE on others)")
    if config.get("kv_lora_rank"):
        raise _refusal("latent-attention (MLA)")
    if config.get("dual_chunk_attention_config"):
        raise _refusal("dual chunk")
    if params.get("mrope_section") or params.get("xdrope_section"):
        raise _refusal(_VARIANTS["mrope"])
    if params.get("use_fope"):
        raise _refusal(_VARIANTS["fope"])
    kind = str(params.get("rope_type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise _refusal(_VARIANTS.get(kind, f"unknown {kind!r}"))
    if params.get("rope_theta") is None:
        raise _refusal("no (the configuration has no rope_theta)")


def _has_layers_without(config: Mapping[str, Any], model_type: str) -> bool:
    if model_type in _SOME_LAYERS_WITHOUT:
        return True
    if model_type in ("exaone4", "exaone_moe"):
        return "sliding_attention" in (config.get("layer_types") or ())
    for name in ("no_rope_layers", "use_rope_layers"):
        flags = config.get(name)
        if isinstance(flags, Sequence) and flags:
            return not all(flags)
    return bool(config.get("no_rope_layer_interval") or config.get("nope_layer_interval"))


def _refusal(variant: str) -> NotRelocatable:
    return NotRelocatable(
        f"this model has {variant} rotary embeddings; its keys cannot be moved to another position. "
        f"Supported are {SUPPORTED}. Serve this model without the InferScale connector."
    )


def _llama3(inv_freq: Tensor, params: Mapping[str, Any]) -> Tensor:
    factor, original = float(params["factor"]), params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wave_len = 2 * math.pi / inv_freq
    smooth = (original / wave_len - low) / (high - low) if low != high else torch.zeros_like(inv_freq)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wave_len > original / low, inv_freq / factor, between)
    return torch.where(wave_len < original / high, inv_freq, scaled)


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


def _spread(num_positions: int) -> Tensor:
    """Positions 0 … num_positions - 1 to look at: the first ones, geometric steps, even steps."""
    last = max(num_positions - 1, 0)
    some = set(range(min(num_positions, 17))) | {last}
    some |= {round(last * i / 64) for i in range(64)}
    some |= {min(last, round(2 ** (i / 2))) for i in range(8, 2 * last.bit_length())}
    return torch.tensor(sorted(some), dtype=torch.int64)


def _style(interleaved: bool) -> str:
    return "interleaved" if interleaved else "half-split"
