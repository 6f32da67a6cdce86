"""`inferscale demo`: one conversation remembered, the same questions asked three ways."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from inferscale.catalog_url import IN_FOLDER
from inferscale.cli.engine import open_llm, show_progress
from inferscale.cli.options import POSITIVE, json_option, model_options, recall_options
from inferscale.cli.output import emit, say
from inferscale.config import MemoryConfig
from inferscale.demo import Question, load_conversation
from inferscale.tail import Tail

if TYPE_CHECKING:
    from inferscale.memory_llm import ChatResult, MemoryLLM, Mode

_USER = "demo"
_MAX_MODEL_LEN = 8192
_MODES: tuple[Mode, ...] = ("none", "text", "inject")
_TITLES = {"none": "no memory", "text": "text memory", "inject": "injected"}


@click.command()
@recall_options
@click.option("--questions", type=POSITIVE, help="Ask only the first so many questions.")
@model_options
@json_option
def demo(
    top_k: int,
    tail: Tail | None,
    questions: int | None,
    model: str | None,
    pool_size: int | None,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Ingest a conversation and answer questions about it: without memory, with text, and injected.

    Everything is stored in a temporary folder and removed at the end.
    """
    conversation = load_conversation()
    with (
        tempfile.TemporaryDirectory(prefix="inferscale-demo-") as folder,
        open_llm(
            model,
            MemoryConfig(folder, catalog=IN_FOLDER),
            pool_size,
            max_model_len=max_model_len or _MAX_MODEL_LEN,
            verbose=verbose,
        ) as llm,
    ):
        say(f"Remembering {len(conversation.turns)} turns of “{conversation.title}” …")
        llm.add(list(conversation.turns), user_id=_USER, progress=show_progress)
        llm.chat("Hello!", user_id=_USER, top_k=top_k, tail=tail, max_tokens=1)  # warms all code paths
        asked = conversation.questions[:questions]
        results = [_ask(llm, question, top_k, tail, as_json) for question in asked]
    if not as_json:
        _print_summary(asked, results)


def _ask(
    llm: MemoryLLM, question: Question, top_k: int, tail: Tail | None, as_json: bool
) -> dict[str, ChatResult]:
    results: dict[str, ChatResult] = {}
    if not as_json:
        click.echo(f"\nQ: {question.question}   (expected: {question.answer})")
    for mode in _MODES:
        llm.engine.reset_prefix_cache()  # no mode profits from what another one left behind
        result = llm.chat(
            question.question,
            user_id=_USER,
            top_k=top_k,
            tail=tail,
            mode=mode,
            max_tokens=32,
        )
        results[mode] = result
        is_right = question.is_right(result.text)
        if as_json:
            emit(_row(question, result, is_right))
        else:
            _print_result(result, is_right)
    return results


def _print_result(result: ChatResult, is_right: bool) -> None:
    answer = " ".join(result.text.split())
    answer = answer if len(answer) <= 76 else answer[:75] + "…"
    click.echo(
        f"  {_TITLES[result.mode]:<11} {'right' if is_right else 'wrong':<5}  "
        f"TTFT {result.ttft_ms:7.0f} ms   injected {result.num_injected_tokens:5d}   "
        f"prefilled {result.num_prefilled_tokens:5d}   {answer}"
    )


def _print_summary(questions: Sequence[Question], results: Sequence[dict[str, ChatResult]]) -> None:
    click.echo("\n              right    median TTFT   median tokens injected / prefilled")
    for mode in _MODES:
        answers = [result[mode] for result in results]
        right = sum(q.is_right(a.text) for q, a in zip(questions, answers, strict=True))
        click.echo(
            f"  {_TITLES[mode]:<11} {right:2d}/{len(answers):<2d}   "
            f"{median(a.ttft_ms for a in answers):8.0f} ms   "
            f"{median(a.num_injected_tokens for a in answers):6.0f} / "
            f"{median(a.num_prefilled_tokens for a in answers):.0f}"
        )
    ratio = median(r["text"].ttft_ms / r["inject"].ttft_ms for r in results)
    click.echo(f"\nInjected memory reached its first token {ratio:.1f} times sooner than text memory.")


def _row(question: Question, result: ChatResult, is_right: bool) -> dict[str, Any]:
    return {
        "question": question.question,
        "expected": question.answer,
        "mode": result.mode,
        "answer": result.text,
        "right": is_right,
        "ttft_ms": round(result.ttft_ms, 1),
        "e2e_ttft_ms": round(result.e2e_ttft_ms, 1),
        "prompt_tokens": result.num_prompt_tokens,
        "injected_tokens": result.num_injected_tokens,
        "prefilled_tokens": result.num_prefilled_tokens,
        "missing_tokens": result.num_missing_tokens,
    }
