"""`inferscale bench ttft`: time to first token with k facts, four modes in turn in one run.

    text    prefill everything
    hit     the same prompt a second time, from vLLM's own exact prefix cache: it attends to as many
            tokens and prefills as few, so it is the floor that the engine itself sets
    inject  the same facts in the same order, their KV taken from the pool
    none    no memory

Before each measured request (but `hit`) the engine's prefix cache is emptied, so that nothing is
found that the mode did not bring itself. Also gives the cost of encoding.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.bench.conversation import BenchConversation
from inferscale.bench.harness import BenchRun, Row
from inferscale.config import EncodingConfig, MemoryConfig
from inferscale.memory_llm import ChatResult, MemoryLLM, Mode

logger = logging.getLogger(__name__)

MODES = ("text", "hit", "inject", "none")
_USER = "bench"


@dataclass(frozen=True)
class TtftOptions:
    """What is measured. ks: numbers of facts; num_questions: measured questions for each k and mode."""

    ks: tuple[int, ...] = (0, 5, 20, 50, 100)
    num_questions: int = 10
    pool_size_bytes: int | str = 2**30
    tail: int = 0


def run_ttft(
    model: str | Path,
    conversation: BenchConversation,
    options: TtftOptions,
    out: Path | None,
    say: Callable[[str], None],
    engine_args: dict[str, Any] | None = None,
) -> list[Row]:
    """Ingest the conversation, measure, append rows to `out` and return them."""
    encoding = EncodingConfig()
    config = {
        "conversation": conversation.name,
        "turns": len(conversation.turns),
        "policy": f"sliding({encoding.window},{encoding.stride})",
        "tail": options.tail,
        "baseline": "text: the same prompt to the same engine without a plan, prefix cache emptied before",
        "engine_args": engine_args or {},
    }
    run = BenchRun("ttft", Path(model).name, out, config)
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder:
        say("Starting the engine …")
        with MemoryLLM(
            model,
            MemoryConfig(folder),
            encoding=encoding,
            pool_size_bytes=options.pool_size_bytes,
            engine_args=engine_args,
        ) as llm:
            _ingest(llm, conversation, run, say)
            for k in options.ks:
                _measure(llm, conversation, k, options, run, say)
    return run.rows


def _ingest(
    llm: MemoryLLM, conversation: BenchConversation, run: BenchRun, say: Callable[[str], None]
) -> None:
    say(f"Encoding {len(conversation.turns)} turns …")
    last = None

    def progress(state: Any) -> None:
        nonlocal last
        last = state
        say(f"  {state.done_jobs}/{state.jobs} passes, {state.computed_tokens / state.seconds:.0f} tokens/s")

    llm.add(list(conversation.turns), user_id=_USER, progress=progress)
    assert last is not None
    # The anchor is captured by every pass, but stored once.
    anchor = len(llm.prompts.anchor_ids)
    stored = last.stored_tokens - anchor * last.jobs
    encode = BenchRun("encode", run.model, run.out, run.config, run.id)
    cost = last.computed_tokens / stored
    encode.add("tokens_per_stored_token", "tokens", [cost], config={"passes": last.jobs})
    encode.add("encode_rate", "facts/s", [len(conversation.turns) / last.seconds])
    run.rows.extend(encode.rows)


def _measure(
    llm: MemoryLLM,
    conversation: BenchConversation,
    k: int,
    options: TtftOptions,
    run: BenchRun,
    say: Callable[[str], None],
) -> None:
    questions = [
        conversation.questions[i % len(conversation.questions)] for i in range(options.num_questions + 1)
    ]
    results: dict[str, list[ChatResult]] = {mode: [] for mode in MODES}
    for number, question in enumerate(questions):
        asked = _ask_in_turn(llm, question, k, options.tail, first=number)
        if number > 0:  # the first one warms up
            for mode, result in asked.items():
                results[mode].append(result)
    for mode, mode_results in results.items():
        tokens = _medians(mode_results)
        run.add("ttft", "ms", [r.ttft_ms for r in mode_results], mode=mode, k=k, config=tokens)
        run.add("e2e_ttft", "ms", [r.e2e_ttft_ms for r in mode_results], mode=mode, k=k, config=tokens)
    for over, under in (("text", "inject"), ("inject", "hit"), ("inject", "none")):
        pair = [[r.ttft_ms for r in results[mode]] for mode in (over, under)]
        run.add_ratio("ttft", f"{over}/{under}", pair[0], pair[1], k=k)
    medians = {mode: sorted(r.ttft_ms for r in rs)[len(rs) // 2] for mode, rs in results.items()}
    say(f"k={k}: " + ", ".join(f"{mode} {value:.1f} ms" for mode, value in medians.items()))


def _ask_in_turn(llm: MemoryLLM, question: str, k: int, tail: int, first: int) -> dict[str, ChatResult]:
    """Each mode once; which one begins changes from question to question, `hit` always follows `text`."""
    groups: list[tuple[str, ...]] = [("text", "hit"), ("inject",), ("none",)]
    first %= len(groups)
    asked: dict[str, ChatResult] = {}
    for group in groups[first:] + groups[:first]:
        llm.engine.reset_prefix_cache()
        for mode in group:
            engine_mode: Mode = "text" if mode == "hit" else mode  # type: ignore[assignment]
            asked[mode] = llm.chat(
                question, user_id=_USER, top_k=k, mode=engine_mode, tail=tail, max_tokens=1
            )
    return asked


def _medians(results: Sequence[ChatResult]) -> dict[str, int]:
    def median(values: list[int]) -> int:
        return sorted(values)[len(values) // 2]

    return {
        "prompt_tokens": median([r.num_prompt_tokens for r in results]),
        "injected_tokens": median([r.num_injected_tokens for r in results]),
        "cached_tokens": median([r.num_cached_tokens for r in results]),
        "prefilled_tokens": median([r.num_prefilled_tokens for r in results]),
        "missing_tokens": median([r.num_missing_tokens for r in results]),
    }
