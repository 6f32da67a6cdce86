"""`inferscale serve`: stock vLLM's API server with memory, in place of this process."""

from __future__ import annotations

import errno
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import click

from inferscale.catalog_url import VARIABLE as CATALOG_VARIABLE
from inferscale.cli.engine import prepare_engine
from inferscale.cli.options import (
    COUNT,
    POSITIVE,
    TAIL,
    catalog_url,
    encryption_key,
    encryption_key_file,
    memory_options,
    order_option,
    read_size,
    read_tier_size,
)
from inferscale.cli.output import say
from inferscale.config import (
    AUTO,
    DEFAULT_POOL_BYTES,
    KV_FOLDER,
    ConnectorConfig,
    InjectionPath,
    PoolDtype,
    SelfCheck,
    default_data_dir,
    default_runtime_dir,
)
from inferscale.encryption import check_installed
from inferscale.pool.places import open_place
from inferscale.runtime.folder_lock import remove_stale_runtime_dirs
from inferscale.server_config import ServerConfig

_DEFAULT = ServerConfig()


class Serve(click.Command):
    """`-h` alone is help, as elsewhere; among vLLM's flags it could be a letter of a short one (`-dph`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--help"] if args == ["-h"] else args)


@click.command(cls=Serve, context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("model")
@click.argument("vllm_flags", metavar="[VLLM_FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@memory_options
@click.option(
    "--embedder-device",
    metavar="DEVICE",
    default=_DEFAULT.embedder_device,
    show_default=True,
    help="Where the embedder and the search index run, such as cpu or cuda:0.",
)
@click.option(
    "--pool-size",
    metavar="SIZE",
    default=AUTO,
    show_default=True,
    callback=read_size,
    help="Memory for the facts' KV on each worker, such as 512MiB or 2GB. auto: a quarter of what the model "
    f"leaves on a GPU, {DEFAULT_POOL_BYTES // 2**30}GiB elsewhere.",
)
@click.option(
    "--pool-dtype",
    type=click.Choice(get_args(PoolDtype)),
    default=ConnectorConfig.pool_dtype,
    show_default=True,
    help="How the facts' KV is kept: as vLLM's cache keeps it, or with a byte an element, in half the room "
    "and not exactly. A start with another one removes the KV on disk.",
)
@click.option(
    "--host-size",
    metavar="SIZE",
    default="0",
    show_default=True,
    callback=read_tier_size,
    help="Host memory on each worker for copies of the facts' KV; what left the pool comes back from there.",
)
@click.option(
    "--disk-size",
    metavar="SIZE",
    default="0",
    show_default=True,
    callback=read_tier_size,
    help="The same on disk, in the folder kv of the data folder; it is there after a restart with the same "
    "model, --pool-dtype, --tensor-parallel-size and encryption key. A start with another removes it.",
)
@click.option(
    "--cold",
    metavar="LOCATION",
    help="Where servers that share a --catalog share copies of the facts' KV too: a folder that all mount, "
    "or a URL such as s3://bucket/prefix. What one has encoded the others load from there.",
)
@click.option(
    "--window",
    type=COUNT,
    default=_DEFAULT.window,
    show_default=True,
    help="Facts that stand before the captured ones while they are encoded.",
)
@click.option(
    "--stride", type=POSITIVE, default=_DEFAULT.stride, show_default=True, help="Facts captured by one pass."
)
@click.option(
    "--mixed",
    type=COUNT,
    default=_DEFAULT.mixed,
    show_default=True,
    help="Facts of a scope that are encoded together, in both directions, once there are so many; --window "
    "and --stride are for fewer. 0: for all.",
)
@click.option(
    "--neighbours",
    type=POSITIVE,
    default=_DEFAULT.neighbours,
    show_default=True,
    help="Facts said one after the other that stay together in a pass of --mixed.",
)
@click.option(
    "--injection-path",
    type=click.Choice(get_args(InjectionPath)),
    default=ConnectorConfig.injection_path,
    show_default=True,
    help="How KV is written: by kernels for CUDA GPUs, or by plain torch. none: not at all; facts are text, "
    "also with a model that is refused otherwise.",
)
@click.option(
    "--self-check",
    type=click.Choice(get_args(SelfCheck)),
    default=ConnectorConfig.self_check,
    show_default=True,
    help="Check before serving that moved KV says what text says, and inject nothing where it does not: at "
    "the first start with a model, at every start, or never.",
)
@click.option(
    "--top-k",
    type=COUNT,
    default=_DEFAULT.top_k,
    show_default=True,
    help="Facts for chats that do not say how many.",
)
@click.option(
    "--tail",
    type=TAIL,
    default=str(_DEFAULT.tail),
    show_default=True,
    help="Best facts that are recomputed instead of injected, in chats that do not say how many and in which "
    "nothing was said before: 5, 10% of their tokens, 300t, the smallest of several, or 0.",
)
@order_option("the facts, in chats that do not name one", _DEFAULT.order)
@click.option(
    "--user-field/--no-user-field",
    default=_DEFAULT.use_user_field,
    show_default=True,
    help="Chats without a `memory` object use the memory of their OpenAI field `user`.",
)
@click.option(
    "--keys-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file that binds API keys to tenants.",
)
@click.option(
    "--allow-remote-without-key",
    is_flag=True,
    help="Let a --host that others can reach stand without an API key: whoever reaches it has all memory.",
)
@click.option(
    "--share-agents",
    is_flag=True,
    help="Let an agent or run that is named without a user read what all its users told.",
)
@click.option(
    "--min-injected-tokens",
    type=COUNT,
    help="Memory of fewer tokens is prefilled. By default 128 on a GPU and 0 elsewhere.",
)
@click.option(
    "--max-facts-per-user", type=POSITIVE, help="What would exceed it is refused. Default: no limit."
)
@click.option(
    "--max-bytes-per-user", type=POSITIVE, help="Of texts and metadata, in the same way. Default: no limit."
)
@click.option("--print-command", is_flag=True, help="Print what would be started, API keys masked.")
def serve(model: str, vllm_flags: tuple[str, ...], print_command: bool, **given: Any) -> None:
    """Serve MODEL (a folder or a hub name) with memory: stock vLLM's OpenAI-compatible API server.

    All flags of vLLM can follow, such as --port 8001 or --max-model-len 8192; they are passed on as they
    are, as is everything behind --. On a GPU, vLLM's share of the memory is set so that the facts' KV fits
    beside it.

    Set VLLM_API_KEY to an API key to answer other machines; without one, only this machine is answered.
    vLLM's flag --api-key works too, but every user of the machine can read it in the process list.
    """
    environment, data_dir = dict(os.environ), given["data_dir"] or default_data_dir()
    if (url := catalog_url()) is not None:
        environment[CATALOG_VARIABLE] = url  # not into the command, which all users of the machine can read
    check_catalog(data_dir, url)
    connector, server = settings_of(given)
    prepare_engine(verbose=False)  # for this process, which asks vLLM for the GPUs; the server's is as it was
    from inferscale.serve_command import serve_command

    command = serve_command(model, vllm_flags, connector, server, environment, engine_id=str(uuid.uuid4()))
    for note in command.notes:
        say(note)
    if print_command:
        if url is not None:
            say(f"Set ${CATALOG_VARIABLE} for it to the URL of that catalog, which is not shown here.")
        click.echo(str(command))
        return
    if command.address is not None:
        check_free(*command.address)
    remove_stale_runtime_dirs(Path(default_runtime_dir("")).parent)
    say(f"Starting: {command}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command.arguments[0], command.arguments, {**environment, **command.environment})


def settings_of(given: Mapping[str, Any]) -> tuple[ConnectorConfig, ServerConfig]:
    """What the options of `serve` say, by their names."""
    data_dir: Path | None = given["data_dir"]
    key_file, keys_file, disk_size = encryption_key_file(), given["keys_file"], given["disk_size"]
    connector = ConnectorConfig(
        pool_size_bytes=AUTO if given["pool_size"] is None else given["pool_size"],
        pool_dtype=given["pool_dtype"],
        host_size_bytes=given["host_size"],
        disk_size_bytes=disk_size,
        disk_dir=str((data_dir or default_data_dir()).absolute() / KV_FOLDER) if disk_size else None,
        cold_location=_located(given["cold"]),
        encryption_key_file=None if key_file is None else str(key_file.absolute()),
        injection_path=given["injection_path"],
        self_check=given["self_check"],
    )
    server = ServerConfig(
        data_dir=None if data_dir is None else str(data_dir.absolute()),
        embedder=_absolute(given["embedder"]),
        embedder_device=given["embedder_device"],
        window=given["window"],
        stride=given["stride"],
        mixed=given["mixed"],
        neighbours=given["neighbours"],
        top_k=given["top_k"],
        tail=str(given["tail"]),
        order=given["order"],
        use_user_field=given["user_field"],
        keys_file=None if keys_file is None else str(keys_file.absolute()),
        allow_remote_without_key=given["allow_remote_without_key"],
        share_agents=given["share_agents"],
        min_injected_tokens=given["min_injected_tokens"],
        max_facts_per_user=given["max_facts_per_user"],
        max_bytes_per_user=given["max_bytes_per_user"],
    )
    return connector, server


def check_catalog(data_dir: Path, url: str | None) -> None:
    """Refused here, not after the model was loaded."""
    from inferscale.catalog import CATALOG_FILE, Catalog
    from inferscale.catalog.copies import check_key

    key = encryption_key()
    if key is not None:
        check_installed()
    if url is not None:
        with closing(Catalog(data_dir, key=key, url=url)) as catalog:
            catalog.count_rows()
        say(f"The catalog is {catalog.place}.")
    elif (data_dir / CATALOG_FILE).is_file():
        check_key(data_dir / CATALOG_FILE, key)


def check_free(host: str, port: int) -> None:
    """vLLM would find out after it has loaded the model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # vLLM says it
                return
            raise click.ClickException(
                f"Port {port} is in use, perhaps by another server. Stop that, or choose one with --port."
            ) from error
        except (OverflowError, UnicodeError):
            return


def _located(cold: str | None) -> str | None:
    """A folder by its whole path. Refused here where it cannot be used, not after the model was loaded."""
    if cold is None:
        return None
    located = cold if "://" in cold else str(Path(cold).absolute())
    open_place(located)
    return located


def _absolute(embedder: str | None) -> str | None:
    """A folder by its whole path; hub names stay."""
    return str(Path(embedder).absolute()) if embedder and Path(embedder).is_dir() else embedder
