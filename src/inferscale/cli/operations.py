"""Commands for who runs a data folder: audit, backup, restore, reembed, rekey. They need no engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from inferscale.cli.options import (
    F,
    catalog_option,
    catalog_url,
    encryption_key,
    json_option,
    key_file_option,
    memory_options,
    read_api_key,
    refuse_catalog_url,
    scope_options,
)
from inferscale.cli.output import emit, say
from inferscale.config import default_data_dir
from inferscale.encryption import EncryptionKey, read_key, read_key_file
from inferscale.errors import InvalidInput
from inferscale.facts import Scope, ScopeIds
from inferscale.operations.audit import Audit, Finding, Numbers
from inferscale.turns import read_scope

_KEY_VARIABLE = "INFERSCALE_API_KEY"
_FOUND = 1


def _folder_options(command: F) -> F:
    """--data-dir, --catalog and --encryption-key-file."""
    command = catalog_option(command)
    return click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Where facts are stored. Default: $INFERSCALE_HOME or ~/.local/share/inferscale.",
    )(key_file_option(command))


@click.command()
@scope_options
@click.option("--text", "texts", multiple=True, help="A text that must not be there. May be given often.")
@click.option(
    "--texts", "text_file", type=click.File(encoding="utf-8"), help="A file of such texts, one a line (-)."
)
@click.option("--url", help="A running server with the memory API, to be asked as well.")
@click.option(
    "--api-key-env",
    metavar="NAME",
    help=f"Environment variable that holds its API key. Default: {_KEY_VARIABLE}, if it is set.",
)
@_folder_options
@json_option
@click.pass_context
def audit(
    context: click.Context,
    ids: ScopeIds,
    texts: tuple[str, ...],
    text_file: Any,
    url: str | None,
    api_key_env: str | None,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Look for anything that is left of a user, agent or run. Deletes nothing.

    Looks through the tables of the data folder, the free pages of its file, the files of KV, with --text or
    --texts the bytes of all files, and with --url a running server. The exit status is 0 where nothing was
    found and 1 where something was.
    """
    from inferscale.operations.audit import audit as look

    folder, scope = data_dir or default_data_dir(), read_scope(**ids)
    given = [*texts, *(line.rstrip("\n") for line in text_file or ())]
    server = None if url is None else _asked(url, api_key_env, scope)
    wanted = [text for text in given if text.strip()]
    found = look(folder, scope, wanted, server, encryption_key(), catalog_url())
    for finding in found.findings if as_json else ():
        emit({**finding._asdict(), "scope": scope.describe()})
    if not as_json:
        _show(found)
    if not found.is_known:
        where = f"in {found.place} under {scope.describe()}"
        say(f"Nothing was ever stored {where}: check the id and --data-dir or --catalog.")
    if not found.is_clean:
        context.exit(_FOUND)


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@_folder_options
@json_option
def backup(target: Path, data_dir: Path | None, as_json: bool) -> None:
    """Copy the data folder to TARGET, a new folder or a name that ends in .tar.

    Servers may go on meanwhile: the copy is of one moment. KV is not in it; it is made again from the texts.
    The backup of an encrypted folder is encrypted with the same key.
    What is deleted later is still in a backup: remove old ones.
    """
    from inferscale.operations.backup import backup as copy

    refuse_catalog_url("backup", "Copy the database with pg_dump, or as its server is backed up.")
    copied = copy(data_dir or default_data_dir(), target, encryption_key())
    emit(_jsonable(copied)) if as_json else click.echo(copied.path)
    say(f"{copied.num_facts} facts, {copied.size_bytes} bytes.")


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@_folder_options
@json_option
def restore(source: Path, data_dir: Path | None, as_json: bool) -> None:
    """Put a backup into an empty data folder, once it was checked."""
    from inferscale.operations.backup import restore as put_back

    refuse_catalog_url(
        "restore",
        "Put back a database with pg_restore; `inferscale import` brings facts from elsewhere into it.",
    )
    restored = put_back(source, data_dir or default_data_dir(), encryption_key())
    emit(_jsonable(restored)) if as_json else click.echo(restored.path)
    say(f"{restored.num_facts} facts, {restored.size_bytes} bytes.")


@click.command()
@memory_options
@click.option(
    "--embedder-device", metavar="DEVICE", default="cpu", show_default=True, help="Such as cpu or cuda:0."
)
@json_option
def reembed(data_dir: Path | None, embedder: str | None, embedder_device: str, as_json: bool) -> None:
    """Change the embedder of a data folder: embed all its facts anew.

    Servers may use the folder meanwhile, with the embedder that it has. The new vectors are used from the
    moment all are there; start servers again with the new --embedder then. Killed, it goes on where it was.
    """
    from inferscale.operations.reembed import reembed as embed_anew
    from inferscale.retrieval import open_embedder

    folder = data_dir or default_data_dir()
    opened = open_embedder(embedder, embedder_device, say)
    done = embed_anew(
        folder,
        opened,
        lambda progress: say(f"{progress.num_done} of {progress.num_facts}"),
        key=encryption_key(),
        url=catalog_url(),
    )
    if as_json:
        emit({**done._asdict(), "embedder": opened.name})
    elif done.is_new:
        click.echo(f"{done.num_facts} facts have vectors of {opened.name}.")
    else:
        click.echo(f"Nothing to do: the vectors are of {opened.name}.")


@click.command()
@_folder_options
@click.option(
    "--new-key-file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="File with the new key, or - for standard input.",
)
@click.option("--no-encryption", is_flag=True, help="Store in plain from now on, instead of with a new key.")
@json_option
def rekey(data_dir: Path | None, new_key_file: Path | None, no_encryption: bool, as_json: bool) -> None:
    """Encrypt a data folder, change its key, or end its encryption.

    Stop what uses the folder first. It needs room for a second catalog. KV on disk is removed and made again.
    Killed, it leaves the folder as it was or done. Backups keep the key that they were made with.
    """
    from inferscale.operations.rekey import rekey as change_key

    refuse_catalog_url("rekey", "Encrypt the disks of its server.")
    if (new_key_file is None) is not no_encryption:
        raise InvalidInput("Give either --new-key-file, or --no-encryption.")
    changed = change_key(data_dir or default_data_dir(), encryption_key(), _new_key(new_key_file))
    emit(_jsonable(changed)) if as_json else click.echo(changed.path)
    state = "encrypted with the new key" if changed.is_encrypted else "not encrypted any more"
    say(f"{changed.num_facts} facts, {state}.")


def _new_key(path: Path | None) -> EncryptionKey | None:
    if path is None:
        return None
    return read_key(sys.stdin.read(), "standard input") if str(path) == "-" else read_key_file(path)


def _asked(url: str, variable: str | None, scope: Scope) -> Numbers:
    """What the server counts for this scope."""
    from inferscale.client import Client

    with Client(url, read_api_key(variable, _KEY_VARIABLE)) as client:
        return client.stats(**scope.ids())


def _show(found: Audit) -> None:
    rows = [(_verdict(finding), finding.place, finding.what, finding.note) for finding in found.findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[3]]).rstrip())
    say("Nothing was found." if found.is_clean else _summary(found.findings))


def _verdict(finding: Finding) -> str:
    if finding.num_found is None:
        return "not checked"
    return f"{finding.num_found} found" if finding.num_found else "nothing"


def _summary(findings: Sequence[Finding]) -> str:
    places = dict.fromkeys(finding.place for finding in findings if finding.num_found)
    return f"Found in: {', '.join(places)}."


def _jsonable(copied: Any) -> dict[str, Any]:
    return {**copied._asdict(), "path": str(copied.path)}
