"""Encode passes: what they hold, what they capture, what they cost."""

from __future__ import annotations

import random
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.errors import InvalidInput, TextTooLong
from inferscale.windows import (
    EncodePass,
    ItemSpan,
    WindowPolicy,
    aligned,
    alone,
    attended,
    backwards,
    cost,
    mixed_groups,
    parse_policy,
    pass_tokens,
    plan_passes,
    sliding,
    split_group,
    window,
)

ODD_LENGTHS = [1, 15, 16, 17, 127, 129]


def plan(
    lengths: list[int], policy: WindowPolicy, needs: list[bool] | None = None, **limits: int
) -> list[EncodePass]:
    needs = [True] * len(lengths) if needs is None else needs
    return plan_passes(
        lengths,
        needs,
        policy,
        anchor_tokens=limits.get("anchor_tokens", 10),
        max_tokens=limits.get("max_tokens", 10_000),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[bool], WindowPolicy, int, int]:
    lengths = draw(st.lists(st.one_of(st.sampled_from(ODD_LENGTHS), st.integers(1, 60)), max_size=40))
    needs = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    policy = WindowPolicy(draw(st.integers(0, 8)), draw(st.integers(1, 8)))
    anchor = draw(st.integers(0, 50))
    longest = max((n for n, needed in zip(lengths, needs, strict=True) if needed), default=1)
    return lengths, needs, policy, anchor, anchor + longest + draw(st.integers(0, 400))


@settings(deadline=None)
@given(problems())
def test_every_needed_item_is_captured_once_in_order(
    problem: tuple[list[int], list[bool], WindowPolicy, int, int],
) -> None:
    lengths, needs, policy, anchor, limit = problem
    passes = plan_passes(lengths, needs, policy, anchor_tokens=anchor, max_tokens=limit)
    captured = [item for p in passes for item in p.captured]
    assert captured == [item for item, needed in enumerate(needs) if needed]


@settings(deadline=None)
@given(problems())
def test_shape_of_every_pass(problem: tuple[list[int], list[bool], WindowPolicy, int, int]) -> None:
    lengths, needs, policy, anchor, limit = problem
    for p in plan_passes(lengths, needs, policy, anchor_tokens=anchor, max_tokens=limit):
        tokens = anchor + sum(lengths[item] for item in p.items)
        assert tokens <= limit
        assert p.items == tuple(range(p.items[0], p.items[-1] + 1))
        assert set(p.captured) <= set(p.items)
        assert p.items[-1] == p.captured[-1]
        assert p.captured[-1] - p.captured[0] < policy.stride
        assert p.window == tuple(range(p.items[0], p.captured[0]))
        assert len(p.window) <= policy.window
        if len(p.window) < policy.window and p.items[0] > 0:
            assert tokens + lengths[p.items[0] - 1] > limit, "a window may shrink only for lack of room"


@settings(deadline=None)
@given(problems())
def test_sliding_never_costs_more_than_one_pass_per_fact(
    problem: tuple[list[int], list[bool], WindowPolicy, int, int],
) -> None:
    lengths, needs, policy, anchor, limit = problem
    slid = plan_passes(lengths, needs, policy, anchor_tokens=anchor, max_tokens=limit)
    single = plan_passes(lengths, needs, window(policy.window), anchor_tokens=anchor, max_tokens=limit)
    assert cost(slid, lengths, anchor) <= cost(single, lengths, anchor) * (1 + 1e-9)
    assert len(slid) <= len(single) == sum(needs)


@settings(deadline=None)
@given(problems())
def test_spans_point_at_the_items_tokens(
    problem: tuple[list[int], list[bool], WindowPolicy, int, int],
) -> None:
    lengths, needs, policy, anchor, limit = problem
    ids = [[1000 * (item + 1) + i for i in range(length)] for item, length in enumerate(lengths)]
    anchor_ids = list(range(anchor))
    for p in plan_passes(lengths, needs, policy, anchor_tokens=anchor, max_tokens=limit):
        token_ids, spans = pass_tokens(anchor_ids, ids, p)
        assert [span.item for span in spans] == list(p.captured)
        assert list(token_ids[:anchor]) == anchor_ids
        for item, start, end in spans:
            assert list(token_ids[start:end]) == ids[item]
            before = [i for earlier in attended(p, item) for i in ids[earlier]]
            assert list(token_ids[anchor:start]) == before
        assert len(token_ids) == anchor + sum(lengths[item] for item in p.items)


def test_the_three_policies() -> None:
    lengths = [5] * 5
    assert plan(lengths, alone()) == [EncodePass((i,), (i,)) for i in range(5)]
    assert plan(lengths, window(2)) == [
        EncodePass((0,), (0,)),
        EncodePass((0, 1), (1,)),
        EncodePass((0, 1, 2), (2,)),
        EncodePass((1, 2, 3), (3,)),
        EncodePass((2, 3, 4), (4,)),
    ]
    assert plan(lengths, sliding(2, 3)) == [
        EncodePass((0, 1, 2), (0, 1, 2)),
        EncodePass((1, 2, 3, 4), (3, 4)),
    ]


