"""The order of facts as a setting; what it does is in test_planner."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from inferscale.config import DEFAULT_ORDER
from inferscale.errors import InvalidInput
from inferscale.fact_order import FactOrder, parse_order


def test_what_is_an_order() -> None:
    assert [parse_order(order) for order in get_args(FactOrder)] == ["best-last", "chronological", "session"]
    assert DEFAULT_ORDER == "best-last"


@pytest.mark.parametrize("value", ["", "best", "Session", None, True, 0, [], {}, float("nan"), "x" * 5000])
def test_what_is_none(value: Any) -> None:
    message = r"memory.order is .*; allowed are best-last, chronological, session\."
    with pytest.raises(InvalidInput, match=message) as caught:
        parse_order(value, "memory.order")
    assert len(str(caught.value)) < 200
