"""The command group, and errors as one line."""

from __future__ import annotations

import sys

import click

from inferscale.cli.bench import bench
from inferscale.cli.demo import demo
from inferscale.cli.doctor import doctor
from inferscale.cli.engine import chat, warm
from inferscale.cli.facts import add, delete, list_facts, search
from inferscale.errors import InferScaleError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="inferscale")
def cli() -> None:
    """Long-term memory for self-hosted LLMs: facts are injected as KV instead of prefilled as text."""


for _command in (demo, add, search, list_facts, delete, chat, warm, doctor, bench):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; an InferScaleError becomes one line on stderr and exit status 1."""
    try:
        cli()
    except InferScaleError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
