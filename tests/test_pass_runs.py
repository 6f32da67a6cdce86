"""The requests of one encode pass: what each computes, what it captures, and under which keys."""

from __future__ import annotations

from inferscale.pass_runs import pass_runs
from inferscale.plan import Span, segment_key

ANCHOR, ITEMS = (1, 2), ((3, 4, 5), (6,), (7, 8))


def test_one_direction_captures_whole_segments_behind_the_window() -> None:
    [run] = pass_runs("owner", ANCHOR, ITEMS, 1)
    assert run.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert run.captures == (
        Span(segment_key("owner", (1, 2, 3, 4, 5), (6,)), 5, 6),
        Span(segment_key("owner", (1, 2, 3, 4, 5, 6), (7, 8)), 6, 8),
    )


def test_two_directions_capture_the_same_keys_in_parts() -> None:
    first, second = pass_runs("owner", ANCHOR, ITEMS, directions=2)
    assert first.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert second.token_ids == (1, 2, 7, 8, 6, 3, 4, 5)
    keys = [span.key for span in first.captures]
    assert first.captures == tuple(
        Span(key, start, end, part=1)
        for key, (start, end) in zip(keys, ((2, 5), (5, 6), (6, 8)), strict=True)
    )
    assert second.captures == tuple(
        Span(key, start, end, part=2)
        for key, (start, end) in zip(keys[::-1], ((2, 4), (4, 5), (5, 8)), strict=True)
    )


def test_neighbours_keep_their_order_in_the_second_direction() -> None:
    first, second = pass_runs("owner", ANCHOR, ITEMS, directions=2, neighbours=2)
    assert first.token_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert second.token_ids == (1, 2, 7, 8, 3, 4, 5, 6)
    assert {span.key for span in first.captures} == {span.key for span in second.captures}
    assert {span.key for span in first.captures[:2]}.isdisjoint(keys_of(*ITEMS))


def keys_of(*items: tuple[int, ...], directions: int = 2, owner: str = "owner") -> list[str]:
    return [span.key for span in pass_runs(owner, ANCHOR, items, directions=directions)[0].captures]


def test_a_key_of_two_directions_names_all_that_was_seen() -> None:
    keys = keys_of(*ITEMS)
    assert len(set(keys)) == 3
    assert set(keys).isdisjoint(keys_of(*ITEMS, directions=1))
    assert set(keys).isdisjoint(keys_of(*ITEMS, owner="another"))
    for other in (
        ITEMS[:2],
        ITEMS[::-1],
        (*ITEMS, (9,)),
        ((3, 4), (5, 6), (7,)),
        ((3, 4, 5), (6,), (7, 9)),
    ):
        assert set(keys).isdisjoint(keys_of(*other)), other


def test_where_one_prefix_ends_and_the_other_begins_is_part_of_the_key() -> None:
    """What stands before in both, one behind the other, is the same in these, and so are the own ids."""
    middle = [keys_of((1, 2, 5), (9,))[1], keys_of((5,), (9,), (1, 2))[1]]
    assert middle[0] != middle[1]
