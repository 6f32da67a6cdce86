"""Find a plan's segments in the ids of the prompt, and the leading run that can be claimed. Pure.

Nothing relies on predicted offsets: where vLLM tokenizes the rendered text itself, ids at the
seams can differ from the plan's. A segment that is not found is prefilled as text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from inferscale.plan import Segments
from inferscale.pool.table import Entry


class Placement(NamedTuple):
    """Segments found in the prompt, in its order, by columns: segment i is tokens `[starts[i], ends[i])`.

    num_lost: how many of the plan's segments were not found. is_contiguous: known to have no gaps. kinds: as
    of `Segments`, of those that were found.
    """

    keys: Sequence[str]
    lengths: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    num_lost: int
    is_contiguous: bool = False
    kinds: str = ""

    @property
    def end(self) -> int:
        """Where the last segment ends."""
        return self.ends[-1] if self.ends else 0


def locate(prompt_ids: Sequence[int], segments: Segments) -> Placement:
    """Match segments by their ids, in order, each at its first place behind the one before."""
    if segments.opens_prompt and all(segments.lengths):
        # As nearly always: head and facts open the prompt, one behind the other.
        ends = list(accumulate(segments.lengths))
        return Placement(segments.keys, segments.lengths, [0, *ends][:-1], ends, 0, True, segments.kinds)
    haystack = array("i", prompt_ids).tobytes()
    keys: list[str] = []
    lengths: list[int] = []
    starts: list[int] = []
    found_ends: list[int] = []
    kinds: list[str] = []
    at_id = cursor = 0
    for key, length, kind in zip(segments.keys, segments.lengths, segments.kinds, strict=True):
        needle = segments.ids[4 * at_id : 4 * (at_id + length)]
        at_id += length
        at = _find_aligned(haystack, needle, cursor * 4) if needle else -1
        if at < 0:
            continue
        cursor = at // 4 + length
        keys.append(key)
        lengths.append(length)
        starts.append(at // 4)
        found_ends.append(cursor)
        kinds.append(kind)
    num_lost = len(segments) - len(keys)
    return Placement(keys, lengths, starts, found_ends, num_lost, kinds="".join(kinds))


def _find_aligned(haystack: bytes, needle: bytes, start: int) -> int:
    at = haystack.find(needle, start)
    while at >= 0 and at % 4:
        at = haystack.find(needle, at + 1)
    return at


class Run(NamedTuple):
    """Prompt tokens `[start, end)`, to be taken from these segments, which stand one behind the other.

    segment_starts: where each of them begins in the prompt; the first may begin before `start` and the
    last may reach beyond `end`.
    """

    entries: Sequence[Entry]
    segment_starts: Sequence[int]
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def truncated(self, num_tokens: int) -> Run:
        """Its first `num_tokens` tokens."""
        end = self.start + num_tokens
        assert end <= self.end, "vLLM counts more external tokens than were offered"
        kept = len(self.entries) if end == self.end else sum(start < end for start in self.segment_starts)
        kept = kept if num_tokens else 0
        return Run(self.entries[:kept], self.segment_starts[:kept], self.start, end)


NO_RUN = Run((), (), 0, 0)

ResidentRun = Callable[[Sequence[str], Sequence[int]], list[Entry]]
"""`PageTable.resident_run`."""


def leading_run(placement: Placement, num_computed: int, limit: int, resident_run: ResidentRun) -> Run:
    """The contiguous resident run directly behind the first `num_computed` tokens.

    It may begin inside a segment (a prefix-cache block ended there) and stops at the first gap,
    at the first segment that is not resident, and at `limit` (exclusive position).
    """
    keys, lengths, starts, ends, _, is_contiguous, _ = placement
    first = bisect_right(ends, num_computed)
    if first == len(keys) or starts[first] > num_computed or num_computed >= limit:
        return NO_RUN
    last = bisect_left(starts, limit)
    if not is_contiguous:
        last = next((i for i in range(first + 1, last) if starts[i] != ends[i - 1]), last)
    entries = resident_run(keys[first:last], lengths[first:last])
    if not entries:
        return NO_RUN
    last = first + len(entries)
    return Run(entries, starts[first:last], num_computed, min(ends[last - 1], limit))
