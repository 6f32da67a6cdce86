"""What the tests and an engine's process send each other. Plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EngineOptions:
    """One configuration of an engine; equal configurations share an engine.

    block_size: of the paged cache, None for vLLM's default (128 on a CPU). num_blocks: blocks of
    the paged cache. pool_tokens: capacity of the pool; 0 starts vLLM without the connector.
    host_tokens: capacity of host memory below the pool. disk: folder of the copies on disk. cold: folder of
    those that engines share.
    key_file: with the key that these are encrypted with.
    engine_args: further arguments of `vllm.LLM`, as JSON.
    num_threads: more than one is slow for models this small, above all where other processes run.
    """

    checkpoint: str
    block_size: int | None = None
    num_blocks: int = 256
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    enable_prefix_caching: bool = True
    pool_tokens: int = 16384
    page_size_tokens: int = 16
    pool_dtype: str = "auto"
    host_tokens: int = 0
    disk: str | None = None
    cold: str | None = None
    key_file: str | None = None
    compile_injection: bool = False
    injection_path: str = "auto"
    num_threads: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    engine_args: str = "{}"


@dataclass(frozen=True)
class Request:
    """One request. params: its `kv_transfer_params`. salt: its cache salt. allowed: tokens that may come.
    adapter: name, number and folder of a LoRA adapter. num_answers: `n` of vLLM, for `ask_all`.
    """

    ids: tuple[int, ...]
    params: Any = None
    salt: str | None = None
    max_tokens: int = 1
    prompt_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    allowed: tuple[int, ...] | None = None
    adapter: tuple[str, int, str] | None = None
    num_answers: int = 1


@dataclass(frozen=True)
class Answer:
    """What came back.

    logits: float32 [generated tokens, vocabulary], raw. outcome: the connector's, or None.
    num_cached_tokens: as vLLM counts them, ours included.
    """

    token_ids: tuple[int, ...]
    logits: FloatArray
    outcome: dict[str, Any] | None
    num_cached_tokens: int | None
    finish_reason: str | None


@dataclass(frozen=True)
class EngineFacts:
    """What a started engine says of itself. num_blocks, block_size: of vLLM's scheduler."""

    model: str
    secret: bytes
    block_size: int
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class RunningRequest:
    """A request inside the engine: where its KV lies and how far it is."""

    block_ids: tuple[int, ...]
    num_computed_tokens: int
    is_running: bool
