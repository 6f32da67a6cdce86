"""Our fields are taken out of every body wherever vLLM would read them, and nothing else is touched."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.errors import InvalidInput
from inferscale.plan import WIRE_KEY, Order, Plan, cache_salt, to_wire
from inferscale.server.border import clean, cleaned, may_name

SECRET = b"s" * 32
PLAN = to_wire(Plan("model", "scope", order=Order("stats")), SECRET)
SALT = cache_salt(SECRET, "model", "scope", 1)
MESSAGES = [{"role": "user", "content": "hi"}]

# One body for each route of vLLM 0.32 that runs the engine, as its protocol has it.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "/v1/chat/completions/batch": {"model": "m", "messages": [MESSAGES, MESSAGES]},
    "/v1/chat/completions/render": {"model": "m", "messages": MESSAGES},
    "/v1/completions": {"model": "m", "prompt": ["one", "two"]},
    "/v1/completions of ids": {"model": "m", "prompt": [[1, 2], [3]]},
    "/v1/responses": {"model": "m", "input": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": MESSAGES, "metadata": {"user_id": "x"}},
    "/cohere/v2/chat": {"model": "m", "messages": MESSAGES},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/generative_scoring": {"query": "a", "items": ["b"]},
    "/invocations": {"model": "m", "prompt": "hi"},
}


def read_by_vllm(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The places of a body from which something comes to the connector or into the cache's salt."""
    sampling = body.get("sampling_params")
    for holder in (body, body.get("vllm_xargs"), isinstance(sampling, dict) and sampling.get("extra_args")):
        if isinstance(holder, dict):
            yield holder, "kv_transfer_params"
            yield holder, "cache_salt"


def has_ours(body: dict[str, Any]) -> bool:
    for holder, name in read_by_vllm(body):
        value = holder.get(name)
        if name == "cache_salt" and isinstance(value, str) and value.startswith("inferscale-"):
            return True
        if name == "kv_transfer_params" and isinstance(value, dict) and WIRE_KEY in value:
            return True
    return False


def planted(body: dict[str, Any], place: str) -> dict[str, Any]:
    body = copy.deepcopy(body)
    if place == "extra_args":
        body.setdefault("sampling_params", {})["extra_args"] = {"kv_transfer_params": PLAN}
    elif place == "vllm_xargs":
        body["vllm_xargs"] = {"kv_transfer_params": PLAN, "other": 1}
    elif place == "salt":
        body["cache_salt"] = SALT
    else:
        body["kv_transfer_params"] = {**PLAN, "do_remote_decode": False}
    assert has_ours(body)
    return body


def spellings(body: dict[str, Any]) -> Iterator[bytes]:
    """The same body in every way of writing JSON that `json.loads` reads, as vLLM does."""
    plain = json.dumps(body)
    yield plain.encode()
    yield json.dumps(body, indent=4).encode()
    yield (
        plain.replace("kv_transfer_params", "kv\\u005ftransfer_params")
        .replace("_salt", "\\u005Fsalt")
        .encode()
    )
    yield plain.replace('"inferscale', '"\\u0069nferscale').replace("kv_", "\\u006bv_").encode()
    yield plain.replace("cache_salt", "\\u0063ache_salt").replace("kv_", "\\u006Bv_").encode()
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        yield plain.encode(encoding)
    yield b" \n\t" + plain.encode() + b"\r\n "


