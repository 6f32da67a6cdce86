"""`inferscale chat`: one question, or a talk line by line, with memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inferscale.cli.engine import open_llm, say_budget, show_progress
from inferscale.cli.options import (
    POSITIVE,
    filter_option,
    json_option,
    memory_config,
    memory_options,
    model_options,
    order_option,
    read_text,
    recall_options,
    scope_options,
)
from inferscale.cli.output import emit, one_line, say
from inferscale.errors import InvalidInput, TextTooLong
from inferscale.fact_order import FactOrder
from inferscale.facts import ScopeIds
from inferscale.tail import Tail
from inferscale.turns import read_query, read_scope

if TYPE_CHECKING:
    from inferscale.memory_llm import ChatResult

Message = dict[str, str]
Ask = Callable[[list[Message]], "ChatResult"]


@click.command()
@click.argument("message", required=False)
@recall_options
@order_option("the facts in the prompt")
@filter_option
@click.option(
    "--mode",
    type=click.Choice(["inject", "text", "none"]),
    default="inject",
    show_default=True,
    help="Inject the facts' KV, prefill their text, or leave memory out.",
)
@click.option("--max-tokens", type=POSITIVE, default=256, show_default=True, help="Longest answer.")
@click.option(
    "--warm/--no-warm",
    "warm_first",
    default=None,
    help="Encode the scope's missing facts first (mode inject). Default: only in a talk.",
)
@scope_options
@memory_options
@model_options
@json_option
def chat(
    message: str | None,
    top_k: int,
    tail: Tail | None,
    order: FactOrder,
    filters: dict[str, Any] | None,
    mode: Any,
    max_tokens: int,
    warm_first: bool | None,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: int | None,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Ask MESSAGE (- for standard input) with memory; without MESSAGE, talk line by line.

    The KV of facts lives in the engine and ends with this command: one question alone is answered
    from text unless --warm is given. In a talk, a message that cannot be asked is reported and
    left out, and the oldest turns are dropped when the talk grows too long for the model.
    """
    if mode != "none":
        read_scope(**ids)
    if warm_first and mode != "inject":
        raise InvalidInput(f"--warm was given with --mode {mode}; only --mode inject uses encoded facts.")
    question = None if message is None else read_query(read_text(message, "message"))
    is_talk = question is None
    memory = memory_config(data_dir, embedder, has_engine=True)
    with open_llm(
        model, memory, pool_size, max_model_len=max_model_len, verbose=verbose, repair=is_talk
    ) as llm:
        say_budget(llm)
        if mode == "inject" and (is_talk if warm_first is None else warm_first):
            llm.warm(**ids, progress=show_progress)

        def ask(messages: list[Message]) -> ChatResult:
            return llm.chat(
                messages,
                **ids,
                top_k=top_k,
                mode=mode,
                tail=tail,
                order=order,
                filters=filters,
                max_tokens=max_tokens,
            )

        if question is None:
            _talk(ask, as_json)
        else:
            _print_answer(ask([_message("user", question)]), as_json)


def _talk(ask: Ask, as_json: bool) -> None:
    """Answer line after line. A message that is refused is dropped; the talk goes on."""
    history: list[Message] = []
    for text in _lines():
        asked = [*history, _message("user", text)]
        try:
            result, num_dropped = _ask_shortened(ask, asked)
        except InvalidInput as error:
            say(f"Error: {one_line(error)} The message was left out.")
            continue
        if num_dropped:
            say(f"The talk is too long for the model; its oldest {num_dropped} messages were dropped.")
        history = [*asked[num_dropped:], _message("assistant", result.text)]
        _print_answer(result, as_json)


def _ask_shortened(ask: Ask, messages: list[Message]) -> tuple[ChatResult, int]:
    """The answer, and how many of the oldest messages had to go: whole turns, never the question."""
    num_dropped = 0
    while True:
        try:
            return ask(messages[num_dropped:]), num_dropped
        except TextTooLong:
            if num_dropped + 2 >= len(messages):
                raise
            num_dropped += 2


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _lines() -> Iterator[str]:
    """Questions from a terminal up to a blank line, or the lines of a pipe that are not blank."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say("Ask; an empty line or Ctrl-D ends.")
    while True:
        if is_terminal:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or (is_terminal and not line.strip()):
            return
        if line.strip():
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
