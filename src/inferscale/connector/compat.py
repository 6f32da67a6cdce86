"""The only place that knows vLLM's versions: reads its configuration and its layers into our own types.

Checked against vLLM 0.25.1 (CUDA), 0.29.0 and 0.32.0 (CPU). Whatever cannot be served is refused here, by
name, at start-up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from inferscale.config import PoolDtype
from inferscale.connector.groups import CacheGroup
from inferscale.connector.layout import LayerCache
from inferscale.errors import UnsupportedLayout
from inferscale.rotary_config import decided_by_context
from inferscale.row_size import RowShape

logger = logging.getLogger(__name__)

OLDEST_RELEASE, NEWEST_RELEASE = (0, 25), (0, 32)
"""Of vLLM, that were run; a newer one starts with a warning (`release_warning`)."""
_WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")
_SAMPLE_BYTES = 65536
_CGROUP = Path("/sys/fs/cgroup")


class CacheShape(NamedTuple):
    """num_blocks, groups: of vLLM's scheduler. layers: names, by group. token, dtype: what one worker keeps
    of one token, in the order of the groups."""

    num_blocks: int
    groups: tuple[CacheGroup, ...]
    layers: tuple[tuple[str, ...], ...]
    token: RowShape
    dtype: torch.dtype

    @property
    def order(self) -> str:
        """Which layers stand where in a row; empty where they stand in the model's order."""
        return "" if len(self.groups) == 1 else json.dumps(self.layers)


