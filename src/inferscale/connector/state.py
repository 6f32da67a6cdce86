"""What the scheduler side remembers, per request, per step and in total, and how it is told to callers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inferscale.connector.locate import NO_RUN, Placement, Run
from inferscale.connector.tiering import Wait
from inferscale.plan import Plan, Span
from inferscale.pool.table import Entry, PageTable


class Piece(NamedTuple):
    """The leading part of a span that is captured already, up to the prompt's token `end`."""

    entry: Entry
    end: int


@dataclass
class RequestState:
    """What the scheduler side knows of one request that carries a plan.

    match_start: prompt tokens that vLLM's prefix cache supplied when it was matched last. num_claims: how
    often vLLM allocated for it; above 1 where it was preempted and resumed. injected: spans of the prompt
    that hold injected KV since the last claim. wait: for segments from lower tiers; has_waited: once is
    enough. block_ids: of each KV cache group, those given back meanwhile included. captured: spans that are
    ordered whole, or given up; pieces: those that are ordered in part. computes_all: it reads no prefix cache
    and injects nothing, to capture all of its spans.
    """

    plan: Plan
    can_inject: bool
    placement: Placement | None = None
    match: Run = NO_RUN
    match_start: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    captured: set[str] = field(default_factory=set)
    pieces: dict[str, Piece] = field(default_factory=dict)
    num_claims: int = 0
    injected: list[tuple[int, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    answer: dict[str, Any] | None = None
    reason: str | None = None
    can_capture: bool = True
    computes_all: bool = False
    wait: Wait | None = None
    has_waited: bool = False

    def note_claim(self, num_external: int) -> None:
        """`num_external` tokens behind `match_start` are injected, for the first time or on a resume.

        Those in front come from the prefix cache, where a resumed request finds again what it injected.
        """
        start = self.match_start
        kept = [(first, min(last, start)) for first, last in self.injected if first < start]
        self.injected = [*kept, (start, start + num_external)] if num_external else kept
        self.num_claims += 1

    @property
    def is_followed(self) -> bool:
        """Whether its blocks still matter: for a capture or an order that is still to come."""
        if self.plan.order is not None:
            return self.answer is None
        return self.can_capture and len(self.captured) < len(self.plan.captures)

    @property
    def num_injected(self) -> int:
        return sum(last - first for first, last in self.injected)

    @property
    def num_supplied(self) -> int:
        """Leading tokens of the prompt that were not computed: cached and injected ones."""
        if self.num_claims == 0:
            return 0
        ends = [last for _, last in self.injected]
        return min(max([self.match_start, *ends]), self.num_prompt_tokens)


@dataclass
class Counters:
    """Totals since start-up, for statistics and the residency socket.

    segments_injected, segments_cached, segments_missing: facts of plans, each counted once a request, when it
    is first scheduled: those that were injected (in part where the prefix cache ended inside), those that lie
    wholly in vLLM's prefix cache, and those that were prefilled: not in the pool, behind one that is not, or
    lost in the prompt. Head and turns are not counted, nor what the planner left as text: it is in no plan.
    captures_without_first: second captures of segments whose first one was not in the pool any more.
    captures_out_of_reach: spans whose beginning some layers' windows had left when their end was computed.
    segments_lost: of any kind, not found in the prompt. tokens_injected: of any kind, again after a resume.
    """

    requests: int = 0
    plans_rejected: int = 0
    plans_stale: int = 0
    segments_lost: int = 0
    segments_injected: int = 0
    segments_cached: int = 0
    segments_missing: int = 0
    tokens_injected: int = 0
    captures: int = 0
    captures_without_room: int = 0
    captures_without_first: int = 0
    captures_out_of_reach: int = 0
    captures_failed: int = 0
    preemptions: int = 0
    weight_reloads: int = 0
    internal_errors: int = 0


def outcome_of(state: RequestState, table: PageTable) -> dict[str, Any]:
    """What became of a plan, in plain values.

    injected_tokens, cached_tokens (by vLLM's own prefix cache) and prefilled_tokens add up to prompt_tokens.
    Of a request that was preempted and resumed they tell what holds since the last resume: it may have come
    back to another pool; what it had injected and finds again in the prefix cache still counts as injected.
    resumes: how often that happened. covered_segments: those that lie wholly in injected or cached tokens.
    captured: spans that the pool holds now, a first part alone only where no more was asked for.
    reason: why nothing was injected. answer: of an order.
    """
    injected, supplied = state.num_injected, state.num_supplied
    ends = state.placement.ends if state.placement else ()
    outcome: dict[str, Any] = {
        "id": state.plan.id,
        "prompt_tokens": state.num_prompt_tokens,
        "injected_tokens": injected,
        "cached_tokens": supplied - injected,
        "prefilled_tokens": state.num_prompt_tokens - supplied,
        "resumes": max(0, state.num_claims - 1),
        "covered_segments": bisect_right(ends, supplied),
        "segments": len(state.plan.segments),
        "lost_segments": state.placement.num_lost if state.placement else 0,
        "captured": sum(_is_captured(span, table.get(span.key)) for span in state.plan.captures),
        "captures": len(state.plan.captures),
    }
    if state.reason is not None:
        outcome["reason"] = state.reason
    if state.answer is not None:
        outcome["answer"] = state.answer
    return outcome


def _is_captured(span: Span, entry: Entry | None) -> bool:
    return entry is not None and (span.part == 1 or not entry.is_half)


def sizes_of(table: PageTable, row_bytes: int) -> dict[str, int]:
    """The pool's part of the statistics. row_bytes: of one token on each worker, as sizes are."""
    page_bytes = table.page_size_tokens * row_bytes
    return {
        "evictions": table.num_evicted,
        "resident_segments": table.num_resident,
        "free_pages": table.num_free_pages,
        "pages": table.num_pages,
        "page_size_tokens": table.page_size_tokens,
        "pool_bytes": (table.num_pages - table.num_free_pages) * page_bytes,
        "pool_capacity_bytes": table.num_pages * page_bytes,
    }