@pytest.mark.parametrize("place", ["top", "salt", "vllm_xargs", "extra_args"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_place_and_spelling(route: str, place: str) -> None:
    body = planted(ROUTES[route], place)
    for raw in spellings(body):
        assert json.loads(raw) == body
        clean_body = json.loads(cleaned(raw))
        assert not has_ours(clean_body), raw
        assert {name: clean_body[name] for name in ROUTES[route] if name != "sampling_params"} == {
            name: value for name, value in ROUTES[route].items() if name != "sampling_params"
        }


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_without_ours_is_the_same_object(route: str) -> None:
    others = {"cache_salt": "mine", "kv_transfer_params": {"do_remote_prefill": True}, "vllm_xargs": {"a": 1}}
    for body in (ROUTES[route], ROUTES[route] | others):
        for raw in spellings(body):
            assert cleaned(raw) is raw


def test_what_else_is_in_the_params_stays() -> None:
    body = json.loads(cleaned(json.dumps({"kv_transfer_params": {**PLAN, "remote": 1}}).encode()))
    assert body == {"kv_transfer_params": {"remote": 1}}
    assert json.loads(cleaned(json.dumps({"kv_transfer_params": PLAN, "n": 1}).encode())) == {"n": 1}


def test_a_salt_that_looks_like_ours_salts_on_as_another() -> None:
    first, second = (json.loads(cleaned(json.dumps({"cache_salt": s}).encode())) for s in (SALT, SALT + "x"))
    assert first != second
    assert not first["cache_salt"].startswith("inferscale-")
    for salt in ("Inferscale-1", " inferscale-1", "inferscale", "mine"):
        raw = json.dumps({"cache_salt": salt}).encode()
        assert cleaned(raw) is raw


@pytest.mark.parametrize("value", ["text", json.dumps(PLAN), 5, [1], True, [PLAN]])
def test_params_that_are_no_object_do_not_come_in_by_the_back_door(value: Any) -> None:
    """vLLM refuses them as a field of their own; among free arguments it would stumble over them."""
    for body in (
        {"vllm_xargs": {"kv_transfer_params": value, "a": 1}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": value, "a": 1}}},
    ):
        assert "kv_transfer_params" not in cleaned(json.dumps(body).encode()).decode()
        assert b'"a": 1' in cleaned(json.dumps(body).encode())
    raw = json.dumps({"kv_transfer_params": value}).encode()
    assert cleaned(raw) is raw


def test_free_arguments_as_text() -> None:
    raw = json.dumps({"vllm_xargs": json.dumps({"kv_transfer_params": PLAN}), "prompt": "x"}).encode()
    assert json.loads(cleaned(raw)) == {"prompt": "x"}
    escaped = json.dumps({"vllm_xargs": '{"kv\\u005ftransfer_params": 1, "a": 1}', "prompt": "x"}).encode()
    assert json.loads(cleaned(escaped)) == {"prompt": "x"}
    raw = json.dumps({"vllm_xargs": '{"a": 1}', "prompt": "kv_transfer_params"}).encode()
    assert cleaned(raw) is raw


def test_of_names_that_come_twice_the_last_counts_as_for_vllm() -> None:
    plan = json.dumps(PLAN)
    last = f'{{"kv_transfer_params": {{}}, "kv_transfer_params": {plan}}}'.encode()
    assert json.loads(cleaned(last)) == {}
    first = f'{{"kv_transfer_params": {plan}, "kv_transfer_params": {{"a": 1}}}}'.encode()
    assert json.loads(cleaned(first)) == {"kv_transfer_params": {"a": 1}}
    inner = f'{{"kv_transfer_params": {{"inferscale": 1, "a": 2, "inferscale": {plan}}}}}'.encode()
    assert json.loads(cleaned(inner)) == {"kv_transfer_params": {"a": 2}}


def test_numbers_come_through_a_change() -> None:
    numbers = b'"n": NaN, "i": Infinity, "j": -Infinity, "h": 1%s, "e": 1e-7' % (b"0" * 500)
    body = json.loads(cleaned(b'{"kv_transfer_params": {"inferscale": 1}, %s}' % numbers))
    assert math.isnan(body["n"])
    assert (body["i"], body["j"], body["h"], body["e"]) == (math.inf, -math.inf, 10**500, 1e-7)


def test_half_a_surrogate_pair_comes_through_a_change() -> None:
    raw = b'{"kv_transfer_params": {"inferscale": 1}, "a": "\\ud83e", "b": "\\ud83e\\udd8a"}'
    assert json.loads(cleaned(raw)) == {"a": "\ud83e", "b": "🦊"}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"kv_transfer_params", b'{"kv_transfer_params": {"inferscale"', b"\xff\xfe\x00",
        b"\x00\x01\x02\x03\x04", b'["kv_transfer_params", {"inferscale": 1}]', b'"kv_transfer_params"', b"5",
        b"null", b'{"cache_salt": "inf',
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n{"kv_transfer_params": "a"}\r\n--x--',
        b"\x1f\x8b\x08\x00kv_transfer_params", b'{"kv_transfer_params": {"inferscale": 1%s}}' % (b"0" * 5000),
    ],
)  # fmt: skip
def test_what_is_no_json_object_goes_on_as_it_is(raw: bytes) -> None:
    """vLLM refuses it, or it is a form, where such a field can only be a text."""
    assert cleaned(raw) is raw


@pytest.mark.parametrize("name", ["kv_transfer_params", "cache_salt", "kv\\u005ftransfer_params"])
def test_a_body_that_is_too_deep_to_look_into_goes_nowhere(name: str) -> None:
    """How deep vLLM can look depends on who calls it."""
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    with pytest.raises(InvalidInput, match="nested too deeply"):
        cleaned(f'{{"{name}": {json.dumps(PLAN)}, "deep": {deep}}}'.encode())
    raw = f'{{"deep": {deep}}}'.encode()
    assert cleaned(raw) is raw


# any JSON ---------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    [
        "kv_transfer_params",
        "cache_salt",
        "vllm_xargs",
        "sampling_params",
        "extra_args",
        "inferscale",
        "messages",
        "a",
        "é",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from([SALT, "inferscale-", "mine"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)


@settings(deadline=None)
@given(BODIES, st.booleans())
def test_any_body(body: dict[str, Any], as_ascii: bool) -> None:
    raw = json.dumps(body, ensure_ascii=as_ascii).encode()
    before = copy.deepcopy(body)
    out = cleaned(raw)
    after = json.loads(out)
    assert not has_ours(after)
    if out is raw:
        assert not has_ours(body)
    else:
        assert cleaned(out) is out, "cleaned once is clean"
    for one in (before, after):  # all else is as it was
        for holder, name in list(read_by_vllm(one)):
            holder.pop(name, None)
        if isinstance(one.get("vllm_xargs"), str):
            del one["vllm_xargs"]
    assert before == after


@settings(deadline=None)
@given(BODIES.filter(lambda body: not has_ours(body)))
def test_any_body_without_ours_is_the_same_object(body: dict[str, Any]) -> None:
    for holder, name in list(read_by_vllm(body))[2:]:
        if not isinstance(holder.get(name), dict):
            holder.pop(name, None)
    if isinstance(body.get("vllm_xargs"), str):
        del body["vllm_xargs"]
    for raw in (json.dumps(body).encode(), json.dumps(body).encode("utf-16")):
        assert cleaned(raw) is raw
    assert not clean(body)


@settings(deadline=None)
@given(BODIES, st.sampled_from(["top", "salt", "vllm_xargs", "extra_args"]))
def test_planted_anywhere(body: dict[str, Any], place: str) -> None:
    if place == "extra_args" and not isinstance(body.get("sampling_params"), dict):
        body.pop("sampling_params", None)
    for raw in spellings(planted(body, place)):
        assert not has_ours(json.loads(cleaned(raw)))


def test_a_name_that_may_be_there() -> None:
    for raw in spellings({"memory": {"user_id": "ana"}}):
        assert may_name(raw, '"memory"')
    assert may_name(b'{"m\\u0065mory": {}}', '"memory"')
    assert not may_name(b'{"messages": "my memory"}', '"memory"')
