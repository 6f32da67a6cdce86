"""`inferscale warm`: encode facts, and say what it cost."""

from __future__ import annotations

from pathlib import Path

import click

from inferscale.cli.engine import open_llm, say_budget, show_progress
from inferscale.cli.options import json_option, memory_config, memory_options, model_options, scope_options
from inferscale.cli.output import emit
from inferscale.facts import Scope, ScopeIds
from inferscale.turns import read_scope


@click.command()
@scope_options
@memory_options
@model_options
@json_option
def warm(
    ids: ScopeIds,
    data_dir: Path | None,
    embedder: str | None,
    model: str | None,
    pool_size: int | None,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Encode the facts of a scope, or of all, and say what it cost.

    The windows are recorded in the data folder. The KV itself lives in the engine and ends with
    this command; `inferscale chat` warms by itself when it is used for a talk.
    """
    scope = Scope(**ids)
    if not scope.is_empty():
        read_scope(**ids)
    memory = memory_config(data_dir, embedder, has_engine=True)
    with open_llm(model, memory, pool_size, max_model_len=max_model_len, verbose=verbose) as llm:
        say_budget(llm)
        result = llm.warm(**ids, progress=show_progress)
        stats = llm.stats()
        num_facts = llm.memory.catalog.count(scope)
    report = {
        "facts": num_facts,
        "passes": result.jobs,
        "stored_tokens": result.stored_tokens,
        "computed_tokens": result.computed_tokens,
        "seconds": round(result.seconds, 2),
        "resident_segments": stats["resident_segments"],
        "free_pages": stats["free_pages"],
    }
    if as_json:
        emit(report)
    else:
        click.echo(
            f"{report['facts']} facts, {report['resident_segments']} segments resident, "
            f"{report['passes']} passes, {report['computed_tokens']} tokens computed in {report['seconds']} s"
        )
