"""Options and output that commands share."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from inferscale.config import MemoryConfig, default_data_dir
from inferscale.errors import InferScaleError, InvalidInput
from inferscale.facts import Fact, SearchHit

F = TypeVar("F", bound=Callable[..., Any])


def say(message: str) -> None:
    """Talk: progress and hints, on stderr."""
    click.echo(message, err=True)


def emit(data: Any) -> None:
    """One JSON document a line, on stdout."""
    click.echo(json.dumps(data, ensure_ascii=False))


def fail(error: InferScaleError) -> NoReturn:
    """One line on stderr, exit status 1."""
    raise click.ClickException(str(error))


def scope_options(command: F) -> F:
    """--user-id, --agent-id, --run-id."""
    for name, what in (("run", "run or session"), ("agent", "agent"), ("user", "user")):
        command = click.option(f"--{name}-id", metavar="ID", help=f"The {what} that the facts belong to.")(
            command
        )
    return command


def memory_options(command: F) -> F:
    """--data-dir and --embedder."""
    command = click.option(
        "--embedder",
        metavar="MODEL",
        help="Folder or hub name of the embedding model. Default: all-MiniLM-L6-v2.",
    )(command)
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Where facts are stored. Default: $INFERSCALE_HOME or ~/.local/share/inferscale.",
    )(command)


def model_options(command: F) -> F:
    """--model, --pool-size, --max-model-len and --verbose."""
    command = click.option("--verbose", is_flag=True, help="Show the engine's log.")(command)
    command = click.option("--max-model-len", type=int, help="Longest prompt and answer, in tokens.")(command)
    command = click.option(
        "--pool-size", default="1GiB", show_default=True, help="Memory for the facts' KV."
    )(command)
    return click.option(
        "--model", metavar="MODEL", help="Folder or hub name of the model. Default: SmolLM2-135M-Instruct."
    )(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")(command)


def memory_config(data_dir: Path | None, embedder: str | None) -> MemoryConfig:
    return MemoryConfig(data_dir or default_data_dir(), embedder)


def model_path(model: str | None) -> str:
    """The given model, or the demo model, fetched on first use."""
    if model is not None:
        return model
    from inferscale.models import ensure_demo_model

    return str(ensure_demo_model(say))


def prepare_engine(*, verbose: bool) -> None:
    """Keep stdout for data: vLLM logs to stderr, and only errors unless asked for.

    One process is enough for one user, and starts four times faster; an explicit setting wins.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # On a CPU, vLLM would otherwise reserve nearly all memory; ignored on a GPU. In GiB.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    if not verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TQDM_DISABLE", "1")
        warnings.filterwarnings("ignore")


def engine_args(max_model_len: int | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for interactive use.

    On a CPU, compiling the model takes longer than most sessions last and gains a few percent.
    """
    import torch

    arguments: dict[str, Any] = {"disable_log_stats": True, "enforce_eager": not torch.cuda.is_available()}
    if max_model_len is not None:
        arguments["max_model_len"] = max_model_len
    return arguments


def read_text(argument: str | None, what: str) -> str:
    """The argument, or standard input for `-`."""
    if argument is None:
        raise InvalidInput(f"No {what} was given. Give it as an argument, or - to read standard input.")
    return sys.stdin.read() if argument == "-" else argument


def fact_json(fact: Fact) -> dict[str, Any]:
    return {
        "id": fact.id,
        "text": fact.text,
        "speaker": fact.speaker,
        "said_at": fact.said_at,
        "created_at": fact.created_at,
        "metadata": fact.metadata,
        **asdict(fact.scope),
    }


def hit_json(hit: SearchHit) -> Mapping[str, Any]:
    return {"score": round(hit.score, 4), **fact_json(hit.fact)}


def fact_line(fact: Fact) -> str:
    source = " ".join(part for part in (fact.speaker, f"({fact.said_at})" if fact.said_at else None) if part)
    return f"{source}: {fact.text}" if source else fact.text