def test_one_added_fact_gets_what_was_said_before_it() -> None:
    needs = [False] * 30 + [True]
    assert plan([5] * 31, sliding(20, 20), needs) == [EncodePass(tuple(range(10, 31)), (30,))]


def test_a_gap_is_bridged_only_where_that_is_no_dearer() -> None:
    needs = [True, False, True]
    bridged = [EncodePass((0, 1, 2), (0, 2))]
    apart = [EncodePass((0,), (0,)), EncodePass((1, 2), (2,))]
    assert plan([5, 20, 5], sliding(1, 4), needs) == bridged
    assert plan([5, 20, 5], sliding(0, 4), needs, anchor_tokens=20) == bridged
    assert plan([5, 20, 5], sliding(0, 4), needs, anchor_tokens=19) == [
        EncodePass((0,), (0,)),
        EncodePass((2,), (2,)),
    ]
    assert plan([5, 20, 5], sliding(1, 2), needs) == apart, "a pass reaches over `stride` items only"


def test_window_shrinks_from_the_front() -> None:
    lengths, needs = [30, 10, 20, 15], [False, False, False, True]
    for limit, items in ((85, (0, 1, 2, 3)), (84, (1, 2, 3)), (54, (2, 3)), (44, (3,)), (25, (3,))):
        assert plan(lengths, sliding(3, 3), needs, max_tokens=limit) == [EncodePass(items, (3,))], limit


def test_pass_is_split_where_captured_facts_do_not_fit() -> None:
    assert plan([30, 30, 30], sliding(0, 20), max_tokens=70) == [
        EncodePass((0, 1), (0, 1)),
        EncodePass((2,), (2,)),
    ]
    assert plan([30, 30, 30], sliding(5, 20), max_tokens=70) == [
        EncodePass((0, 1), (0, 1)),
        EncodePass((1, 2), (2,)),
    ]


def test_fact_that_does_not_fit_is_named() -> None:
    assert plan([30], sliding(5, 20), max_tokens=40)
    with pytest.raises(TextTooLong, match=r"31 tokens.*10 tokens of the anchor.*30 of the model's 40"):
        plan([1, 31], sliding(5, 20), max_tokens=40)
    assert plan([31, 5], sliding(5, 20), [False, True], max_tokens=40) == [EncodePass((1,), (1,))]
    with pytest.raises(TextTooLong, match="room for 0"):
        plan([1], alone(), anchor_tokens=50, max_tokens=40)


def test_cost_of_a_long_conversation() -> None:
    generator = random.Random(7)
    lengths = [max(1, min(160, round(generator.lognormvariate(3.7, 0.5)))) for _ in range(419)]
    for position, length in enumerate(ODD_LENGTHS * 3):
        lengths[position * 23] = length
    passes = plan(lengths, sliding(20, 20), anchor_tokens=80, max_tokens=8192)
    assert len(passes) == 21
    assert 1.9 < cost(passes, lengths, 80) <= 2.3
    single = cost(plan(lengths, window(20), anchor_tokens=80, max_tokens=8192), lengths, 80)
    assert single > 9 * cost(passes, lengths, 80)
    assert cost([], lengths, 80) == 0.0


def test_spans_at_odd_lengths() -> None:
    ids = [list(range(length)) for length in ODD_LENGTHS]
    (only,) = plan(ODD_LENGTHS, sliding(20, 20))
    spans = pass_tokens([7] * 10, ids, only).spans
    assert spans[:3] == (ItemSpan(0, 10, 11), ItemSpan(1, 11, 26), ItemSpan(2, 26, 42))
    assert spans[-1].end == 10 + sum(ODD_LENGTHS)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("alone", WindowPolicy(0, 1)),
        ("window(5)", WindowPolicy(5, 1)),
        ("sliding(20,20)", WindowPolicy(20, 20)),
        (" sliding( 8 , 4 ) ", WindowPolicy(8, 4)),
        ("mixed(60)", WindowPolicy(20, 20, 60)),
        ("mixed(60, 2)", WindowPolicy(20, 20, 60, 2)),
        ("mixed( 4,1, 0, 1)", WindowPolicy(0, 1, 4)),
    ],
)
def test_policies_are_read_and_written(text: str, policy: WindowPolicy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy
    assert str(policy) == text.replace(" ", "")


@pytest.mark.parametrize(
    "text",
    [
        *("", "alone()", "alone(1)", "window", "window()", "window(-1)", "window(1,2)", "sliding(20)"),
        *(
            "mixed",
            "mixed()",
            "mixed(0)",
            "mixed(60,0)",
            "mixed(60,65)",
            "mixed(60,2,20)",
            "mixed(60,2,20,0)",
            "mixed(60,2,20,1,1)",
        ),
        *("sliding(2,)", "sliding(20,0)", "sliding(1 2,3)", "sliding(²,1)", "rolling(2,2)", "sliding(20,20"),
    ],
)
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="window policy is"):
        parse_policy(text)


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(4, 100))
def test_mixed_groups_are_about_equal_and_hold_each_item_once(num: int, size: int) -> None:
    groups = mixed_groups([f"fact {number}" for number in range(num)], size)
    assert sorted(item for group in groups for item in group) == list(range(num))
    lengths = [len(group) for group in groups]
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    if num >= size / 2:
        assert len(groups) == max(1, int(num / size + 0.5))
        assert size / 2 <= min(lengths)
        assert max(lengths) <= 1.5 * size


