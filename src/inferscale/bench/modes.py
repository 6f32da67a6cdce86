"""The modes that benchmarks compare, and the ratios between them. Light to import.

text    prefill everything
hit     head and facts are found in vLLM's own exact prefix cache: attends to as many tokens and
        prefills as few, so it is the floor that the engine itself sets
inject  the same facts in the same order, their KV taken from the pool
none    no memory
"""

from __future__ import annotations

from typing import NamedTuple

MODES = ("text", "hit", "inject", "none")


class Ratio(NamedTuple):
    """Two modes of one run, compared pair by pair; as text `over/under`, as rows name it."""

    over: str
    under: str

    def __str__(self) -> str:
        return f"{self.over}/{self.under}"


TTFT_RATIOS = (
    Ratio("text", "inject"),
    Ratio("text", "hit"),
    Ratio("inject", "hit"),
    Ratio("inject", "none"),
    Ratio("hit", "none"),
)
RATE_RATIOS = (
    Ratio("inject", "text"),
    Ratio("hit", "text"),
    Ratio("inject", "hit"),
    Ratio("inject", "none"),
)

STEADY_LOOP = "closed: a user's next request is sent when its last one is done; users out of step"
"""What rows of throughput say of their load; in older rows users sent in step, or it is not said."""
