"""Wire form of a plan: round trip, tampering, junk; keys and salts that cannot be confused."""

from __future__ import annotations

import json
from array import array
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
    salt_of,
    scope_digest,
    segment_key,
    to_wire,
)

SECRET = b"s" * 32
IDS = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(max_size=8)
NUMBER = st.integers(0, 99)
KEY = st.text(st.characters(exclude_characters=",\n", exclude_categories=["Cs"]), max_size=8)

PLANS = st.builds(
    Plan,
    model=TEXT,
    scope=TEXT,
    epoch=st.integers(0, 2**40),
    segments=st.lists(
        st.builds(
            Segment, KEY, st.lists(IDS, max_size=5).map(tuple), st.sampled_from(["text", "fact", "turn"])
        ),
        max_size=4,
    ).map(tuple),
    captures=st.lists(st.builds(Span, TEXT, NUMBER, NUMBER, NUMBER, NUMBER), max_size=3).map(tuple),
    order=st.none()
    | st.builds(
        Order,
        st.sampled_from(["forget", "stats", "prefetch"]),
        st.lists(TEXT, max_size=3).map(tuple),
        st.lists(st.tuples(TEXT, st.integers(0, 99)), max_size=3).map(tuple),
    ),
    id=st.text("0123456789abcdef", min_size=1, max_size=16),
    caller_salt=TEXT,
)

FULL = Plan(
    model="m",
    scope="s",
    epoch=3,
    segments=(Segment("k1", (1, 2, 3), "text"), Segment("k2", (4,))),
    captures=(Span("k3", 4, 9, part=2),),
    order=Order("forget", ("k4",), (("s", 4),)),
    id="abc",
)


@settings(max_examples=50)
@given(PLANS)
def test_round_trip_through_json(plan: Plan) -> None:
    params = json.loads(json.dumps(to_wire(plan, SECRET)))
    received = from_wire(params, SECRET)
    assert received == plan
    assert received is not None
    assert not received.table.opens_prompt


@settings(max_examples=50)
@given(PLANS, st.lists(IDS, max_size=3))
def test_a_prompt_that_begins_with_the_segments_is_known_by_the_signature(
    plan: Plan, question: list[int]
) -> None:
    ids = [token_id for segment in plan.segments for token_id in segment.token_ids]
    params = json.loads(json.dumps(to_wire(plan, SECRET)))
    received = from_wire(params, SECRET, ids + question)
    assert received == plan
    assert received is not None
    assert received.table.opens_prompt == bool(ids)
    for place in range(len(ids)):
        other = [*ids[:place], ids[place] ^ 1, *ids[place + 1 :]]
        received = from_wire(params, SECRET, other + question)
        assert received == plan, "the plan is as good as before"
        assert received is not None
        assert not received.table.opens_prompt
    received = from_wire(params, SECRET, [2**31, *ids])
    assert received is not None
    assert not received.table.opens_prompt


def test_the_ids_of_a_prompt_do_not_make_a_plan_ours() -> None:
    """Neither under another secret nor with the border between plan and ids moved."""
    params = to_wire(FULL, SECRET)
    with pytest.raises(PlanRejected, match="signature"):
        from_wire(params, b"t" * 32, [1, 2, 3, 4])
    body = params[WIRE_KEY]
    moved = {**body, "plan": body["plan"] + body["ids"][:8], "ids": body["ids"][8:]}
    with pytest.raises(PlanRejected, match="signature"):
        from_wire({WIRE_KEY: moved}, SECRET, [2, 3, 4])


@pytest.mark.parametrize("key", ["a,b", "a\nb", ","])
def test_keys_that_would_run_together_are_an_error(key: str) -> None:
    with pytest.raises(ValueError, match="comma or a line break"):
        to_wire(Plan("m", "s", segments=(Segment(key, (1,)), Segment("k", (2,)))), SECRET)


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


@pytest.mark.parametrize(
    "version", [0, 1, 2, 3, 4, 6, "5", None, [2], 2.5, pytest.param(10**5000, id="huge"), float("nan")]
)
def test_other_versions_are_rejected_by_number(version: Any) -> None:
    params = to_wire(FULL, SECRET)
    params[WIRE_KEY]["v"] = version
    with pytest.raises(PlanRejected, match="wire version"):
        from_wire(params, SECRET)


HEAD = ("id", "model", "scope", "epoch", "captures", "order", "caller_salt")
LINES = ("kinds", "keys", "lengths")


def changed(raw: bytes, **fields: Any) -> bytes:
    """The `plan` part of a wire form with some of its fields changed."""
    head, *lines = raw.split(b"\n", 3)
    values = dict(zip(HEAD, json.loads(head), strict=True))
    values.update((name, value) for name, value in fields.items() if name not in LINES)
    parts = dict(zip(LINES, lines, strict=True)) | {n: v for n, v in fields.items() if n in LINES}
    return b"\n".join([json.dumps(list(values.values())).encode(), *parts.values()])


def changed_head(name: str, value: Any) -> dict[str, Any]:
    """FULL's wire form with one field changed and the signature left alone."""
    params = to_wire(FULL, SECRET)
    body = params[WIRE_KEY]
    body["plan"] = changed(bytes.fromhex(body["plan"]), **{name: value}).hex()
    return params