def cache_shape(vllm_config: Any, kv_cache_config: Any) -> CacheShape:
    """Sizes of the paged cache. Raises UnsupportedLayout for caches that are not plain attention."""
    refuse_unsupported(vllm_config)
    groups: list[CacheGroup] = []
    shapes: list[tuple[int, int]] = []
    dtypes = set()
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        per_layer = [specs[name] if specs else group.kv_cache_spec for name in group.layer_names]
        kinds = {_group_of(spec, group.kv_cache_spec.block_size) for spec in per_layer}
        if len(kinds) != 1:
            raise UnsupportedLayout(
                "Layers with different windows share a group of KV caches; InferScale needs a group for "
                "each. Start vLLM without the connector."
            )
        groups.append(kinds.pop())
        shapes += [(spec.num_kv_heads, spec.head_size) for spec in per_layer]
        dtypes |= {spec.dtype for spec in per_layer}
    if not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
        raise UnsupportedLayout(
            f"The model's KV cache holds {', '.join(sorted(map(str, dtypes)))}; InferScale moves float32, "
            "float16 and bfloat16 only. Start vLLM with --kv-cache-dtype bfloat16, or without the connector."
        )
    if len(dtypes) != 1:
        raise UnsupportedLayout("The layers' KV caches differ in dtype; InferScale needs one dtype.")
    layers = tuple(tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    return CacheShape(
        kv_cache_config.num_blocks, tuple(groups), layers, RowShape(tuple(shapes)), dtypes.pop()
    )


def _group_of(spec: Any, block_size: int) -> CacheGroup:
    """How a layer's blocks are kept. Raises UnsupportedLayout for what is no plain attention."""
    kind = type(spec).__name__
    # Exactly these: others keep something else than keys and values, or give blocks back in other ways.
    if kind == "FullAttentionSpec":
        group = CacheGroup(block_size)
    elif kind == "SlidingWindowSpec" and not getattr(spec, "extra_retained_tokens", 0):
        group = CacheGroup(block_size, window=int(spec.sliding_window))
    elif kind == "ChunkedLocalAttentionSpec":
        group = CacheGroup(block_size, chunk=int(spec.attention_chunk_size))
    else:
        raise UnsupportedLayout(
            f"The model keeps {kind} state; InferScale can inject into full, sliding-window and chunked "
            "attention only. Start vLLM without the connector."
        )
    if getattr(spec, "head_size_v", None) not in (None, spec.head_size):
        raise UnsupportedLayout(
            "Keys and values of the model have different sizes; InferScale needs one size."
        )
    return group


def no_cache(vllm_config: Any, kv_cache_config: Any) -> CacheShape:
    """Where nothing is captured or injected: of any model, a stand-in."""
    num_groups = len(kv_cache_config.kv_cache_groups)
    groups, layers = (CacheGroup(1),) * num_groups, ((),) * num_groups
    return CacheShape(kv_cache_config.num_blocks, groups, layers, RowShape(((1, 1),)), torch.float32)


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse, by name, what injection is not right for."""
    parallel = vllm_config.parallel_config
    reasons = {
        # The engine of a replica is told that it is the only one, but for its place among them.
        "data parallelism (run one server for each replica)": (
            parallel.data_parallel_size > 1 or getattr(parallel, "data_parallel_index", 0) > 0
        ),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "decode context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        # Gave wrong output in vLLM 0.25.1 (vllm issue 49250).
        "kv_load_failure_policy='recompute' (leave it at 'fail')": getattr(
            vllm_config.kv_transfer_config, "kv_load_failure_policy", "fail"
        )
        != "fail",
        "models served for pooling": getattr(vllm_config.model_config, "runner_type", "generate")
        == "pooling",
        "weights that a trainer sends (weight_transfer_config)": getattr(
            vllm_config, "weight_transfer_config", None
        )
        is not None,
        "sleep mode on a GPU with vLLM before 0.29, which takes the pool's memory away": (
            _sleep_takes_the_pool(vllm_config)
        ),
        f"speculative decoding with a draft model ({_method(vllm_config)}); ngram and suffix have none": (
            _method(vllm_config) not in (None, *_WITHOUT_DRAFT_MODEL)
        ),
        f"the KV cache dtype {vllm_config.cache_config.cache_dtype}": str(
            vllm_config.cache_config.cache_dtype
        ).startswith(("fp8", "int8", "nvfp4", "turboquant")),
    }
    for name, applies in reasons.items():
        if applies:
            raise UnsupportedLayout(
                f"InferScale does not support {name}. Start vLLM without it, or without the connector."
            )


def _method(vllm_config: Any) -> str | None:
    """Of speculative decoding; a draft model would have KV of its own, which nobody injects."""
    speculative = vllm_config.speculative_config
    return None if speculative is None else str(speculative.method)


def _sleep_takes_the_pool(vllm_config: Any) -> bool:
    """Up to 0.28, what a connector allocates at its start lies in the memory that vLLM gives back asleep."""
    is_cpu = str(getattr(vllm_config.device_config, "device_type", "")) == "cpu"
    is_on = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
    return is_on and not is_cpu and (release() or (0, 0)) < (0, 29)


def release() -> tuple[int, int] | None:
    """Of vLLM, as (major, minor); None for a build that names none."""
    import vllm

    numbers = re.match(r"(\d+)\.(\d+)", str(getattr(vllm, "__version__", "")))
    found = (int(numbers[1]), int(numbers[2])) if numbers else None
    return None if found in (None, (0, 0)) else found


def release_warning() -> str | None:
    """What to say at the start with a vLLM that InferScale was never run with; None for others."""
    found = release()
    if found is not None and OLDEST_RELEASE <= found <= NEWEST_RELEASE:
        return None
    import vllm

    known = " to ".join(".".join(map(str, numbers)) for numbers in (OLDEST_RELEASE, NEWEST_RELEASE))
    return (
        f"vLLM {getattr(vllm, '__version__', 'of an unknown version')} was never run with InferScale, which "
        f"knows {known}. Start-up probes the cache, and the self-check compares injected with prefilled "
        "answers; where either fails, facts are refused or prefilled as text."
    )


def refuse_pool_dtype(vllm_config: Any, pool_dtype: PoolDtype) -> None:
    """Refuse a pool whose numbers are too coarse for the model's keys.

    The bias of a key projection makes a few dimensions a hundred times the others; the three bits of E4M3's
    fraction leave them errors as large as what tells one token from another (docs/quality.md).
    """
    config = vllm_config.model_config.hf_text_config
    model_type = str(getattr(config, "model_type", ""))
    has_bias = (
        model_type.startswith("qwen2")
        or model_type == "phi"
        or any(
            getattr(config, name, False) is True
            for name in ("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "use_bias")
        )
    )
    if pool_dtype == "fp8" and has_bias:
        raise UnsupportedLayout(
            "pool_dtype is 'fp8', which is too coarse for this model: the projection of its keys has a bias. "
            "Set it to 'int8', which takes about as much room, or to 'auto'."
        )


def steps_at_once(vllm_config: Any) -> int:
    """How many steps are under way at most, one that begins included: two with asynchronous scheduling."""
    in_this_release = 2 if vllm_config.scheduler_config.async_scheduling else 1
    return int(getattr(vllm_config, "max_concurrent_batches", in_this_release))


def layer_caches(
    vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Sequence[str]]
) -> list[LayerCache]:
    """Attention layers, each with its paged cache; layers that share a cache count once.

    groups: names of the layers of each KV cache group. Their order is that of the result; in a single group
    layers are in the model's order.
    """
    context = vllm_config.compilation_config.static_forward_context
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    layers: list[LayerCache] = []
    for name, cache in kv_caches.items():
        layer = context[name]
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        if not isinstance(cache, torch.Tensor) or not hasattr(layer.impl, "do_kv_cache_update"):
            raise UnsupportedLayout(
                f"Layer {name} ({type(layer).__name__}) has no ordinary paged KV cache; InferScale cannot "
                "inject into it. Start vLLM without the connector."
            )
        layers.append(LayerCache(name, layer, cache, layer.num_kv_heads, layer.head_size, group_of[name]))
    if not layers:
        raise UnsupportedLayout("The model has no attention layer with a paged KV cache.")
    if len(groups) > 1:
        names = [name for group in groups for name in group]
        layers.sort(key=lambda layer: names.index(layer.name))
    return layers


def watch_weights(layers: Sequence[LayerCache], note: Callable[[], None]) -> None:
    """Call `note` whenever vLLM has loaded weights into the model again (`reload_weights`): it then finishes
    each attention layer as at the start (vllm/model_executor/model_loader/reload)."""
    layer = layers[0].layer
    finish = getattr(layer, "process_weights_after_loading", None)
    if finish is None:
        return

    def noted(*arguments: Any, **named: Any) -> Any:
        note()
        return finish(*arguments, **named)

    layer.process_weights_after_loading = noted


def model_fingerprint(vllm_config: Any) -> str:
    """Digest of what decides a key's value: architecture, dtype, quantization, the longest context where keys
    depend on it, and a sample of the weights.

    The same on the front end, the scheduler and the workers; independent of the folder's path.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(volatile, None)
    digest = hashlib.blake2b(digest_size=16)
    facts = [config, str(model.dtype), str(model.quantization), str(vllm_config.cache_config.cache_dtype)]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(decided_by_context(config, int(getattr(model, "max_model_len", 0) or 0)).encode())
    folder = Path(model.model)
    if vllm_config.load_config.load_format == "dummy":
        digest.update(f"dummy {model.seed}".encode())
    elif folder.is_dir():
        for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as weights:
                digest.update(weights.read(_SAMPLE_BYTES))
                weights.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
                digest.update(weights.read(_SAMPLE_BYTES))
    else:
        digest.update(f"{model.model} {model.revision}{_commit(model)}".encode())
    return digest.hexdigest()


def _commit(model: Any) -> str:
    """Of a model that is named as on the hub: machines may hold different ones of a branch. Empty where the
    hub's cache does not have it."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except (OSError, ValueError):  # also what is no name of the hub
        return ""
    return f" {Path(found).parent.name}" if isinstance(found, str) else ""


def worker_rank() -> int:
    """Tensor-parallel rank of this worker."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; on a CPU also within the container's limit (cgroup v2)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def free_bytes_per_worker(vllm_config: Any, device: torch.device) -> int:
    """Free memory for one worker's pool: on a CPU all tensor-parallel ranks share what is free."""
    ranks = vllm_config.parallel_config.tensor_parallel_size if device.type == "cpu" else 1
    return free_bytes(device) // int(ranks)
