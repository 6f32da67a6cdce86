"""What is checked, read from the engine's configuration (the same attributes in vLLM 0.25 and 0.32)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from inferscale.config import ConnectorConfig
from inferscale.self_check.trials import Seen, Subject


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
    """All that a verdict may depend on, in plain values. The fingerprint holds the dtypes of model and
    cache."""
    parallel = vllm_config.parallel_config
    return {
        "model": model,
        "vllm": str(getattr(sys.modules.get("vllm"), "__version__", "")),
        "device": str(getattr(vllm_config.device_config, "device_type", "")),
        "dtype": str(vllm_config.model_config.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "pool_dtype": connector.pool_dtype,
        "injection_path": connector.injection_path,
        "compile_injection": connector.compile_injection,
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
    }


def seen_of(logprobs: Any, outcome: Mapping[str, Any] | None) -> Seen:
    """logprobs: of vLLM's completion, a dict for each token; None where the request failed."""
    steps = tuple(
        {int(token): float(told.logprob) for token, told in step.items()} for step in logprobs or ()
    )
    return Seen(steps, None if outcome is None else dict(outcome))
