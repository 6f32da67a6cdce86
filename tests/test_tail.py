"""Which of the best facts are recomputed: as people write it, and of which facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.config import DEFAULT_TAIL
from inferscale.errors import InvalidInput
from inferscale.tail import NO_TAIL, Tail


@pytest.mark.parametrize(
    ("given", "tail", "written"),
    [
        (5, Tail(5), "5"),
        (" 5 ", Tail(5), "5"),
        ("10%", Tail(share=0.1), "10%"),
        ("12.5 %", Tail(share=0.125), "12.5%"),
        ("0.45%", Tail(share=0.0045), "0.45%"),
        ("100%", Tail(share=1.0), "100%"),
        ("300t", Tail(tokens=300), "300t"),
        ("300 tokens", Tail(tokens=300), "300t"),
        ("1 token", Tail(tokens=1), "1t"),
        ("5,10%", Tail(5, share=0.1), "5,10%"),
        ("300t, 7%, 5", Tail(5, 300, 0.07), "5,7%,300t"),
        ("5,3,20%,10%", Tail(3, share=0.1), "3,10%"),
        ("6,12%,min256t", Tail(6, share=0.12, floor=256), "6,12%,min256t"),
        ("min 9 tokens, 5, min8t", Tail(5, floor=9), "5,min9t"),
        ("5,min0t", Tail(5), "5"),
        ("0,min256t", NO_TAIL, "0"),
        (Tail(5), Tail(5), "5"),
        (0, NO_TAIL, "0"),
        ("0%", NO_TAIL, "0"),
        ("0 tokens", NO_TAIL, "0"),
        ("5,0%", NO_TAIL, "0"),
    ],
)
def test_read_and_written(given: Any, tail: Tail, written: str) -> None:
    assert Tail.parse(given) == tail
    assert str(tail) == written
    assert Tail.parse(written) == tail
    assert tail.is_none == (written == "0")


@pytest.mark.parametrize(
    "value",
    [-1, 10**9 + 10**9, True, 1.0, None, [], {}, "", "x", "5,", ",5", "-5", "101%", "1.23456%", "1.5",
     "min256t", "5,min256", "5,min10%", "5 facts", "t", "%", "٣", "5;10%", "1e3", "9" * 5000, float("nan")],
)  # fmt: skip
def test_what_is_no_tail(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"memory.tail is .*; allowed are .* such as '6,12%'") as caught:
        Tail.parse(value, "memory.tail")
    assert len(str(caught.value)) < 420


@pytest.mark.parametrize(
    "limits",
    [
        (),
        (-1,),
        (True,),
        (1.5,),
        (None, 2.0),
        (None, -1),
        (None, None, 1.1),
        (None, None, -0.1),
        (1, None, None, -1),
        (1, None, None, True),
        (None, None, None, 5),
    ],
)
def test_limits_that_cannot_be(limits: Any) -> None:
    with pytest.raises(InvalidInput, match="a tail has facts="):
        Tail(*limits)


@pytest.mark.parametrize(
    ("tail", "num_tokens", "num_recomputed"),
    [
        ("0", [10, 10], 0),
        ("3", [10] * 2, 2),
        ("3", [10] * 9, 3),
        ("10%", [10] * 50, 5),
        ("10%", [10] * 49, 4),
        ("29%", [1] * 100, 29),
        ("10%", [10] * 3, 1),
        ("1t", [10], 1),
        ("25t", [10] * 9, 2),
        ("30t", [10] * 9, 3),
        ("30t", [40, 10, 10], 1),
        ("30t", [20, 20, 1], 1),
        ("5,10%,min45t", [10] * 9, 4),
        ("5,10%,min45t", [10] * 100, 5),
        ("2,min100t", [10] * 9, 9),
        ("2,min5t", [10] * 9, 2),
        ("2,min5t", [], 0),
        ("0,min50t", [10] * 9, 0),
        ("5,10%", [10] * 30, 3),
        ("5,10%", [10] * 100, 5),
        ("5,10%,20t", [10] * 100, 2),
        ("100%", [10] * 4, 4),
        ("5,10%", [], 0),
    ],
)
def test_how_many_facts(tail: str, num_tokens: list[int], num_recomputed: int) -> None:
    assert Tail.parse(tail).count(num_tokens) == num_recomputed


_LIMITS = st.one_of(st.none(), st.integers(0, 10**9 - 1))


@given(_LIMITS, _LIMITS, st.none() | st.floats(0, 1))
def test_what_is_written_is_read_again(facts: int | None, tokens: int | None, share: float | None) -> None:
    if (facts, tokens, share) != (None, None, None):
        tail = Tail(facts, tokens, share)
        assert str(Tail.parse(str(tail))) == str(tail)
        assert Tail.parse(str(tail)) == tail


def test_the_default() -> None:
    assert str(Tail.parse(DEFAULT_TAIL)) == DEFAULT_TAIL