CHANGES: list[tuple[str, Any]] = [
    ("id", "abd"),
    ("model", "M"),
    ("scope", ""),
    ("epoch", 2),
    ("epoch", "3"),
    ("keys", b""),
    ("keys", b"k2,k1"),
    ("lengths", array("i", [1, 3]).tobytes()),
    ("kinds", b"xx"),
    ("captures", [["k3", 4, 8]]),
    ("captures", [["k3", 4.0, 9]]),
    ("order", None),
    ("order", ["forget", [], [["s", 4]]]),
    ("order", ["forget", ["k4"], [["s", 5]]]),
    ("order", ["stats", ["k4"], [["s", 4]]]),
    ("order", ["prefetch", ["k4"], [["s", 4]]]),
    ("extra", 1),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_changing_any_field_breaks_the_signature(field: str, value: Any) -> None:
    with pytest.raises(PlanRejected, match="signature"):
        from_wire(changed_head(field, value), SECRET)


def test_changing_any_byte_breaks_the_signature() -> None:
    for part in ("plan", "ids"):
        params = to_wire(FULL, SECRET)
        raw = bytes.fromhex(params[WIRE_KEY][part])
        for place in range(len(raw)):
            flipped = bytearray(raw)
            flipped[place] ^= 1
            body = {**params[WIRE_KEY], part: flipped.hex()}
            with pytest.raises(PlanRejected, match="signature"):
                from_wire({WIRE_KEY: body}, SECRET)


def test_removing_any_field_is_rejected() -> None:
    fields = set(to_wire(FULL, SECRET)[WIRE_KEY])
    assert fields == {"v", "plan", "ids", "sig"}
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
    for body in (junk, {"v": 5, "sig": junk}, {"v": 5, "sig": "0" * 64, "plan": junk, "ids": junk}):
        with pytest.raises(PlanRejected):
            from_wire({WIRE_KEY: body}, SECRET)
    from_wire(junk, SECRET)


HOSTILE: dict[str, Callable[[], Any]] = {
    "long text": lambda: "x" * 10**6,
    "list": lambda: [[]],
    "no signature": lambda: {"v": 3},
    "signature is null": lambda: {"v": 5, "sig": None},
    "signature is bytes": lambda: {"v": 5, "sig": b"0"},
    "signature is not ASCII": lambda: {"v": 5, "sig": "é"},
    "signature is a lone surrogate": lambda: {"v": 5, "sig": "\ud800"},
    "set": lambda: {"v": 5, "sig": "0" * 64, "plan": {1, 2}},
    "NaN": lambda: {"v": 5, "sig": "0" * 64, "plan": float("nan")},
    "mixed keys": lambda: {"v": 5, "sig": "0" * 64, 1: 2, "a": 3},
    "lone surrogate": lambda: {"v": 5, "sig": "0" * 64, "plan": "\ud800"},
    "huge": lambda: {"v": 5, "sig": "0" * 64, "plan": "x" * 10**6},
    "no hexadecimal": lambda: {"v": 5, "sig": "0" * 64, "plan": "é", "ids": ""},
    "plan is a list": lambda: {"v": 5, "sig": "0" * 64, "plan": ["AAAA"]},
    "nested field": lambda: {"v": 5, "sig": "0" * 64, "plan": nested(100_000)},
    "nested version": lambda: {"v": nested(100_000)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_rejected(name: str) -> None:
    params = {WIRE_KEY: HOSTILE[name]()}
    with pytest.raises(PlanRejected):
        from_wire(params, SECRET)


def signed(ids: bytes | None = None, raw: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A plan with a right signature and wrong content, as only a bug of our own could make."""
    from inferscale.plan import _sign

    body = to_wire(FULL, SECRET)[WIRE_KEY]
    if raw is None:
        raw = changed(bytes.fromhex(body["plan"]), **fields)
    if ids is None:
        ids = bytes.fromhex(body["ids"])
    return {WIRE_KEY: {"v": 5, "plan": raw.hex(), "ids": ids.hex(), "sig": _sign(raw, ids, SECRET)}}


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": b"k1"},
        {"keys": b"\xff,k2"},
        {"lengths": array("i", [-1, 5]).tobytes()},
        {"lengths": array("i", [100, 1]).tobytes()},
        {"lengths": b"abc"},
        {"kinds": b"x?"},
        {"kinds": b"xfx"},
        {"ids": b"abc"},  # no whole id
        {"ids": b""},
        {"captures": [["k", "a", 1, 0, 0, 0]]},
        {"captures": [["k", 1]]},
        {"captures": [["k", 0, 1, 0, 0, 0, 0]]},
        {"epoch": "x"},
        {"epoch": None},
        {"order": ["unknown", [], []]},
        {"order": ["forget", 5, []]},
        {"order": ["forget", [], [["s"]]]},
        {"order": "forget"},
        {"order": ["forget", [[1]], []]},
        {"order": ["prefetch", [1], []]},
        {"epoch": float("inf")},
        {"captures": [["k", 0, float("inf"), 0, 0, 0]]},
        {"raw": b""},
        {"raw": b"[]\n\n\n"},
        {"raw": b"[" * 100_000 + b"\n\n\n"},
    ],
    ids=lambda fields: str(fields)[:40],
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


def test_the_salt_tells_kinds_and_callers_apart() -> None:
    salts = {
        cache_salt(SECRET, "m", "s", epoch, kind, caller)
        for epoch in (0, 1)
        for kind in ("inject", "encode", "text")
        for caller in ("", "a", "b", "\0", "1")
    }
    assert len(salts) == 30
    assert salt_of(Plan("m", "s", 1, caller_salt="a"), SECRET) == cache_salt(
        SECRET, "m", "s", 1, "inject", "a"
    )


def test_the_salt_depends_on_the_encoder_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_salt(SECRET, "m", "s", 0), segment_key("m", [], [1])
    monkeypatch.setattr("inferscale.plan.ENCODER_VERSION", 99)
    assert cache_salt(SECRET, "m", "s", 0) != before[0]
    assert segment_key("m", [], [1]) != before[1]
