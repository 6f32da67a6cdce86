"""`inferscale kv status`: what a running server's tiers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from inferscale.capacity import size_text
from inferscale.cli.options import json_option, read_api_key
from inferscale.cli.output import emit

_KEY_VARIABLE = "VLLM_API_KEY"
_LOWER = ("host", "disk", "cold")
_USE = {"injected": "injected", "cached": "cached", "prefilled": "missing"}
"""What became of the facts that plans named, by the counters that tell it."""


class TierStatus(NamedTuple):
    """size, capacity: bytes on each worker. hits: facts that were injected and had been in the pool already,
    or segments that a request had loaded from this tier, now and then a system text among them; prefetched:
    loaded ahead of requests. wait_ms: the mean time from the order of a hit's load to its end, with what it
    waited for others; None without any."""

    tier: str
    segments: int
    size: int
    capacity: int
    used_share: float
    hits: int
    evictions: int
    wait_ms: float | None
    prefetched: int = 0


def tiers_of(stats: Mapping[str, Any]) -> list[TierStatus]:
    """Tiers from the server's numbers, nearest first."""
    pages, free = int(stats.get("pages", 0)), int(stats.get("free_pages", 0))
    loaded = sum(int(stats.get(f"{name}_hits", 0)) for name in _LOWER)
    tiers = [
        TierStatus(
            "pool",
            int(stats.get("resident_segments", 0)),
            int(stats.get("pool_bytes", 0)),
            int(stats.get("pool_capacity_bytes", 0)),
            (pages - free) / pages if pages else 0.0,
            max(0, int(stats.get("segments_injected", 0)) - loaded),
            int(stats.get("evictions", 0)),
            None,
        )
    ]
    for name in _LOWER:
        if f"{name}_segments" not in stats:
            continue
        used, capacity, hits = (int(stats[f"{name}_{what}"]) for what in ("bytes", "capacity_bytes", "hits"))
        tiers.append(
            TierStatus(
                name,
                int(stats[f"{name}_segments"]),
                used,
                capacity,
                used / capacity if capacity else 0.0,
                hits,
                int(stats[f"{name}_evictions"]),
                int(stats[f"{name}_load_ms"]) / hits if hits else None,
                int(stats.get(f"{name}_prefetched", 0)),
            )
        )
    return tiers


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option(
    "--api-key-env",
    metavar="NAME",
    help=f"Environment variable that holds its API key. Default: {_KEY_VARIABLE}, if it is set.",
)
@json_option
def status(url: str, api_key_env: str | None, as_json: bool) -> None:
    """Show what the pool, host memory and disk of a running server hold, and how often they helped.

    Sizes are of each worker. Hits and their shares are of the facts that chats were to inject since the
    server started: injected from the pool, injected after a load from host memory or disk, found in vLLM's
    own prefix cache (cached), or prefilled after all. Facts that had no KV when the chat came stand in its
    prompt as text and are not among them: /metrics counts their tokens, as
    inferscale_prompt_tokens_total{source="missing"}. The mean wait is the time from the order of a load to
    its end, with what it waited for other loads.
    """
    from inferscale.client import Client

    with Client(url, api_key=read_api_key(api_key_env, _KEY_VARIABLE)) as client:
        found = client.stats()
    stats = {**found.pool, **found.counters}
    tiers = tiers_of(stats)
    use = {name: int(stats.get(f"segments_{key}", 0)) for name, key in _USE.items()}
    if as_json:
        told = {"tiers": [tier._asdict() for tier in tiers], "planned_facts": use, "facts": found.facts}
        emit({**told, "self_check": found.self_check})
        return
    click.echo(f"{found.facts} facts, {found.pending} encode passes waiting")
    if "detail" in found.self_check:
        click.echo(found.self_check["detail"])
    _show(tiers, use)


def _show(tiers: Sequence[TierStatus], use: Mapping[str, int]) -> None:
    asked = sum(use.values())

    def hits(count: int) -> tuple[str, str]:
        return str(count), f"{count / asked:.0%}" if asked else ""

    rows = [("tier", "segments", "size", "used", "hits", "of all", "mean wait", "prefetched", "evicted")]
    for tier in tiers:
        size = f"{size_text(tier.size)} of {size_text(tier.capacity)}" if tier.capacity else ""
        wait = "" if tier.wait_ms is None else f"{tier.wait_ms:.1f} ms"
        ahead = "" if tier.tier == "pool" else str(tier.prefetched)
        held = (tier.tier, str(tier.segments), size, f"{tier.used_share:.0%}")
        rows.append((*held, *hits(tier.hits), wait, ahead, str(tier.evictions)))
    rows += [(name, "", "", "", *hits(use[name]), "", "", "") for name in ("cached", "prefilled")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo(
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
    click.echo("hits: of the facts that chats were to inject; see --help")
