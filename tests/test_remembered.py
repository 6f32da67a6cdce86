"""Remembered reads: the same answers as the catalog's, whoever writes meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from inferscale.catalog import Catalog, RememberedReads
from inferscale.catalog import remembered as remembered_module
from inferscale.facts import Scope, Turn

pytestmark = pytest.mark.usefixtures("both_databases")

ANA, BEN = Scope("ana", None, None), Scope("ben", "bot", None)


def add(catalog: Catalog, scope: Scope, *texts: str) -> list[int]:
    turns = [Turn(text) for text in texts]
    vectors = np.ones((len(texts), 2), dtype=np.float32)
    return [fact.seq for fact in catalog.add_facts(scope, turns, vectors)]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    catalog = Catalog(tmp_path)
    catalog.record_embedder("words", 2)
    return catalog


def test_answers_are_the_catalogs_under_random_writes_of_two_processes(
    catalog: Catalog, tmp_path: Path, both_databases: str
) -> None:
    """The second Catalog on the folder stands for another process: it shares nothing but the file."""
    other = Catalog(tmp_path)
    reads = RememberedReads(catalog)
    rng = random.Random(0)
    seqs = add(catalog, ANA, "one", "two")
    for step in range(300 if both_databases == "sqlite" else 100):
        writer = rng.choice([catalog, other])
        action = rng.random()
        if action < 0.1:
            seqs += add(writer, rng.choice([ANA, BEN]), f"text {step}")
        elif action < 0.15:
            ids = list(catalog.found_facts(ANA, seqs).facts.values())
            if len(ids) > 2:
                writer.delete(rng.choice(ids).id)
        elif action < 0.25:
            facts = writer.facts(ANA)
            if facts:
                fact, turn = rng.choice(facts), Turn(f"changed {step}", metadata={"step": step})
                if rng.random() < 0.5:
                    turn = Turn(fact.text, fact.speaker, fact.said_at, turn.metadata)
                assert writer.update(fact, turn, np.ones(2, dtype=np.float32)) is not None
        elif action < 0.27:
            writer.delete_all(rng.choice([ANA, BEN]))
        elif action < 0.35:
            facts = writer.facts(ANA)
            if facts:
                writer.passes.record("m", ANA, [], [facts[0].id], [f"key {step}"])
        wanted = rng.sample([*seqs, 10**6], k=min(4, len(seqs)))
        for scope in (ANA, BEN, Scope(None, "bot", None), Scope()):
            assert reads.has_facts(scope) == catalog.has_facts(scope)
            assert sorted(reads.scope_codes(scope)) == sorted(catalog.feed.scope_codes(scope))
            for model in ("m", None, "other"):
                assert reads.found_facts(scope, wanted, model) == catalog.found_facts(scope, wanted, model)
    other.close()


def test_facts_are_read_once_until_somebody_writes(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    seqs = add(catalog, ANA, "one", "two", "three")
    reads = RememberedReads(catalog)
    asked: list[list[int]] = []
    original = catalog.found_facts

    def found_facts(filter: Scope, seqs: list[int], model: str | None = None) -> object:
        asked.append(list(seqs))
        return original(filter, seqs, model)

    monkeypatch.setattr(catalog, "found_facts", found_facts)
    reads.found_facts(ANA, seqs[:2], "m")
    reads.found_facts(ANA, seqs, "m")
    reads.found_facts(ANA, seqs[::-1], "m")
    assert asked == [seqs[:2], seqs[2:]]
    add(catalog, BEN, "four")
    reads.found_facts(ANA, seqs, "m")
    assert asked[2:] == [seqs]


def test_a_write_during_a_read_is_not_mixed_with_what_was_read_before(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = add(catalog, ANA, "one", "two")
    reads, other = RememberedReads(catalog), Catalog(tmp_path)
    reads.found_facts(ANA, seqs[:1])
    original = catalog.found_facts

    def found_facts(*arguments: object) -> object:
        monkeypatch.setattr(catalog, "found_facts", original)
        other.delete(other.facts(ANA)[0].id)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "found_facts", found_facts)
    found = reads.found_facts(ANA, seqs)
    assert list(found.facts) == seqs[1:], "the deleted fact must not come from what was remembered"
    assert found.epoch == 1
    other.close()


def test_what_is_remembered_has_a_bound(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_module, "MAX_FACTS", 3)
    seqs = add(catalog, ANA, *"abcdef")
    reads = RememberedReads(catalog)
    for start in range(5):
        wanted = seqs[start : start + 2]
        assert reads.found_facts(ANA, wanted, "m") == catalog.found_facts(ANA, wanted, "m")
        assert len(reads._facts) <= 3
    assert reads.found_facts(ANA, seqs, "m") == catalog.found_facts(ANA, seqs, "m")


def test_what_a_caller_writes_into_a_fact_is_not_remembered(catalog: Catalog) -> None:
    turns = [Turn("one", metadata={"tags": ["a"]}), Turn("two")]
    seqs = [fact.seq for fact in catalog.add_facts(ANA, turns, np.ones((2, 2), dtype=np.float32))]
    reads = RememberedReads(catalog)
    for _ in range(3):
        first, second = reads.found_facts(ANA, seqs).facts.values()
        assert (first.metadata, second.metadata) == ({"tags": ["a"]}, {})
        first.metadata["tags"].append("b")
        first.metadata["x"] = second.metadata["x"] = 1


def test_a_catalog_that_is_written_all_the_time_is_asked_directly(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = add(catalog, ANA, "one", "two")
    reads, other = RememberedReads(catalog), Catalog(tmp_path)
    original, num_reads = catalog.found_facts, 0

    def found_facts(filter: Scope, seqs: list[int], model: str | None = None) -> object:
        nonlocal num_reads
        num_reads += 1
        assert reads._lock.locked() == (num_reads <= 3), "others are not kept waiting by the last"
        found = original(filter, seqs, model)
        add(other, BEN, "meanwhile")
        return found

    monkeypatch.setattr(catalog, "found_facts", found_facts)
    found = reads.found_facts(ANA, seqs, "m")
    assert num_reads == 4
    monkeypatch.setattr(catalog, "found_facts", original)
    assert found == catalog.found_facts(ANA, seqs, "m")
    other.delete(found.facts[seqs[0]].id)
    assert list(reads.found_facts(ANA, seqs, "m").facts) == seqs[1:]
    other.close()
