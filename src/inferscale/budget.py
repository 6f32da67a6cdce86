"""How a GPU's memory is divided between the model, vLLM's cache and the pool. Pure arithmetic.

    total │ used by others │ vLLM: weights · activations · CUDA graphs · cache │ pool │ reserve │
          └── not free ────┘└────────── gpu_memory_utilization × total ───────┘

How vLLM accounts (read in 0.25.1): a worker *requests* `ceil(total × gpu_memory_utilization)` bytes and
refuses to start where fewer are free (`v1/worker/utils.py: request_memory`). The fraction is of all of
the device's memory, whatever other processes hold. Its cache gets what is left of the request after
weights, the peak of a profiling pass, memory that torch does not manage, and an estimate of the CUDA
graphs, unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 (`v1/worker/gpu_worker.py:
determine_available_memory`; `utils/mem_utils.py: memory_profiling`, the baseline is taken after the CUDA
context and NCCL exist, so these count as used by others). With `kv_cache_memory_bytes` the cache has that
size, and the fraction is only checked against what is free. vLLM's default fraction is 0.92
(`config/cache.py`), so by itself it leaves 8 % for everything that it does not know: the pool.

The rules here, for each device:

- `gpu_memory_utilization` given: it is respected; a pool that cannot fit beside it is refused.
- not given: (free − pool − reserve) / total, but never above vLLM's default.
- no pool size given: a quarter of what the model leaves, less where vLLM's cache could then not hold
  one request of the longest length (but not below a sixteenth: then vLLM says what is missing). The
  cache is the larger part on purpose: every running request needs it, while a fact that finds no room
  in the pool is only prefilled.
- a pool that leaves no room for the weights and a minimal cache is refused before anything is loaded.

Weights are an estimate (`model_size`), so they only serve to divide and to refuse what cannot be.
Knows nothing of vLLM's objects; `offline` measures and applies. A CPU is not budgeted here: there the
pool has a fixed default and vLLM's cache follows VLLM_CPU_KVCACHE_SPACE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inferscale.errors import PoolTooLarge

MAX_UTILIZATION = 0.92
"""vLLM's default: a small pool changes nothing for vLLM."""
POOL_SHARE = 1 / 4
"""Of the memory that the model leaves, the pool's part where no size is given."""
LEAST_POOL_SHARE = 1 / 16
LEAST_POOL_BYTES = 64 * 2**20
MIN_CACHE_TOKENS = 4096
"""What vLLM's cache must hold at least, where `max_model_len` is not given."""
FACT_TOKENS = 30
"""Tokens of a usual fact, for saying how many the pool holds."""

_GIB = 2**30


class DeviceMemory(NamedTuple):
    """Of one GPU. free_bytes: before vLLM starts on it."""

    name: str
    total_bytes: int
    free_bytes: int


class ModelSize(NamedTuple):
    """Estimates for one worker.

    weight_bytes: None where they cannot be told. token_bytes: KV of one token. max_tokens: the longest
    request; is_max_given: whether the caller named it (otherwise vLLM may shorten it).
    """

    weight_bytes: int | None
    token_bytes: int
    max_tokens: int
    is_max_given: bool = False


class Budget(NamedTuple):
    """What to start with. gpu_memory_utilization: as given, or the one computed."""

    pool_bytes: int
    gpu_memory_utilization: float


def default_reserve(total_bytes: int, *, num_workers: int = 1) -> int:
    """Bytes of a device that neither vLLM nor the pool may take.

    1 GiB for what no profile sees (the CUDA context, about 0.5 GiB, the scratch memory of an injection,
    vLLM's own error of about 0.15 GiB) and 1.5 % of the device for fragments of torch's allocator and
    an embedder with its index; with tensor parallelism 0.75 GiB for NCCL.
    """
    nccl = 3 * 2**28 if num_workers > 1 else 0
    return _GIB + int(0.015 * total_bytes) + nccl


