"""Find a plan's segments in the ids of the prompt, and the leading run that can be claimed. Pure.

Nothing relies on predicted offsets: where vLLM tokenizes the rendered text itself, ids at the
seams can differ from the plan's. A segment that is not found is prefilled as text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inferscale.plan import Segment


class Located(NamedTuple):
    """A segment and its place in the prompt: tokens `[start, end)`."""

    key: str
    start: int
    end: int


class Placement(NamedTuple):
    """Located segments in prompt order, and how many of the plan's segments were not found."""

    located: tuple[Located, ...]
    num_lost: int


def locate(prompt_ids: Sequence[int], segments: Sequence[Segment]) -> Placement:
    """Match segments by their ids, in order, each at its first place behind the one before."""
    haystack = array("i", prompt_ids).tobytes()
    located: list[Located] = []
    num_lost = 0
    cursor = 0
    for segment in segments:
        needle = array("i", segment.token_ids).tobytes()
        at = _find_aligned(haystack, needle, cursor * 4) if needle else -1
        if at < 0:
            num_lost += 1
            continue
        start = at // 4
        cursor = start + len(segment.token_ids)
        located.append(Located(segment.key, start, cursor))
    return Placement(tuple(located), num_lost)


def _find_aligned(haystack: bytes, needle: bytes, start: int) -> int:
    at = haystack.find(needle, start)
    while at >= 0 and at % 4:
        at = haystack.find(needle, at + 1)
    return at


class Piece(NamedTuple):
    """Tokens `[start, end)` of the segment `key`, to be written at prompt position `position`."""

    key: str
    start: int
    end: int
    position: int


def leading_run(
    located: Sequence[Located], num_computed: int, limit: int, is_resident: Callable[[str], bool]
) -> list[Piece]:
    """The contiguous resident run directly behind the first `num_computed` tokens.

    It may begin inside a segment (a prefix-cache block ended there) and stops at the first gap,
    at the first segment that is not resident, and at `limit` (exclusive position).
    """
    pieces: list[Piece] = []
    at = num_computed
    for segment in located:
        if segment.end <= at:
            continue
        if segment.start > at or at >= limit or not is_resident(segment.key):
            break
        end = min(segment.end, limit)
        pieces.append(Piece(segment.key, at - segment.start, end - segment.start, at))
        at = end
    return pieces
