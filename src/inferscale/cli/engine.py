"""Commands that start the engine: chat and warm."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.common import (
    emit,
    engine_args,
    json_option,
    memory_config,
    memory_options,
    model_options,
    model_path,
    prepare_engine,
    read_text,
    say,
    scope_options,
)
from inferscale.facts import Scope

if TYPE_CHECKING:
    from inferscale.memory_llm import ChatResult, EncodeProgress, MemoryLLM


@click.command()
@click.argument("message", required=False)
@click.option("--top-k", default=50, show_default=True, help="Facts in the prompt.")
@click.option(
    "--tail", default=0, show_default=True, help="Best facts that are recomputed before the question."
)
@click.option(
    "--mode",
    type=click.Choice(["inject", "text", "none"]),
    default="inject",
    show_default=True,
    help="Inject the facts' KV, prefill their text, or leave memory out.",
)
@click.option("--max-tokens", default=256, show_default=True, help="Longest answer.")
@click.option(
    "--warm/--no-warm",
    "warm_first",
    default=None,
    help="Encode missing facts first. Default: only in a talk.",
)
@scope_options
@memory_options
@model_options
@json_option
def chat(
    message: str | None,
    top_k: int,
    tail: int,
    mode: Any,
    max_tokens: int,
    warm_first: bool | None,
    user_id: str | None,
    agent_id: str | None,
    run_id: str | None,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: str,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Ask MESSAGE (- for standard input) with memory; without MESSAGE, talk line by line.

    The KV of facts lives in the engine and ends with this command: one question alone is answered
    from text unless --warm is given.
    """
    question = None if message is None else read_text(message, "message")
    with open_llm(
        data_dir, embedder, model, pool_size, max_model_len, verbose=verbose, repair=question is None
    ) as llm:
        if warm_first or (warm_first is None and question is None):
            llm.warm(user_id=user_id, agent_id=agent_id, run_id=run_id, progress=show_progress)
        history: list[dict[str, str]] = []
        for text in [question] if question is not None else _lines():
            history.append({"role": "user", "content": text})
            result = llm.chat(
                history,
                user_id=user_id,
                agent_id=agent_id,
                run_id=run_id,
                top_k=top_k,
                mode=mode,
                tail=tail,
                max_tokens=max_tokens,
            )
            history.append({"role": "assistant", "content": result.text})
            _print_answer(result, as_json)


@click.command()
@scope_options
@memory_options
@model_options
@json_option
def warm(
    user_id: str | None,
    agent_id: str | None,
    run_id: str | None,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: str,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Encode the facts of a scope, or of all, and say what it cost.

    The windows are recorded in the data folder. The KV itself lives in the engine and ends with
    this command; `inferscale chat` warms by itself when it is used for a talk.
    """
    with open_llm(data_dir, embedder, model, pool_size, max_model_len, verbose=verbose, repair=True) as llm:
        progress = llm.warm(user_id=user_id, agent_id=agent_id, run_id=run_id, progress=show_progress)
        stats = llm.stats()
        left = llm.memory.catalog.count(Scope(user_id, agent_id, run_id))
    report = {
        "facts": left,
        "passes": progress.jobs,
        "computed_tokens": progress.computed_tokens,
        "seconds": round(progress.seconds, 2),
        "resident_segments": stats["resident_segments"],
        "free_pages": stats["free_pages"],
    }
    if as_json:
        emit(report)
    else:
        click.echo(
            f"{report['resident_segments']} segments resident, {report['passes']} passes, "
            f"{report['computed_tokens']} tokens computed in {report['seconds']} s"
        )


def open_llm(
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: str,
    max_model_len: int | None,
    *,
    verbose: bool,
    repair: bool,
) -> MemoryLLM:
    prepare_engine(verbose=verbose)
    path = model_path(model)
    say(f"Starting the engine with {Path(path).name} …")
    from inferscale.memory_llm import MemoryLLM

    return MemoryLLM(
        path,
        memory_config(data_dir, embedder),
        pool_size_bytes=pool_size,
        repair_after_chat=repair,
        engine_args=engine_args(max_model_len),
    )


def show_progress(state: EncodeProgress) -> None:
    say(
        f"  encoded {state.done_jobs}/{state.jobs} passes, "
        f"{state.computed_tokens / max(state.seconds, 1e-9):.0f} tokens/s"
    )


def _lines() -> Any:
    """Questions from a terminal, or the lines of a pipe."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say("Ask; an empty line or Ctrl-D ends.")
    while True:
        if is_terminal:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.strip()


def _print_answer(result: ChatResult, as_json: bool) -> None:
    if as_json:
        emit(
            {
                **{name: value for name, value in asdict(result).items() if name != "hits"},
                "facts": [hit.fact.id for hit in result.hits],
            }
        )
        return
    click.echo(result.text.strip())
    say(
        f"[{result.mode}: TTFT {result.ttft_ms:.0f} ms, {result.num_injected_tokens} tokens injected, "
        f"{result.num_prefilled_tokens} prefilled, {result.num_missing_tokens} missing]"
    )
