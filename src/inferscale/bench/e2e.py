"""`inferscale bench e2e`: from the text of a question to the first token, through `MemoryLLM.chat`.

With k facts injected and without memory, in turn, the prefix cache emptied before each; what memory adds
is the paired difference. Several devices of the embedder are measured on one engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from inferscale.bench.conversation import BenchConversation
from inferscale.bench.engine import EngineSpec, describe
from inferscale.bench.harness import BenchRun, Row, Say, median_interval, middle
from inferscale.bench.options import E2eOptions
from inferscale.bench.spoken import prompt_builder
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.errors import EngineError
from inferscale.facts import Fact, Scope
from inferscale.memory import Memory
from inferscale.memory_llm import ChatResult, MemoryLLM

_USER = "bench"
_WARM_UPS = 3
_QUESTION_TOKENS = 512
_PARTS = ("embed_ms", "search_ms", "residency_ms", "prompt_ms", "engine_ms")


def measure_e2e(
    spec: EngineSpec,
    conversation: BenchConversation,
    options: E2eOptions,
    out: Path | None,
    say: Say,
    embedder: str | None = None,
) -> list[Row]:
    """Store and encode the conversation, ask with and without memory; append rows and return them.

    embedder: folder or hub name; None for the default one. Raises InvalidInput for a k above the number of
    turns, and EngineError for a question whose facts were not all injected.
    """
    conversation.check_k(options.k)
    sized = _sized(spec, conversation, options.k)
    run = BenchRun("e2e", spec.name, out)
    with (
        tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder,
        ExitStack() as stack,
    ):
        # One memory a device, all on the same data: embedder and index of each are where it says.
        memories = {
            device: stack.enter_context(
                closing(Memory(MemoryConfig(folder, embedder, device, catalog=IN_FOLDER)))
            )
            for device in options.devices
        }
        first = memories[options.devices[0]]
        llm = stack.enter_context(
            MemoryLLM(
                sized.model,
                first,
                connector=sized.connector(),
                repair_after_chat=False,
                engine_args=sized.arguments(),
            )
        )
        run.config |= {
            **describe(llm.engine.llm.llm_engine.vllm_config, sized),
            "conversation": conversation.name,
            "turns": len(conversation.turns),
            "policy": str(llm.encoder.policy),
            "tail": str(options.tail),
            "baseline": "mode none of the same command: the same questions without memory, in turn",
        }
        say(f"Encoding {len(conversation.turns)} turns …")
        llm.add(list(conversation.turns), user_id=_USER)
        for device, memory in memories.items():
            llm.memory = memory
            _measure_device(llm, conversation, options, device, run, say)
    return run.rows


def _sized(spec: EngineSpec, conversation: BenchConversation, k: int) -> EngineSpec:
    """With room for all turns in the pool, and for the `k` longest of them in a prompt."""
    prompts = prompt_builder(spec.tokenizer or spec.model)
    lengths = [
        len(prompts.fact_ids(Fact("", 0, Scope(), turn.text, turn.speaker, turn.said_at)))
        for turn in conversation.turns
    ]
    head = len(prompts.anchor_ids)
    longest = head + sum(sorted(lengths)[-k:] if k else ()) + _QUESTION_TOKENS
    return spec.sized([head, *lengths], longest)


def _measure_device(
    llm: MemoryLLM, conversation: BenchConversation, options: E2eOptions, device: str, run: BenchRun, say: Say
) -> None:
    results: dict[str, list[ChatResult]] = {"inject": [], "none": []}
    for number in range(options.num_questions + _WARM_UPS):
        question = conversation.questions[number % len(conversation.questions)]
        modes = ("inject", "none") if number % 2 else ("none", "inject")
        for mode in modes:
            result = _ask(llm, question, mode, options)
            if number >= _WARM_UPS:
                results[mode].append(result)
    config = {
        "embedder": str(llm.memory.config.embedder or "default"),
        "embedder_device": device,
        "questions": options.num_questions,
    }
    for mode, ones in results.items():
        told = {**config, **_tokens(ones)}
        run.add("e2e_ttft", "ms", [one.e2e_ttft_ms for one in ones], mode=mode, k=options.k, config=told)
        for part in _PARTS:
            values = [float(getattr(one.timings, part)) for one in ones]
            run.add(f"e2e_{part}", "ms", values, mode=mode, k=options.k, config=config)
    pairs = zip(results["inject"], results["none"], strict=True)
    added = np.array([one.e2e_ttft_ms - other.e2e_ttft_ms for one, other in pairs])
    ci95 = median_interval(added)
    run.add("e2e_minus_none", "ms", added.tolist(), mode="inject", k=options.k, ci95=ci95, config=config)
    say(f"k={options.k}, embedder on {device}: memory adds {np.median(added):.1f} ms to the first token.")


def _ask(llm: MemoryLLM, question: str, mode: Any, options: E2eOptions) -> ChatResult:
    llm.engine.reset_prefix_cache()
    result = llm.chat(
        question,
        user_id=_USER,
        top_k=options.k,
        mode=mode,
        tail=options.tail,
        max_tokens=1,
        sampling={"detokenize": False},
    )
    if (
        mode == "inject"
        and options.k
        and (result.num_missing_tokens or result.num_left_out or not result.hits)
    ):
        raise EngineError(
            f"Of the facts of a question {result.num_missing_tokens} tokens were not injected and "
            f"{result.num_left_out} facts left out ({result.reason or 'not all is in the pool'}); raise "
            "--pool-size or --max-model-len."
        )
    return result


def _tokens(results: Sequence[ChatResult]) -> dict[str, int]:
    return {
        "prompt_tokens": middle([one.num_prompt_tokens for one in results]),
        "injected_tokens": middle([one.num_injected_tokens for one in results]),
        "cached_tokens": middle([one.num_cached_tokens for one in results]),
        "prefilled_tokens": middle([one.num_prefilled_tokens for one in results]),
    }
