"""`memory` objects of chats, made up by hypothesis: good ones, and such as have to be refused."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_IDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=1000).filter(
    str.strip
)
_BAD_IDS = st.one_of(
    st.sampled_from(["", " \n", "a\0", "\ud800", "x" * 1001]),
    ANYTHING.filter(lambda value: value is not None and not isinstance(value, str)),
)
_COUNTS = st.integers(0, 1000)
_BAD_COUNTS = ANYTHING.filter(lambda value: type(value) is not int or not 0 <= value <= 1000)
_TAILS = _COUNTS | st.sampled_from(["0", "5", "10%", "300t", "5,10%", " 1 tokens"])
_BAD_TAILS = ANYTHING.filter(
    lambda value: (
        not re.search(r"\d", value)
        if isinstance(value, str)
        else type(value) is not int or not 0 <= value < 10**9
    )
)
_MODES = ("inject", "text", "none")
_FIELDS = {
    "agent_id": st.none() | _IDS,
    "run_id": st.none() | _IDS,
    "top_k": _COUNTS,
    "tail": _TAILS,
    "mode": st.sampled_from(_MODES),
    "store": st.booleans() | st.just("infer"),
    "filters": st.none()
    | st.dictionaries(st.sampled_from(["topic", "n"]), st.integers(0, 9) | st.just({"in": [1]})),
}
_BAD_FIELDS = {
    "user_id": _BAD_IDS,
    "agent_id": _BAD_IDS,
    "run_id": _BAD_IDS,
    "top_k": _BAD_COUNTS,
    "tail": _BAD_TAILS,
    "mode": ANYTHING.filter(lambda value: value not in _MODES),
    "store": ANYTHING.filter(lambda value: not isinstance(value, bool) and value != "infer"),
    "filters": ANYTHING.filter(lambda value: value is not None and not isinstance(value, dict)),
}


def good_objects() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"user_id": st.just("ana") | _IDS}, optional=_FIELDS)


def bad_objects() -> st.SearchStrategy[Any]:
    """Of the wrong type, with a field that is unknown, with one that is wrong, or without a user."""
    none_at_all = ANYTHING.filter(lambda value: value is not None and not isinstance(value, dict))
    unknown = st.dictionaries(
        st.text().filter(lambda name: name not in (*_FIELDS, "user_id")), ANYTHING, min_size=1
    )
    wrong = st.sampled_from(sorted(_BAD_FIELDS)).flatmap(
        lambda name: st.fixed_dictionaries({name: _BAD_FIELDS[name]})
    )
    changed = st.builds(lambda good, change: {**good, **change}, good_objects(), unknown | wrong)
    nobodys = st.fixed_dictionaries({}, optional={**_FIELDS, "user_id": st.none()})
    return none_at_all | changed | nobodys