def test_the_order_of_a_mixed_group_depends_on_the_names_alone() -> None:
    names = [f"fact {number}" for number in range(60)]
    [group] = mixed_groups(names, 60)
    assert list(group) != sorted(group)
    steps = [abs(b - a) for a, b in pairwise(group)]
    assert sum(steps) / len(steps) > 15, "neighbours stand far apart: 20 on average by chance"
    [again] = mixed_groups(names[::-1], 60)
    assert [names[::-1][item] for item in again] == [names[item] for item in group]


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(4, 100), st.integers(2, 5))
def test_neighbours_stay_together_in_a_mixed_group(num: int, size: int, neighbours: int) -> None:
    groups = mixed_groups([f"fact {number}" for number in range(num)], size, neighbours)
    assert sorted(item for group in groups for item in group) == list(range(num))
    lengths = [len(group) for group in groups]
    assert max(lengths, default=0) - min(lengths, default=0) < 2 * neighbours
    short = 0
    for group in groups:
        for start in range(0, len(group), neighbours):
            chunk = group[start : start + neighbours]
            assert list(chunk) == list(range(chunk[0], chunk[0] + len(chunk)))
            assert chunk[0] % neighbours == 0
            short += len(chunk) < neighbours
            assert len(chunk) == neighbours or start + neighbours >= len(group), "shorter ones stand last"
    assert short == (num % neighbours > 0)


def test_chunks_of_neighbours_are_as_good_as_in_random_order() -> None:
    [group] = mixed_groups([f"fact {number}" for number in range(60)], 60, 2)
    steps = [abs(b - a) for a, b in pairwise(group[::2])]
    assert sum(steps) / len(steps) > 15


def test_the_other_direction_keeps_neighbours_in_their_order() -> None:
    assert backwards("abcdefg", 2) == tuple("gefcdab")
    assert backwards("abcdef", 3) == tuple("defabc")
    assert backwards("abc", 1) == tuple("cba")
    assert backwards("", 2) == ()


def test_shorter_chunks_stand_behind_whole_ones() -> None:
    assert aligned(["a", "bc", "d", "ef", ""]) == tuple("bcefad")


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 300), st.integers(1, 4))
def test_a_part_of_a_group_begins_with_a_chunk(lengths: list[int], room: int, neighbours: int) -> None:
    parts = split_group(lengths, room, neighbours)
    assert [item for part in parts for item in part] == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in part) <= room for part in parts)
    if neighbours * max(lengths, default=0) <= room:
        assert all(part.start % neighbours == 0 for part in parts)


def test_the_same_text_said_often_is_spread() -> None:
    places = [place for group in mixed_groups(["yes"] * 8 + ["no"] * 8, 16) for place in group]
    assert sorted(places) == list(range(16))
    assert len(list(groupby(places, lambda place: place < 8))) > 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 300))
def test_a_group_is_split_into_parts_that_fit(lengths: list[int], room: int) -> None:
    parts = split_group(lengths, room)
    assert [item for part in parts for item in part] == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in part) <= room for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    if sum(lengths) <= room:
        assert len(parts) == min(1, len(lengths))


def test_bad_arguments() -> None:
    with pytest.raises(InvalidInput, match="2 lengths and 1 needs"):
        plan([1, 2], alone(), [True])
    with pytest.raises(InvalidInput, match="item 1 has 0 tokens"):
        plan([1, 0], alone())
    with pytest.raises(InvalidInput, match="window -1"):
        WindowPolicy(-1, 1)
    for size in (-1, 3, 513):
        with pytest.raises(InvalidInput, match=f"mixes {size} facts; allowed are 4 to 512"):
            WindowPolicy(20, 20, size)
    assert plan([], sliding(20, 20)) == []
    assert plan([4, 4], sliding(20, 20), [False, False]) == []
