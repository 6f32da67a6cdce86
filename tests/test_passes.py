"""Which facts each key attended to, and what a deletion takes with it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ANA, add, ids, open_catalog
from inferscale.catalog import Catalog
from inferscale.errors import InvalidInput, UnknownFact
from inferscale.facts import Scope


@pytest.fixture
def catalog(tmp_path: Path):
    with_embedder = open_catalog(tmp_path / "data")
    yield with_embedder
    with_embedder.close()


def test_a_pass_is_recorded_and_read_back(catalog: Catalog) -> None:
    facts = ids(add(catalog, ANA, *"abcd"))
    assert ids(catalog.unencoded("m", ANA)) == facts
    pass_id = catalog.passes.record("m", ANA, facts[:2], facts[2:], ["k2", "k3"])
    assert catalog.passes.encodings("m", facts) == {
        facts[2]: ("k2", pass_id, 2),
        facts[3]: ("k3", pass_id, 3),
    }
    assert catalog.passes.encodings("other model", facts) == {}
    [(id, recorded)] = catalog.passes.by_ids([pass_id, 10**9]).items()
    assert id == pass_id
    assert recorded == (pass_id, "m", ANA, tuple(facts), 2, {facts[2]: "k2", facts[3]: "k3"})
    assert ids(catalog.unencoded("m", ANA)) == facts[:2]
    assert ids(catalog.unencoded("other model", ANA)) == facts
    assert catalog.passes.attended_to("k2") == facts[:3]
    assert catalog.passes.attended_to("k3") == facts
    assert catalog.passes.attended_to("none") == catalog.passes.keys_attending("none") == []
    assert catalog.passes.keys_attending(facts[0]) == catalog.passes.keys_attending(facts[2]) == ["k2", "k3"]
    assert catalog.passes.keys_attending(facts[3]) == ["k3"]


def test_the_same_pass_is_stored_once_and_the_newest_counts(catalog: Catalog) -> None:
    a, b = ids(add(catalog, ANA, "a", "b"))
    first = catalog.passes.record("m", ANA, [], [a, b], ["ka", "kb"])
    assert catalog.passes.record("m", ANA, [], [a, b], ["ka", "kb"]) == first
    alone = catalog.passes.record("m", ANA, [], [b], ["kb alone"])
    assert catalog.passes.encodings("m", [a, b]) == {a: ("ka", first, 0), b: ("kb alone", alone, 0)}
    assert catalog.passes.record("m", ANA, [], [a, b], ["ka", "kb"]) not in (first, alone)
    assert catalog.passes.encodings("m", [b])[b].key == "kb"
    assert catalog.delete(a).keys == ("ka", "kb")
    assert catalog.passes.encodings("m", [a, b]) == {b: ("kb alone", alone, 0)}  # never saw what was deleted


def test_passes_refuse_what_cannot_be_theirs(catalog: Catalog) -> None:
    a, b, c = ids(add(catalog, ANA, *"abc"))
    other = ids(add(catalog, Scope("ana", run_id="r"), "x"))
    with pytest.raises(UnknownFact, match="scope"):
        catalog.passes.record("m", ANA, other, [a], ["k"])
    for window, captured, keys in (([a], [a], ["k"]), ([], [], []), ([], [a, b], ["k"])):
        with pytest.raises(InvalidInput):
            catalog.passes.record("m", ANA, window, captured, keys)
    catalog.delete(a)
    with pytest.raises(UnknownFact, match="forget"):
        catalog.passes.record("m", ANA, [a], [b, c], ["kb", "kc"])
    assert catalog.passes.encodings("m", [b, c]) == {}


def test_deleting_truncates_a_pass_or_removes_it(catalog: Catalog) -> None:
    facts = ids(add(catalog, ANA, *"abcdef"))
    pass_id = catalog.passes.record("m", ANA, facts[:2], facts[2:], ["k2", "k3", "k4", "k5"])
    assert catalog.delete(facts[4]).keys == ("k4", "k5")
    shorter = catalog.passes.by_ids([pass_id])[pass_id]
    assert (shorter.fact_ids, shorter.num_window) == (tuple(facts[:4]), 2)
    assert shorter.keys == {facts[2]: "k2", facts[3]: "k3"}
    assert ids(catalog.unencoded("m", ANA)) == [*facts[:2], facts[5]]
    assert catalog.delete(facts[1]).keys == ("k2", "k3")
    assert catalog.passes.by_ids([pass_id]) == {}
    assert catalog.delete(facts[0]).keys == ()


def test_a_key_that_another_owner_holds_is_kept(catalog: Catalog) -> None:
    bob = Scope(user_id="bob")
    [mine], [his] = ids(add(catalog, ANA, "same")), ids(add(catalog, bob, "same"))
    catalog.passes.record("m", ANA, [], [mine], ["same key"])
    catalog.passes.record("m", bob, [], [his], ["same key"])
    assert catalog.passes.attended_to("same key") == [mine, his]
    assert catalog.delete(mine).keys == ()
    assert catalog.passes.encodings("m", [his])[his].key == "same key"
    assert catalog.delete(his).keys == ("same key",)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_encoding_attends_to_a_deleted_fact(data: st.DataObject) -> None:
    """Random passes of two models and scopes, random deletions: bookkeeping equals a plain model of it."""
    with tempfile.TemporaryDirectory() as folder:
        catalog = open_catalog(Path(folder))
        owners = [ANA, Scope("ana", "bot")]
        facts = {scope: ids(add(catalog, scope, *"abcdefg")) for scope in owners}
        seen: dict[str, tuple[str, ...]] = {}  # key → facts it attended to
        pass_of: dict[int, list[str]] = {}
        for number in range(data.draw(st.integers(1, 5))):
            scope = data.draw(st.sampled_from(owners))
            members = data.draw(st.lists(st.sampled_from(facts[scope]), min_size=1, max_size=6, unique=True))
            num_window = data.draw(st.integers(0, len(members) - 1))
            keys = [f"{number}-{i}" for i in range(num_window, len(members))]
            model = data.draw(st.sampled_from(["m", "n"]))
            pass_id = catalog.passes.record(model, scope, members[:num_window], members[num_window:], keys)
            pass_of[pass_id] = keys
            seen |= {key: tuple(members[: num_window + i + 1]) for i, key in enumerate(keys)}
        everyone = [fact for scope in owners for fact in facts[scope]]
        for victim in data.draw(st.lists(st.sampled_from(everyone), max_size=4, unique=True)):
            expected = {key for key, attended in seen.items() if victim in attended}
            assert set(catalog.passes.keys_attending(victim)) == expected
            assert set(catalog.delete(victim).keys) == expected
            everyone.remove(victim)
            seen = {key: attended for key, attended in seen.items() if key not in expected}
            found = [
                encoding.key
                for model in ("m", "n")
                for encoding in catalog.passes.encodings(model, everyone).values()
            ]
            assert set(found) <= set(seen)
            stored = {
                key: fact for p in catalog.passes.by_ids(pass_of).values() for fact, key in p.keys.items()
            }
            assert stored == {key: attended[-1] for key, attended in seen.items()}
            for key, attended in seen.items():
                assert tuple(catalog.passes.attended_to(key)) == attended
                assert set(attended) <= set(everyone)
            for encode_pass in catalog.passes.by_ids(pass_of).values():
                assert len(encode_pass.fact_ids) == encode_pass.num_window + len(encode_pass.keys)
                assert set(encode_pass.fact_ids) <= set(everyone)
        catalog.close()
