"""Segments in a prompt, and the leading run, against naive implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from inferscale.connector.locate import NO_RUN, Placement, Run, leading_run, locate
from inferscale.plan import Segment, Segments
from inferscale.pool.table import Entry

# Few ids, so that repeats are likely; some whose bytes match at offsets that are no multiple of 4.
IDS = st.sampled_from([0, 1, 2, 256, 65536, 16777216, 2**31 - 1, 0x01010101, 0x00010100])
PROMPTS = st.lists(IDS, max_size=40)
SEGMENTS = st.lists(st.lists(IDS, max_size=4), max_size=8)


class Located(NamedTuple):
    key: str
    start: int
    end: int


def located(placement: Placement) -> list[Located]:
    return [Located(*item) for item in zip(placement.keys, placement.starts, placement.ends, strict=True)]


def placed(items: list[Located]) -> Placement:
    starts, ends = [i.start for i in items], [i.end for i in items]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return Placement([i.key for i in items], lengths, starts, ends, 0)


def run_of(items: list[Located], computed: int, limit: int, is_resident: Callable[[str], bool]) -> Run:
    def resident_run(keys: Sequence[str], lengths: Sequence[int]) -> list[Entry]:
        there = takewhile(lambda item: is_resident(item[0]), zip(keys, lengths, strict=True))
        return [Entry(key, length, np.empty(0), b"", 0) for key, length in there]

    return leading_run(placed(items), computed, limit, resident_run)


def pieces(run: Run) -> list[tuple[str, int, int, int]]:
    """(key, first and last token of the segment, place of the first in the prompt)."""
    found = []
    for entry, begin in zip(run.entries, run.segment_starts, strict=True):
        start, end = max(begin, run.start), min(begin + entry.num_tokens, run.end)
        found.append((entry.key, start - begin, end - begin, start))
    return found


def segments_of(lists: list[list[int]]) -> Segments:
    return Segments.of(Segment(f"s{index}", tuple(ids)) for index, ids in enumerate(lists))


def naive_locate(prompt: list[int], segments: Segments) -> tuple[list[Located], int]:
    found, lost, cursor = [], 0, 0
    for segment in segments:
        length = len(segment.token_ids)
        for start in range(cursor, len(prompt) - length + 1):
            if length and tuple(prompt[start : start + length]) == segment.token_ids:
                found.append(Located(segment.key, start, start + length))
                cursor = start + length
                break
        else:
            lost += 1
    return found, lost


@given(PROMPTS, SEGMENTS)
@example([256, 0], [[1]])
@example([0x00010100, 0x00010100], [[0x01010001], [0x00010100]])
@example([1, 1, 1], [[1, 1], [1], [1]])
def test_locate_is_the_naive_search(prompt: list[int], lists: list[list[int]]) -> None:
    segments = segments_of(lists)
    found, lost = naive_locate(prompt, segments)
    placement = locate(prompt, segments)
    assert located(placement) == found
    assert placement.num_lost == lost
    assert len(found) + lost == len(segments)
    opening = [token_id for ids in lists for token_id in ids]
    known = Segments(segments.keys, segments.lengths, segments.kinds, segments.ids, opens_prompt=True)
    assert locate(opening + prompt, known)[:5] == locate(opening + prompt, segments)[:5]


def test_bytes_that_match_between_two_ids_are_no_match() -> None:
    # 01 00 00 00 | 00 01 00 00: the bytes of id 1 also stand at offset 5.
    assert locate([256, 2], segments_of([[1]])).num_lost == 1
    # A false match in front of the true one must not hide it.
    assert located(locate([256, 2, 1], segments_of([[1]]))) == [Located("s0", 2, 3)]


def test_repeated_segments_take_one_place_each_in_order() -> None:
    placement = locate([7, 8, 7, 8, 9], segments_of([[7, 8], [7, 8], [7, 8]]))
    assert located(placement) == [Located("s0", 0, 2), Located("s1", 2, 4)]
    assert placement.num_lost == 1


def test_a_segment_out_of_order_or_longer_than_the_prompt_is_lost() -> None:
    placement = locate([1, 2, 3], segments_of([[2], [1], [3], [3, 4]]))
    assert placement.keys == ["s0", "s2"]
    assert placement.num_lost == 2


def test_nothing_is_found_in_nothing() -> None:
    assert locate([], segments_of([[1]])).num_lost == 1
    assert locate([1], segments_of([[]])).num_lost == 1
    assert located(locate([1], segments_of([]))) == []


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Located], set[str]]:
    items, at = [], 0
    for index in range(draw(st.integers(0, 6))):
        at += draw(st.sampled_from([0, 0, 0, 1, 3]))
        end = at + draw(st.integers(1, 6))
        items.append(Located(f"s{draw(st.integers(0, 3))}-{index % 2}", at, end))
        at = end
    return items, draw(st.sets(st.sampled_from(sorted({item.key for item in items}) or ["none"])))


@given(layouts(), st.integers(0, 40), st.integers(0, 40))
def test_leading_run_is_the_naive_walk(
    layout: tuple[list[Located], set[str]], computed: int, limit: int
) -> None:
    items, missing = layout
    expected: list[tuple[str, int, int]] = []
    for position in range(computed, limit):
        owner = next((item for item in items if item.start <= position < item.end), None)
        if owner is None or owner.key in missing:
            break
        expected.append((owner.key, position - owner.start, position))
    run = run_of(items, computed, limit, lambda key: key not in missing)
    tokens = [
        (key, start + i, position + i)
        for key, start, end, position in pieces(run)
        for i in range(end - start)
    ]
    assert tokens == expected
    assert run.num_tokens == len(expected)
    assert all(end > start for _, start, end, _ in pieces(run))
    for kept in range(run.num_tokens + 1):
        cut = run.truncated(kept)
        assert cut.num_tokens == kept
        assert sum(end - start for _, start, end, _ in pieces(cut)) == kept
        assert pieces(cut) == [] if kept == 0 else pieces(cut)[0][3] == computed


def test_a_run_may_begin_inside_a_segment_and_ends_at_the_limit() -> None:
    items = [Located("a", 0, 10), Located("b", 10, 20)]
    assert pieces(run_of(items, 4, 15, lambda key: True)) == [("a", 4, 10, 4), ("b", 0, 5, 10)]
    assert pieces(run_of(items, 10, 20, lambda key: key == "b")) == [("b", 0, 10, 10)]
    assert run_of(items, 20, 30, lambda key: True) == NO_RUN
    assert run_of(items, 5, 5, lambda key: True) == NO_RUN
