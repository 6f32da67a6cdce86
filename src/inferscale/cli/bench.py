"""`inferscale bench …`: benchmarks and their reports."""

from __future__ import annotations

from pathlib import Path

import click

from inferscale.cli.common import emit, json_option, model_options, model_path, prepare_engine, say
from inferscale.errors import InvalidInput


@click.group()
def bench() -> None:
    """Measure; rows are appended to benchmarks/results."""


@bench.command()
@click.option(
    "--conversation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A LoCoMo file. Default: the demo's conversation.",
)
@click.option(
    "--number", default=1, show_default=True, help="Which conversation of the file, counted from 1."
)
@click.option("--k", "ks", default="0,5,20,50,100", show_default=True, help="Numbers of facts.")
@click.option("--questions", default=10, show_default=True, help="Questions for each k and mode.")
@click.option("--tail", default=0, show_default=True, help="Best facts that are recomputed.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("benchmarks/results/ttft.jsonl"),
    show_default=True,
    help="Where rows are appended.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("benchmarks/results/ttft.png"),
    show_default=True,
    help="Where the plot goes.",
)
@model_options
@json_option
def ttft(
    conversation: Path | None,
    number: int,
    ks: str,
    questions: int,
    tail: int,
    out: Path,
    plot: Path,
    model: str | None,
    pool_size: str,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Time to first token with k facts: prefilled as text, cached, injected, and without memory."""
    from inferscale.bench.conversation import read_conversation
    from inferscale.bench.report import plot_ttft, ttft_table
    from inferscale.bench.ttft import TtftOptions, run_ttft

    if questions < 1:
        raise InvalidInput(f"--questions is {questions}; it must be 1 or more.")
    counts = _counts(ks)
    data = read_conversation(conversation, number)
    prepare_engine(verbose=verbose)
    arguments = {} if max_model_len is None else {"max_model_len": max_model_len}
    options = TtftOptions(counts, questions, pool_size, tail)
    rows = run_ttft(model_path(model), data, options, out, say, arguments)
    if as_json:
        for row in rows:
            emit(row)
    else:
        click.echo(ttft_table(rows))
    plot_ttft(rows, plot)
    say(f"Rows appended to {out}, plot in {plot}.")


@bench.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG as well.")
def report(results: Path, plot: Path | None) -> None:
    """Draw the table of the last run in RESULTS, a file of rows."""
    from inferscale.bench.harness import read_rows
    from inferscale.bench.report import plot_ttft, ttft_table

    rows = read_rows(results)
    run = [row for row in rows if row["run"] == rows[-1]["run"]] if rows else []
    if not any(row["bench"] == "ttft" for row in run):
        raise InvalidInput(f"{results} has no run of `inferscale bench ttft`.")
    click.echo(ttft_table(run))
    if plot is not None:
        plot_ttft(run, plot)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 0:
        raise InvalidInput(
            f"--k is {text!r}; give whole numbers from 0, separated by commas, such as 0,5,50."
        )
    return counts
