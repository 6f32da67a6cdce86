"""`inferscale kv status`: what a running server's tiers hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from inferscale.capacity import size_text
from inferscale.cli.options import json_option
from inferscale.cli.output import emit


class TierStatus(NamedTuple):
    """size, capacity: bytes on each worker, None for the pool, which counts pages. hits: segments that were
    injected from it (pool) or that a request had loaded from it; prefetched: loaded ahead of requests.
    hit_ms: the mean time of a hit's load, None without any."""

    tier: str
    segments: int
    size: int | None
    capacity: int | None
    used_share: float
    hits: int
    evictions: int
    hit_ms: float | None
    prefetched: int = 0


def tiers_of(stats: Mapping[str, Any]) -> list[TierStatus]:
    """Tiers from the server's numbers, nearest first."""
    pages, free = int(stats.get("pages", 0)), int(stats.get("free_pages", 0))
    loaded = sum(int(stats.get(f"{name}_hits", 0)) for name in ("host", "disk"))
    tiers = [
        TierStatus(
            "pool",
            int(stats.get("resident_segments", 0)),
            None,
            None,
            (pages - free) / pages if pages else 0.0,
            max(0, int(stats.get("segments_injected", 0)) - loaded),
            int(stats.get("evictions", 0)),
            None,
        )
    ]
    for name in ("host", "disk"):
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
@click.option("--api-key-env", metavar="NAME", default="VLLM_API_KEY", help="Variable with the API key.")
@json_option
def status(url: str, api_key_env: str, as_json: bool) -> None:
    """Show what the pool, host memory and disk of a running server hold, and how often they helped."""
    from inferscale.client import Client

    with Client(url, api_key=os.environ.get(api_key_env)) as client:
        found = client.stats()
    stats = {**found.pool, **found.counters}
    tiers = tiers_of(stats)
    missing = int(stats.get("segments_missing", 0))
    if as_json:
        emit({"tiers": [tier._asdict() for tier in tiers], "missing": missing, "facts": found.facts})
        return
    click.echo(f"{found.facts} facts, {found.pending} encode passes waiting")
    asked = sum(tier.hits for tier in tiers) + missing
    rows = [("tier", "segments", "size", "used", "hits", "of all", "a load", "prefetched", "evicted")]
    for tier in tiers:
        size = "" if tier.size is None else f"{size_text(tier.size)} of {size_text(tier.capacity or 0)}"
        load = "" if tier.hit_ms is None else f"{tier.hit_ms:.1f} ms"
        share = f"{tier.hits / asked:.0%}" if asked else ""
        numbers = (str(tier.segments), size, f"{tier.used_share:.0%}", str(tier.hits), share)
        ahead = "" if tier.tier == "pool" else str(tier.prefetched)
        rows.append((tier.tier, *numbers, load, ahead, str(tier.evictions)))
    share = f"{missing / asked:.0%}" if asked else ""
    rows.append(("prefilled", "", "", "", str(missing), share, "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo(
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
