"""`inferscale bench …`: benchmarks and their reports."""

from __future__ import annotations

from pathlib import Path

import click

from inferscale.bench.options import TtftOptions
from inferscale.cli.engine import model_path, open_llm, prepare_engine
from inferscale.cli.options import COUNT, POSITIVE, json_option, model_options
from inferscale.cli.output import emit, say
from inferscale.config import MemoryConfig
from inferscale.errors import InvalidInput

_DEFAULTS = TtftOptions()


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
    "--number",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Which conversation of the file, counted from 1.",
)
@click.option(
    "--k",
    "ks",
    default=",".join(map(str, _DEFAULTS.ks)),
    show_default=True,
    help="Numbers of facts.",
)
@click.option(
    "--questions",
    type=POSITIVE,
    default=_DEFAULTS.num_questions,
    show_default=True,
    help="Questions for each k and mode.",
)
@click.option(
    "--tail",
    type=COUNT,
    default=_DEFAULTS.tail,
    show_default=True,
    help="Best facts that are recomputed.",
)
@click.option("--enforce-eager", is_flag=True, help="Run the model uncompiled.")
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
    enforce_eager: bool,
    out: Path,
    plot: Path,
    model: str | None,
    pool_size: int,
    max_model_len: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Time to first token with k facts: prefilled as text, cached, injected, and without memory."""
    from inferscale.bench.conversation import read_conversation
    from inferscale.bench.report import check_plotting, plot_ttft, ttft_table

    options = TtftOptions(_counts(ks), questions, tail)
    data = read_conversation(conversation, number)
    check_plotting()
    prepare_engine(verbose=verbose)
    path = model_path(model)
    from inferscale.bench.ttft import run_ttft
    from inferscale.memory_llm import MemoryLLM

    def open_engine(memory: MemoryConfig) -> MemoryLLM:
        return open_llm(
            path,
            memory,
            pool_size,
            max_model_len=max_model_len,
            verbose=verbose,
            enforce_eager=enforce_eager,
        )

    rows = run_ttft(open_engine, path, data, options, out, say)
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
    from inferscale.bench.harness import latest_run, read_rows
    from inferscale.bench.report import check_plotting, plot_ttft, ttft_table

    run = latest_run(read_rows(results), "ttft")
    if not run:
        raise InvalidInput(f"{results} has no run of `inferscale bench ttft`.")
    if plot is not None:
        check_plotting()
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
