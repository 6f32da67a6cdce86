"""Options and arguments that commands share, checked before anything is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from inferscale.catalog_url import VARIABLE, WAYS, check_url, find_url
from inferscale.config import (
    AUTO,
    DEFAULT_ORDER,
    DEFAULT_POOL_BYTES,
    DEFAULT_TAIL,
    ConnectorConfig,
    MemoryConfig,
    default_data_dir,
)
from inferscale.encryption import EncryptionKey, find_key
from inferscale.errors import InvalidConfig, InvalidInput
from inferscale.fact_order import FactOrder
from inferscale.facts import ScopeIds
from inferscale.filters import read_filter
from inferscale.tail import Tail

F = TypeVar("F", bound=Callable[..., Any])

COUNT = click.IntRange(min=0)
POSITIVE = click.IntRange(min=1)


class _TailType(click.ParamType[Tail]):
    name = "tail"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Tail:
        try:
            return Tail.parse(value, "the tail")
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


TAIL = _TailType()


def scope_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--user-id, --agent-id and --run-id, which the command gets as `ids`."""

    @wraps(command)
    def with_ids(
        *given: Any, user_id: str | None, agent_id: str | None, run_id: str | None, **options: Any
    ) -> Any:
        ids = ScopeIds(user_id=user_id, agent_id=agent_id, run_id=run_id)
        return command(*given, ids=ids, **options)

    for name, what in (("run", "run or session"), ("agent", "agent"), ("user", "user")):
        with_ids = click.option(f"--{name}-id", metavar="ID", help=f"The {what} that the facts belong to.")(
            with_ids
        )
    return with_ids


_KEY_FILE = "inferscale.encryption_key_file"


def key_file_option(command: F) -> F:
    """--encryption-key-file, which `encryption_key_file` and `encryption_key` read."""
    return click.option(
        "--encryption-key-file",
        type=click.Path(dir_okay=False, path_type=Path),
        expose_value=False,
        callback=_keep_key_file,
        help="File with the key of an encrypted data folder. Default: $INFERSCALE_ENCRYPTION_KEY.",
    )(command)


def _keep_key_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    context.meta[_KEY_FILE] = value


