"""`inferscale block`: the core blocks of a user, agent or run. Needs no engine."""

from __future__ import annotations

from pathlib import Path

import click

from inferscale.cli.options import json_option, memory_config, memory_options, read_text, scope_options
from inferscale.cli.output import block_json, emit, say
from inferscale.facts import ScopeIds
from inferscale.memory import Memory


@click.group()
def block() -> None:
    """Core blocks: named texts that stand in front of every chat of their user, agent or run."""


@block.command(name="set")
@click.argument("name")
@click.argument("text")
@scope_options
@memory_options
@json_option
def set_block(
    name: str,
    text: str,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """Store TEXT (- for standard input) as the block NAME, in place of the one of that name, if any."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        update = memory.set_block(name, read_text(text, "text"), **ids)
    emit(block_json(update.fact)) if as_json else click.echo(update.fact.id)
    say(f"Stored {name}.")


@block.command(name="list")
@scope_options
@memory_options
@json_option
def list_blocks(
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """List the blocks of a chat with this user, agent and run, in the order in which they stand there."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        blocks = memory.get_blocks(**ids)
    for found in blocks:
        emit(block_json(found)) if as_json else click.echo(f"{found.block}: {found.text}")


@block.command(name="delete")
@click.argument("name")
@scope_options
@memory_options
def delete_block(
    name: str,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
) -> None:
    """Delete the block NAME of exactly this user, agent and run."""
    with Memory(memory_config(data_dir, embedder)) as memory:
        memory.delete_block(name, **ids)
    say(f"Deleted {name}.")
