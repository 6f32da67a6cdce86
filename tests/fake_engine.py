"""An engine for benchmarks without vLLM: it keeps account of a prefix cache and a pool, times are made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.config import ConnectorConfig
from inferscale.offline import Answer, Generation, GenerationRequest
from inferscale.plan import Order

BLOCK = 16
VOCAB = 512


class FakeOffline:
    """A millisecond for each prefilled token, two for each further output token.

    pool_tokens: captures that find no room below it are lost. loses: keys vanish once they were asked for.
    caches: whether prompts are found again in the prefix cache.
    """

    def __init__(self, *, pool_tokens: int = 10**9, loses: bool = False, caches: bool = True) -> None:
        self.fingerprint = "model"
        self.max_model_len = 4096
        self.connector = ConnectorConfig(pool_size_bytes=2**20)
        self.pool_tokens, self.loses, self.caches = pool_tokens, loses, caches
        self.pool: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.log: list[str] = []
        self.most_in_flight = 0
        self.is_closed = False
        self.residency = SimpleNamespace(
            resident=self._resident, stats=lambda: {"preemptions": 0, "pages": 9}
        )
        self._waiting: dict[str, GenerationRequest] = {}
        self._num = 0
        cache = SimpleNamespace(block_size=BLOCK, gpu_memory_utilization=0.9, num_gpu_blocks=10)
        model = SimpleNamespace(
            get_vocab_size=lambda: VOCAB, dtype="torch.bfloat16", enforce_eager=True, max_model_len=4096
        )
        scheduler = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
        config = SimpleNamespace(cache_config=cache, model_config=model, scheduler_config=scheduler)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))

    def _resident(self, keys: Sequence[str]) -> list[bool]:
        there = [key in self.pool for key in keys]
        if self.loses:
            self.pool.clear()
        return there

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")
        self.prompts.clear()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._answer(request) for request in requests]

    def submit(self, request: GenerationRequest) -> str:
        self._num += 1
        self._waiting[str(self._num)] = request
        self.most_in_flight = max(self.most_in_flight, len(self._waiting))
        return str(self._num)

    def step(self) -> list[Answer]:
        """The oldest request is done."""
        name = next(iter(self._waiting))
        return [Answer(name, self._answer(self._waiting.pop(name)))]

    def abort(self, names: Iterable[str]) -> None:
        for name in names:
            del self._waiting[name]

    def order(self, order: Order) -> dict[str, Any]:
        self.log.append(order.op)
        return {}

    def close(self) -> None:
        self.is_closed = True

    def _answer(self, request: GenerationRequest) -> Generation:
        ids, plan = tuple(request.token_ids), request.plan
        outcome: dict[str, Any] | None = None
        num_supplied = 0
        if plan is None:
            num_supplied = self._cached(ids)
            self.prompts.append(ids)
        else:
            captured = [span for span in plan.captures if self._capture(span.key, span.end - span.start)]
            for segment in plan.segments:
                if segment.key not in self.pool:
                    break
                num_supplied += len(segment.token_ids)
            outcome = {"injected_tokens": num_supplied, "cached_tokens": 0, "captured": len(captured)}
        self.log.append("plan" if plan is not None and plan.segments else "plain")
        ttft_s = (len(ids) - num_supplied) / 1000
        total_s = ttft_s + 0.002 * (request.max_tokens - 1)
        output = (0,) * request.max_tokens
        return Generation("", output, ttft_s, total_s, num_supplied, outcome, "length")

    def _capture(self, key: str, num_tokens: int) -> bool:
        if key not in self.pool and sum(self.pool.values()) + num_tokens <= self.pool_tokens:
            self.pool[key] = num_tokens
        return key in self.pool

    def _cached(self, ids: tuple[int, ...]) -> int:
        longest = 0
        for prompt in self.prompts if self.caches else ():
            num = 0
            while num < min(len(ids), len(prompt)) and ids[num] == prompt[num]:
                num += 1
            longest = max(longest, min(num, len(ids) - 1) // BLOCK * BLOCK)
        return longest


def fake_engine(**options: Any) -> BenchEngine:
    spec = EngineSpec("some/tiny", random_weights=True, pool_size_bytes=2**20)
    return BenchEngine(FakeOffline(**options), spec)  # type: ignore[arg-type]
