"""Commands on facts: add, search, list, delete. They need no engine, but `add --infer` does."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from inferscale.catalog import Added
from inferscale.cli.engine import open_llm
from inferscale.cli.options import (
    COUNT,
    filter_option,
    json_option,
    memory_config,
    memory_options,
    model_options,
    read_text,
    read_time_option,
    scope_options,
)
from inferscale.cli.output import emit, fact_json, fact_line, hit_json, say
from inferscale.errors import InvalidInput
from inferscale.facts import ScopeIds
from inferscale.memory import Memory


@click.command()
@click.argument("text", required=False)
@click.option(
    "--messages", type=click.File(encoding="utf-8"), help="A file of chat messages, one JSON object a line."
)
@click.option("--speaker", help="Who said it.")
@click.option("--said-at", help="When it was said, in words.")
@click.option(
    "--expires-at", metavar="TIME", help="From when on it is not found: a date, or seconds since 1970."
)
@click.option("--infer", is_flag=True, help="Extract short facts with a model, and store these.")
@click.option(
    "--infer-url",
    metavar="URL",
    help="OpenAI-compatible server whose --model extracts, such as http://127.0.0.1:8000/v1, with the API "
    "key of $OPENAI_API_KEY. Default: an engine that is started here.",
)
@scope_options
@memory_options
@model_options
@json_option
def add(
    text: str | None,
    messages: Any,
    speaker: str | None,
    said_at: str | None,
    expires_at: str | None,
    infer: bool,
    infer_url: str | None,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: int | None,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Store TEXT (- for standard input), or the turns of a conversation.

    Prints the ids of the new facts. Their KV is encoded when an engine first needs it.

    --infer stores short facts that a model extracts of it. They supersede or end those of the same scope that
    they contradict, and what is known already is not stored again. Prints what became of each.
    """
    if (text is None) == (messages is None):
        raise InvalidInput("Give either TEXT or --messages FILE.")
    if not infer and (infer_url, model, pool_size, max_model_len) != (None,) * 4:
        raise InvalidInput(
            "--infer-url, --model, --pool-size and --max-model-len are for the extraction; add --infer."
        )
    content: Any = read_text(text, "text") if messages is None else _read_messages(messages)
    given: dict[str, Any] = {
        **ids,
        "speaker": speaker,
        "said_at": said_at,
        "expires_at": read_time_option(expires_at),
    }
    if not infer:
        with Memory(memory_config(data_dir, embedder)) as memory:
            _report(memory.add(content, **given), as_json)
    elif infer_url is None:
        config = memory_config(data_dir, embedder, has_engine=True)
        with open_llm(model, config, pool_size, max_model_len=max_model_len, verbose=verbose) as llm:
            added = llm.memory.add(content, infer=True, **given)  # its KV would end with this command
        _report_changes(added, as_json)
    else:
        from inferscale.extraction import OpenAIModel

        if model is None or (pool_size, max_model_len) != (None, None):
            raise InvalidInput(
                "--infer-url needs --model, the name of the model there, and starts no engine: leave out "
                "--pool-size and --max-model-len."
            )
        extraction = OpenAIModel(infer_url, model, api_key=os.environ.get("OPENAI_API_KEY") or None)
        with closing(extraction), Memory(memory_config(data_dir, embedder), extraction=extraction) as memory:
            _report_changes(memory.add(content, infer=True, **given), as_json)


def _report(facts: Added, as_json: bool) -> None:
    for fact in facts:
        emit(fact_json(fact)) if as_json else click.echo(fact.id)
    say(f"Stored {len(facts)} {'fact' if len(facts) == 1 else 'facts'}.")


def _report_changes(added: Added, as_json: bool) -> None:
    for event in added.events:
        emit(event._asdict()) if as_json else click.echo(f"{event.event:6}  {event.id}  {event.text}")
    if added.warning is not None:
        say(f"Warning: {added.warning}")
    say(f"Stored {len(added)} {'fact' if len(added) == 1 else 'facts'}.")


@click.command()
@click.argument("query")
@click.option("--top-k", type=COUNT, default=10, show_default=True, help="How many facts to find.")
@filter_option
@scope_options
@memory_options
@json_option
def search(
    query: str,
    top_k: int,
    filters: dict[str, Any] | None,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """Find the facts that fit QUERY (- for standard input) best, best first.

    The number is a fact's similarity to the query.
    """
    with Memory(memory_config(data_dir, embedder)) as memory:
        hits = memory.search(
            read_text(query, "query"),
            **ids,
            top_k=top_k,
            filters=filters,
        )
    for hit in hits:
        emit(hit_json(hit)) if as_json else click.echo(
            f"{hit.score:.3f}  {hit.fact.id}  {fact_line(hit.fact)}"
        )


@click.command(name="list")
@click.option("--limit", type=COUNT, help="At most so many, oldest first.")
@filter_option
@scope_options
@memory_options
@json_option
def list_facts(
    limit: int | None,
    filters: dict[str, Any] | None,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """List the facts of a user, agent or run in the order they were stored."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        facts = memory.get_all(**ids, limit=limit, filters=filters)
    for fact in facts:
        emit(fact_json(fact)) if as_json else click.echo(f"{fact.id}  {fact_line(fact)}")


@click.command()
@click.argument("fact_ids", metavar="FACT_ID...", nargs=-1, required=True)
@memory_options
@json_option
def delete(fact_ids: tuple[str, ...], data_dir: Path | None, embedder: str | None, as_json: bool) -> None:
    """Delete facts by id. The KV of facts that were encoded behind them is forgotten, too."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        for fact_id in fact_ids:
            deletion = memory.delete(fact_id)
            if as_json:
                emit({**fact_json(deletion.fact), "forgotten_keys": len(deletion.keys)})
            else:
                click.echo(deletion.fact.id)
    say(f"Deleted {len(fact_ids)}.")


def _read_messages(file: Any) -> list[Any]:
    messages = []
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            messages.append(json.loads(line))
        except ValueError as error:
            name = "standard input" if file is sys.stdin else file.name
            raise InvalidInput(
                f"Line {number} of {name} is not JSON: {error}. Give one object a line."
            ) from error
    return messages
