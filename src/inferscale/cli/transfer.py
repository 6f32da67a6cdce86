"""Commands that take facts out of a data folder and into one: export, import."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from inferscale.catalog import Imported
from inferscale.cli.options import POSITIVE, json_option, memory_config, memory_options, scope_options
from inferscale.cli.output import emit, say
from inferscale.errors import InvalidInput
from inferscale.facts import Scope, ScopeIds
from inferscale.memory import Memory
from inferscale.transfer import Item, export_facts, import_facts, read_source
from inferscale.transfer.moves import DEFAULT_BATCH
from inferscale.turns import read_scope

_PROGRESS_EVERY_S = 1.0


@click.command()
@click.option("--all", "of_all", is_flag=True, help="The facts of everybody.")
@click.option(
    "--history", "with_history", is_flag=True, help="Former texts as well, and facts that are no longer so."
)
@scope_options
@memory_options
def export(
    of_all: bool,
    with_history: bool,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
) -> None:
    """Print the facts of a user, agent or run as JSON lines, with all that is stored of them.

    `inferscale import` reads them. Vectors and KV are none of it: they are made again.
    """
    if of_all == any(ids.values()):
        raise InvalidInput("Give either --all, or at least one of --user-id, --agent-id and --run-id.")
    scope = Scope() if of_all else read_scope(**ids)
    num_facts = 0
    with Memory(memory_config(data_dir, embedder)) as memory:
        for record in export_facts(memory, scope, with_history=with_history):
            emit(record)
            num_facts += 1
    say(f"Exported {num_facts:,} {'fact' if num_facts == 1 else 'facts'}.")


@click.command(name="import")
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "--replace", "replaces", is_flag=True, help="Facts that are there already get what the file says."
)
@click.option(
    "--batch",
    "batch_size",
    type=POSITIVE,
    default=DEFAULT_BATCH,
    show_default=True,
    help="Facts that are embedded and stored together: all of them or none.",
)
@click.option("--history-db", metavar="FILE", help="Mem0's history.db: the former texts of its memories.")
@click.option("--collection", metavar="NAME", help="The collection of a Qdrant folder. Default: mem0.")
@scope_options
@memory_options
@json_option
def import_(
    sources: tuple[str, ...],
    replaces: bool,
    batch_size: int,
    history_db: str | None,
    collection: str | None,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    as_json: bool,
) -> None:
    """Store the facts of SOURCEs with the ids, owners and times that they have.

    A SOURCE is a file of `inferscale export` (- for standard input), the memories of a Mem0 `get_all` as
    JSON or JSON lines, the folder of Mem0's local Qdrant store, or its history.db, which names no owners:
    --user-id, --agent-id and --run-id are those of facts that name none.

    A fact that is there already, by its id, is passed over, so an import can be run again.
    """
    owner = Scope(**ids)
    if not owner.is_empty():
        read_scope(**ids)
    done = Imported(0, 0, 0)
    with Memory(memory_config(data_dir, embedder)) as memory:
        for source in sources:
            items = read_source(source, owner, history=history_db, collection=collection)
            done = done.plus(_import(memory, items, replaces, batch_size))
    if as_json:
        emit({"added": done.num_added, "replaced": done.num_replaced, "skipped": done.num_skipped})
    else:
        click.echo(_counts(done))


def _import(memory: Memory, items: Iterator[Item], replaces: bool, batch_size: int) -> Imported:
    """Import with progress; says how far it came when it is interrupted or fails."""
    told_s = time.perf_counter()
    done, last = Imported(0, 0, 0), "nothing"

    def tell(so_far: Imported, item: Item) -> None:
        nonlocal told_s, done, last
        done, last = so_far, item.place
        if time.perf_counter() - told_s >= _PROGRESS_EVERY_S:
            told_s = time.perf_counter()
            say(f"  {_counts(done)}, up to {last}")

    try:
        return import_facts(memory, items, replaces=replaces, batch_size=batch_size, progress=tell)
    except BaseException:
        say(f"Stopped: {_counts(done)}, up to {last}. It can be run again.")
        raise


def _counts(done: Imported) -> str:
    return f"{done.num_added:,} added, {done.num_replaced:,} replaced, {done.num_skipped:,} skipped"
