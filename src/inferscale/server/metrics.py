"""Prometheus metrics of the server's memory, in the registry that vLLM's `/metrics` shows.

Numbers only: no label holds an id or a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from inferscale.chat_plan import PreparedChat

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

TIERS = ("host", "disk", "cold")

_M = TypeVar("_M", Counter, Gauge, Histogram)


def _metric(kind: type[_M], name: str, text: str, **settings: Any) -> _M:
    """A metric of this process; the same one where it exists already."""
    known = getattr(REGISTRY, "_names_to_collectors", {}).get(name)
    return known if isinstance(known, kind) else kind(name, text, **settings)


class Metrics:
    """One object a process; making another one counts on in the same metrics."""

    def __init__(self) -> None:
        self.chats = _metric(
            Counter, "inferscale_chats_total", "Chats with memory, by mode", labelnames=("mode",)
        )
        self.front = _metric(
            Histogram,
            "inferscale_front_seconds",
            "Time before the engine: embed, search, residency, prompt",
            labelnames=("part",),
            buckets=_SECONDS,
        )
        self.tokens = _metric(
            Counter,
            "inferscale_prompt_tokens_total",
            "Prompt tokens of chats with memory: injected, cached, prefilled; missing are part of prefilled",
            labelnames=("source",),
        )
        self.added = _metric(Counter, "inferscale_facts_added_total", "Facts stored")
        self.deleted = _metric(Counter, "inferscale_facts_deleted_total", "Facts deleted")
        self.encoded = _metric(Counter, "inferscale_facts_encoded_total", "Facts whose KV was captured")
        self.failed_injections = _metric(
            Counter,
            "inferscale_failed_injections_total",
            "Chats that the engine failed with injected facts, asked again with these as text",
        )
        self.refused = _metric(
            Gauge, "inferscale_injection_refused", "1 where the self-check refused injection for this model"
        )
        self.refused_chats = _metric(
            Counter,
            "inferscale_refused_injections_total",
            "Chats that were to inject and had their facts as text, since the self-check refused injection",
        )
        self.backlog = _metric(Gauge, "inferscale_encode_backlog", "Encode passes that wait or run")
        self.tiers = _metric(
            Gauge, "inferscale_tier_bytes", "Bytes of KV below the pool", labelnames=("tier", "state")
        )
        self.segments = _metric(
            Gauge, "inferscale_tier_segments", "Segments below the pool", labelnames=("tier",)
        )
        self.hits = _metric(
            Gauge,
            "inferscale_tier_hits",
            "Segments that chats had loaded from a tier since the start",
            labelnames=("tier",),
        )
        self.prefetched = _metric(
            Gauge,
            "inferscale_tier_prefetched",
            "Segments loaded from a tier ahead of chats since the start",
            labelnames=("tier",),
        )
        self.pool = _metric(Gauge, "inferscale_pool_pages", "Pages of the KV pool", labelnames=("state",))

    def prepared(self, mode: str, chat: PreparedChat) -> None:
        self.chats.labels(mode).inc()
        parts = {
            "embed": chat.timings.embed_ms,
            "search": chat.timings.search_ms,
            "residency": chat.timings.residency_ms,
            "prompt": chat.timings.prompt_ms,
        }
        for part, ms in parts.items():
            self.front.labels(part).observe(ms / 1e3)

    def answered(self, use: Mapping[str, Any]) -> None:
        """use: the `memory` object of an answer."""
        for source in ("injected", "cached", "prefilled", "missing"):
            self.tokens.labels(source).inc(max(0, int(use.get(f"{source}_tokens") or 0)))

    def observe(self, num_waiting: int, stats: Mapping[str, Any]) -> None:
        """Before somebody reads the metrics."""
        self.backlog.set(num_waiting)
        pages, free = int(stats.get("pages", 0)), int(stats.get("free_pages", 0))
        self.pool.labels("free").set(free)
        self.pool.labels("used").set(pages - free)
        for tier in TIERS:
            if f"{tier}_segments" not in stats:
                continue
            used, capacity = int(stats[f"{tier}_bytes"]), int(stats[f"{tier}_capacity_bytes"])
            self.tiers.labels(tier, "used").set(used)
            self.tiers.labels(tier, "free").set(max(0, capacity - used))
            self.segments.labels(tier).set(int(stats[f"{tier}_segments"]))
            self.hits.labels(tier).set(int(stats[f"{tier}_hits"]))
            self.prefetched.labels(tier).set(int(stats.get(f"{tier}_prefetched", 0)))
