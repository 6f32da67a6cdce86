"""Bodies of the memory API, apart from any route."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from inferscale.errors import InvalidInput
from inferscale.facts import Fact, HistoryEvent, Scope
from inferscale.server import models
from inferscale.server.keys import OPERATOR
from inferscale.server.results import ShownFact

HALF, WHOLE = "a\ud83eb", "a\ufffdb"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_a_scope() -> None:
    assert models.ScopeBody(user_id="ana", run_id="1").scope() == Scope("ana", None, "1")
    assert models.ScopeBody().scope().is_empty()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (models.AddBody, {"user_id": "ana", "text": 5}),
        (models.AddBody, {"user_id": "ana", "text": "x", "other": 1}),
        (models.AddBody, {"user_id": "ana", "items": "x"}),
        (models.AddBody, {"user_id": "ana", "items": [{"speaker": "x"}]}),
        (models.AddBody, {"user_id": "ana", "items": [{"text": "x", "user_id": "bob"}]}),
        (models.AddBody, {"user_id": "ana", "messages": ["x"]}),
        (models.AddBody, {"user_id": "ana", "messages": [{}] * 10_001}),
        (models.AddBody, {"user_id": "ana", "text": "x", "metadata": []}),
        (models.AddBody, {"user_id": "ana", "text": "x", "metadata": {1: 2}}),
        (models.SearchBody, {"user_id": "ana"}),
        (models.SearchBody, {"user_id": "ana", "query": "x", "top_k": "5"}),
        (models.SearchBody, {"user_id": "ana", "query": "x", "top_k": True}),
        (models.SearchBody, {"user_id": "ana", "query": "x", "top_k": 1.5}),
        (models.SearchBody, {"user_id": "ana", "query": "x", "top_k": -1}),
        (models.SearchBody, {"user_id": "ana", "query": "x", "top_k": 1001}),
        (models.ChangeBody, {"user_id": "ana"}),
        (models.ChangeBody, {"metadata": "x"}),
        (models.InjectionBody, {}),
        (models.InjectionBody, {"enabled": "true"}),
        (models.InjectionBody, {"enabled": 1}),
    ],
)
def test_refused(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(body)


def test_halves_of_characters_are_repaired_as_memory_does() -> None:
    body = models.AddBody.model_validate(
        {
            "user_id": "ana",
            "items": [
                {"text": HALF, "speaker": HALF, "said_at": HALF, "metadata": {HALF: [HALF, {"a": HALF}]}}
            ],
            "messages": [{"role": "user", "content": HALF}],
            "text": HALF,
            "speaker": HALF,
            "metadata": {"a": HALF},
        }
    )
    assert body.items is not None
    [item] = body.items
    assert (item.text, item.speaker, item.said_at) == (WHOLE, WHOLE, WHOLE)
    assert item.metadata == {WHOLE: [WHOLE, {"a": WHOLE}]}
    assert (body.text, body.speaker, body.metadata) == (WHOLE, WHOLE, {"a": WHOLE})
    assert body.messages == [{"role": "user", "content": HALF}], "Memory repairs it"
    assert models.SearchBody.model_validate({"query": HALF}).query == WHOLE
    assert models.ChangeBody.model_validate({"text": HALF}).text == WHOLE


def test_ids_are_refused_rather_than_repaired() -> None:
    body = models.AddBody.model_validate({"user_id": HALF, "text": "x"})
    with pytest.raises(InvalidInput, match="surrogate characters are not allowed in ids"):
        OPERATOR.stored(body.scope())


def test_metadata_is_as_deep_as_it_can_be_sent_back() -> None:
    for levels in (1, 50):
        body = models.ChangeBody.model_validate({"metadata": nested(levels)})
        assert body.metadata == nested(levels)
    lists: Any = []
    for _ in range(3000):
        lists = [lists]
    for metadata in (nested(51), nested(300), nested(3000), {"a": lists}):
        with pytest.raises(ValidationError, match="more than 50 levels"):
            models.ChangeBody.model_validate({"metadata": metadata})


@pytest.mark.parametrize("levels", [51, 600])
def test_other_fields_that_are_too_deep_are_refused_as_well(levels: int) -> None:
    deep = nested(levels)
    for body in ({"text": deep}, {"speaker": deep}, {"items": [{"text": [deep]}]}):
        with pytest.raises(ValidationError, match="valid string"):
            models.AddBody.model_validate({"user_id": "ana", **body})
    with pytest.raises(ValidationError, match="valid string"):
        models.SearchBody.model_validate({"query": deep})
    message = {"role": "user", "content": "x", "name": deep}
    with pytest.raises(ValidationError, match="more than 50 levels"):
        models.AddBody.model_validate({"user_id": "ana", "messages": [message]})


def test_other_control_characters_of_metadata_stay() -> None:
    assert models.ChangeBody.model_validate({"metadata": {"a\0": "b\0\n"}}).metadata == {"a\0": "b\0\n"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.text())
def test_whatever_is_stored_can_be_sent(metadata: dict[str, Any], text: str) -> None:
    fact = Fact("id", 1, Scope("ana"), text, None, None, 1.0, 2.0, metadata)
    raw = models.memory_of(ShownFact(fact, True)).model_dump_json()
    assert json.loads(raw) == {
        "id": "id", "object": "memory", "user_id": "ana", "agent_id": None, "run_id": None, "text": text,
        "speaker": None, "said_at": None, "metadata": metadata, "created_at": 1.0, "updated_at": 2.0,
        "expires_at": None, "injectable": True,
    }  # fmt: skip


def test_halves_that_were_stored_can_be_sent() -> None:
    """`Memory.add` took them in metadata once."""
    fact = Fact("id", 1, Scope("ana"), "x", metadata={HALF: HALF})
    assert json.loads(models.found_memory(ShownFact(fact, False), 0.5).model_dump_json())["metadata"] == {
        WHOLE: WHOLE
    }


def test_an_event() -> None:
    event = models.event_of(HistoryEvent("UPDATE", "new", "old", 1.5))
    assert event.model_dump() == {
        "event": "UPDATE",
        "text": "new",
        "previous_text": "old",
        "at": 1.5,
        "reason": None,
    }
