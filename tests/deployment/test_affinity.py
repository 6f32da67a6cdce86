"""Which requests go to one replica together, and which name nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale.deployment.affinity import CHAT, MEMORIES, affinity_key
from inferscale.server.keys import OPERATOR, Caller

ACME = Caller("acme")


def key(
    method: str = "POST",
    path: str = CHAT,
    body: Any = None,
    query: str = "",
    caller: Caller = OPERATOR,
    user_field: bool = False,
) -> str | None:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return affinity_key(method, path, query.encode(), raw, caller, use_user_field=user_field)


ANA = key(body={"memory": {"user_id": "ana"}})


@pytest.mark.parametrize(
    ("method", "path", "body", "query"),
    [
        ("POST", CHAT, {"memory": {"user_id": "ana", "agent_id": "cook"}, "user": "bob"}, ""),
        ("POST", MEMORIES, {"user_id": "ana", "text": "x"}, ""),
        ("POST", f"{MEMORIES}/search", {"user_id": "ana", "run_id": "r", "query": "x"}, ""),
        ("POST", f"{MEMORIES}/warm", {"user_id": "ana"}, ""),
        ("GET", MEMORIES, None, "limit=3&user_id=ana"),
        ("DELETE", MEMORIES, None, "user_id=ana"),
        ("PUT", f"{MEMORIES}/blocks/name", {"user_id": "ana", "text": "x"}, ""),
        ("GET", f"{MEMORIES}/blocks", None, "user_id=ana&agent_id=cook"),
    ],
)
def test_all_that_names_a_user_has_one_key(method: str, path: str, body: Any, query: str) -> None:
    assert ANA is not None
    assert key(method, path, body, query) == ANA


def test_users_agents_and_runs_of_one_name_are_apart() -> None:
    found = {key(body={"memory": {name: "ana"}}) for name in ("user_id", "agent_id", "run_id")}
    assert len(found) == 3
    assert ANA in found
    assert key(body={"memory": {"user_id": "bob"}}) not in found


def test_a_tenants_user_is_another_one() -> None:
    body = {"memory": {"user_id": "ana"}}
    assert key(body=body, caller=ACME) not in (None, ANA)
    # the operator names ids as they are stored
    assert key(body={"memory": {"user_id": "acme/ana"}}) == key(body=body, caller=ACME)


def test_the_user_field_counts_where_the_server_says_so() -> None:
    assert key(body={"user": "ana"}, user_field=True) == ANA
    assert key(body={"user": "ana", "memory": {}}, user_field=True) == ANA
    assert key(body={"user": "ana"}) is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"{nonsense",
        b"[" * 200_000,
        [],
        {"memory": "ana"},
        {"memory": {"user_id": 3}},
        {"memory": {"user_id": ""}},
        {"memory": {"user_id": "x" * 5000}},
        {"messages": []},
    ],
)
def test_what_cannot_be_read_has_no_key(body: Any) -> None:
    assert key(body=body) is None


def test_other_routes_and_facts_by_id_have_none() -> None:
    assert key("GET", "/v1/models", query="user_id=ana") is None
    assert key("POST", "/v1/completions", {"memory": {"user_id": "ana"}}) is None
    assert key("DELETE", f"{MEMORIES}/some-id") is None


def test_a_key_does_not_show_the_id() -> None:
    assert ANA is not None
    assert "ana" not in ANA
