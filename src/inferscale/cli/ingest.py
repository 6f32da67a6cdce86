"""`inferscale ingest`: many facts from files, with progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from inferscale.cli.engine import open_llm, say_budget, show_progress
from inferscale.cli.ingest_files import FactFile, Format, Item, read_file
from inferscale.cli.options import (
    POSITIVE,
    json_option,
    memory_config,
    memory_options,
    model_options,
    scope_options,
)
from inferscale.cli.output import emit, rate_text, say
from inferscale.errors import InvalidInput
from inferscale.facts import Scope, ScopeIds
from inferscale.memory import Memory
from inferscale.turns import read_scope

if TYPE_CHECKING:
    from inferscale.memory_llm import EncodeProgress, MemoryLLM

_PROGRESS_EVERY_S = 1.0


class _Stored(NamedTuple):
    facts: int
    seconds: float

    @property
    def facts_per_s(self) -> float:
        return self.facts / self.seconds if self.seconds else 0.0


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "jsonl", "json", "text"]),
    default="auto",
    show_default=True,
    help="One JSON value a line, one JSON list, or one fact a line. auto: by name and content.",
)
@click.option("--speaker", help="Who said what has no speaker of its own.")
@click.option("--said-at", help="When that was said which has no time of its own, in words.")
@click.option(
    "--batch",
    "batch_size",
    type=POSITIVE,
    default=256,
    show_default=True,
    help="Facts that are embedded and stored together: all of them or none.",
)
@click.option("--encode", is_flag=True, help="Start the engine and encode the scope's facts as well.")
@scope_options
@memory_options
@model_options
@json_option
def ingest(
    files: tuple[str, ...],
    form: Format,
    speaker: str | None,
    said_at: str | None,
    batch_size: int,
    encode: bool,
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: int | None,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Store the facts of FILEs (- for standard input) under one user, agent or run.

    A fact is a text, an object with "text" and if you like "speaker", "said_at" and "metadata", or a
    chat message. All files are read and checked before the first fact is stored; then facts are
    stored in batches, and after an interruption those of whole batches are there.

    The facts' KV is encoded when an engine first needs it. --encode does it at once, which shows how
    fast it is and whether it fits into the pool; the KV itself ends with this command.
    """
    scope = read_scope(**ids)
    if not encode and (model is not None or pool_size is not None or max_model_len is not None):
        raise InvalidInput("--model, --pool-size and --max-model-len are for the engine; add --encode.")
    read = [read_file(path, form, speaker, said_at) for path in files]
    config = memory_config(data_dir, embedder, has_engine=encode)
    encoding = None
    with ExitStack() as stack:
        if encode:
            llm = stack.enter_context(
                open_llm(model, config, pool_size, max_model_len=max_model_len, verbose=verbose)
            )
            say_budget(llm)
            stored = _store(llm.memory, scope, read, batch_size)
            encoding = _encode(llm, scope)
        else:
            stored = _store(stack.enter_context(Memory(config)), scope, read, batch_size)
    _report(read, stored, encoding, as_json)


def _store(memory: Memory, scope: Scope, files: Sequence[FactFile], batch_size: int) -> _Stored:
    """Store batch by batch; says how far it came when it is interrupted or fails."""
    items = [(file, item) for file in files for item in file.items]
    _check(memory, items)
    start_s = told_s = time.perf_counter()
    num_stored = 0
    try:
        while num_stored < len(items):
            batch = items[num_stored : num_stored + batch_size]
            memory.add(
                [item.turn for _, item in batch],
                **scope.ids(),
            )
            num_stored += len(batch)
            now_s = time.perf_counter()
            if now_s - told_s >= _PROGRESS_EVERY_S or num_stored == len(items):
                rate = num_stored / max(now_s - start_s, 1e-9)
                say(f"  stored {num_stored:,}/{len(items):,} facts, {rate_text(rate)} facts/s")
                told_s = now_s
    except BaseException:
        if num_stored:
            file, item = items[num_stored - 1]
            say(
                f"Stopped: the first {num_stored:,} of {len(items):,} facts are stored, up to {item.place} "
                f"of {file.name}."
            )
        raise
    return _Stored(num_stored, time.perf_counter() - start_s)


def _check(memory: Memory, items: Sequence[tuple[FactFile, Item]]) -> None:
    """Ask the engine's check of every text, so that a later batch does not fail on one."""
    if memory.check_text is None:
        return
    for file, item in items:
        try:
            memory.check_text(item.turn)
        except InvalidInput as error:
            raise type(error)(f"{item.place.capitalize()} of {file.name}: {error}") from error


def _encode(llm: MemoryLLM, scope: Scope) -> EncodeProgress | None:
    """Encode the scope; None where it holds no fact."""
    if llm.memory.count(**scope.ids()) == 0:
        return None
    return llm.warm(**scope.ids(), progress=show_progress)


def _report(
    files: Sequence[FactFile], stored: _Stored, encoding: EncodeProgress | None, as_json: bool
) -> None:
    skipped = sum(file.num_skipped for file in files)
    report: dict[str, Any] = {
        "files": len(files),
        "facts": stored.facts,
        "skipped": skipped,
        "seconds": round(stored.seconds, 2),
        "facts_per_s": round(stored.facts_per_s, 1),
    }
    if encoding is not None:
        report["encoding"] = {
            "facts": encoding.stored_facts,
            "passes": encoding.jobs,
            "failed": encoding.num_failed,
            "stored_tokens": encoding.stored_tokens,
            "computed_tokens": encoding.computed_tokens,
            "seconds": round(encoding.seconds, 2),
            "facts_per_s": round(encoding.stored_facts_per_s, 1),
            "stored_tokens_per_s": round(encoding.stored_tokens_per_s, 1),
        }
    if as_json:
        emit(report)
        return
    click.echo(
        f"{stored.facts:,} facts stored from {len(files)} {'file' if len(files) == 1 else 'files'} in "
        f"{stored.seconds:.1f} s ({rate_text(stored.facts_per_s)} facts/s)"
        + (f"; messages that are no utterances, not stored: {skipped:,}" if skipped else "")
    )
    if encoding is not None:
        click.echo(
            f"{encoding.stored_facts:,} facts encoded in {encoding.seconds:.1f} s "
            f"({rate_text(encoding.stored_facts_per_s)} facts/s, "
            f"{encoding.stored_tokens_per_s:.0f} tokens/s, "
            f"{encoding.computed_tokens:,} tokens computed for {encoding.stored_tokens:,} stored)"
            + (f"; {encoding.num_failed} found no room" if encoding.num_failed else "")
        )