def plan_budget(
    devices: Sequence[DeviceMemory],
    model: ModelSize | None,
    *,
    pool_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    cache_bytes: int | None = None,
    reserve_bytes: int | None = None,
    default_pool_bytes: int = _GIB,
) -> Budget:
    """Pool and fraction that fit on every one of the engine's devices, one a worker.

    pool_bytes, gpu_memory_utilization: None where the user gave none. cache_bytes: vLLM's
    `kv_cache_memory_bytes`, if given. reserve_bytes: None for `default_reserve`. default_pool_bytes:
    where no size is given and the model's is not known. Raises PoolTooLarge, which says what was given,
    what is there and what to change.
    """
    assert devices
    rooms = [_Room(device, model, cache_bytes, reserve_bytes, len(devices)) for device in devices]
    if gpu_memory_utilization is not None:
        for room in rooms:
            room.check_beside(gpu_memory_utilization, pool_bytes or 0)
        pool = (
            min(room.pool_beside(gpu_memory_utilization) for room in rooms)
            if pool_bytes is None
            else pool_bytes
        )
        return Budget(pool, gpu_memory_utilization)
    pool = min(room.default_pool(default_pool_bytes) for room in rooms) if pool_bytes is None else pool_bytes
    for room in rooms:
        room.check(pool)
    return Budget(pool, min(room.utilization(pool) for room in rooms))


@dataclass(frozen=True)
class _Room:
    """One device and what is to stand on it."""

    device: DeviceMemory
    model: ModelSize | None
    cache_bytes: int | None
    reserve_bytes: int | None
    num_workers: int

    @property
    def usable_bytes(self) -> int:
        """Free now, without the reserve: for vLLM and the pool."""
        reserve = self.reserve_bytes
        if reserve is None:
            reserve = default_reserve(self.device.total_bytes, num_workers=self.num_workers)
        return self.device.free_bytes - reserve

    @property
    def weight_bytes(self) -> int:
        return (self.model.weight_bytes if self.model else None) or 0

    @property
    def least_cache_bytes(self) -> int:
        """What vLLM refuses to start without, as far as it is known."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        if self.model is None:
            return 0
        longest = self.model.max_tokens
        return self.model.token_bytes * (
            longest if self.model.is_max_given else min(longest, MIN_CACHE_TOKENS)
        )

    def default_pool(self, where_unknown: int) -> int:
        if self.model is None or self.model.weight_bytes is None:
            return where_unknown
        left = max(0, self.usable_bytes - self.weight_bytes)
        beside_longest = left - (self.cache_bytes or self.model.token_bytes * self.model.max_tokens)
        pool = min(POOL_SHARE * left, max(beside_longest, LEAST_POOL_SHARE * left))
        return max(_whole(int(pool)), LEAST_POOL_BYTES)

    def pool_beside(self, utilization: float) -> int:
        """The default pool where vLLM's share is fixed: the usual one, if so much is left."""
        left = self.usable_bytes - self.requested_bytes(utilization)
        usual = self.default_pool(_GIB)
        if min(left, usual) < LEAST_POOL_BYTES:
            raise PoolTooLarge(
                f"gpu_memory_utilization={utilization} gives vLLM {_gib(self.requested_bytes(utilization))} "
                f"of {self._there()}, which leaves nothing for the pool beside {self._reserve()}. Leave "
                "gpu_memory_utilization out, and it is set so that both fit, or lower it to "
                f"{self.utilization(usual):.2f} or less."
            )
        return _whole(min(left, usual))

    def requested_bytes(self, utilization: float) -> int:
        """What vLLM takes; with `kv_cache_memory_bytes` that does not follow the fraction."""
        if self.cache_bytes is not None:
            return self.weight_bytes + self.cache_bytes
        return math.ceil(utilization * self.device.total_bytes)

    def utilization(self, pool_bytes: int) -> float:
        fraction = (self.usable_bytes - pool_bytes) / self.device.total_bytes
        return max(0.01, min(MAX_UTILIZATION, math.floor(fraction * 10_000) / 10_000))

    def check_beside(self, utilization: float, pool_bytes: int) -> None:
        """Refuse what cannot fit even without a reserve."""
        requested = self.requested_bytes(utilization)
        if pool_bytes and requested + pool_bytes > self.device.free_bytes:
            raise PoolTooLarge(
                f"pool_size_bytes is {pool_bytes} ({_gib(pool_bytes)}), and "
                f"gpu_memory_utilization={utilization} gives vLLM {_gib(requested)}; together that is more "
                f"than is free on {self._there()}. Leave gpu_memory_utilization out, and it is set so that "
                "both fit, or lower one of the two."
            )

    def check(self, pool_bytes: int) -> None:
        """Refuse a pool beside which the weights and a minimal cache have no room."""
        left = min(self.usable_bytes - pool_bytes, int(MAX_UTILIZATION * self.device.total_bytes))
        needed = self.weight_bytes + self.least_cache_bytes
        if left > needed:
            return
        if self.model is None or self.model.weight_bytes is None:
            what = "vLLM has nothing left"
        else:
            what = (
                f"vLLM has {_gib(max(0, left))} left for weights of about {_gib(self.weight_bytes)} (an "
                f"estimate) and a cache of at least {_gib(self.least_cache_bytes)}"
            )
        most = self.usable_bytes - needed
        advice = (
            f"Set pool_size_bytes to at most {_whole(most)}"
            if most >= 2 * LEAST_POOL_BYTES
            else "Take a smaller model or a larger GPU"
        )
        raise PoolTooLarge(
            f"A pool of {pool_bytes} bytes ({_gib(pool_bytes)}) does not fit on {self._there()}: beside it "
            f"and {self._reserve()}, {what}. {advice}, free memory that other processes hold, or lower "
            "max_model_len."
        )

    def _reserve(self) -> str:
        return f"a reserve of {_gib(self.device.free_bytes - self.usable_bytes)}"

    def _there(self) -> str:
        free, total = self.device.free_bytes, self.device.total_bytes
        return f"{self.device.name} ({_gib(free)} of {_gib(total)} free)"


