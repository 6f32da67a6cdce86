"""What the scheduler side remembers: per request, per step, and in total. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inferscale.connector.locate import Piece, Placement
from inferscale.plan import Plan


@dataclass
class RequestState:
    """What the scheduler side knows of one request that carries a plan."""

    plan: Plan
    can_inject: bool
    placement: Placement | None = None
    match: list[Piece] = field(default_factory=list)
    match_start: int = 0
    num_cached: int = 0
    block_ids: list[int] = field(default_factory=list)
    captured: set[str] = field(default_factory=set)
    num_injected: int | None = None
    num_prompt_tokens: int = 0
    answer: dict[str, Any] | None = None
    reason: str | None = None
    can_capture: bool = True


@dataclass
class StepRecord:
    """What a step's report will release: pins of injected segments, keys being written."""

    pins: list[str] = field(default_factory=list)
    writing: list[str] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not self.pins and not self.writing


@dataclass
class Counters:
    """Totals since start-up, for statistics and the residency socket."""

    requests: int = 0
    plans_rejected: int = 0
    plans_stale: int = 0
    segments_lost: int = 0
    segments_missing: int = 0
    segments_injected: int = 0
    tokens_injected: int = 0
    captures: int = 0
    captures_without_room: int = 0
    captures_failed: int = 0
    preemptions: int = 0
    internal_errors: int = 0
