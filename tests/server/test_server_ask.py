"""The `memory` object of a chat body."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.server.ask import MemoryAsk, take_ask
from inferscale.server_config import ServerConfig
from inferscale.tail import NO_TAIL, Tail

PLAIN, WITH_USER = ServerConfig(), ServerConfig(use_user_field=True, top_k=7)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def take(memory: Any, config: ServerConfig = PLAIN, **body: Any) -> MemoryAsk | None:
    body = {"model": "m", "memory": memory, **body}
    found = take_ask(body, config)
    assert "memory" not in body, "vLLM does not see it"
    return found


def test_defaults() -> None:
    assert take({"user_id": "ana"}) == MemoryAsk(Scope("ana"), PLAIN.top_k, "inject", None, False)
    assert take({"user_id": "ana"}, WITH_USER) == MemoryAsk(Scope("ana"), 7, "inject", None, False)


def test_all_fields() -> None:
    memory = {
        "user_id": "ana", "agent_id": "bot", "run_id": "1",
        "top_k": 0, "mode": "text", "tail": 1000, "store": True,
    }  # fmt: skip
    assert take(memory) == MemoryAsk(Scope("ana", "bot", "1"), 0, "text", Tail(1000), True)


@pytest.mark.parametrize(
    ("given", "tail"), [(0, NO_TAIL), ("0", NO_TAIL), (5, Tail(5)), ("5, 10%", Tail(5, share=0.1))]
)
def test_a_tail(given: int | str, tail: Tail) -> None:
    asked = take({"user_id": "ana", "tail": given})
    assert asked is not None
    assert asked.tail == tail


def test_an_order() -> None:
    for order in ("best-last", "chronological", "session"):
        asked = take({"user_id": "ana", "order": order})
        assert asked is not None
        assert asked.order == order
    asked = take({"user_id": "ana"})
    assert asked is not None
    assert asked.order is None
    for value in ("best", "", None, 1, [], {}):
        with pytest.raises(InvalidInput, match=r"memory.order is .*; allowed are best-last, chronological"):
            take({"user_id": "x", "order": value})


def test_facts_of_the_chat_are_to_be_stored() -> None:
    asked = take({"user_id": "ana", "store": "infer"})
    assert asked is not None
    assert (asked.store, asked.infers) == (True, True)
    stored = take({"user_id": "ana", "store": True})
    assert stored is not None
    assert not stored.infers


@pytest.mark.parametrize("config", [PLAIN, WITH_USER])
def test_a_chat_without_memory(config: ServerConfig) -> None:
    for body in ({}, {"memory": None}, {"user": ""}, {"user": 5}, {"user": None}, {"user": ["ana"]}):
        kept = dict(body)
        assert take_ask(kept, config) is None
        assert kept == {name: value for name, value in body.items() if name != "memory"}


def test_the_user_field() -> None:
    assert take_ask({"user": "ana"}, PLAIN) is None
    body = {"user": "ana", "model": "m"}
    assert take_ask(body, WITH_USER) == MemoryAsk(Scope("ana"), 7, "inject", None, False)
    assert body == {"user": "ana", "model": "m"}, "it is vLLM's as well"
    assert take(None, WITH_USER, user="ana") == take({"user_id": "ana"}, WITH_USER)
    assert take({}, WITH_USER, user="ana") == take({"user_id": "ana"}, WITH_USER)


def test_the_memory_object_counts_before_the_user_field() -> None:
    for memory, scope in (
        ({"user_id": "bob"}, Scope("bob")),
        ({"agent_id": "bot"}, Scope("ana", "bot")),
        ({"user_id": None, "agent_id": "bot"}, Scope(None, "bot")),
    ):
        found = take(memory, WITH_USER, user="ana")
        assert found is not None
        assert found.scope == scope
    with pytest.raises(InvalidInput, match="no scope was given"):
        take({}, PLAIN, user="ana")


@pytest.mark.parametrize("user", ["a\0", "\ud800", " ", "x" * 1001, 5])
def test_a_user_field_that_names_no_memory_is_refused(user: Any) -> None:
    with pytest.raises(InvalidInput, match="user_id"):
        take({}, WITH_USER, user=user)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({}, "no scope was given"),
        ([], r"memory is \[\]; allowed is an object with user_id"),
        ("ana", "memory is 'ana'; allowed is an object"),
        (False, "memory is False; allowed is an object"),
        (["x" * 10_000], "allowed is an object"),
        ({"user_id": "x", "userid": "y", "Mode": 1}, "unknown fields 'Mode, userid'; allowed are user_id"),
        ({"user_id": 7}, "user_id is 7; it must be text"),
        ({"user_id": ""}, "user_id has 0 characters"),
        ({"user_id": "x", "agent_id": {}}, "agent_id is {}; it must be text"),
        ({"user_id": "x", "run_id": "\0"}, "run_id is '.x00'; NUL"),
        ({"user_id": "x", "mode": "fast"}, "memory.mode is 'fast'; allowed are inject, text, none"),
        ({"user_id": "x", "mode": None}, "memory.mode is None"),
        ({"user_id": "x", "mode": ["inject"]}, "memory.mode is"),
        ({"user_id": "x", "store": None}, "memory.store is None; allowed are true, false and 'infer'"),
        ({"user_id": "x", "store": "yes"}, "memory.store is 'yes'"),
    ],
)
def test_refused(memory: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        take(memory)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [-1, 1001, 10**30, 1.0, 1.5, "1", True, None, [], float("nan")])
def test_numbers_that_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"memory.top_k is .*; allowed are whole numbers from 0 to 1000"):
        take({"user_id": "x", "top_k": value})


@pytest.mark.parametrize("value", [-1, 10**30, 1.0, "x", "5;5", "101%", True, None, [], float("nan")])
def test_tails_that_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"memory.tail is .*; allowed are a whole number of facts"):
        take({"user_id": "x", "tail": value})


@settings(deadline=None)
@given(JSON)
def test_anything_else_is_taken_or_refused(memory: Any) -> None:
    for body in ({"memory": memory}, {"memory": {"user_id": "x", "mode": memory, "store": memory}}):
        try:
            found = take_ask(body, WITH_USER)
        except InvalidInput:
            continue
        assert found is None or not found.scope.is_empty()
