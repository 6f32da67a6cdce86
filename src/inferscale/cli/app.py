"""The command group, and errors as one line."""

from __future__ import annotations

from typing import Any

import click

from inferscale.cli.bench import bench
from inferscale.cli.blocks import block
from inferscale.cli.chat import chat
from inferscale.cli.demo import demo
from inferscale.cli.deploy import deploy
from inferscale.cli.doctor import doctor
from inferscale.cli.facts import add, delete, list_facts, search
from inferscale.cli.ingest import ingest
from inferscale.cli.kv import kv
from inferscale.cli.mcp import mcp
from inferscale.cli.operations import audit, backup, reembed, rekey, restore
from inferscale.cli.output import one_line
from inferscale.cli.serve import serve
from inferscale.cli.transfer import export, import_
from inferscale.cli.warm import warm
from inferscale.errors import InferScaleError

_INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended


class _Commands(click.Group):
    """An InferScaleError becomes one line on stderr and exit status 1; Ctrl-C ends silently."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InferScaleError as error:
            raise click.ClickException(one_line(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)  # the shell's prompt begins on a line of its own
            ctx.exit(_INTERRUPTED)


@click.group("inferscale", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="inferscale")
def main() -> None:
    """Long-term memory for self-hosted LLMs: facts are injected as KV instead of prefilled as text."""


for _command in (
    demo,
    add,
    ingest,
    search,
    list_facts,
    delete,
    chat,
    warm,
    serve,
    deploy,
    mcp,
    doctor,
    bench,
):
    main.add_command(_command)
for _command in (audit, backup, restore, reembed, rekey, kv):
    main.add_command(_command)
for _command in (export, import_):
    main.add_command(_command)
main.add_command(block)
