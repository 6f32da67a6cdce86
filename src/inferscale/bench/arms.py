"""The requests of each mode (see `modes`), and the proof that each ran in its mode.

A request that silently ran in another way would make a wrong row, so `check` raises instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inferscale.bench.encode import Encoding
from inferscale.bench.engine import BenchEngine
from inferscale.bench.harness import BenchRun, middle
from inferscale.bench.load import SAMPLING
from inferscale.bench.workload import Asked
from inferscale.errors import EngineError, InvalidInput
from inferscale.offline import Generation, GenerationRequest
from inferscale.tail import NO_TAIL, Tail


class TokenCounts(NamedTuple):
    """Where the KV of a prompt's tokens came from: injected + cached + prefilled = prompt."""

    prompt: int
    injected: int
    cached: int
    prefilled: int


def request_of(mode: str, asked: Asked, encoding: Encoding, max_tokens: int = 1) -> GenerationRequest:
    """The request that asks in this mode. Only `inject` has a plan, and only where facts are in front."""
    ids = {
        "text": asked.memory + asked.rest,
        "hit": asked.memory + asked.hit_rest,
        "inject": asked.memory + asked.rest,
        "none": asked.none,
    }[mode]
    plan = encoding.plan(asked) if mode == "inject" and asked.facts else None
    return GenerationRequest(ids, max_tokens, plan, sampling=SAMPLING)


def prime_of(asked: Asked) -> GenerationRequest:
    """The request after which `hit` finds head and facts in the prefix cache."""
    return GenerationRequest(asked.memory + asked.rest, 1, sampling=SAMPLING)


def checked_counts(
    mode: str, asked: Asked, request: GenerationRequest, generation: Generation, block_size: int
) -> TokenCounts:
    """The account of a finished request. Raises EngineError unless it ran as its mode says.

    vLLM's prefix cache may supply a little to every mode: blocks of the head that all users share.
    """
    if generation.finish_reason == "error":
        raise EngineError(f"The engine failed a request of mode {mode}; its log (--verbose) says why.")
    outcome = generation.outcome or {}
    injected = int(outcome.get("injected_tokens", 0))
    cached = int(outcome.get("cached_tokens", generation.num_cached_tokens))
    num = len(request.token_ids)
    counts = TokenCounts(num, injected, cached, num - injected - cached)
    num_memory = len(asked.memory)
    if mode == "inject" and asked.facts:
        if counts.prefilled != len(asked.rest) or counts.injected < num_memory - _shared(asked, block_size):
            reason = outcome.get("reason") or outcome.get("rejected") or "not all is in the pool"
            raise EngineError(
                f"Of {num_memory} memory tokens {counts.injected} were injected and {counts.cached} found in "
                f"vLLM's prefix cache ({reason}); no row is written for requests that fell back to text. "
                "Raise --pool-size."
            )
    elif mode == "hit" and asked.facts:
        expected = num_memory // block_size * block_size
        if counts.cached < expected:
            raise EngineError(
                f"Of {num_memory} memory tokens {counts.cached} were found in vLLM's prefix cache instead of "
                f"{expected}: it is too small for this benchmark, or off. Lower --users, or raise "
                "--gpu-memory-utilization (VLLM_CPU_KVCACHE_SPACE on a CPU)."
            )
    elif mode == "text" and counts.cached > _shared(asked, block_size):
        raise EngineError(
            f"The prompt was to be prefilled, but {counts.cached} of its {counts.prompt} tokens were found "
            "in vLLM's prefix cache, which was emptied before."
        )
    return counts


def new_run(
    bench: str, engine: BenchEngine, encoding: Encoding, out: Path | None, tail: Tail = NO_TAIL
) -> BenchRun:
    """A run whose rows say how the engine was started, what the baseline is, and what the workload was."""
    settings = engine.describe()
    baseline = (
        "mode text of the same command: the same engine and prompt ids without a plan, temperature=0, prefix "
        f"cache emptied before; dtype={settings['dtype']}, "
        f"enforce_eager={settings['execution'] == 'eager'}, max_model_len={settings['max_model_len']}"
    )
    config = {
        **settings,
        "baseline": baseline,
        "policy": str(encoding.policy),
        "tail": str(tail),
        **encoding.workload.describe(),
    }
    return BenchRun(bench, engine.spec.name, out, config)


def check_fits(asked: Asked, output_tokens: int, max_model_len: int) -> None:
    """Raise InvalidInput for a prompt that does not fit into the model's context with its answer."""
    num_tokens = len(asked.memory) + max(len(asked.rest), len(asked.hit_rest)) + output_tokens
    if num_tokens > max_model_len:
        raise InvalidInput(
            f"Prompt ({len(asked.facts)} facts) and answer have {num_tokens} tokens "
            f"and do not fit into max_model_len={max_model_len}. Lower --k or raise --max-model-len; the "
            "rows of smaller k are stored."
        )


def _shared(asked: Asked, block_size: int) -> int:
    """Tokens that requests may find in the prefix cache by chance: the head, and a first fact or two."""
    return len(asked.head) + sum(len(ids) for ids in asked.facts[:2]) + block_size


def summarize(counts: Sequence[TokenCounts]) -> dict[str, int]:
    """Medians over the requests of a row, and the extremes of what must not vary."""
    return {
        "prompt_tokens": middle([one.prompt for one in counts]),
        "injected_tokens": middle([one.injected for one in counts]),
        "min_injected_tokens": min(one.injected for one in counts),
        "cached_tokens": middle([one.cached for one in counts]),
        "prefilled_tokens": middle([one.prefilled for one in counts]),
        "max_prefilled_tokens": max(one.prefilled for one in counts),
    }
