"""Commands on facts: add, search, list, delete. They need no engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from inferscale.cli.options import (
    COUNT,
    json_option,
    memory_config,
    memory_options,
    read_text,
    scope_options,
)
from inferscale.cli.output import emit, fact_json, fact_line, hit_json, say
from inferscale.errors import InvalidInput
from inferscale.memory import Memory


@click.command()
@click.argument("text", required=False)
@click.option(
    "--messages", type=click.File(encoding="utf-8"), help="A file of chat messages, one JSON object a line."
)
@click.option("--speaker", help="Who said it.")
@click.option("--said-at", help="When it was said, in words.")
@scope_options
@memory_options
@json_option
def add(
    text: str | None,
    messages: Any,
    speaker: str | None,
    said_at: str | None,
    user_id: str | None,
    agent_id: str | None,
    run_id: str | None,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """Store TEXT (- for standard input), or the turns of a conversation.

    Prints the ids of the new facts. Their KV is encoded when an engine first needs it.
    """
    if (text is None) == (messages is None):
        raise InvalidInput("Give either TEXT or --messages FILE.")
    content: Any = read_text(text, "text") if messages is None else _read_messages(messages)
    with Memory(memory_config(data_dir, embedder)) as memory:
        facts = memory.add(
            content, user_id=user_id, agent_id=agent_id, run_id=run_id, speaker=speaker, said_at=said_at
        )
    for fact in facts:
        emit(fact_json(fact)) if as_json else click.echo(fact.id)
    say(f"Stored {len(facts)} {'fact' if len(facts) == 1 else 'facts'}.")


@click.command()
@click.argument("query")
@click.option("--top-k", type=COUNT, default=10, show_default=True, help="How many facts to find.")
@scope_options
@memory_options
@json_option
def search(
    query: str,
    top_k: int,
    user_id: str | None,
    agent_id: str | None,
    run_id: str | None,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """Find the facts most similar to QUERY (- for standard input), best first."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        hits = memory.search(
            read_text(query, "query"), user_id=user_id, agent_id=agent_id, run_id=run_id, top_k=top_k
        )
    for hit in hits:
        emit(hit_json(hit)) if as_json else click.echo(
            f"{hit.score:.3f}  {hit.fact.id}  {fact_line(hit.fact)}"
        )


@click.command(name="list")
@click.option("--limit", type=COUNT, help="At most so many, oldest first.")
@scope_options
@memory_options
@json_option
def list_facts(
    limit: int | None,
    user_id: str | None,
    agent_id: str | None,
    run_id: str | None,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """List the facts of a user, agent or run in the order they were stored."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        facts = memory.get_all(user_id=user_id, agent_id=agent_id, run_id=run_id, limit=limit)
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
