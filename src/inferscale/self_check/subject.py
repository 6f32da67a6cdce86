"""What is checked, read from the engine's configuration (the same attributes in vLLM 0.25 and 0.32)."""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferscale.config import ConnectorConfig
from inferscale.self_check.trials import Seen, Subject

logger = logging.getLogger(__name__)


def subject_of(vllm_config: Any, model: str, text_ids: tuple[int, ...]) -> Subject:
    """model: the fingerprint. text_ids: of `trials.TEXT`."""
    config = vllm_config.model_config
    return Subject(
        model=model,
        text_ids=text_ids,
        max_tokens=int(config.max_model_len),
        dtype=str(config.dtype).removeprefix("torch."),
        max_logprobs=int(getattr(config, "max_logprobs", 20)),
        is_raw=str(getattr(config, "logprobs_mode", "")).startswith("raw_"),
    )


def conditions_of(vllm_config: Any, connector: ConnectorConfig, model: str) -> dict[str, Any]:
    """What a verdict may depend on, in plain values: the model's fingerprint, the versions of vLLM and torch,
    the device's kind and name, the formats of model, cache and pool, how KV is injected, how many GPUs share
    the model, the cache's block size, whether the model is run without CUDA graphs, and the attention backend
    as asked for. Which one vLLM takes by itself is not told, and follows from the others.
    """
    cache, device = vllm_config.cache_config, str(getattr(vllm_config.device_config, "device_type", ""))
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    parallel = vllm_config.parallel_config
    return {
        "model": model,
        "vllm": _version("vllm"),
        "torch": _version("torch"),
        "device": device,
        "device_name": _cpu() if device == "cpu" else _gpu(),
        "dtype": str(vllm_config.model_config.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "block_size": int(getattr(cache, "block_size", None) or 0),
        "attention_backend": "auto" if backend is None else str(getattr(backend, "name", backend)),
        "enforce_eager": bool(getattr(vllm_config.model_config, "enforce_eager", False)),
        "pool_dtype": connector.pool_dtype,
        "injection_path": connector.injection_path,
        "compile_injection": connector.compile_injection,
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
    }


def _version(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", ""))


def _gpu() -> str:
    """Of the first GPU, from the driver: asking torch would start CUDA in the server's process."""
    vllm_platforms = sys.modules.get("vllm.platforms")
    try:
        return str(vllm_platforms.current_platform.get_device_name()) if vllm_platforms else ""
    except Exception as error:  # noqa: BLE001 — NVML's errors have no base that exists without a driver
        logger.info("The driver does not tell the GPU's name: %s", error)
        return ""


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def seen_of(logprobs: Any, outcome: Mapping[str, Any] | None) -> Seen:
    """logprobs: of vLLM's completion, a dict for each token; None where the request failed."""
    steps = tuple(
        {int(token): float(told.logprob) for token, told in step.items()} for step in logprobs or ()
    )
    return Seen(steps, None if outcome is None else dict(outcome))
