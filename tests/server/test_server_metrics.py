"""Metrics of the server's memory."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

from inferscale.chat_plan import NO_RECALL, ChatTimings, PreparedChat
from inferscale.server.metrics import Metrics


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_several_objects_count_in_the_same_metrics() -> None:
    """As when a process opens two services, one after the other."""
    first, second = Metrics(), Metrics()
    before = value("inferscale_facts_added_total")
    first.added.inc()
    second.added.inc(2)
    assert value("inferscale_facts_added_total") == before + 3
    for name in vars(first):
        assert getattr(first, name) is getattr(second, name)


def test_tokens_of_an_answer() -> None:
    sources = ("injected", "cached", "prefilled", "missing")
    before = [value("inferscale_prompt_tokens_total", source=source) for source in sources]
    Metrics().answered({"injected_tokens": 5, "cached_tokens": None, "prefilled_tokens": -3, "other": 1})
    after = [value("inferscale_prompt_tokens_total", source=source) for source in sources]
    assert [a - b for a, b in zip(after, before, strict=True)] == [5, 0, 0, 0]


def test_a_chat_that_was_prepared() -> None:
    before = (
        value("inferscale_chats_total", mode="text"),
        value("inferscale_front_seconds_sum", part="search"),
    )
    prompt: Any = None
    chat = PreparedChat(prompt, prompt, NO_RECALL.hits, None, 0, None, ChatTimings(1.0, 2000.0, 3.0, 4.0))
    Metrics().prepared("text", chat)
    after = value("inferscale_chats_total", mode="text"), value("inferscale_front_seconds_sum", part="search")
    assert after == (before[0] + 1, before[1] + 2.0)


def test_before_somebody_reads() -> None:
    Metrics().observe(3, {"pages": 10, "free_pages": 4})
    assert value("inferscale_encode_backlog") == 3
    assert value("inferscale_pool_pages", state="free") == 4
    assert value("inferscale_pool_pages", state="used") == 6
    Metrics().observe(0, {})
    assert value("inferscale_pool_pages", state="used") == 0


def test_loads_ahead_of_chats_are_told_apart() -> None:
    stats = {
        "host_bytes": 1,
        "host_capacity_bytes": 2,
        "host_segments": 1,
        "host_hits": 4,
        "host_prefetched": 5,
    }
    Metrics().observe(0, stats)
    assert value("inferscale_tier_hits", tier="host") == 4
    assert value("inferscale_tier_prefetched", tier="host") == 5
