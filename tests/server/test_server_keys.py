"""Who asks, and what is whose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.errors import InvalidConfig, InvalidInput
from inferscale.facts import Scope
from inferscale.server.keys import (
    OPERATOR,
    Caller,
    Forbidden,
    Keys,
    Unauthorized,
    check_readable,
)
from inferscale.turns import MAX_ID_CHARS

IDS = st.none() | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(str.strip)
SCOPES = st.builds(Scope, IDS, IDS, IDS).filter(lambda scope: not scope.is_empty())
TENANTS = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


def keys() -> Keys:
    return Keys(["sk-one", "sk-two"], {"sk-acme": "acme", "sk-beta": "beta"})


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [
        ("Bearer sk-one", None),
        ("bearer sk-two", None),
        ("BEARER sk-acme", "acme"),
        ("Bearer  sk-beta ", "beta"),
    ],
)
def test_known_keys(authorization: str, tenant: str | None) -> None:
    assert keys().caller(authorization) == Caller(tenant)


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", " ", "Bearer", "Bearer ", "Bearer sk-on", "Bearer sk-one2", "Bearer SK-ONE", "Basic sk-one",
        "sk-one", "Token sk-one", "Bearer\tsk-one", "Bearer sk-one sk-two", "Bearer Bearer sk-one",
        "Bearer sk-\u00f6ne", "\ud800",
    ],
)  # fmt: skip
def test_unknown_keys(authorization: str | None) -> None:
    with pytest.raises(Unauthorized):
        keys().caller(authorization)


def test_without_keys_everybody_is_the_operator() -> None:
    open_ = Keys(["", ""], {})
    assert open_.is_open
    assert open_.caller(None) is OPERATOR
    assert open_.caller("Bearer anything") is OPERATOR
    assert open_.for_engine() is None


def test_tenants_alone_close_the_server() -> None:
    """vLLM asks for no key then, and its routes are guarded all the same."""
    only = Keys([], {"sk-acme": "acme"})
    assert not only.is_open
    assert only.for_engine() is None
    with pytest.raises(Unauthorized):
        only.caller(None)


def test_the_engine_gets_a_key_of_its_own() -> None:
    assert keys().for_engine() == "Bearer sk-one"


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "ä", "a\n", "x" * 65, "/", "a\0"])
def test_names_that_no_tenant_may_have(tenant: str) -> None:
    with pytest.raises(InvalidConfig, match="a tenant is called"):
        Keys([], {"sk": tenant})


@pytest.mark.parametrize("tenant", ["a", "A-b_c.d", ".", "..", "x" * 64, "0"])
def test_names_that_a_tenant_may_have(tenant: str) -> None:
    assert Keys([], {"sk": tenant}).caller("Bearer sk") == Caller(tenant)


@pytest.mark.parametrize("key", ["", " ", "sk ", " sk", "s\nk", "ключ", "s\0k", "\ud800"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    """A blank one would let in who sends none; `with_headers` could not send others on."""
    with pytest.raises(InvalidConfig, match="cannot be sent in a header") as caught:
        Keys([], {key: "acme"})
    assert len(key) < 2 or key.strip() not in str(caught.value), "keys are no text for a log"
    if key:
        with pytest.raises(InvalidConfig, match="cannot be sent in a header"):
            Keys([key], {})


def test_a_key_is_of_one_caller() -> None:
    with pytest.raises(InvalidConfig, match="give the tenant another key"):
        Keys(["sk-one"], {"sk-one": "acme"})


def test_a_key_of_latin_letters_with_accents_is_as_vllm_reads_it() -> None:
    assert Keys(["schlüssel"], {}).caller("Bearer schlüssel") == OPERATOR


# scopes -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(SCOPES, TENANTS)
def test_a_tenant_sees_what_it_stores_as_it_named_it(scope: Scope, tenant: str) -> None:
    caller = Caller(tenant)
    stored = caller.stored(scope)
    assert caller.may_see(stored)
    assert caller.shown(stored) == scope
    assert OPERATOR.may_see(stored)
    assert (OPERATOR.stored(stored), OPERATOR.shown(stored)) == (stored, stored)


@settings(deadline=None)
@given(SCOPES, SCOPES, TENANTS, TENANTS)
def test_no_ids_of_one_tenant_reach_anothers(one: Scope, other: Scope, first: str, second: str) -> None:
    if first == second:
        return
    mine, theirs = Caller(first).stored(one), Caller(second).stored(other)
    assert not Caller(first).may_see(theirs)
    assert not mine.covers(theirs)
    assert not theirs.covers(mine)


@pytest.mark.parametrize("user", ["acme/ana", "/ana", "../acme/ana", "b/ana"])
def test_a_separator_in_an_id_does_not_leave_the_tenant(user: str) -> None:
    for tenant in ("a", "ac", "beta", "."):
        assert Caller(tenant).stored(Scope(user)) == Scope(f"{tenant}/{user}")
        assert not Caller("acme").may_see(Caller(tenant).stored(Scope(user)))


def test_a_tenant_does_not_see_what_is_partly_its_own() -> None:
    assert not Caller("acme").may_see(Scope("acme/ana", "shared"))
    assert not Caller("acme").may_see(Scope("acme"))
    assert not Caller("acme").may_see(Scope())


@pytest.mark.parametrize("caller", [OPERATOR, Caller("acme")])
@pytest.mark.parametrize("user", ["", " ", "\t\n", "a\0", "a\ud800"])
def test_ids_that_cannot_be_stored_are_refused_with_a_tenant_too(caller: Caller, user: str) -> None:
    with pytest.raises(InvalidInput):
        caller.stored(Scope(user))
    with pytest.raises(InvalidInput):
        caller.stored(Scope("ana", user))


def test_the_name_of_a_tenant_counts_for_the_length() -> None:
    longest = MAX_ID_CHARS - len("acme/")
    assert len(Caller("acme").stored(Scope("x" * longest)).user_id or "") == MAX_ID_CHARS
    with pytest.raises(
        InvalidInput, match=f"agent_id has {longest + 1} characters; allowed are 1 to {longest}"
    ):
        Caller("acme").stored(Scope("ana", "x" * (longest + 1)))


@pytest.mark.parametrize("caller", [OPERATOR, Caller("acme")])
def test_no_scope_is_none_for_a_tenant_too(caller: Caller) -> None:
    with pytest.raises(InvalidInput, match="no scope was given"):
        caller.stored(Scope())


def test_what_only_the_operator_may_do() -> None:
    OPERATOR.check_operator()
    with pytest.raises(Forbidden, match="bound to a tenant"):
        Caller("acme").check_operator()


@pytest.mark.parametrize("share_agents", [True, False])
def test_a_scope_that_may_be_read(share_agents: bool) -> None:
    check_readable(Scope("ana"), share_agents)
    check_readable(Scope("ana", "bot", "1"), share_agents)
    with pytest.raises(InvalidInput, match="no scope was given"):
        check_readable(Scope(), share_agents)


@pytest.mark.parametrize("scope", [Scope(None, "bot"), Scope(None, None, "1"), Scope(None, "bot", "1")])
def test_what_all_users_told_is_read_on_purpose_only(scope: Scope) -> None:
    check_readable(scope, True)
    with pytest.raises(InvalidInput, match="without user_id names what all users told"):
        check_readable(scope, False)
