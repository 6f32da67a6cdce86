"""The order of facts in a prompt: front, tail, left out."""

from __future__ import annotations

import pytest

from inferscale.errors import InvalidInput
from inferscale.facts import Fact, Scope
from inferscale.planner import Candidate, choose


def found(*keys: str | None, num_tokens: int = 10) -> list[Candidate]:
    """Candidates, best first, named by rank; the key None stands for a fact without KV."""
    return [
        Candidate(Fact(f"f{rank}", rank + 1, Scope("ana"), f"fact {rank}"), num_tokens, key)
        for rank, key in enumerate(keys)
    ]


def ids(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.fact.id for candidate in candidates]


def test_nothing_found() -> None:
    assert choose([], tail=3, budget_tokens=0) == ((), (), (), 0, 0)


def test_best_fact_stands_last() -> None:
    choice = choose(found("a", "b", "c"), tail=0, budget_tokens=100)
    assert ids(choice.front) == ["f2", "f1", "f0"]
    assert (choice.tail, choice.missing, choice.num_left_out) == ((), (), 0)


def test_best_facts_go_into_the_tail() -> None:
    choice = choose(found("a", "b", "c", "d"), tail=2, budget_tokens=100)
    assert ids(choice.front) == ["f3", "f2"]
    assert ids(choice.tail) == ["f1", "f0"]
    assert choice.missing == ()


@pytest.mark.parametrize("tail", [4, 50])
def test_tail_may_be_larger_than_what_exists(tail: int) -> None:
    choice = choose(found("a", "b", None, "d"), tail=tail, budget_tokens=100)
    assert choice.front == ()
    assert ids(choice.tail) == ["f3", "f2", "f1", "f0"]


def test_the_best_may_be_recomputed_where_they_stand() -> None:
    """With KV or without: what has none among the others goes into the tail as ever."""
    choice = choose(found(None, "b", "c", None, "e"), tail=2, budget_tokens=100, in_place=True)
    assert ids(choice.front) == ["f4", "f2", "f1", "f0"]
    assert ids(choice.injected) == ["f4", "f2"]
    assert (ids(choice.tail), ids(choice.missing), choice.num_recomputed) == (["f3"], ["f3"], 2)
    all_of_them = choose(found("a", "b"), tail=5, budget_tokens=10, in_place=True)
    assert (ids(all_of_them.front), ids(all_of_them.injected)) == (["f0"], [])


def test_facts_without_kv_go_into_the_tail_in_order_of_rank() -> None:
    choice = choose(found("a", None, "c", None, "e"), tail=0, budget_tokens=100)
    assert ids(choice.front) == ["f4", "f2", "f0"]
    assert ids(choice.tail) == ["f3", "f1"]
    assert ids(choice.missing) == ["f1", "f3"]


def test_facts_of_the_tail_are_not_missing() -> None:
    """They are recomputed on purpose, whether or not they have KV."""
    choice = choose(found(None, "b", None), tail=2, budget_tokens=100)
    assert ids(choice.tail) == ["f2", "f1", "f0"]
    assert ids(choice.missing) == ["f2"]


def test_as_text_all_facts_stand_where_injected_ones_would() -> None:
    choice = choose(found(None, "b", None, None), tail=1, budget_tokens=100, needs_residency=False)
    assert ids(choice.front) == ["f3", "f2", "f1"]
    assert ids(choice.tail) == ["f0"]
    assert choice.missing == ()


@pytest.mark.parametrize(
    ("budget", "num_kept"), [(-1, 0), (0, 0), (9, 0), (10, 1), (29, 2), (30, 3), (31, 3)]
)
def test_lowest_ranked_facts_are_left_out(budget: int, num_kept: int) -> None:
    choice = choose(found("a", "b", "c"), tail=0, budget_tokens=budget)
    assert ids(choice.front) == ["f2", "f1", "f0"][3 - num_kept :]
    assert choice.num_left_out == 3 - num_kept


def test_nothing_ranked_below_a_fact_that_does_not_fit_any_more_is_taken() -> None:
    candidates = [*found("a"), *found("b", num_tokens=95), *found("c")]
    choice = choose(candidates, tail=0, budget_tokens=100)
    assert (len(choice.front), choice.num_left_out) == (1, 2)


def test_a_fact_that_fits_into_no_prompt_does_not_keep_out_the_others() -> None:
    candidates = [*found("a", num_tokens=500), *found("b", "c")]
    choice = choose(candidates, tail=0, budget_tokens=20)
    assert (len(choice.front), choice.num_left_out) == (2, 1)


def test_facts_left_out_are_neither_missing_nor_in_the_tail() -> None:
    choice = choose(found("a", None, None), tail=0, budget_tokens=20)
    assert (ids(choice.front), ids(choice.tail), ids(choice.missing)) == (["f0"], ["f1"], ["f1"])


@pytest.mark.parametrize("tail", [-1, 1.0, "2", None, True])
def test_a_tail_that_is_no_count(tail: object) -> None:
    with pytest.raises(InvalidInput, match="tail"):
        choose(found("a"), tail=tail, budget_tokens=100)  # type: ignore[arg-type]
