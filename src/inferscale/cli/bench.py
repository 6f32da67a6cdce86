"""`inferscale bench …`: benchmarks of the engine with memory, and their report."""

from __future__ import annotations

from pathlib import Path

import click

from inferscale.bench.options import EncodeOptions, ThroughputOptions, TtftOptions
from inferscale.cli.bench_options import (
    EngineChoice,
    WorkloadChoice,
    engine_options,
    out_option,
    read_counts,
    show,
    start,
    tail_option,
    workload_options,
)
from inferscale.cli.bench_parts import decode, e2e, kernels, recall, tiers
from inferscale.cli.bench_quality import fidelity, locomo
from inferscale.cli.options import POSITIVE, json_option
from inferscale.cli.output import say
from inferscale.errors import InvalidInput
from inferscale.tail import Tail

_TTFT = TtftOptions()
_THROUGHPUT = ThroughputOptions()
_ENCODE = EncodeOptions()


@click.group()
def bench() -> None:
    """Measure; rows are appended to benchmarks/results."""


@bench.command()
@click.option("--k", "ks", default=",".join(map(str, _TTFT.ks)), show_default=True, help="Numbers of facts.")
@click.option(
    "--questions",
    type=POSITIVE,
    default=_TTFT.num_questions,
    show_default=True,
    help="Questions for each k and mode.",
)
@tail_option
@workload_options
@out_option("ttft")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("benchmarks/results/ttft.png"),
    show_default=True,
    help="Where the plot goes.",
)
@engine_options
@json_option
def ttft(
    ks: str,
    questions: int,
    tail: Tail,
    workload: WorkloadChoice,
    out: Path,
    plot: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """Time to first token with k facts: prefilled as text, cached, injected, and without memory."""
    from inferscale.bench.plots import check_plotting, plot_ttft

    options = TtftOptions(read_counts("--k", ks), questions, tail)
    conversation = workload.read(engine)
    if conversation is not None:
        conversation.check_k(max(options.ks))
    check_plotting()
    spec = engine.spec()
    from inferscale.bench.suite import run_ttft, ttft_need

    source = workload.source(conversation, spec)
    with start(spec, source, [ttft_need(options)]) as running:
        run = run_ttft(running, source, options, workload.policy(), out, say)
    show(run.rows, out, as_json=as_json)
    plot_ttft(run.rows, plot)
    say(f"Plot in {plot}.")


@bench.command()
@click.option(
    "--users",
    type=POSITIVE,
    default=_THROUGHPUT.users,
    show_default=True,
    help="Users at once, each with a memory of its own.",
)
@click.option("--k", type=POSITIVE, default=_THROUGHPUT.k, show_default=True, help="Facts of a request.")
@click.option(
    "--output-tokens",
    type=POSITIVE,
    default=_THROUGHPUT.output_tokens,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option(
    "--rounds",
    type=POSITIVE,
    default=_THROUGHPUT.rounds,
    show_default=True,
    help="Measured requests of each user, on average.",
)
@click.option(
    "--repeats",
    type=POSITIVE,
    default=_THROUGHPUT.repeats,
    show_default=True,
    help="How often all modes run in turn.",
)
@tail_option
@workload_options
@out_option("throughput")
@engine_options
@json_option
def throughput(
    users: int,
    k: int,
    output_tokens: int,
    rounds: int,
    repeats: int,
    tail: Tail,
    workload: WorkloadChoice,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """Requests a second of many users at once, with the same four modes in turn."""
    options = ThroughputOptions(users, k, output_tokens, rounds, repeats, tail)
    conversation = workload.read(engine)
    spec = engine.spec()
    from inferscale.bench.suite import run_throughput, throughput_need

    source = workload.source(conversation, spec)
    with start(spec, source, [throughput_need(options)]) as running:
        run = run_throughput(running, source, options, workload.policy(), out, say)
    show(run.rows, out, as_json=as_json)


@bench.command()
@click.option(
    "--facts",
    type=POSITIVE,
    default=_ENCODE.num_facts,
    show_default=True,
    help="Facts to encode; of a conversation at most its turns.",
)
@click.option(
    "--in-flight",
    type=POSITIVE,
    default=_ENCODE.in_flight,
    show_default=True,
    help="Passes that the engine has at once.",
)
@workload_options
@out_option("encode")
@engine_options
@json_option
def encode(
    facts: int,
    in_flight: int,
    workload: WorkloadChoice,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """How fast facts become KV in the pool, beside computing the same passes without keeping it."""
    conversation = workload.read(engine)
    num_facts = facts if conversation is None else min(facts, len(conversation.turns))
    options = EncodeOptions(num_facts, in_flight)
    spec = engine.spec()
    from inferscale.bench.suite import encode_need, run_encode

    source = workload.source(conversation, spec)
    policy = workload.policy()
    with start(spec, source, [encode_need(options, policy)]) as running:
        run = run_encode(running, source, options, policy, out, say)
    show(run.rows, out, as_json=as_json)


@bench.command()
@click.argument("results", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Draw plots into this folder as well."
)
def report(results: tuple[Path, ...], plots: Path | None) -> None:
    """Tables of the last run of each benchmark, model and hardware in RESULTS.

    RESULTS are files of rows, or folders of them; benchmarks/results without any.
    """
    from inferscale.bench.harness import read_rows
    from inferscale.bench.plots import check_plotting, plot_runs
    from inferscale.bench.report import report as render

    places = results or (Path("benchmarks/results"),)
    files = [
        file for place in places for file in (sorted(place.glob("*.jsonl")) if place.is_dir() else [place])
    ]
    rows = [row for file in files for row in read_rows(file)]
    if not rows:
        raise InvalidInput(f"{', '.join(map(str, places))}: there are no rows; run a benchmark first.")
    if plots is not None:
        check_plotting()
    click.echo(render(rows), nl=False)
    if plots is not None:
        for path in plot_runs(rows, plots):
            say(f"Plot in {path}.")


for _command in (decode, e2e, fidelity, kernels, locomo, recall, tiers):
    bench.add_command(_command)
