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

pytestmark = pytest.mark.usefixtures("both_databases")


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
    assert recorded == (pass_id, "m", ANA, tuple(facts), 2, {facts[2]: "k2", facts[3]: "k3"}, 1, 1)
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
    for window, directions in (([a], 2), ([], 0), ([], 3)):
        with pytest.raises(InvalidInput, match=f"{directions} directions and {len(window)} facts"):
            catalog.passes.record("m", ANA, window, [b], ["k"], directions)
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


def test_a_pass_of_two_directions_is_seen_by_all_its_facts_and_goes_with_any(catalog: Catalog) -> None:
    facts = ids(add(catalog, ANA, *"abc"))
    pass_id = catalog.passes.record("m", ANA, [], facts, ["ka", "kb", "kc"], 2)
    recorded = catalog.passes.by_ids([pass_id])[pass_id]
    assert (recorded.directions, recorded.num_window, recorded.fact_ids) == (2, 0, tuple(facts))
    assert catalog.passes.record("m", ANA, [], facts, ["ka", "kb", "kc"], 2) == pass_id
    assert catalog.passes.attended_to("ka") == catalog.passes.attended_to("kc") == facts
    for fact in facts:
        assert catalog.passes.keys_attending(fact) == ["ka", "kb", "kc"]
    assert catalog.delete(facts[2]).keys == ("ka", "kb", "kc")
    assert catalog.passes.by_ids([pass_id]) == {}
    assert ids(catalog.unencoded("m", ANA)) == facts[:2]


def test_two_directions_count_more_than_a_newer_one(catalog: Catalog) -> None:
    a, b, c = ids(facts := add(catalog, ANA, *"abc"))
    seqs = [fact.seq for fact in facts]
    catalog.passes.record("m", ANA, [], [a, b], ["a1", "b1"])
    catalog.passes.record("other", ANA, [], [a, b], ["other a", "other b"])
    assert ids(catalog.provisional("m", ANA)) == [a, b]
    assert catalog.passes.superseded_keys("m", ["a1", "b1"]) == []
    both = catalog.passes.record("m", ANA, [], [a, b], ["a2", "b2"], 2)
    catalog.passes.record("m", ANA, [a], [b, c], ["b3", "c3"])
    assert ids(catalog.provisional("m", ANA)) == [a, b, c]
    assert catalog.found_facts(ANA, seqs, "m").keys == {a: "a1", b: "b3", c: "c3"}, "until it is done"
    catalog.passes.mark_done("m", ["a2", "b2"])
    assert ids(catalog.provisional("m", ANA)) == [c]
    assert ids(catalog.provisional("other", ANA)) == [a, b]
    found = catalog.passes.encodings("m", [a, b, c])
    assert {id: encoding.key for id, encoding in found.items()} == {a: "a2", b: "b2", c: "c3"}
    assert found[b].pass_id == both
    assert catalog.found_facts(ANA, seqs, "m").keys == {a: "a2", b: "b2", c: "c3"}
    assert catalog.passes.superseded_keys("m", ["a2"]) == ["a1"]
    assert catalog.passes.superseded_keys("m", ["a2", "b2"]) == ["a1", "b1", "b3"]
    assert set(catalog.passes.keys_attending(a)) == {"a1", "b1", "other a", "other b", "a2", "b2", "b3", "c3"}


def test_a_pass_of_two_directions_counts_once_it_is_done(catalog: Catalog) -> None:
    a, b, c = ids(add(catalog, ANA, *"abc"))
    catalog.passes.record("m", ANA, [], [a], ["a1"])
    first = catalog.passes.record("m", ANA, [], [a, b], ["a2", "b2"], 2)

    def keys() -> dict[str, str]:
        return {id: encoding.key for id, encoding in catalog.passes.encodings("m", [a, b, c]).items()}

    assert keys() == {a: "a1", b: "b2"}, "b has no other, and can be rebuilt"
    assert ids(catalog.provisional("m", ANA)) == [a, b]
    assert catalog.passes.superseded_keys("m", ["a2", "b2"]) == []
    for captured in (["a2"], ["b2", "other"]):
        catalog.passes.mark_done("m", captured)
        catalog.passes.mark_done("other", ["a2", "b2"])
        assert keys()[a] == "a1", "not all of it"
    other = catalog.passes.record("m", ANA, [], [a, c], ["a3", "c3"], 2)
    assert catalog.passes.record("m", ANA, [], [a, b], ["a2", "b2"], 2) == first, "to be done yet"
    assert other != first
    catalog.passes.mark_done("m", ["b2", "other", "a2"])
    assert keys() == {a: "a2", b: "b2", c: "c3"}
    assert ids(catalog.provisional("m", ANA)) == [c]
    assert catalog.passes.superseded_keys("m", ["a2", "b2"]) == ["a1", "a3"]
    catalog.passes.mark_done("m", ["a3", "c3"])
    assert keys()[a] == "a3"
    assert catalog.passes.record("m", ANA, [], [a, b], ["a2", "b2"], 2) not in (first, other), "it is older"
    assert set(catalog.delete(a).keys) == {"a1", "a2", "b2", "a3", "c3"}


def test_facts_of_one_exact_scope_are_provisional(catalog: Catalog) -> None:
    run = Scope("ana", run_id="r")
    [mine], [its] = ids(add(catalog, ANA, "a")), ids(add(catalog, run, "b"))
    block = catalog.set_block(ANA, "persona", "Be kind.").fact
    for scope, fact in ((ANA, mine), (run, its), (ANA, block.id)):
        catalog.passes.record("m", scope, [], [fact], [f"key of {fact}"])
    assert ids(catalog.provisional("m", ANA)) == [mine, its], "no block"
    assert ids(catalog.provisional("m", ANA, is_exact=True)) == [mine]
    assert ids(catalog.provisional("m", run, is_exact=True)) == [its]
    assert catalog.provisional("m", Scope("bob"), is_exact=True) == []


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
        own: dict[str, str] = {}  # key → its fact
        pass_of: dict[int, list[str]] = {}
        for number in range(data.draw(st.integers(1, 5))):
            scope = data.draw(st.sampled_from(owners))
            members = data.draw(st.lists(st.sampled_from(facts[scope]), min_size=1, max_size=6, unique=True))
            directions = data.draw(st.sampled_from([1, 2]))
            num_window = data.draw(st.integers(0, len(members) - 1)) if directions == 1 else 0
            keys = [f"{number}-{i}" for i in range(num_window, len(members))]
            model = data.draw(st.sampled_from(["m", "n"]))
            captured = members[num_window:]
            pass_id = catalog.passes.record(model, scope, members[:num_window], captured, keys, directions)
            pass_of[pass_id] = keys
            own |= dict(zip(keys, captured, strict=True))
            ends = [len(members) if directions == 2 else num_window + i + 1 for i in range(len(keys))]
            seen |= {key: tuple(members[:end]) for key, end in zip(keys, ends, strict=True)}
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
            assert stored == {key: own[key] for key in seen}
            for key, attended in seen.items():
                assert tuple(catalog.passes.attended_to(key)) == attended
                assert set(attended) <= set(everyone)
            for encode_pass in catalog.passes.by_ids(pass_of).values():
                assert len(encode_pass.fact_ids) == encode_pass.num_window + len(encode_pass.keys)
                assert set(encode_pass.fact_ids) <= set(everyone)
        catalog.close()
