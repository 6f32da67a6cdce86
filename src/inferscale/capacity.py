"""How much room the KV of facts takes in each tier: arithmetic on a model's shape, nothing is loaded.

Keys and values of one token take 2 · layers · KV heads · head size elements. The GPU pool gives a fact whole
pages; in host memory it takes its tokens; on disk also a header, and whole blocks of the file system. Sizes
are of all workers together: tensor parallelism divides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast, get_args

from inferscale.config import ConnectorConfig, PoolDtype
from inferscale.errors import InvalidInput
from inferscale.model_size import KvShape, model_kv_shape, model_size
from inferscale.row_size import RowShape

GIB = 2**30
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "fp8": 1}
"""Bytes of an element, by the dtype that the pool keeps: that of vLLM's cache, or a quantized one, which adds
scales (`row_size`)."""
_QUANTIZED = get_args(PoolDtype)[1:]

_DISK_HEADER_BYTES = 66
_DISK_BLOCK_BYTES = 4096


COMMON: Mapping[str, KvShape] = {
    "SmolLM2-135M": KvShape(30, 3, 64),
    "Qwen2.5-7B": KvShape(28, 4, 128),
    "Llama-3.1-8B": KvShape(32, 8, 128),
    "Mistral-7B": KvShape(32, 8, 128),
    "Qwen3-14B": KvShape(40, 8, 128),
    "Llama-3.3-70B": KvShape(80, 8, 128),
}
"""Of public models, from the configs that their publishers put beside the weights."""


class FactSize(NamedTuple):
    """Bytes of one fact in each tier."""

    num_tokens: int
    pool: int
    host: int
    disk: int


class TierPlan(NamedTuple):
    """One tier: whose facts it holds, how many that are, and the room that they take."""

    tier: str
    users: int
    facts: int
    size_bytes: int


class KvPlan(NamedTuple):
    """token_bytes: KV of one token. facts_per_gib: of GPU memory."""

    model: str
    dtype: str
    token_bytes: int
    fact: FactSize
    facts_per_gib: int
    tiers: tuple[TierPlan, ...]


def fact_size(token_bytes: int, num_tokens: int, page_tokens: int | None = None) -> FactSize:
    """page_tokens: of a page of the pool; default: the connector's."""
    page = ConnectorConfig.page_size_tokens if page_tokens is None else page_tokens
    in_pool = -(-num_tokens // page) * page * token_bytes
    in_file = num_tokens * token_bytes + _DISK_HEADER_BYTES
    blocks = -(-in_file // _DISK_BLOCK_BYTES)
    return FactSize(num_tokens, in_pool, num_tokens * token_bytes, blocks * _DISK_BLOCK_BYTES)


def facts_per_gib(token_bytes: int, num_tokens: int) -> int:
    """How many facts fit into one GiB of the GPU pool."""
    return GIB // fact_size(token_bytes, num_tokens).pool


def row_bytes(shape: KvShape, pool_dtype: PoolDtype) -> int:
    """KV of one token in a quantized pool, with its scales."""
    return RowShape(((shape.heads, shape.head_dim),) * shape.layers).row_bytes(pool_dtype, 1)


def token_bytes_of(model: str, dtype: str | None) -> int:
    """KV of one token. model: a name of `COMMON`, a folder, a config.json, or a hub name.

    dtype: of the pool; None for the model's own, bfloat16 for a name of `COMMON`. Raises InvalidInput.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInput(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}.")
    shape = _common(model)
    if shape is not None and dtype not in _QUANTIZED:
        return shape.elements * DTYPES[dtype or "bfloat16"]
    path = Path(model)
    folder = str(path.parent) if path.name == "config.json" and path.is_file() else model
    if dtype in _QUANTIZED:
        shape = shape or model_kv_shape(folder)
        if shape is not None:
            return row_bytes(shape, cast(PoolDtype, dtype))
    size = model_size(folder, {"dtype": dtype or "auto", "kv_cache_dtype": dtype or "auto"})
    if size is None:
        raise InvalidInput(
            f"the model is {model!r}, whose shape cannot be read; give {', '.join(COMMON)}, a folder with "
            "config.json, the path of a config.json, or a hub name."
        )
    return size.token_bytes


def _common(model: str) -> KvShape | None:
    return next((shape for name, shape in COMMON.items() if name.lower() == model.lower()), None)


def plan(
    model: str,
    users: int,
    facts_per_user: int,
    *,
    tokens_per_fact: int = 30,
    dtype: str | None = None,
    talking: int | None = None,
    recent: int | None = None,
) -> KvPlan:
    """Room for the facts of `users`.

    talking: users whose facts are in the GPU pool at the same time, by default one in a hundred. recent:
    those whose facts are in host memory, by default one in ten. The disk holds everybody's. Raises
    InvalidInput.
    """
    talking = max(1, users // 100) if talking is None else talking
    recent = max(1, users // 10) if recent is None else recent
    for name, value, most in (
        ("users", users, None),
        ("facts", facts_per_user, None),
        ("tokens_per_fact", tokens_per_fact, None),
        ("talking", talking, users),
        ("recent", recent, users),
    ):
        if value < 1 or (most is not None and value > most):
            allowed = f"1 to {most}, the number of users" if most else "1 or more"
            raise InvalidInput(f"{name} is {value}; allowed are {allowed}.")
    token_bytes = token_bytes_of(model, dtype)
    fact = fact_size(token_bytes, tokens_per_fact)
    tiers = tuple(
        TierPlan(tier, count, count * facts_per_user, count * facts_per_user * size)
        for tier, count, size in (
            ("GPU pool", talking, fact.pool),
            ("host memory", recent, fact.host),
            ("disk", users, fact.disk),
        )
    )
    per_gib = facts_per_gib(token_bytes, tokens_per_fact)
    named = dtype or ("bfloat16" if _common(model) else "the model's")
    return KvPlan(model, named, token_bytes, fact, per_gib, tiers)


def size_text(size_bytes: int) -> str:
    """Such as `1.5 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.4g} {unit}"
    return f"{size_bytes} B"
