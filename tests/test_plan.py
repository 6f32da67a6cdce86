"""Wire form of a plan: round trip, tampering, junk; keys and salts that cannot be confused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.errors import PlanRejected
from inferscale.plan import (
    WIRE_KEY,
    Order,
    Plan,
    Segment,
    Span,
    cache_salt,
    from_wire,
    scope_digest,
    segment_key,
    to_wire,
)

SECRET = b"s" * 32
IDS = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(max_size=8)

PLANS = st.builds(
    Plan,
    model=TEXT,
    scope=TEXT,
    epoch=st.integers(0, 2**40),
    segments=st.lists(
        st.builds(
            Segment, TEXT, st.lists(IDS, max_size=5).map(tuple), st.sampled_from(["text", "fact", "turn"])
        ),
        max_size=4,
    ).map(tuple),
    captures=st.lists(st.builds(Span, TEXT, st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple),
    order=st.none()
    | st.builds(
        Order,
        st.sampled_from(["forget", "stats"]),
        st.lists(TEXT, max_size=3).map(tuple),
        st.lists(st.tuples(TEXT, st.integers(0, 99)), max_size=3).map(tuple),
    ),
    id=st.text("0123456789abcdef", min_size=1, max_size=16),
)

FULL = Plan(
    model="m",
    scope="s",
    epoch=3,
    segments=(Segment("k1", (1, 2, 3), "text"), Segment("k2", (4,))),
    captures=(Span("k3", 4, 9),),
    order=Order("forget", ("k4",), (("s", 4),)),
    id="abc",
)


@settings(max_examples=50)
@given(PLANS)
def test_round_trip_through_json(plan: Plan) -> None:
    params = json.loads(json.dumps(to_wire(plan, SECRET)))
    assert from_wire(params, SECRET) == plan


def test_a_plan_gets_an_id_of_its_own() -> None:
    assert Plan("m", "s").id != Plan("m", "s").id
    assert len(Plan("m", "s").id) == 16


def test_params_without_a_plan_are_none() -> None:
    for params in (
        None,
        {},
        {"do_remote_prefill": True},
        "inferscale",
        [WIRE_KEY],
        7,
        b"inferscale",
        object(),
    ):
        assert from_wire(params, SECRET) is None


def test_another_secret_is_rejected() -> None:
    with pytest.raises(PlanRejected, match="signature"):
        from_wire(to_wire(FULL, SECRET), b"t" * 32)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, [2], 2.5])
def test_other_versions_are_rejected_by_number(version: Any) -> None:
    params = to_wire(FULL, SECRET)
    params[WIRE_KEY]["v"] = version
    with pytest.raises(PlanRejected, match="wire version"):
        from_wire(params, SECRET)


def changed_head(name: str, value: Any) -> dict[str, Any]:
    """FULL's wire form with one field of the head changed and the signature left alone."""
    params = to_wire(FULL, SECRET)
    head, _, ids = bytes.fromhex(params[WIRE_KEY]["plan"]).partition(b"\n")
    fields = {**json.loads(head), name: value}
    raw = json.dumps(fields, separators=(",", ":")).encode() + b"\n" + ids
    params[WIRE_KEY]["plan"] = raw.hex()
    return params


CHANGES: list[tuple[str, Any]] = [
    ("id", "abd"),
    ("model", "M"),
    ("scope", ""),
    ("epoch", 2),
    ("epoch", "3"),
    ("keys", []),
    ("lengths", [1, 2]),
    ("kinds", "xx"),
    ("captures", [["k3", 4, 8]]),
    ("captures", [["k3", 4.0, 9]]),
    ("order", None),
    ("order", ["forget", [], [["s", 4]]]),
    ("order", ["forget", ["k4"], [["s", 5]]]),
    ("order", ["stats", ["k4"], [["s", 4]]]),
    ("extra", 1),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_changing_any_field_breaks_the_signature(field: str, value: Any) -> None:
    with pytest.raises(PlanRejected, match="signature"):
        from_wire(changed_head(field, value), SECRET)


def test_changing_any_byte_breaks_the_signature() -> None:
    params = to_wire(FULL, SECRET)
    raw = bytes.fromhex(params[WIRE_KEY]["plan"])
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        body = {**params[WIRE_KEY], "plan": changed.hex()}
        with pytest.raises(PlanRejected, match="signature"):
            from_wire({WIRE_KEY: body}, SECRET)


def test_removing_any_field_is_rejected() -> None:
    fields = set(to_wire(FULL, SECRET)[WIRE_KEY])
    assert fields == {"v", "plan", "sig"}
    for field in fields:
        params = to_wire(FULL, SECRET)
        del params[WIRE_KEY][field]
        with pytest.raises(PlanRejected):
            from_wire(params, SECRET)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON, st.booleans())
def test_junk_is_rejected_and_never_anything_else(junk: Any, has_version: bool) -> None:
    for body in (junk, {"v": 2, "sig": junk}, {"v": 2, "sig": "0" * 64, "plan": junk}):
        with pytest.raises(PlanRejected):
            from_wire({WIRE_KEY: body}, SECRET)
    from_wire(junk, SECRET)


