"""`inferscale doctor`."""

from __future__ import annotations

import sys

import click

from inferscale.cli.options import json_option


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show engine, device and models, what is missing, and the command that fixes it.

    Exit status 1 if something required is missing.
    """
    from inferscale.doctor import diagnose, is_ready, render_json, render_text

    findings = diagnose()
    click.echo(render_json(findings) if as_json else render_text(findings))
    sys.exit(0 if is_ready(findings) else 1)