def encryption_key_file() -> Path | None:
    """As given to the command that runs."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_KEY_FILE)


def encryption_key() -> EncryptionKey | None:
    """Of the data folder of the command that runs; None: it is not encrypted."""
    return find_key(encryption_key_file())


_CATALOG = "inferscale.catalog"


def catalog_option(command: F) -> F:
    """--catalog, which `catalog_url` reads."""
    return click.option(
        "--catalog",
        metavar="URL",
        expose_value=False,
        callback=_keep_catalog,
        help="PostgreSQL database that holds the facts instead of the data folder, so that several machines "
        f"share them: postgresql://USER@HOST/DATABASE. Default: ${VARIABLE}; a password is best given there.",
    )(command)


def _keep_catalog(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    context.meta[_CATALOG] = value


def catalog_url() -> str | None:
    """Of the command that runs; None: the catalog is a file of the data folder. Raises InvalidConfig."""
    context = click.get_current_context(silent=True)
    given = None if context is None else context.meta.get(_CATALOG)
    return find_url() if given is None else check_url(given, "--catalog")


def refuse_catalog_url(what: str, instead: str) -> None:
    """For a command that works on the file of the data folder. Raises InvalidInput."""
    if catalog_url() is not None:
        raise InvalidInput(
            f"{what} works on a data folder, and the catalog is in PostgreSQL ({WAYS}). {instead}"
        )


def memory_options(command: F) -> F:
    """--data-dir, --catalog, --encryption-key-file and --embedder."""
    command = catalog_option(key_file_option(command))
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
    """--model, --pool-size (in bytes), --max-model-len and --verbose."""
    command = click.option("--verbose", is_flag=True, help="Show the engine's log.")(command)
    command = click.option("--max-model-len", type=POSITIVE, help="Longest prompt and answer, in tokens.")(
        command
    )
    command = click.option(
        "--pool-size",
        metavar="SIZE",
        default=AUTO,
        show_default=True,
        callback=read_size,
        help="Memory for the facts' KV, such as 512MiB or 2GB. auto: a quarter of what the model leaves on "
        f"a GPU, {_size_text(DEFAULT_POOL_BYTES)} elsewhere.",
    )(command)
    return click.option(
        "--model", metavar="MODEL", help="Folder or hub name of the model. Default: SmolLM2-135M-Instruct."
    )(command)


def order_option(what: str, default: FactOrder = DEFAULT_ORDER) -> Callable[[F], F]:
    """--order. what: the facts whose order it is."""
    return click.option(
        "--order",
        type=click.Choice(get_args(FactOrder)),
        default=default,
        show_default=True,
        help=f"Order of {what}: the best one last, as they were stored, or those of one session together. "
        "Those of the tail stand behind the others.",
    )


def recall_options(command: F) -> F:
    """--top-k and --tail."""
    command = click.option(
        "--tail",
        type=TAIL,
        help="Best facts that are recomputed instead of injected, nearer to text memory and slower: 5, 10% "
        "of the facts' tokens, 300t, the smallest of several, or 0. "
        f"Default: {DEFAULT_TAIL}, and 0 behind earlier turns.",
    )(command)
    return click.option("--top-k", type=COUNT, default=50, show_default=True, help="Facts in the prompt.")(
        command
    )


_FILTER = '{"topic": "travel", "rating": {"gte": 3}}'


def filter_option(command: F) -> F:
    """--filter, as `filters`."""
    return click.option(
        "--filter",
        "filters",
        metavar="JSON",
        callback=_read_filters,
        help=f"Only facts whose metadata pass, such as '{_FILTER}'.",
    )(command)


def _read_filters(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    try:
        read = None if value is None else json.loads(value)
        read_filter(read)
    except json.JSONDecodeError as error:
        given = f"{value!r} is no JSON ({error})"
        text = f"{given}; give an object such as '{_FILTER}', in quotes that keep the shell from reading it."
        raise click.BadParameter(text, context, parameter) from error
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return read


def read_time_option(value: str | None) -> float | str | None:
    """Seconds since 1970, or a text that names a time."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")(command)


def memory_config(data_dir: Path | None, embedder: str | None, *, has_engine: bool = False) -> MemoryConfig:
    """has_engine: whether the command starts one. Without, a GPU is not worth the start of CUDA, and
    another process's engine may fill it."""
    folder, device = data_dir or default_data_dir(), AUTO if has_engine else "cpu"
    return MemoryConfig(
        folder, embedder, device, encryption_key_file=encryption_key_file(), catalog=catalog_url()
    )


def read_api_key(variable: str | None, default: str) -> str | None:
    """The API key in the environment variable that --api-key-env names, else in `default`, where it is set.
    Raises InvalidInput where the one that was named is not."""
    key = os.environ.get(variable or default, "").strip()
    if variable and not key:
        raise InvalidInput(f"The environment variable {variable}, named by --api-key-env, is not set.")
    return key or None


def read_text(argument: str | None, what: str) -> str:
    """The argument, or standard input for `-`."""
    if argument is None:
        raise InvalidInput(f"No {what} was given. Give it as an argument, or - to read standard input.")
    return sys.stdin.read() if argument == "-" else argument


def read_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A size such as 512MiB in bytes, as a click callback; None where none was given, or `auto`."""
    if value in (None, AUTO):
        return None
    try:
        return ConnectorConfig(pool_size_bytes=value).size_bytes
    except InvalidConfig as error:
        raise click.BadParameter(str(error), context, parameter) from error


def read_tier_size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A size in bytes, as a click callback; 0 for none."""
    try:
        return ConnectorConfig(host_size_bytes=value).host_bytes
    except InvalidConfig as error:
        message = str(error).replace("host_size_bytes", str(parameter.opts[0]))
        raise click.BadParameter(message, context, parameter) from error


def _size_text(size_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)
