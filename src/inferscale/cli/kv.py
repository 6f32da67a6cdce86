"""`inferscale kv`: the room that facts' KV takes."""

from __future__ import annotations

import click

from inferscale.capacity import COMMON, DTYPES, KvPlan, size_text
from inferscale.capacity import plan as make_plan
from inferscale.cli.kv_status import status
from inferscale.cli.options import POSITIVE, json_option
from inferscale.cli.output import emit
from inferscale.errors import InvalidInput


@click.group()
def kv() -> None:
    """The facts' KV: how much room it takes."""


kv.add_command(status)


@kv.command()
@click.option(
    "--model", required=True, help=f"A folder, a config.json, a hub name, or one of {', '.join(COMMON)}."
)
@click.option("--users", type=POSITIVE, required=True, help="How many users there are.")
@click.option("--facts", type=POSITIVE, required=True, help="Facts of each user.")
@click.option("--tokens-per-fact", type=POSITIVE, default=30, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of the KV. Default: the model's own.")
@click.option(
    "--talking",
    type=POSITIVE,
    help="Users whose facts are in the GPU pool at once. Default: one in a hundred.",
)
@click.option("--recent", type=POSITIVE, help="Users whose facts are in host memory. Default: one in ten.")
@json_option
def plan(
    model: str,
    users: int,
    facts: int,
    tokens_per_fact: int,
    dtype: str | None,
    talking: int | None,
    recent: int | None,
    as_json: bool,
) -> None:
    """Say how much GPU memory, host memory and disk the facts' KV takes.

    Sizes are of all workers together.
    """
    try:
        planned = make_plan(
            model,
            users,
            facts,
            tokens_per_fact=tokens_per_fact,
            dtype=dtype,
            talking=talking,
            recent=recent,
        )
    except InvalidInput as error:
        raise InvalidInput(_with_option(str(error))) from error
    if as_json:
        emit(
            {
                **planned._asdict(),
                "fact": planned.fact._asdict(),
                "tiers": [tier._asdict() for tier in planned.tiers],
            }
        )
    else:
        _show(planned)


def _with_option(message: str) -> str:
    """`--talking is 50` instead of the argument's name."""
    name, rest = message.split(" ", 1)
    return f"--{name} {rest}" if name in ("talking", "recent") else message


def _show(planned: KvPlan) -> None:
    click.echo(f"{planned.model}, dtype {planned.dtype}: {size_text(planned.token_bytes)} of KV a token")
    click.echo(
        f"{planned.fact.num_tokens} tokens a fact: {size_text(planned.fact.pool)} in the pool, "
        f"{planned.facts_per_gib} facts a GiB"
    )
    rows = [("tier", "users", "facts", "size")]
    rows += [(t.tier, str(t.users), str(t.facts), size_text(t.size_bytes)) for t in planned.tiers]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]
        click.echo("  ".join(cells))
