"""`inferscale bench …`: how good answers with injected memory are."""

from __future__ import annotations

import re
from pathlib import Path

import click

from inferscale.bench.options import FidelityOptions
from inferscale.bench.policies import Policy, parse_policies
from inferscale.cli.bench_options import EngineChoice, engine_options, out_option, read_counts, show
from inferscale.cli.engine import start_errors
from inferscale.cli.options import COUNT, POSITIVE, json_option
from inferscale.cli.output import say
from inferscale.errors import InvalidInput

_FIDELITY = FidelityOptions()


@click.command()
@click.option(
    "--conversation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="A LoCoMo file.",
)
@click.option(
    "--conversations",
    default="1",
    show_default=True,
    help="Which conversations of the file, counted from 1, such as 1-4 or 5,7-10.",
)
@click.option(
    "--questions",
    type=POSITIVE,
    help="Questions of each conversation, evenly spread over it. Default: all.",
)
@click.option(
    "--categories",
    default=",".join(map(str, _FIDELITY.categories)),
    show_default=True,
    help="Of questions: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop.",
)
@click.option("--k", type=POSITIVE, default=_FIDELITY.k, show_default=True, help="Facts in every prompt.")
@click.option(
    "--policies",
    default=str(Policy.default()),
    show_default=True,
    help="What is compared, separated by semicolons: alone (or anchor), window(W), sliding(W,STRIDE), each "
    "with +tailN for N facts recomputed before the question, or +lastN for N recomputed where they stand.",
)
@click.option(
    "--instruction",
    default=_FIDELITY.instruction,
    show_default=True,
    help="Text behind every question; the search does not see it.",
)
@click.option(
    "--timed",
    type=COUNT,
    default=_FIDELITY.num_timed,
    show_default=True,
    help="Questions whose time to first token is measured.",
)
@click.option(
    "--reference",
    "checked",
    type=COUNT,
    default=_FIDELITY.num_checked,
    show_default=True,
    help="Answers of text and of the first policy that transformers computes as well, in float32.",
)
@click.option(
    "--in-flight",
    type=POSITIVE,
    default=_FIDELITY.in_flight,
    show_default=True,
    help="Requests that the engine has at once.",
)
@click.option(
    "--cache",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that keeps the score of every answer, so that an interrupted run goes on, and one with other "
    "policies computes only those. Default: none is kept.",
)
@out_option("fidelity")
@engine_options
@json_option
def fidelity(
    conversation: Path,
    conversations: str,
    questions: int | None,
    categories: str,
    k: int,
    policies: str,
    instruction: str,
    timed: int,
    checked: int,
    in_flight: int,
    cache: Path | None,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """How close answers behind injected facts are to those behind text."""
    compared = parse_policies(policies)
    wanted = read_counts("--categories", categories, 1)
    options = FidelityOptions(k, questions, wanted, instruction, timed, checked, in_flight)
    if engine.random_weights is not None:
        raise InvalidInput("--random-weights has nothing to say about answers; give --model.")
    numbers = read_ranges("--conversations", conversations)
    from inferscale.bench.questions import read_gold

    asked = [read_gold(conversation, number, wanted) for number in numbers]
    spec = engine.spec()
    from inferscale.bench.fidelity import run_fidelity

    with start_errors(spec.model):
        rows = run_fidelity(spec, asked, compared, options, out, cache, say)
    show(rows, out, as_json=as_json)


def read_ranges(option: str, text: str) -> tuple[int, ...]:
    """`5,7-10` → 5, 7, 8, 9, 10; each once. Raises InvalidInput."""
    numbers: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, flags=re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise InvalidInput(
                f"{option} is {text!r}; give numbers from 1 and ranges of them, such as 1-4 or 5,7."
            )
        numbers |= dict.fromkeys(range(first, last + 1))
    return tuple(numbers)
