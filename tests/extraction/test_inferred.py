"""What the catalog does for extraction: similar facts of exactly one scope, decisions of one moment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes import ANA, DIM, open_catalog
from inferscale.errors import UnknownFact
from inferscale.facts import Scope, Turn

EAST, NORTH = np.eye(DIM, dtype=np.float32)[:2]


def test_similar_facts_are_of_exactly_the_scope_best_first_newest_of_equals(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    assert catalog.similar(ANA, EAST, 5).hits == ()
    vectors = np.stack([NORTH, EAST * 3, EAST, (EAST + NORTH)])
    facts = catalog.add_facts(ANA, [Turn("n"), Turn("e"), Turn("e2"), Turn("ne")], vectors)
    for other in (Scope("ana", run_id="1"), Scope("ben"), Scope(agent_id="ana")):
        catalog.add_facts(other, [Turn("foreign")], EAST.reshape(1, -1))
    hits = catalog.similar(ANA, EAST, 3).hits
    assert [hit.fact for hit in hits] == [facts[2], facts[1], facts[3]]
    assert [round(hit.score, 4) for hit in hits] == [1.0, 1.0, 0.7071]
    assert catalog.similar(ANA, EAST, 0).hits == ()


def test_a_decision_holds_for_one_moment(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    mark = catalog.similar(ANA, EAST, 5).mark
    [old] = catalog.add_facts(ANA, [Turn("old")], EAST.reshape(1, -1))
    assert catalog.apply_inferred(ANA, Turn("new"), EAST, mark=mark) is None
    marks = [catalog.similar(ANA, EAST, 5).mark]
    catalog.add_facts(Scope("ben"), [Turn("x")], EAST.reshape(1, -1))
    assert catalog.similar(ANA, EAST, 5).mark == marks[0], "what others store does not matter"
    assert catalog.update(old, Turn("reworded"), NORTH) is not None
    marks.append(catalog.similar(ANA, EAST, 5).mark)
    catalog.delete(old.id)
    marks.append(catalog.similar(ANA, EAST, 5).mark)
    assert len(set(marks)) == 3
    for former in marks[:2]:
        assert catalog.apply_inferred(ANA, None, None, mark=former, retires=old.id) is None
    applied = catalog.apply_inferred(ANA, Turn("new"), EAST, mark=marks[2])
    assert applied is not None
    assert applied.is_new


def test_the_same_words_are_stored_once_and_still_supersede(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    first, second = catalog.add_facts(
        ANA, [Turn("a", "Ana", "1 May 2023"), Turn("b", "Ana")], np.stack([EAST, NORTH])
    )
    applied = catalog.apply_inferred(ANA, Turn("a", "Ana", "2 May 2023"), EAST, retires=second.id)
    assert applied is not None
    assert (applied.fact, applied.is_new) == (first, False)
    assert applied.retired is not None
    assert [fact.id for fact in catalog.facts(ANA)] == [first.id]
    other = catalog.apply_inferred(ANA, Turn("a", "Ben"), EAST)
    assert other is not None
    assert other.is_new, "somebody else said it"
    itself = catalog.apply_inferred(ANA, Turn("a", "Ana"), EAST, retires=first.id)
    assert itself is not None
    assert (itself.is_new, itself.retired) == (False, None), "nothing supersedes itself"


@pytest.mark.parametrize("scope", [Scope("ben"), Scope("ana", run_id="1"), Scope(agent_id="ana")])
def test_a_fact_of_another_scope_cannot_be_retired(tmp_path: Path, scope: Scope) -> None:
    catalog = open_catalog(tmp_path)
    [fact] = catalog.add_facts(ANA, [Turn("a")], EAST.reshape(1, -1))
    for turn in (None, Turn("new")):
        with pytest.raises(UnknownFact):
            catalog.apply_inferred(scope, turn, EAST, retires=fact.id)
    assert catalog.get(fact.id) == fact
    assert catalog.count(scope) == 0, "all of it or nothing"


def test_new_turns_are_stored_once_with_their_time(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    turns = [Turn("a", "Ana", "1 May 2023"), Turn("a", "Ana", "2 May 2023"), Turn("a", "Ana", "1 May 2023")]
    stored = catalog.add_new_facts(ANA, turns, np.stack([EAST] * 3))
    assert [applied.is_new for applied in stored] == [True, True, False]
    assert stored[2].fact == stored[0].fact