# --- saying it ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryBudget:
    """How the memory of one worker is divided now.

    model_bytes: of the weights, an estimate; None where it is not known. cache_bytes, cache_tokens: of
    vLLM's paged cache. free_bytes: what nobody holds. gpu_memory_utilization: None on a CPU.
    """

    device: str
    model_bytes: int | None
    cache_bytes: int
    cache_tokens: int
    pool_bytes: int
    pool_tokens: int
    page_size_tokens: int
    free_bytes: int
    gpu_memory_utilization: float | None = None

    @property
    def pool_facts(self) -> int:
        """Facts of 30 tokens that the pool holds; each takes whole pages."""
        pages_a_fact = -(-FACT_TOKENS // self.page_size_tokens)
        return self.pool_tokens // self.page_size_tokens // pages_a_fact

    def __str__(self) -> str:
        weights = "" if self.model_bytes is None else f"model weights {_gib(self.model_bytes)} · "
        return (
            f"Memory of {self.device}: {weights}vLLM's cache {_gib(self.cache_bytes)} "
            f"({self.cache_tokens:,} tokens) · pool {_gib(self.pool_bytes)} ({self.pool_tokens:,} tokens, "
            f"about {self.pool_facts:,} facts of {FACT_TOKENS} tokens in pages of {self.page_size_tokens}) · "
            f"{_gib(self.free_bytes)} free"
        )


def _gib(size_bytes: int) -> str:
    """`29.8 GiB`; small sizes in MiB."""
    mib = round(size_bytes / 2**20)
    if mib < 1000:
        return f"{mib} MiB"
    return f"{size_bytes / _GIB:.1f} GiB"


def _whole(size_bytes: int) -> int:
    """Rounded down to 64 MiB: sizes that people can read."""
    return size_bytes // LEAST_POOL_BYTES * LEAST_POOL_BYTES
