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

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from inferscale.bench.conversation import BenchConversation
from inferscale.bench.harness import BenchRun, Row, command, environment
from inferscale.bench.options import TtftOptions
from inferscale.config import EncodingConfig, MemoryConfig
from inferscale.errors import InvalidInput
from inferscale.memory_llm import ChatResult, MemoryLLM, Mode

MODES = ("text", "hit", "inject", "none")
_USER = "bench"


def run_ttft(
    open_engine: Callable[[MemoryConfig], MemoryLLM],
    model: str | Path,
    conversation: BenchConversation,
    options: TtftOptions,
    out: Path | None,
    say: Callable[[str], None],
) -> list[Row]:
    """Ingest the conversation, measure, append rows to `out` and return them.

    open_engine starts the model with a memory and the default encoding. Raises InvalidInput for a k
    above the number of turns, before the engine starts, and for one whose facts do not fit into the
    model's context, before it is measured; the rows of those before it stay.
    """
    num_turns = len(conversation.turns)
    if max(options.ks) > num_turns:
        raise InvalidInput(
            f"k={max(options.ks)} was asked for; {conversation.name} has {num_turns} turns. Lower --k."
        )
    run = BenchRun("ttft", Path(model).name, out)
    with (
        tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder,
        open_engine(MemoryConfig(folder)) as llm,
    ):
        run.config |= _config(llm, conversation, options)
        _ingest(llm, conversation, run, say)
        for k in options.ks:
            _measure(llm, conversation, k, options, run, say)
    return run.rows


def _config(llm: MemoryLLM, conversation: BenchConversation, options: TtftOptions) -> dict[str, Any]:
    encoding = EncodingConfig()
    config = llm.engine.llm.llm_engine.vllm_config
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    eager = bool(config.model_config.enforce_eager)
    return {
        "command": command(),
        "baseline": (
            "mode text of the same command: the same engine and prompt ids without a plan, "
            f"max_tokens=1, temperature=0, prefix cache emptied before; dtype={dtype}, "
            f"enforce_eager={eager}, max_model_len={llm.engine.max_model_len}"
        ),
        "conversation": conversation.name,
        "turns": len(conversation.turns),
        "policy": f"sliding({encoding.window},{encoding.stride})",
        "tail": options.tail,
        "dtype": dtype,
        "execution": "eager" if eager else "compiled",
        "max_model_len": llm.engine.max_model_len,
        "num_threads": torch.get_num_threads(),
        "environment": environment(),
    }


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
    cost = last.computed_tokens / last.stored_tokens
    passes = {"passes": last.jobs}
    run.add("tokens_per_stored_token", "tokens", [cost], config=passes, bench="encode")
    rate = len(conversation.turns) / last.seconds
    run.add("encode_rate", "facts/s", [rate], config=passes, bench="encode")


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
        if number == 0:  # warms up
            _check_fits(asked.values(), k, llm.engine.max_model_len)
            continue
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


def _check_fits(results: Iterable[ChatResult], k: int, max_model_len: int) -> None:
    num_left_out = max(result.num_left_out for result in results)
    if num_left_out:
        raise InvalidInput(
            f"{num_left_out} of k={k} facts do not fit into max_model_len={max_model_len}. Lower --k or "
            "raise --max-model-len; the rows of smaller k are stored."
        )


def _medians(results: Sequence[ChatResult]) -> dict[str, int]:
    def median(values: list[int]) -> int:
        return sorted(values)[len(values) // 2]

    return {
        "prompt_tokens": median([r.num_prompt_tokens for r in results]),
        "injected_tokens": median([r.num_injected_tokens for r in results]),
        "cached_tokens": median([r.num_cached_tokens for r in results]),
        "prefilled_tokens": median([r.num_prefilled_tokens for r in results]),
        "missing_tokens": median([r.num_missing_tokens for r in results]),
        "num_left_out": max(r.num_left_out for r in results),
    }
