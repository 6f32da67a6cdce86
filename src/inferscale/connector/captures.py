"""What the steps capture: the part of the scheduler side that fills the pool.

A span is captured in the step that computes its last token. Its pages are reserved when that step's orders
are built and can be used once the workers have reported the step. A segment of two parts (`Span.part`) takes
its pages with the first one and can be used after the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from inferscale.connector.messages import StepReport
from inferscale.connector.state import Counters, RequestState
from inferscale.connector.tiering import Tiering
from inferscale.plan import Span
from inferscale.pool.moves import Moves, MovesBuilder
from inferscale.pool.table import Entry, PageTable


class Capturing(NamedTuple):
    """A request of a step that may still capture. num_computed: of its tokens, once the step has run."""

    state: RequestState
    num_computed: int


class Written(NamedTuple):
    """A segment that a step writes. is_half: the first of two captures."""

    key: str
    is_half: bool


class Captures:
    """Of one scheduler side, whose table, tiers and counters it shares. block_size: vLLM's."""

    def __init__(
        self, table: PageTable, tiering: Tiering | None, counters: Counters, block_size: int
    ) -> None:
        self._table = table
        self._tiering = tiering
        self._counters = counters
        self._block_size = block_size
        self._num_steps = 0
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

    def order(self, capturing: Iterable[Capturing]) -> tuple[Moves | None, Moves | None]:
        """What is captured in this step, and of what the mean with an earlier capture is taken.

        Second parts come last: the first ones may be captured in this very step.
        """
        whole, second = MovesBuilder(self._block_size), MovesBuilder(self._block_size)
        for state, num_computed in sorted(capturing, key=_has_second_parts):
            for span in state.plan.captures:
                if span.key in state.captured or not 0 <= span.start < span.end <= state.num_prompt_tokens:
                    continue
                if span.end > num_computed or span.end > len(state.block_ids) * self._block_size:
                    continue
                state.captured.add(span.key)
                entry = self._entry_for(span, state.plan.scope)
                if entry is None:
                    continue
                self._open.append(Written(span.key, is_half=span.part == 1))
                start, block_ids = span.start, state.block_ids
                if span.misplaced_blocks:  # on purpose; the tokens still lie in their own slots
                    start += span.misplaced_blocks * self._block_size
                    block_ids = [0] * span.misplaced_blocks + block_ids
                if self._tiering is not None and span.part != 1:
                    self._tiering.save(entry, start, state.plan.scope, shared=span.shared)
                (second if span.part == 2 else whole).add(entry.packed_rows, start, block_ids)
        return whole.build(), second.build()

    def _entry_for(self, span: Span, owner: str) -> Entry | None:
        """Where to write a span; None where it is there already, or where there is no room or first part."""
        if self._table.holds(span.key):
            known = self._table.get(span.key)
            if known is not None and known.is_resident:
                self._table.touch([known])  # not to make room for what is captured behind it
            is_same = known is not None and known.num_tokens == span.end - span.start
            if known is None or not is_same or not known.is_half or span.part != 2:
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

    def close(self) -> int:
        """The step's orders are complete: its number, which workers report, or 0 where it writes nothing."""
        if not self._open:
            return 0
        self._steps[self._num_steps] = self._open
        return self._num_steps

    def undo(self) -> None:
        """The step's orders are not given after all."""
        for key, _ in self._open:
            self._table.abandon(key)
        if self._tiering is not None:
            self._tiering.cancel_saves(key for key, _ in self._open)
        self._open = []

    def complete(self, report: StepReport) -> None:
        """The workers carried out these steps: commit what they captured, or abandon it."""
        for step in sorted(report.done):
            for key, is_half in self._steps.pop(step, ()):
                if step in report.failed_captures:
                    self._counters.captures_failed += 1
                    self._table.abandon(key)
                elif is_half:
                    self._table.commit_half(key)
                else:
                    self._counters.captures += 1
                    self._table.commit(key)


def _has_second_parts(capturing: Capturing) -> bool:
    return any(span.part == 2 for span in capturing.state.plan.captures)
