"""What the steps capture: the part of the scheduler side that fills the pool.

A span is captured in the step that computes its last token, and before that in pieces where layers with
windows would not hold its beginning any more. Its pages are reserved when the orders of its first piece are
built, and can be used once the workers have reported the step of the last one. A segment of two parts
(`Span.part`) takes its pages with the first one and can be used after the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inferscale.connector.groups import CacheGroup, held_from
from inferscale.connector.messages import StepReport
from inferscale.connector.state import Counters, Piece, RequestState
from inferscale.connector.tiering import Tiering
from inferscale.plan import Span
from inferscale.pool.moves import GroupMoves, MovesBuilder, build_groups
from inferscale.pool.table import Entry, PageTable


class Capturing(NamedTuple):
    """A request of a step that may still capture. num_before, num_computed: of its tokens, before and after
    the step."""

    state: RequestState
    num_before: int
    num_computed: int


class Written(NamedTuple):
    """A segment that a step writes. is_half: the first of two captures. is_whole: up to its last token."""

    entry: Entry
    is_half: bool
    is_whole: bool


class Captures:
    """Of one scheduler side, whose table, tiers and counters it shares. groups: vLLM's."""

    def __init__(
        self, table: PageTable, tiering: Tiering | None, counters: Counters, groups: Sequence[CacheGroup]
    ) -> None:
        self._table = table
        self._tiering = tiering
        self._counters = counters
        self._groups = groups
        self._misplaced_tokens = max(group.block_size for group in groups)
        self._num_steps = 0
        self._begun: dict[str, Entry] = {}  # of which pieces are still to be ordered
        self._open: list[Written] = []  # of the step whose orders are being built
        self._steps: dict[int, list[Written]] = {}  # of steps that are not reported yet

    @property
    def num_unreported(self) -> int:
        """Steps that write and are not reported yet."""
        return len(self._steps)

    def begin(self) -> None:
        """The orders of the next step are built."""
        self._num_steps += 1
        self._open = []

    def order(self, capturing: Iterable[Capturing]) -> tuple[GroupMoves, GroupMoves]:
        """What is captured in this step, and of what the mean with an earlier capture is taken.

        Second parts come last: the first ones may be captured in this very step.
        """
        whole, second = ([MovesBuilder(group.block_size) for group in self._groups] for _ in range(2))
        for one in sorted(capturing, key=_has_second_parts):
            state = one.state
            held, held_next = (held_from(self._groups, n) for n in (one.num_before, one.num_computed))
            for span in state.plan.captures:
                if span.key in state.captured or not 0 <= span.start < span.end <= state.num_prompt_tokens:
                    continue
                piece = state.pieces.get(span.key)
                start = span.start if piece is None else piece.end
                end = min(span.end, one.num_computed)
                if end <= start or (end < span.end and start >= held_next):
                    continue  # nothing of it is computed, or all that is can be had in the next step too
                entry = self._entry_for(
                    span, state, piece, start >= held and self._is_held(state, start, end)
                )
                if entry is not None:
                    self._order_piece(second if span.part == 2 else whole, span, state, entry, start, end)
        return build_groups(whole), build_groups(second)

    def _is_held(self, state: RequestState, start: int, end: int) -> bool:
        if not state.block_ids:
            return False
        groups = zip(self._groups, state.block_ids, strict=True)
        return all(group.holds(block_ids, start, end) for group, block_ids in groups)

    def _order_piece(
        self,
        builders: Sequence[MovesBuilder],
        span: Span,
        state: RequestState,
        entry: Entry,
        start: int,
        end: int,
    ) -> None:
        is_whole = end == span.end
        if is_whole:
            state.captured.add(span.key)
            state.pieces.pop(span.key, None)
            self._begun.pop(span.key, None)
        else:
            state.pieces[span.key] = Piece(entry, end)
            self._begun[span.key] = entry
        self._open.append(Written(entry, span.part == 1, is_whole))
        rows = entry.packed_rows[4 * (start - span.start) : 4 * (end - span.start)]
        shift = (
            span.misplaced_blocks * self._misplaced_tokens
        )  # on purpose; the tokens lie in their own slots
        for builder, group, block_ids in zip(builders, self._groups, state.block_ids, strict=True):
            padding = [0] * (shift // group.block_size)
            builder.add(rows, start + shift, padding + block_ids if padding else block_ids)
        if is_whole and self._tiering is not None and span.part != 1:
            self._tiering.save(entry, span.start + shift, state.plan.scope, shared=span.shared)

    def _entry_for(self, span: Span, state: RequestState, piece: Piece | None, is_held: bool) -> Entry | None:
        """Where to write a span, or the rest of it. Else None, and the span is given up: it is there already,
        or there is no room, no first part, or no KV of its beginning any more."""
        entry: Entry | None = None
        if piece is not None:
            entry = (
                piece.entry if self._table.get(span.key) is piece.entry else None
            )  # not forgotten meanwhile
            if not is_held and entry is not None:
                self._counters.captures_out_of_reach += 1
                entry = None
        elif is_held or self._is_there(span):
            entry = self._new_entry_for(span, state.plan.scope)
        else:
            self._counters.captures_out_of_reach += 1
        if entry is None:
            state.captured.add(span.key)
            self._give_up(state, span.key)
        return entry

    def _is_there(self, span: Span) -> bool:
        """Whether a span need not be captured: somebody has done so, or is about to."""
        known = self._table.get(span.key)
        return known is not None and not (span.part == 2 and known.is_half)

    def is_out_of_reach(self, state: RequestState, num_cached: int) -> bool:
        """Whether a request that wants to capture would find the KV of a span in the prefix cache, of which
        it gets only so much as the next token sees."""
        held = held_from(self._groups, num_cached)
        if not held:
            return False
        return any(
            span.key not in state.captured
            and (span.key in state.pieces or not self._is_there(span))
            and _next(state, span) < held
            for span in state.plan.captures
        )

    def _new_entry_for(self, span: Span, owner: str) -> Entry | None:
        if self._table.holds(span.key):
            known = self._table.get(span.key)
            if known is not None and known.is_resident:
                self._table.touch([known])  # not to make room for what is captured behind it
            is_same = known is not None and known.num_tokens == span.end - span.start
            if known is None or not is_same or not known.is_half or span.part != 2:
                return None
            if self._begun.get(span.key) is known:
                self._counters.captures_without_first += 1
                return None
            self._table.resume(known)
            return known
        if span.part == 2:
            self._counters.captures_without_first += 1
            return None
        entry = self._table.reserve(span.key, span.end - span.start, owner=owner, is_half=span.part == 1)
        if entry is None:
            self._counters.captures_without_room += 1
        return entry

    def _give_up(self, state: RequestState, key: str) -> None:
        """Give back the pages of a span of which only pieces are ordered."""
        piece = state.pieces.pop(key, None)
        if piece is not None:
            if self._begun.get(key) is piece.entry:
                del self._begun[key]
            self._abandon(piece.entry)

    def end(self, state: RequestState) -> None:
        """A request is over: what it has not captured whole is given up."""
        for key in list(state.pieces):
            self._give_up(state, key)

    def close(self) -> int:
        """The step's orders are complete: its number, which workers report, or 0 where it writes nothing."""
        if not self._open:
            return 0
        self._steps[self._num_steps] = self._open
        return self._num_steps

    def undo(self) -> None:
        """The step's orders are not given after all."""
        for written in self._open:
            self._abandon(written.entry)
        if self._tiering is not None:
            self._tiering.cancel_saves(written.entry.key for written in self._open)
        self._open = []

    def complete(self, report: StepReport) -> None:
        """The workers carried out these steps: commit what they captured, or abandon it."""
        for step in sorted(report.done):
            for entry, is_half, is_whole in self._steps.pop(step, ()):
                if step in report.failed_captures:
                    self._counters.captures_failed += 1
                    self._abandon(entry)
                    if not is_whole and self._tiering is not None:
                        self._tiering.forget([entry.key])  # a copy may be ordered with the last piece already
                elif is_half and is_whole and self._table.is_live(entry):
                    self._table.commit_half(entry.key)
                elif is_whole and not is_half:
                    self._counters.captures += 1
                    if self._table.is_live(entry):
                        self._table.commit(entry.key)

    def _abandon(self, entry: Entry) -> None:
        """Unless others have the key meanwhile."""
        if self._table.is_live(entry):
            self._table.abandon(entry.key)


def _next(state: RequestState, span: Span) -> int:
    """The first token of a span that is still to be captured."""
    piece = state.pieces.get(span.key)
    return span.start if piece is None else piece.end


def _has_second_parts(capturing: Capturing) -> bool:
    return any(span.part == 2 for span in capturing.state.plan.captures)