HOSTILE: dict[str, Callable[[], Any]] = {
    "long text": lambda: "x" * 10**6,
    "list": lambda: [[]],
    "no signature": lambda: {"v": 2},
    "signature is null": lambda: {"v": 2, "sig": None},
    "signature is bytes": lambda: {"v": 2, "sig": b"0"},
    "signature is not ASCII": lambda: {"v": 2, "sig": "é"},
    "signature is a lone surrogate": lambda: {"v": 2, "sig": "\ud800"},
    "set": lambda: {"v": 2, "sig": "0" * 64, "plan": {1, 2}},
    "NaN": lambda: {"v": 2, "sig": "0" * 64, "plan": float("nan")},
    "mixed keys": lambda: {"v": 2, "sig": "0" * 64, 1: 2, "a": 3},
    "lone surrogate": lambda: {"v": 2, "sig": "0" * 64, "plan": "\ud800"},
    "huge": lambda: {"v": 2, "sig": "0" * 64, "plan": "x" * 10**6},
    "no hexadecimal": lambda: {"v": 2, "sig": "0" * 64, "plan": "é"},
    "plan is a list": lambda: {"v": 2, "sig": "0" * 64, "plan": ["AAAA"]},
    "nested field": lambda: {"v": 2, "sig": "0" * 64, "plan": nested(100_000)},
    "nested version": lambda: {"v": nested(100_000)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_rejected(name: str) -> None:
    params = {WIRE_KEY: HOSTILE[name]()}
    with pytest.raises(PlanRejected):
        from_wire(params, SECRET)


def signed(ids: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A plan with a right signature and wrong content, as only a bug of our own could make."""
    from inferscale.plan import _sign

    raw_head, _, old_ids = bytes.fromhex(to_wire(FULL, SECRET)[WIRE_KEY]["plan"]).partition(b"\n")
    head = json.dumps({**json.loads(raw_head), **fields}).encode()
    raw = head + b"\n" + (old_ids if ids is None else ids)
    body = {"v": 2, "plan": raw.hex(), "sig": _sign(raw, SECRET)}
    return {WIRE_KEY: body}


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": ["k1"]},
        {"keys": [1, 2]},
        {"keys": 5},
        {"lengths": [-1, 6]},
        {"lengths": [1.0, 4.0]},
        {"lengths": [100, 1]},
        {"kinds": "x?"},
        {"kinds": "xfx"},
        {"ids": b"abc"},  # no whole id
        {"ids": b""},
        {"captures": [["k", "a", 1]]},
        {"captures": [["k", 1]]},
        {"epoch": "x"},
        {"epoch": None},
        {"order": ["unknown", [], []]},
        {"order": ["forget", 5, []]},
        {"order": ["forget", [], [["s"]]]},
        {"order": "forget"},
    ],
    ids=str,
)
def test_a_malformed_plan_is_rejected_even_when_signed(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanRejected, match="malformed"):
        from_wire(signed(**fields), SECRET)


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 2**63])
def test_ids_outside_int32_are_an_error_and_never_wrap(token_id: int) -> None:
    with pytest.raises(OverflowError):
        to_wire(Plan("m", "s", segments=(Segment("k", (token_id,)),)), SECRET)
    with pytest.raises(OverflowError):
        segment_key("m", [], [token_id])


def test_segment_keys_are_unique_per_model_prefix_and_boundary() -> None:
    keys = [
        segment_key(model, prefix, ids)
        for model in ("m", "m2", "")
        for prefix, ids in [
            ([1], [2, 3]),
            ([1, 2], [3]),
            ([], [1, 2, 3]),
            ([1, 2, 3], []),
            ([], []),
            ([2], [1, 3]),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)
    assert segment_key("m", (1,), (2, 3)) == segment_key("m", [1], [2, 3])


@given(st.tuples(TEXT, st.lists(IDS, max_size=4), st.lists(IDS, max_size=4)), st.data())
def test_segment_keys_differ_whenever_anything_differs(
    one: tuple[str, list[int], list[int]], data: st.DataObject
) -> None:
    other = data.draw(
        st.tuples(
            st.just(one[0]) | TEXT, st.just(one[1]) | st.lists(IDS, max_size=4), st.lists(IDS, max_size=4)
        )
    )
    assert (segment_key(*one) == segment_key(*other)) == (one == other)


NAMES = st.none() | st.text('abc"\\,[] nul\0é', max_size=4) | st.just("null")


@given(st.tuples(NAMES, NAMES, NAMES), st.tuples(NAMES, NAMES, NAMES))
def test_scope_digests_are_unambiguous(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> None:
    assert (scope_digest(*one) == scope_digest(*other)) == (one == other)


def test_scope_digest_tells_none_from_text_and_fields_from_each_other() -> None:
    scopes = [
        ("a", None, None),
        (None, "a", None),
        (None, None, "a"),
        ("null", None, None),
        (None, None, None),
    ]
    scopes += [("", None, None), ('a", null', None, None), ("a,b", None, None), ("a", "b", None)]
    assert len({scope_digest(*scope) for scope in scopes}) == len(scopes)


def test_the_salt_depends_on_every_part() -> None:
    salts = {
        cache_salt(secret, model, scope, epoch)
        for secret in (SECRET, b"t" * 32)
        for model in ("m", "n")
        for scope in ("s", "t")
        for epoch in (0, 1, 10)
    }
    assert len(salts) == 24
    assert all(salt.startswith("inferscale-") for salt in salts)
    assert cache_salt(SECRET, "m", "s", 1) == cache_salt(SECRET, "m", "s", 1)


def test_the_salt_depends_on_the_encoder_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_salt(SECRET, "m", "s", 0), segment_key("m", [], [1])
    monkeypatch.setattr("inferscale.plan.ENCODER_VERSION", 99)
    assert cache_salt(SECRET, "m", "s", 0) != before[0]
    assert segment_key("m", [], [1]) != before[1]
