"""Filters: what they mean, by a plain reading of the same tree in Python; what is refused; no SQL gets in."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import ANA, DIM, WordEmbedder, open_catalog, open_memory
from inferscale.catalog import Catalog
from inferscale.catalog.conditions import condition_of, prepare
from inferscale.errors import InvalidInput
from inferscale.facts import Scope, Turn
from inferscale.filters import MAX_LEVELS, MAX_TESTS, MAX_VALUES, Comparison, Filter, Group, read_filter

pytestmark = pytest.mark.usefixtures("both_databases")

NAMES = ["topic", "rating", "done", "tags", "é", 'a"b', "a.b", "$[0]", "x' OR 1=1 --"]
VALUES = (
    st.sampled_from(["travel", "Travel", "work", "", "1", "true", "ß", "é%_'\"", "x' OR 1=1 --"])
    | st.integers(-3, 3)
    | st.sampled_from([1.5, 2.0, 2**63, -(2**70), 0.1])
    | st.booleans()
    | st.none()
)
METADATA = st.dictionaries(
    st.sampled_from(NAMES),
    VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.just("topic"), VALUES, max_size=1),
    max_size=4,
)


def operators() -> st.SearchStrategy[dict[str, Any]]:
    ordered = VALUES.filter(
        lambda value: isinstance(value, str | int | float) and not isinstance(value, bool)
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "eq": VALUES,
            "ne": VALUES,
            "in": st.lists(VALUES, max_size=3),
            "nin": st.lists(VALUES, max_size=3),
            **dict.fromkeys(("gt", "gte", "lt", "lte"), ordered),
            "contains": VALUES,
            "icontains": VALUES.filter(lambda value: isinstance(value, str)),
        },
    ).filter(bool)


def filters() -> st.SearchStrategy[dict[str, Any]]:
    tests = st.dictionaries(st.sampled_from(NAMES), VALUES | operators(), min_size=1, max_size=2)
    return st.recursive(
        tests,
        lambda inner: st.dictionaries(
            st.sampled_from(["AND", "OR", "NOT"]),
            st.lists(inner, min_size=1, max_size=2),
            min_size=1,
            max_size=2,
        ),
        max_leaves=4,
    )


def passes(metadata: dict[str, Any], part: Filter) -> bool:
    """The plain reading."""
    if isinstance(part, Group):
        results = [passes(metadata, inner) for inner in part.parts]
        return {"AND": all(results), "OR": any(results), "NOT": not any(results)}[part.junction]
    if part.operator in ("ne", "nin"):
        return not passes(
            metadata, Comparison(part.name, "eq" if part.operator == "ne" else "in", part.values)
        )
    if part.name not in metadata:
        return False
    found, value = metadata[part.name], part.values[0] if part.values else None
    match part.operator:
        case "eq" | "in":
            return any(same(found, wanted) for wanted in part.values)
        case "contains":
            if isinstance(found, list):
                return any(same(item, value) for item in found)
            return isinstance(found, str) and isinstance(value, str) and value in found
        case "icontains":
            return isinstance(found, str) and str(value).casefold() in found.casefold()
    if kind(found) != kind(value) or kind(found) not in ("text", "number"):
        return False
    order: dict[str, Callable[[Any, Any], bool]] = {
        "gt": lambda a, b: a > b,
        "gte": lambda a, b: a >= b,
        "lt": lambda a, b: a < b,
        "lte": lambda a, b: a <= b,
    }
    return order[part.operator](found, value)


def same(found: Any, wanted: Any) -> bool:
    return kind(found) == kind(wanted) != "other" and found == wanted


def kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    return "text" if isinstance(value, str) else "number" if isinstance(value, int | float) else "other"


@pytest.mark.sqlite_only
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(METADATA, max_size=4), filters())
def test_sql_means_what_the_tree_says(stored: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    tree = read_filter(asked)
    assert tree is not None
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE TABLE facts (n INTEGER, metadata TEXT)")
        connection.executemany(
            "INSERT INTO facts VALUES (?, ?)", [(n, json.dumps(item)) for n, item in enumerate(stored)]
        )
        prepare(connection)
        sql, values = condition_of(tree)
        found = connection.execute(f"SELECT n FROM facts f WHERE {sql} ORDER BY n", values).fetchall()
        unknown = connection.execute(f"SELECT count(*) FROM facts f WHERE ({sql}) IS NULL", values).fetchone()
    finally:
        connection.close()
    assert [n for (n,) in found] == [n for n, item in enumerate(stored) if passes(item, tree)]
    assert unknown == (0,)


def store(catalog: Catalog, *turns: Turn, scope: Scope = ANA) -> None:
    catalog.add_facts(scope, turns, np.ones((len(turns), DIM), dtype=np.float32))


def listed(catalog: Catalog, asked: dict[str, Any]) -> list[str]:
    return [fact.text for fact in catalog.facts(ANA, within=read_filter(asked))]


def test_large_numbers(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    store(catalog, *(Turn(str(n), metadata={"n": n}) for n in (10**25, -(10**400), 2**63 - 1)))
    assert listed(catalog, {"n": 10**25}) == [str(10**25)]
    assert listed(catalog, {"n": 2**63 - 1}) == [str(2**63 - 1)]
    assert listed(catalog, {"n": {"lt": -1e308}}) == [str(-(10**400))]
    assert listed(catalog, {"n": {"gte": 10**25}}) == [str(10**25)]
    catalog.close()


def test_times_and_speaker_are_the_facts_own(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    store(
        catalog,
        Turn("early", "Ana", "8 May 2023", {"speaker": "nobody", "happened_at": 0}),
        Turn("late", "ben", "2024-01-02T03:00:00Z"),
        Turn("never", None, "7 May"),
    )
    assert listed(catalog, {"happened_at": {"gte": "2023-05-08", "lt": "2023-05-09"}}) == ["early"]
    assert listed(catalog, {"happened_at": {"gt": 1683504000.0}}) == ["late"]
    assert listed(catalog, {"happened_at": None}) == ["never"]
    assert listed(catalog, {"happened_at": {"ne": None}}) == ["early", "late"]
    assert listed(catalog, {"NOT": [{"happened_at": {"lt": "2024-01-01"}}]}) == ["late", "never"]
    assert listed(catalog, {"speaker": "Ana"}) == ["early"]
    assert listed(catalog, {"speaker": {"icontains": "BE"}}) == ["late"]
    assert listed(catalog, {"speaker": {"nin": ["Ana", "ben"]}}) == ["never"]
    assert listed(catalog, {"created_at": {"gt": 0}, "updated_at": {"lt": "2100-01-01"}}) == [
        "early",
        "late",
        "never",
    ]
    assert listed(catalog, {"created_at": {"lt": "2020-01-01"}}) == []
    catalog.close()


@pytest.mark.parametrize(
    "bad",
    [
        [],
        "topic",
        7,
        {"": 1},
        {7: 1},
        {"topic": {}},
        {"topic": {"like": "x"}},
        {"topic": [1]},
        {"topic": {"eq": [1]}},
        {"topic": {"in": "abc"}},
        {"topic": {"in": [[1]]}},
        {"topic": {"gt": None}},
        {"topic": {"gt": True}},
        {"topic": {"icontains": 3}},
        {"topic": float("nan")},
        {"topic": 10**400},
        {"topic": "a\0"},
        {"topic": "\ud800"},
        {"topic": "x" * 1001},
        {"x" * 1001: 1},
        {"AND": []},
        {"AND": {"a": 1}},
        {"AND": [{}]},
        {"OR": [1]},
        {"and": [{"a": 1}]},
        {"user_id": "ben"},
        {"created_at": "yesterday"},
        {"created_at": {"contains": "2"}},
        {"created_at": True},
        {"speaker": 3},
        {"speaker": {"contains": 3}},
        {"OR": [{f"n{n}": 1} for n in range(MAX_TESTS + 1)]},
        {"topic": {"in": list(range(MAX_VALUES + 1))}},
    ],
)
def test_what_is_no_filter_is_refused_in_one_line(bad: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_filter(bad)
    assert len(str(refused.value)) < 400


def test_depth_is_bounded_however_deep_it_is() -> None:
    deep: dict[str, Any] = {"a": 1}
    for _ in range(MAX_LEVELS - 1):
        deep = {"NOT": deep}
    assert read_filter(deep) is not None
    for _ in range(100_000):
        deep = {"NOT": [deep]}
    with pytest.raises(InvalidInput, match="levels"):
        read_filter(deep)


def test_nothing_is_no_filter() -> None:
    assert read_filter(None) is None
    assert read_filter({}) is None


def test_ten_facts_among_thousands_are_all_found(tmp_path: Path) -> None:
    """`top_k` counts what passes: nothing of others, or of the same user, pushes it out."""
    with open_memory(tmp_path) as memory:
        memory.add("the first fact", user_id="ana")  # records the embedder
        rows = np.random.default_rng(0).standard_normal((4000, WordEmbedder().dim)).astype(np.float32)
        for part in range(5):
            turns = [Turn(f"fact {part} {n}", metadata={"kind": "many"}) for n in range(len(rows))]
            memory.catalog.add_facts(Scope("ana" if part == 0 else f"user{part}"), turns, rows)
        rare = [Turn(f"rare {n}", metadata={"kind": "rare"}) for n in range(10)]
        memory.catalog.add_facts(ANA, rare, -rows[:10])
        found = memory.search("fact 0 1", user_id="ana", top_k=10, filters={"kind": "rare"})
        assert sorted(hit.fact.text for hit in found) == sorted(turn.text for turn in rare)
        assert memory.search("fact", user_id="ana", filters={"kind": "none"}) == []
        page = memory.page(user_id="ana", limit=4, filters={"kind": {"in": ["rare"]}})
        rest = memory.page(user_id="ana", limit=9, after=page.next_cursor, filters={"kind": {"in": ["rare"]}})
        assert [fact.text for fact in (*page.facts, *rest.facts)] == [turn.text for turn in rare]
        assert len(memory.get_all(user_id="ana", filters={"kind": {"ne": "many"}})) == 11
