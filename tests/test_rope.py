"""Rotary frequencies against vLLM and transformers, and the invariant of moving keys."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from inferscale.errors import NotRelocatable
from inferscale.rope import Rotary, delta_cos_sin, relocate, rotate
from inferscale.rotary_config import rotary_from_config

HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "large_theta": {"rope_type": "default", "rope_theta": 5000000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn_magnitude": {**YARN, "attention_factor": 1.7},
    "yarn_betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn_no_truncate": {**YARN, "truncate": False},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "partial_quarter": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "partial_yarn": {**YARN, "partial_rotary_factor": 0.5},
}
MAX_POSITION = {"yarn": 4096, "llama3": 4096}

every_variant = pytest.mark.parametrize("name", list(VARIANTS))
every_style = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
# vLLM's and torch's own, at import.
quiet_vllm = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def config_of(name: str, **more: Any) -> dict[str, Any]:
    params = dict(VARIANTS[name])
    limit = MAX_POSITION.get(str(params["rope_type"]), 2048)
    return {
        "model_type": "llama",
        "rope_parameters": params,
        "max_position_embeddings": limit,
        "hidden_size": 4 * HEAD_DIM,
        "num_attention_heads": 4,
        "head_dim": HEAD_DIM,
        **more,
    }


def project(keys: Tensor, positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """Reference: rotate unrotated keys [..., n, heads, head_dim] to `positions`, all in `dtype`.

    Written with complex numbers in float64 and with a rotated copy otherwise, unlike the code
    under test.
    """
    angles = torch.outer(positions.double(), rotary.inv_freq)
    half = rotary.rotary_dim // 2
    first = torch.arange(half) * 2 if rotary.interleaved else torch.arange(half)
    second = first + (1 if rotary.interleaved else half)
    out = keys.to(dtype).clone()
    if dtype == torch.float64:
        pairs = torch.complex(out[..., first], out[..., second])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, :]
        out[..., first], out[..., second] = pairs.real, pairs.imag
        return out
    cos, sin = angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :]
    one, two = out[..., first].clone(), out[..., second].clone()
    out[..., first] = one * cos + (-two) * sin
    out[..., second] = two * cos + one * sin
    return out


def some_keys(dtype: torch.dtype, n: int = 37, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, 3, HEAD_DIM, generator=generator).to(dtype)


def positions_of(n: int, seed: int, limit: int = 4000) -> Tensor:
    return torch.randint(0, limit, (n,), generator=torch.Generator().manual_seed(seed))


@every_variant
@every_style
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moving_equals_projecting(name: str, interleaved: bool, dtype: torch.dtype) -> None:
    rotary = rotary_from_config(config_of(name), HEAD_DIM, interleaved=interleaved)
    keys = some_keys(dtype)
    old, new = positions_of(37, 1), positions_of(37, 2)
    truth = project(keys, new, rotary, torch.float64)
    stored = project(keys, old, rotary, torch.float64).to(dtype)
    moved = relocate(stored, new - old, rotary)
    same_precision = (project(keys, new, rotary, dtype).double() - truth).abs().max()
    assert moved.dtype == dtype
    assert moved.shape == keys.shape
    assert (moved.double() - truth).abs().max() <= 2 * same_precision


@every_style
def test_moves_compose_and_come_back(interleaved: bool) -> None:
    rotary = rotary_from_config(config_of("llama3"), HEAD_DIM, interleaved=interleaved)
    keys = some_keys(torch.float32)
    there, further = positions_of(37, 3) - 2000, positions_of(37, 4) - 2000
    assert (there < 0).any()
    assert (there > 0).any()
    two_moves = relocate(relocate(keys, there, rotary), further, rotary)
    torch.testing.assert_close(two_moves, relocate(keys, there + further, rotary), atol=3e-6, rtol=0)
    torch.testing.assert_close(
        relocate(relocate(keys, there, rotary), -there, rotary), keys, atol=3e-6, rtol=0
    )
    assert not torch.allclose(relocate(keys, there, rotary), keys, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_style
def test_zero_delta_keeps_every_bit(dtype: torch.dtype, interleaved: bool) -> None:
    rotary = rotary_from_config(config_of("plain"), HEAD_DIM, interleaved=interleaved)
    keys = some_keys(dtype)
    keys[0, 0, 0, :4] = torch.tensor([-0.0, float("inf"), float("nan"), 0.0])
    deltas = torch.zeros(37, dtype=torch.int64)
    deltas[1] = 5
    view = torch.int32 if dtype == torch.float32 else torch.int16
    before, after = keys.view(view), relocate(keys, deltas, rotary).view(view)
    still = deltas == 0
    assert torch.equal(before[:, still], after[:, still])
    assert not torch.equal(before[:, ~still], after[:, ~still])


def test_elements_behind_rotary_dim_keep_every_bit() -> None:
    rotary = rotary_from_config(config_of("partial_quarter"), HEAD_DIM)
    keys = some_keys(torch.bfloat16)
    moved = relocate(keys, torch.arange(1, 38), rotary)
    assert rotary.rotary_dim == 16
    assert torch.equal(keys[..., 16:].view(torch.int16), moved[..., 16:].view(torch.int16))
    assert (keys[..., :16] != moved[..., :16]).any(dim=(0, 1, 2)).all()


def test_relocate_leaves_its_argument_alone_and_takes_any_leading_dims() -> None:
    rotary = rotary_from_config(config_of("plain"), HEAD_DIM)
    keys, deltas = some_keys(torch.float32), positions_of(37, 5) - 1000
    copy = keys.clone()
    both = relocate(keys, deltas, rotary)
    assert torch.equal(keys, copy)
    assert torch.equal(both[1], relocate(keys[1], deltas, rotary))
    assert relocate(keys[0, :0], deltas[:0], rotary).shape == (0, 3, HEAD_DIM)


def test_large_positions_stay_exact() -> None:
    rotary = rotary_from_config(config_of("plain"), HEAD_DIM)
    positions = torch.tensor([10_000_019, -10_000_019])
    cos, sin = rotary.cos_sin(positions)
    angles = torch.outer(positions.double(), rotary.inv_freq)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (2, HEAD_DIM // 2)
    torch.testing.assert_close(cos.double(), angles.cos(), atol=6e-8, rtol=0)
    torch.testing.assert_close(sin.double(), angles.sin(), atol=6e-8, rtol=0)
    in_float32 = (positions.float()[:, None] * rotary.inv_freq.float()).cos()
    assert (in_float32 - cos).abs().max() > 1e-2, "the case does not tell float32 angles apart"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_deltas_are_deduplicated_but_complete(dtype: torch.dtype) -> None:
    rotary = rotary_from_config(config_of("yarn"), HEAD_DIM)
    deltas = torch.tensor([5, -3, 5, 0, -3, 5], dtype=dtype)
    cos, sin = delta_cos_sin(deltas, rotary)
    whole = rotary.cos_sin(deltas)
    assert torch.equal(cos, whole.cos)
    assert torch.equal(sin, whole.sin)
    moved = rotate(some_keys(torch.float32, 6), cos, sin, rotary)
    assert torch.equal(moved[:, 0], relocate(some_keys(torch.float32, 6), deltas, rotary)[:, 0])


@needs_vllm
@quiet_vllm
@every_variant
@every_style
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_vllm(name: str, interleaved: bool, dtype: torch.dtype) -> None:
    layer = vllm_rope(VARIANTS[name], not interleaved, dtype)
    rotary = rotary_from_config(config_of(name), HEAD_DIM, interleaved=interleaved)
    rotary.check_against_cache(layer.cos_sin_cache, is_neox_style=layer.is_neox_style)
    params = VARIANTS[name]
    scale = params["factor"] if params["rope_type"] in ("yarn", "linear") else params["rope_theta"]
    theirs = layer._compute_inv_freq(scale if params["rope_type"] == "yarn" else params["rope_theta"])
    if params["rope_type"] == "linear":
        theirs = theirs / scale
    assert torch.equal(rotary.inv_freq.float(), theirs)
    if dtype == torch.float32:
        keys = some_keys(dtype)[0]
        positions = positions_of(37, 6, 2000)
        _, moved = layer.forward_native(positions, torch.zeros(37, HEAD_DIM), keys.clone().flatten(1))
        magnitude = getattr(layer, "mscale", 1.0)
        expected = relocate(keys, positions, rotary)
        expected[..., : rotary.rotary_dim] *= magnitude
        torch.testing.assert_close(moved.view_as(keys), expected, atol=2e-3, rtol=0)


@every_variant
def test_agrees_with_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.LlamaConfig(**config_of(name))
    kind = VARIANTS[name]["rope_type"]
    if kind == "default":
        theirs = plain_by_hand(VARIANTS[name])
    else:
        theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    assert torch.equal(rotary_from_config(config.to_dict(), HEAD_DIM).inv_freq.float(), theirs)


def plain_by_hand(params: dict[str, Any]) -> Tensor:
    dim = int(HEAD_DIM * params.get("partial_rotary_factor", 1.0))
    return 1.0 / (params["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))


def vllm_rope(params: dict[str, Any], is_neox_style: bool, dtype: torch.dtype) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        return get_rope(HEAD_DIM, 2048, is_neox_style, dict(params), dtype)


def cache_of(rotary: Rotary, num: int, dtype: torch.dtype, magnitude: float = 1.0) -> Tensor:
    """A cache as engines build it: float32 angles, then rounded to `dtype`."""
    angles = torch.outer(torch.arange(num).float(), rotary.inv_freq.float())
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 2, 700, 131072])
@pytest.mark.parametrize("magnitude", [1.0, 1.46, 0.3])
def test_cache_check_accepts_the_right_cache(dtype: torch.dtype, num: int, magnitude: float) -> None:
    rotary = rotary_from_config(config_of("llama3"), 16)
    rotary.check_against_cache(cache_of(rotary, num, dtype, magnitude))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [2048, 8192])
def test_cache_check_rejects_other_frequencies(dtype: torch.dtype, num: int) -> None:
    plain = rotary_from_config(config_of("plain"), HEAD_DIM)
    for other in ("large_theta", "linear", "llama3", "yarn"):
        with pytest.raises(NotRelocatable, match="differs from the frequencies"):
            plain.check_against_cache(cache_of(rotary_from_config(config_of(other), HEAD_DIM), num, dtype))
    near = Rotary(plain.inv_freq * (1 + 1e-4), HEAD_DIM, HEAD_DIM, False)
    with pytest.raises(NotRelocatable, match="differs"):
        plain.check_against_cache(cache_of(near, num, dtype))


def test_cache_check_rejects_what_is_no_rotation() -> None:
    rotary = rotary_from_config(config_of("plain"), HEAD_DIM)
    cache = cache_of(rotary, 512, torch.float32)
    swapped = torch.cat(cache.chunk(2, dim=-1)[::-1], dim=-1)
    uneven = cache.clone()
    uneven[:, :4] *= 1.1
    uneven[:, 32:36] *= 1.1
    broken = [cache[:0], cache[:, :32], cache[0], cache.to(torch.int32), -cache, torch.zeros_like(cache)]
    for wrong in (swapped, uneven, *broken):
        with pytest.raises(NotRelocatable):
            rotary.check_against_cache(wrong)


def test_cache_check_rejects_the_other_style() -> None:
    rotary = rotary_from_config(config_of("plain"), HEAD_DIM, interleaved=True)
    cache = cache_of(rotary, 64, torch.float32)
    rotary.check_against_cache(cache, is_neox_style=False)
    with pytest.raises(NotRelocatable, match="interleaved=False"):
        rotary.check_against_cache(cache, is_neox_style=True)


def by_layer() -> Rotary:
    plain = rotary_from_config(config_of("plain"), HEAD_DIM)
    return Rotary(torch.stack((plain.inv_freq, 0 * plain.inv_freq)), HEAD_DIM, HEAD_DIM, False)


def test_layers_that_differ_are_moved_each_in_its_own_way() -> None:
    rotary, plain = by_layer(), rotary_from_config(config_of("plain"), HEAD_DIM)
    keys, deltas = some_keys(torch.float32), positions_of(37, 5) - 1000
    moved = relocate(keys, deltas, rotary)
    assert torch.equal(moved[0], relocate(keys[0], deltas, plain))
    assert torch.equal(moved[1], keys[1]), "without rotary embedding keys stay as they are"
    both = delta_cos_sin(deltas, rotary)
    assert torch.equal(both.of_layer(0).cos, delta_cos_sin(deltas, plain).cos)
    assert both.of_layer(1).sin.abs().max() == 0
    one = delta_cos_sin(deltas, plain)
    assert one.of_layer(1) is one
    assert rotary.of_layer(0).is_by_layer is False


def test_frequencies_of_an_engine_that_keeps_no_cache() -> None:
    plain = rotary_from_config(config_of("plain"), HEAD_DIM)
    plain.check_against_frequencies(plain.inv_freq.float())
    with pytest.raises(NotRelocatable, match="frequencies differ"):
        plain.check_against_frequencies(plain.inv_freq.float() * (1 + 1e-4))
    with pytest.raises(NotRelocatable, match=r"rotates 62 elements .* 64"):
        plain.check_against_frequencies(plain.inv_freq[1:])
