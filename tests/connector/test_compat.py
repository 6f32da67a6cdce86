"""What cannot be served is refused by name, from vLLM's own configuration objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from inferscale.connector import compat
from inferscale.connector.groups import CacheGroup
from inferscale.connector.layout import LayerCache
from inferscale.errors import UnsupportedLayout
from inferscale.row_size import RowShape

FULL = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}


def vllm_config(**changes: Any) -> Any:
    parallel = {
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in parallel.items()}),
        speculative_config=changes.get("speculative_config"),
        model_config=SimpleNamespace(
            runner_type=changes.get("runner_type", "generate"),
            enable_sleep_mode=changes.get("enable_sleep_mode", False),
        ),
        device_config=SimpleNamespace(device_type=changes.get("device_type", "cpu")),
        weight_transfer_config=changes.get("weight_transfer_config"),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=changes.get("policy", "fail")),
    )


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{index}.attn"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)


def test_sizes_of_a_plain_model() -> None:
    shape = compat.cache_shape(vllm_config(), caches(FullAttentionSpec(**FULL)))
    assert shape == (10, (CacheGroup(16),), (("layers.0.attn",),), RowShape(((2, 8),)), torch.bfloat16)
    assert shape.order == ""


def test_sizes_of_layers_that_differ() -> None:
    specs = {"a": FullAttentionSpec(**FULL), "b": FullAttentionSpec(**{**FULL, "num_kv_heads": 3})}
    config = caches(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    config.kv_cache_groups[0].layer_names = ["a", "b"]
    assert compat.cache_shape(vllm_config(), config).token == RowShape(((2, 8), (3, 8)))


def test_groups_that_give_blocks_back() -> None:
    shape = compat.cache_shape(
        vllm_config(),
        caches(
            FullAttentionSpec(**FULL),
            SlidingWindowSpec(**{**FULL, "block_size": 8, "head_size": 16}, sliding_window=64),
            ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=128),
        ),
    )
    assert shape.groups == (CacheGroup(16), CacheGroup(8, window=64), CacheGroup(16, chunk=128))
    assert shape.layers == (("layers.0.attn",), ("layers.1.attn",), ("layers.2.attn",))
    assert shape.token == RowShape(((2, 8), (2, 16), (2, 8)))
    assert shape.order, "files on disk tell rows in this order from those of one group"


def test_windows_kept_longer_than_they_are_seen_are_refused() -> None:
    """vLLM does so for drafts of several tokens."""
    spec = SlidingWindowSpec(**FULL, sliding_window=64, extra_retained_tokens=1)
    with pytest.raises(UnsupportedLayout, match="SlidingWindowSpec"):
        compat.cache_shape(vllm_config(), caches(spec))


def test_different_windows_in_one_group_are_refused() -> None:
    specs = {name: SlidingWindowSpec(**FULL, sliding_window=n) for name, n in (("a", 32), ("b", 64))}
    config = caches(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    config.kv_cache_groups[0].layer_names = ["a", "b"]
    with pytest.raises(UnsupportedLayout, match="different windows"):
        compat.cache_shape(vllm_config(), config)


def test_sliding_window_layers_in_full_caches_are_served() -> None:
    """As with the hybrid cache manager off: nothing is given back."""
    spec = FullAttentionSpec(**FULL, sliding_window=64)
    assert compat.cache_shape(vllm_config(), caches(spec)).groups == (CacheGroup(16),)


def test_latent_attention_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="MLAAttentionSpec"):
        compat.cache_shape(vllm_config(), caches(MLAAttentionSpec(**{**FULL, "num_kv_heads": 1})))


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"model_type": "qwen2"}, True),
        ({"model_type": "phi"}, True),
        ({"model_type": "phi3"}, False),
        ({"model_type": "llama", "attention_bias": True}, True),
        ({"model_type": "stablelm", "use_qkv_bias": True}, True),
        ({"model_type": "starcoder2", "use_bias": True}, True),
        ({"model_type": "llama", "attention_bias": False}, False),
        ({"model_type": "qwen3", "attention_bias": False}, False),
    ],
)
def test_keys_with_a_bias_are_not_kept_in_e4m3(config: dict[str, Any], is_refused: bool) -> None:
    described = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**config)))
    for pool_dtype in ("auto", "int8"):
        compat.refuse_pool_dtype(described, pool_dtype)  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(UnsupportedLayout, match="Set it to 'int8'"):
            compat.refuse_pool_dtype(described, "fp8")
    else:
        compat.refuse_pool_dtype(described, "fp8")


def test_steps_that_are_under_way_at_once() -> None:
    for is_async, num in ((True, 2), (False, 1)):
        older = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
        assert compat.steps_at_once(older) == num
        assert compat.steps_at_once(SimpleNamespace(**vars(older), max_concurrent_batches=3)) == 3


def test_values_of_another_size_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="different sizes"):
        compat.cache_shape(vllm_config(), caches(FullAttentionSpec(**FULL, head_size_v=4)))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"data_parallel_index": 1}, "data parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, r"draft model \(eagle3\)"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "speculative decoding"),
        ({"runner_type": "pooling"}, "models served for pooling"),
        ({"weight_transfer_config": object()}, "weights that a trainer sends"),
        ({"cache_dtype": "fp8_e4m3"}, "KV cache dtype fp8_e4m3"),
        ({"policy": "recompute"}, "kv_load_failure_policy='recompute'"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedLayout, match=name):
        compat.refuse_unsupported(vllm_config(**changes))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_a_draft_model_is_served(method: str) -> None:
    compat.refuse_unsupported(vllm_config(speculative_config=SimpleNamespace(method=method)))


def test_sleep_mode_is_refused_where_it_would_take_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, version, is_refused in (
        ("cuda", "0.25.1", True),
        ("cuda", "0.29.0", False),
        ("cpu", "0.25.1", False),
    ):
        monkeypatch.setattr("vllm.__version__", version)
        config = vllm_config(enable_sleep_mode=True, device_type=device)
        if is_refused:
            with pytest.raises(UnsupportedLayout, match="sleep mode"):
                compat.refuse_unsupported(config)
        else:
            compat.refuse_unsupported(config)


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("0.25.1", True), ("0.32.0", True), ("0.29.0+cpu", True), ("0.33.0", False), ("1.0.0", False),
     ("0.24.9", False), ("dev", False), ("0.0.0", False)],
)  # fmt: skip
def test_an_unknown_release_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, is_known: bool
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    warning = compat.release_warning()
    assert (warning is None) == is_known
    assert warning is None or (version in warning and "0.25 to 0.32" in warning)


def test_quantized_caches_are_refused_whatever_names_them() -> None:
    """As where a checkpoint asks for one and the setting says `auto`."""
    spec = FullAttentionSpec(**{**FULL, "dtype": torch.float8_e4m3fn})
    with pytest.raises(UnsupportedLayout, match=r"holds torch\.float8_e4m3fn"):
        compat.cache_shape(vllm_config(), caches(spec))


def test_layers_in_order_and_shared_caches_once() -> None:
    impl = SimpleNamespace(do_kv_cache_update=lambda *_: None)
    names = ["layers.0", "layers.1", "layers.2"]
    context = {
        name: SimpleNamespace(impl=impl, num_kv_heads=2, head_size=8, kv_sharing_target_layer_name=target)
        for name, target in zip(names, [None, "layers.0", None], strict=True)
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    tensors = {name: torch.zeros(1) for name in names}
    layers = compat.layer_caches(config, tensors, [names])
    assert [layer.name for layer in layers] == ["layers.0", "layers.2"]
    layers = compat.layer_caches(config, tensors, [["layers.2"], ["layers.0", "layers.1"]])
    assert [(layer.name, layer.group) for layer in layers] == [("layers.2", 0), ("layers.0", 1)]


def test_a_layer_without_the_portable_write_is_refused() -> None:
    context = {"l": SimpleNamespace(impl=object(), num_kv_heads=2, head_size=8)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    with pytest.raises(UnsupportedLayout, match="Layer l"):
        compat.layer_caches(config, {"l": torch.zeros(1)}, [["l"]])
    with pytest.raises(UnsupportedLayout, match="no attention layer"):
        compat.layer_caches(config, {}, [["l"]])


def test_weights_that_are_loaded_again_are_noticed() -> None:
    layer = torch.nn.Module()
    finished: list[Any] = []
    layer.process_weights_after_loading = finished.append  # type: ignore[assignment]
    noted: list[int] = []
    compat.watch_weights([LayerCache("l", layer, torch.zeros(1), 1, 8)], lambda: noted.append(1))
    layer.process_weights_after_loading(torch.float32)
    assert (finished, noted) == ([torch.float32], [1])
    compat.watch_weights([LayerCache("l", torch.nn.Module(), torch.zeros(1), 1, 8)], noted.clear)


def test_the_longest_context_is_part_of_the_model_where_keys_depend_on_it() -> None:
    def fingerprint(max_model_len: int, rope_type: str) -> str:
        rope = {"rope_type": rope_type, "original_max_position_embeddings": 4096}
        hf_config = SimpleNamespace(to_dict=lambda: {"model_type": "phi3", "rope_parameters": rope})
        model = SimpleNamespace(
            hf_config=hf_config, dtype=torch.bfloat16, quantization=None, model="m", revision=None, seed=0
        )
        model.max_model_len = max_model_len
        return compat.model_fingerprint(
            SimpleNamespace(
                model_config=model,
                cache_config=SimpleNamespace(cache_dtype="auto"),
                load_config=SimpleNamespace(load_format="dummy"),
            )
        )

    assert fingerprint(4096, "longrope") != fingerprint(4097, "longrope")
    assert fingerprint(2048, "longrope") == fingerprint(4096, "longrope")
    assert fingerprint(4096, "yarn") == fingerprint(4097, "yarn")


def test_a_model_of_the_hub_is_the_commit_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that share KV may have fetched a branch at different times."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=dict),
            dtype=torch.bfloat16,
            quantization=None,
            model="owner/name",
            revision=None,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
    )
    found = [compat.model_fingerprint(config)]
    repo = tmp_path / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
        (repo / "refs" / "main").write_text(commit)
        found.append(compat.model_fingerprint(config))
    assert len(set(found)) == 3
    config.model_config.model = "s3://no/name of the hub"
    assert compat.model_fingerprint(config)
