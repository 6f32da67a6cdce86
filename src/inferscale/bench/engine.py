"""Which engine a benchmark runs on: its settings, sized for the workload, and the running engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from inferscale.bench.harness import command, environment
from inferscale.bench.shapes import model_folder, read_config, token_size_bytes
from inferscale.config import AUTO, ConnectorConfig, InjectionPath, PoolDtype
from inferscale.offline import OfflineEngine

_POOL_MARGIN = 1.1
_MAX_MODEL_LEN = 8192
_COUNTERS = ("preemptions", "evictions", "captures_without_room", "segments_lost", "internal_errors")


@dataclass(frozen=True)
class EngineSpec:
    """Settings of an engine for benchmarks; what is None is sized by `sized`, or left to vLLM.

    model: a folder or hub name. random_weights: only its `config.json` is read. tokenizer: a folder, for
    what needs texts with random weights. disk_dir: given where lower tiers are measured. extra: further
    arguments of `vllm.LLM`.
    """

    model: str
    random_weights: bool = False
    tokenizer: str | None = None
    pool_size_bytes: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int | None = None
    dtype: str | None = None
    injection_path: InjectionPath = "auto"
    pool_dtype: PoolDtype = "auto"
    host_size_bytes: int = 0
    disk_size_bytes: int = 0
    disk_dir: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What rows call the model."""
        return Path(self.model).name + (" (random weights)" if self.random_weights else "")

    def sized(self, segments: Iterable[int], num_prompt_tokens: int) -> EngineSpec:
        """With a pool that holds segments of these lengths, and a context for prompts and answers of this
        length; what was set stays, and nothing changes for a model whose config is not at hand."""
        config = read_config(Path(self.model))
        if config is None or "num_hidden_layers" not in config:
            return self
        page = ConnectorConfig().page_size_tokens
        num_tokens = sum(math.ceil(num / page) * page for num in segments)
        size = int(num_tokens * token_size_bytes(config, self.dtype) * _POOL_MARGIN) + 2**26
        longest = int(config.get("max_position_embeddings", num_prompt_tokens))
        return replace(
            self,
            pool_size_bytes=self.pool_size_bytes or size,
            max_model_len=self.max_model_len or min(longest, max(_MAX_MODEL_LEN, num_prompt_tokens)),
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` but model and connector."""
        arguments: dict[str, Any] = {"enforce_eager": self.enforce_eager, "use_tqdm_on_load": False}
        if self.random_weights:
            # Without `tokenizer` the folder need hold nothing but its config.
            arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
        for name in (
            "tokenizer",
            "max_model_len",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "dtype",
        ):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        return {**arguments, **self.extra}

    def connector(self) -> ConnectorConfig:
        return ConnectorConfig(
            pool_size_bytes=AUTO if self.pool_size_bytes is None else self.pool_size_bytes,
            injection_path=self.injection_path,
            pool_dtype=self.pool_dtype,
            host_size_bytes=self.host_size_bytes,
            disk_size_bytes=self.disk_size_bytes,
            disk_dir=self.disk_dir,
            max_share=ConnectorConfig.max_share if self.disk_dir is None else 1.0,
            tier_wait="auto" if self.disk_dir is None else "always",
        )

    def open(self) -> BenchEngine:
        """Start it. Raises what `OfflineEngine` raises."""
        return BenchEngine(OfflineEngine(self.model, self.connector(), self.arguments()), self)

    def to_json(self) -> str:
        """For a child process."""
        return json.dumps({**vars(self), "extra": dict(self.extra)})

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        return cls(**json.loads(text))


def random_weights(shape: str, **settings: Any) -> EngineSpec:
    """A model of this shape; see `shapes.model_folder`."""
    return EngineSpec(str(model_folder(shape)), random_weights=True, **settings)


class BenchEngine:
    """An `OfflineEngine` that runs, with the sizes that benchmarks ask for."""

    def __init__(self, offline: OfflineEngine, spec: EngineSpec) -> None:
        self.offline = offline
        self.spec = spec
        config = offline.llm.llm_engine.vllm_config
        self.block_size = int(config.cache_config.block_size)
        self.vocab_size = int(config.model_config.get_vocab_size())

    def reset_prefix_cache(self) -> None:
        self.offline.reset_prefix_cache()

    def counters(self) -> dict[str, int]:
        """What went on in the connector and the pool since the start and may explain a number."""
        stats = self.offline.residency.stats()
        return {name: stats[name] for name in _COUNTERS if name in stats}

    def describe(self) -> dict[str, Any]:
        """What rows say of the engine."""
        settings = describe(self.offline.llm.llm_engine.vllm_config, self.spec)
        return {**settings, "pool_size_bytes": self.offline.connector.size_bytes}

    def close(self) -> None:
        self.offline.close()

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe(vllm_config: Any, spec: EngineSpec) -> dict[str, Any]:
    """Settings of a running engine that decide its speed, and the command that started it."""
    import torch

    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    return {
        "command": command(),
        "engine_args": spec.arguments(),
        "pool_size_bytes": spec.pool_size_bytes,
        "injection_path": spec.injection_path,
        "pool_dtype": spec.pool_dtype,
        "dtype": str(model.dtype).removeprefix("torch."),
        "execution": "eager" if model.enforce_eager else "compiled",
        "max_model_len": int(model.max_model_len),
        "block_size": int(cache.block_size),
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "num_gpu_blocks": getattr(cache, "num_gpu_blocks", None),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "async_scheduling": bool(getattr(scheduler, "async_scheduling", False)),
        "num_threads": torch.get_num_threads(),
        "environment": environment(),
        "torch": torch.__version__,
    }
