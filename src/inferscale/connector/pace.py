"""How fast this engine prefills and its lower tiers load, measured while it runs. Pure.

Prefilling: tokens of a step over the time to the first one that begins when it is done, which is the next
one, or with asynchronous scheduling the one after that. A pause of the engine makes a sample slower, never
faster, so the fastest of the last ones counts. Loading: bytes over the time that a request waited for them,
in steps and queues as they are; the median of the last ones counts.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from inferscale.pool.tiers import TierName

_SAMPLES = 16
_LEAST_TOKENS = 128
"""Of a step that says how fast prefilling is; smaller ones are decoding for the most part."""
_LEAST_LOADS = 3
"""Of a tier, before its rate counts."""
_LOADS_COUNT_S = 300.0
"""So long: nothing is measured where nobody waits, and what was slow need not stay so."""


class Pace:
    """steps_at_once: so many can be under way when another one begins, itself included."""

    def __init__(self, steps_at_once: int = 1) -> None:
        self._prefill: deque[float] = deque(maxlen=_SAMPLES)
        self._loads: dict[str, deque[tuple[float, float]]] = {}
        self._begun: deque[tuple[int, float]] = deque(maxlen=steps_at_once)

    def note_step(self, num_tokens: int, now_s: float) -> None:
        """A step of so many tokens begins."""
        if len(self._begun) == self._begun.maxlen:
            done, then_s = self._begun[0]
            if done >= _LEAST_TOKENS and now_s > then_s:
                self._prefill.append(done / (now_s - then_s))
        self._begun.append((num_tokens, now_s))

    def note_load(self, tier: str, size_bytes: int, seconds: float, now_s: float) -> None:
        """A request has waited so long for so much."""
        if size_bytes and seconds > 0:
            self._loads.setdefault(tier, deque(maxlen=_SAMPLES)).append((now_s, size_bytes / seconds))

    def prefill_tokens_per_s(self) -> float | None:
        return max(self._prefill, default=None)

    def load_bytes_per_s(self, tier: str, now_s: float) -> float | None:
        """None where it was hardly measured, or long ago."""
        rates = [rate for then_s, rate in self._loads.get(tier, ()) if now_s - then_s <= _LOADS_COUNT_S]
        return statistics.median(rates) if len(rates) >= _LEAST_LOADS else None

    def is_worth_waiting(self, num_tokens: int, size_bytes: Mapping[TierName, int], now_s: float) -> bool:
        """Whether to load so many bytes from each tier takes less long than to prefill the tokens.

        What was hardly measured is assumed to be worth it: then it is measured. One slow load, such as the
        first one, must not be the last.
        """
        prefill = self.prefill_tokens_per_s()
        if prefill is None:
            return True
        load_s = 0.0
        for tier, size in size_bytes.items():
            rate = self.load_bytes_per_s(tier, now_s)
            load_s += 0.0 if rate is None else size / rate
        return load_s <= num_tokens / prefill
