"""Rotary embeddings by configuration: both forms, by layer, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferscale.errors import NotRelocatable
from inferscale.rotary_config import decided_by_context, rotary_from_config

HEAD_DIM = 64
SLIDING, FULL = "sliding_attention", "full_attention"
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
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_no_truncate": {**YARN, "truncate": False},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def config_of(name: str, **more: Any) -> dict[str, Any]:
    params = dict(VARIANTS[name])
    return {"model_type": "llama", "rope_parameters": params, "max_position_embeddings": 4096, **more}


@pytest.mark.parametrize("name", ["plain", "linear", "llama3", "yarn_no_truncate", "partial"])
def test_old_form_of_configuration(name: str) -> None:
    new = config_of(name)
    params = dict(new["rope_parameters"])
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old["rope_theta"] = params.pop("rope_theta")
    factor = params.pop("partial_rotary_factor", None)
    if factor is not None:
        old["partial_rotary_factor"] = factor
    params["type"] = params.pop("rope_type")
    old["rope_scaling"] = None if params == {"type": "default"} else params
    a, b = rotary_from_config(new, HEAD_DIM), rotary_from_config(old, HEAD_DIM)
    assert torch.equal(a.inv_freq, b.inv_freq)
    assert a.rotary_dim == b.rotary_dim


def test_text_config_inside_is_used() -> None:
    outer = {"model_type": "llava", "text_config": config_of("llama3")}
    inner = rotary_from_config(config_of("llama3"), HEAD_DIM)
    assert torch.equal(rotary_from_config(outer, HEAD_DIM).inv_freq, inner.inv_freq)


@pytest.mark.parametrize(
    ("config", "rotary_dim"),
    [
        ({"rope_theta": 1e4, "rotary_pct": 0.25}, 16),
        ({"rotary_emb_base": 1e4, "rotary_emb_fraction": 0.5}, 32),
        ({"model_type": "gptj", "rotary_dim": 48}, 48),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_dim": 24}}, 24),
        ({"rope_theta": 1e4}, 64),
    ],
)
def test_partial_rotary_by_any_name(config: dict[str, Any], rotary_dim: int) -> None:
    rotary = rotary_from_config(config, HEAD_DIM)
    assert rotary.rotary_dim == rotary_dim
    assert rotary.head_dim == HEAD_DIM
    assert rotary.inv_freq.shape == (rotary_dim // 2,)
    assert float(rotary.inv_freq[1]) == pytest.approx(1e4 ** (-2 / rotary_dim))


def test_style_follows_the_model_type_unless_given() -> None:
    assert not rotary_from_config(config_of("plain"), HEAD_DIM).interleaved
    assert rotary_from_config(config_of("plain", model_type="glm4"), HEAD_DIM).interleaved
    assert not rotary_from_config(
        config_of("plain", model_type="glm4"), HEAD_DIM, interleaved=False
    ).interleaved


def test_yarn_original_length_falls_back_as_in_transformers() -> None:
    config = config_of("yarn")
    del config["rope_parameters"]["original_max_position_embeddings"]
    given = rotary_from_config({**config, "original_max_position_embeddings": 1024}, HEAD_DIM)
    assert torch.equal(given.inv_freq, rotary_from_config(config_of("yarn"), HEAD_DIM).inv_freq)
    assert not torch.equal(given.inv_freq, rotary_from_config(config, HEAD_DIM).inv_freq)


REFUSED = [
    ("dynamic NTK", {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("dynamic NTK", {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 2.0}}),
    ("longrope (whose factors depend", {"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}),
    ("mrope", {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}),
    ("mrope", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [8, 12, 12]}}),
    ("proportional", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "proportional"}}),
    ("FoPE", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "use_fope": True}}),
    ("dual chunk", {"rope_theta": 1e4, "dual_chunk_attention_config": {"chunk_size": 8}}),
    (
        "per-layer-type (none of ['full_attention', 'sliding_attention'] is that of layer 0)",
        {
            "rope_parameters": {
                FULL: {"rope_theta": 1e6},
                SLIDING: {"rope_theta": 1e4},
            }
        },
    ),
    ("rope_local_base_freq without layer_types", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    ("global_rope_theta", {"rope_theta": 1e6, "global_rope_theta": 1e4}),
    ("by-layer (rope_theta is a list)", {"rope_theta": [1e4, 1e6]}),
    (
        "by-layer partial rotary ([32, 64] of 64 elements)",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "rope_parameters": {
                FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_theta": 1e4},
            },
        },
    ),
    ("no (the configuration has no rope_theta)", {"model_type": "something"}),
    ("ALiBi", {"model_type": "falcon", "alibi": True, "rope_theta": 1e4}),
    ("ALiBi", {"model_type": "mpt", "attn_config": {"alibi": True}}),
    ("ALiBi", {"model_type": "bloom"}),
    ("learned positions", {"model_type": "gpt2"}),
    ("'nope'", {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "rope_theta": 1e4}),
    (
        "no rotary",
        {"model_type": "smollm3", "rope_theta": 1e4, "no_rope_layers": [0, 0], "num_hidden_layers": 2},
    ),
    (
        "for layer 1 unknown (no_rope_layers has 1 entries)",
        {"rope_theta": 1e4, "no_rope_layers": [1], "num_hidden_layers": 2},
    ),
    ("NoPE", {"model_type": "cohere2_moe", "rope_theta": 1e4}),
    ("NoPE", {"model_type": "llama4_text", "rope_theta": 1e4}),
    ("NoPE", {"model_type": "something", "no_rope_layer_interval": 4, "rope_theta": 1e4}),
    ("a norm with weights behind its rotary", {"model_type": "hunyuan_v1_dense", "rope_theta": 1e4}),
    ("indexer", {"rope_theta": 1e4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}),
    ("unknown 'spiral'", {"rope_theta": 1e4, "rope_scaling": {"rope_type": "spiral"}}),
    ("partial rotary (33 of 64", {"rope_parameters": {"rope_theta": 1e4, "rope_dim": 33}}),
    ("partial rotary (96 of 64", {"rope_theta": 1e4, "partial_rotary_factor": 1.5}),
]


@pytest.mark.parametrize(("variant", "config"), REFUSED, ids=[name for name, _ in REFUSED])
def test_refused_by_name(variant: str, config: dict[str, Any]) -> None:
    with pytest.raises(NotRelocatable) as caught:
        rotary_from_config(config, HEAD_DIM)
    assert variant in str(caught.value)
    assert "YaRN" in str(caught.value), "the message must say what is supported"


def test_layers_that_all_rotate_are_accepted_and_a_missing_parameter_is_named() -> None:
    assert rotary_from_config({"rope_theta": 1e4, "no_rope_layers": [1, 1]}, HEAD_DIM)
    assert rotary_from_config({"model_type": "exaone4", "rope_theta": 1e4, "layer_types": None}, HEAD_DIM)
    with pytest.raises(NotRelocatable, match=r"linear .* lacks the parameter 'factor'"):
        rotary_from_config({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, HEAD_DIM)


def test_layers_differ_by_their_type() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config: dict[str, Any] = {
        "layer_types": types,
        "num_hidden_layers": 3,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    rotary = rotary_from_config(config, HEAD_DIM)
    full = rotary_from_config({"rope_parameters": config["rope_parameters"]["full_attention"]}, HEAD_DIM)
    local = rotary_from_config({"rope_theta": 1e4}, HEAD_DIM)
    wanted = torch.stack((local.inv_freq, full.inv_freq, local.inv_freq))
    assert rotary.is_by_layer
    assert torch.equal(rotary.inv_freq, wanted)
    assert torch.equal(rotary.of_layer(1).inv_freq, full.inv_freq)
    only_two = rotary_from_config(config, HEAD_DIM, layers=[1, 2])
    assert torch.equal(only_two.inv_freq, wanted[1:])
    same = rotary_from_config(config, HEAD_DIM, layers=[0, 2])
    assert not same.is_by_layer, "all layers that have a cache share their frequencies"
    older = {"layer_types": types, "num_hidden_layers": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    older["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert torch.equal(rotary_from_config(older, HEAD_DIM).inv_freq, wanted)


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 0]}, [True, True, False]),
        ({"model_type": "llama4_text", "no_rope_layers": [0, 1, 0]}, [False, True, False]),
        ({"model_type": "step3p5", "use_rope_layers": [True, False, True]}, [True, False, True]),
        ({"model_type": "cohere2", "layer_types": [SLIDING, FULL, SLIDING]}, [True, False, True]),
        ({"model_type": "afmoe", "layer_types": [FULL, FULL, SLIDING]}, [False, False, True]),
        ({"model_type": "exaone4", "layer_types": [SLIDING, FULL, FULL]}, [True, False, False]),
    ],
)
def test_layers_without_rotary_embedding(config: dict[str, Any], rotated: list[bool]) -> None:
    rotary = rotary_from_config({**config, "rope_theta": 1e4, "num_hidden_layers": 3}, HEAD_DIM)
    plain = rotary_from_config({"rope_theta": 1e4}, HEAD_DIM).inv_freq
    assert torch.equal(rotary.inv_freq, torch.stack([plain * flag for flag in rotated]))


def test_exaone_without_sliding_windows_rotates_all_layers() -> None:
    config = {"model_type": "exaone4", "layer_types": [FULL, FULL], "num_hidden_layers": 2, "rope_theta": 1e4}
    assert not rotary_from_config(config, HEAD_DIM).is_by_layer


@pytest.mark.parametrize(("max_tokens", "factors"), [(1024, "short_factor"), (1025, "long_factor")])
def test_longrope_by_the_longest_context(max_tokens: int, factors: str) -> None:
    params = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 10 for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + i for i in range(HEAD_DIM // 2)],
    }
    config = {"rope_parameters": params, "original_max_position_embeddings": 1024}
    rotary = rotary_from_config(config, HEAD_DIM, max_tokens=max_tokens)
    plain = rotary_from_config({"rope_theta": 1e4}, HEAD_DIM).inv_freq
    torch.testing.assert_close(
        rotary.inv_freq, plain / torch.tensor(params[factors], dtype=torch.float64), rtol=2**-22, atol=0
    )
    del params[factors]
    with pytest.raises(NotRelocatable, match="lacks the parameter"):
        rotary_from_config(config, HEAD_DIM, max_tokens=max_tokens)


def test_what_the_longest_context_decides_is_told() -> None:
    """Engines with other factors must not read each other's keys, on disk or in a shared store."""
    original = {"original_max_position_embeddings": 1024}
    for config in (
        {"rope_scaling": {"type": "su"}, **original},
        {"rope_parameters": {"rope_type": "longrope", **original}},
        {"text_config": {"rope_parameters": {FULL: {"rope_type": "longrope"}}, **original}},
    ):
        short, long = decided_by_context(config, 1024), decided_by_context(config, 1025)
        assert short != long
        assert (short, long) == (decided_by_context(config, 7), decided_by_context(config, 9999))
    for config in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "yarn", **original}}):
        assert decided_by_context(config, 9999) == ""


def test_latent_attention_has_a_rotated_part_of_its_own() -> None:
    config = {"model_type": "deepseek_v3", "rope_theta": 1e4, "kv_lora_rank": 512, "qk_rope_head_dim": 32}
    rotary = rotary_from_config(config, 272)
    assert (rotary.rotary_dim, rotary.head_dim, rotary.interleaved) == (32, 272, True)
    yarn = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    theirs = rotary_from_config({**config, "rope_parameters": yarn}, 272)
    plain = rotary_from_config({"rope_theta": 1e4, "rope_scaling": {**yarn, "rope_type": "yarn"}}, 32)
    assert torch.equal(theirs.inv_freq, plain.inv_freq)
