"""`inferscale bench …`: how good answers with injected memory are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import click

from inferscale.bench.options import FidelityOptions, JudgeOptions, LocomoOptions
from inferscale.bench.policies import Policy, parse_policies
from inferscale.cli.bench_options import EngineChoice, F, engine_options, out_option, read_counts, show
from inferscale.cli.engine import start_errors
from inferscale.cli.options import COUNT, POSITIVE, json_option
from inferscale.cli.output import say
from inferscale.errors import InvalidInput

_FIDELITY = FidelityOptions()
_LOCOMO = LocomoOptions()
_KEY_VARIABLE = "INFERSCALE_JUDGE_API_KEY"
_CATEGORIES = "1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop"


def _questions_asked(
    conversations: str, options: FidelityOptions | LocomoOptions, categories: str
) -> Callable[[F], F]:
    """Which questions, behind what, in which ways and how many at once. conversations: by default."""
    made = (
        click.option(
            "--conversation",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            required=True,
            help="A LoCoMo file.",
        ),
        click.option(
            "--conversations",
            default=conversations,
            show_default=True,
            help="Which conversations of the file, counted from 1, such as 1-4 or 5,7-10.",
        ),
        click.option(
            "--questions",
            type=POSITIVE,
            help="Questions of each conversation, evenly spread over it. Default: all.",
        ),
        click.option(
            "--categories",
            default=",".join(map(str, options.categories)),
            show_default=True,
            help=f"Of questions: {categories}.",
        ),
        click.option(
            "--policies",
            default=str(Policy.default()),
            show_default=True,
            help="What is compared, separated by semicolons: alone (or anchor), window(W), sliding(W,S), "
            "mixed(N,NEIGHBOURS), each with +tail5, +tail10%, +tail300t or +tail6,12% for the best facts "
            "recomputed, and +chronological or +session for another order of the facts.",
        ),
        click.option(
            "--instruction",
            default=options.instruction,
            show_default=True,
            help="Text behind every question; the search does not see it.",
        ),
        click.option(
            "--in-flight",
            type=POSITIVE,
            default=options.in_flight,
            show_default=True,
            help="Requests that the engine has at once.",
        ),
    )

    def apply(command: F) -> F:
        for option in reversed(made):
            command = option(command)
        return command

    return apply


@click.command()
@_questions_asked("1", _FIDELITY, _CATEGORIES)
@click.option("--k", type=POSITIVE, default=_FIDELITY.k, show_default=True, help="Facts in every prompt.")
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


@click.command()
@_questions_asked("1-10", _LOCOMO, _CATEGORIES + ", 5 adversarial (apart)")
@click.option(
    "--k", "ks", default=",".join(map(str, _LOCOMO.ks)), show_default=True, help="Numbers of facts."
)
@click.option(
    "--facts",
    type=click.Choice(["turns", "extracted"]),
    default=_LOCOMO.facts,
    show_default=True,
    help="What memory holds: turns as they were said, or what the model extracts of them.",
)
@click.option(
    "--adversarial-note",
    default=_LOCOMO.adversarial_note,
    show_default=True,
    help="Text behind the instruction for questions of category 5.",
)
@click.option(
    "--max-tokens",
    type=POSITIVE,
    default=_LOCOMO.max_tokens,
    show_default=True,
    help="Longest answer.",
)
@click.option("--judge-url", metavar="URL", help="Server with OpenAI's chat completions that judges answers.")
@click.option("--judge-model", metavar="MODEL", help="Its model.")
@click.option(
    "--judge-styles",
    default="strict,generous",
    show_default=True,
    help="How it judges. Its key is read from the environment variable " + _KEY_VARIABLE + ".",
)
@click.option(
    "--cache",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(".cache/locomo.jsonl"),
    show_default=True,
    help="File that keeps every answer, so that an interrupted run goes on.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("benchmarks/results/locomo.html"),
    show_default=True,
    help="Where the HTML page goes; it has plots where matplotlib is installed.",
)
@out_option("locomo")
@engine_options
@json_option
def locomo(
    conversation: Path,
    conversations: str,
    questions: int | None,
    categories: str,
    ks: str,
    policies: str,
    facts: str,
    instruction: str,
    adversarial_note: str,
    max_tokens: int,
    in_flight: int,
    judge_url: str | None,
    judge_model: str | None,
    judge_styles: str,
    cache: Path,
    report_path: Path,
    out: Path,
    engine: EngineChoice,
    as_json: bool,
) -> None:
    """How right answers are with memory injected, as text and without any."""
    compared = parse_policies(policies)
    wanted = read_counts("--categories", categories, 1)
    counts = tuple(sorted(set(read_counts("--k", ks, 1))))
    options = LocomoOptions(
        counts, questions, wanted, instruction, adversarial_note, max_tokens, facts, in_flight
    )
    if engine.random_weights is not None:
        raise InvalidInput("--random-weights has nothing to say about answers; give --model.")
    judging = read_judge(judge_url, judge_model, judge_styles)
    numbers = read_ranges("--conversations", conversations)
    from inferscale.bench.questions import read_gold

    asked = [read_gold(conversation, number, wanted, with_adversarial=True) for number in numbers]
    spec = engine.spec()
    from inferscale.bench.locomo import LocomoFiles, run_locomo

    with start_errors(spec.model):
        files = LocomoFiles(out, cache, report_path)
        rows = run_locomo(spec, asked, compared, options, files, judging, say)
    show(rows, out, as_json=as_json)


def read_judge(url: str | None, model: str | None, styles: str) -> JudgeOptions | None:
    """The judge, if one was given. Raises InvalidInput."""
    if url is None and model is None:
        return None
    if url is None or model is None:
        given, missing = ("--judge-model", "--judge-url") if url is None else ("--judge-url", "--judge-model")
        raise InvalidInput(f"{given} was given without {missing}; a judge needs both.")
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"--judge-url is {url!r}; give one such as 'http://127.0.0.1:8001/v1'.")
    from inferscale.bench.judge import check_styles

    names = tuple(dict.fromkeys(name.strip() for name in styles.split(",") if name.strip()))
    check_styles(names)
    return JudgeOptions(url, model, names, os.environ.get(_KEY_VARIABLE) or None)


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
