"""The order of facts in a prompt: front, tail, left out."""

from __future__ import annotations

import pytest

from inferscale.fact_order import FactOrder
from inferscale.facts import Fact, Scope
from inferscale.planner import Candidate, choose
from inferscale.tail import Tail


def found(*keys: str | None, num_tokens: int = 10) -> list[Candidate]:
    """Candidates, best first, named by rank; the key None stands for a fact without KV."""
    return [
        Candidate(Fact(f"f{rank}", rank + 1, Scope("ana"), f"fact {rank}"), num_tokens, key)
        for rank, key in enumerate(keys)
    ]


def ids(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.fact.id for candidate in candidates]


def test_nothing_found() -> None:
    assert choose([], tail=Tail(3), budget_tokens=0) == ((), (), (), 0, 0, ())


def test_best_fact_stands_last() -> None:
    choice = choose(found("a", "b", "c"), tail=Tail(0), budget_tokens=100)
    assert ids(choice.front) == ["f2", "f1", "f0"]
    assert (choice.tail, choice.missing, choice.num_left_out) == ((), (), 0)


def test_best_facts_go_into_the_tail() -> None:
    choice = choose(found("a", "b", "c", "d"), tail=Tail(2), budget_tokens=100)
    assert ids(choice.front) == ["f3", "f2"]
    assert ids(choice.tail) == ["f1", "f0"]
    assert choice.missing == ()


@pytest.mark.parametrize("tail", [4, 50])
def test_tail_may_be_larger_than_what_exists(tail: int) -> None:
    choice = choose(found("a", "b", None, "d"), tail=Tail(tail), budget_tokens=100)
    assert choice.front == ()
    assert ids(choice.tail) == ["f3", "f2", "f1", "f0"]


def test_the_best_may_be_recomputed_where_they_stand() -> None:
    """With KV or without."""
    choice = choose(found(None, "b", "c", "d"), tail=Tail(2), budget_tokens=100, in_place=True)
    assert ids(choice.front) == ["f3", "f2", "f1", "f0"]
    assert ids(choice.injected) == ["f3", "f2"]
    assert (choice.tail, choice.missing, choice.num_recomputed) == ((), (), 2)
    assert ids(choice.unencoded) == ["f0"]
    all_of_them = choose(found("a", "b"), tail=Tail(5), budget_tokens=10, in_place=True)
    assert (ids(all_of_them.front), ids(all_of_them.injected)) == (["f0"], [])


def test_the_best_stay_last_where_other_facts_have_no_kv() -> None:
    choice = choose(found(None, "b", "c", None, "e"), tail=Tail(2), budget_tokens=100, in_place=True)
    assert ids(choice.front) == ids(choice.injected) == ["f4", "f2"]
    assert ids(choice.tail) == ["f3", "f1", "f0"]
    assert (ids(choice.missing), choice.num_recomputed) == (["f3"], 0)
    assert ids(choice.unencoded) == ["f3", "f0"]


def test_facts_without_kv_go_into_the_tail_in_order_of_rank() -> None:
    choice = choose(found("a", None, "c", None, "e"), tail=Tail(0), budget_tokens=100)
    assert ids(choice.front) == ["f4", "f2", "f0"]
    assert ids(choice.tail) == ["f3", "f1"]
    assert ids(choice.missing) == ["f1", "f3"]


def test_facts_of_the_tail_are_not_missing() -> None:
    """They are recomputed on purpose, whether or not they have KV."""
    choice = choose(found(None, "b", None), tail=Tail(2), budget_tokens=100)
    assert ids(choice.tail) == ["f2", "f1", "f0"]
    assert ids(choice.missing) == ["f2"]


def test_as_text_all_facts_stand_where_injected_ones_would() -> None:
    choice = choose(found(None, "b", None, None), tail=Tail(1), budget_tokens=100, needs_residency=False)
    assert ids(choice.front) == ["f3", "f2", "f1"]
    assert ids(choice.tail) == ["f0"]
    assert choice.missing == ()


@pytest.mark.parametrize(
    ("budget", "num_kept"), [(-1, 0), (0, 0), (9, 0), (10, 1), (29, 2), (30, 3), (31, 3)]
)
def test_lowest_ranked_facts_are_left_out(budget: int, num_kept: int) -> None:
    choice = choose(found("a", "b", "c"), tail=Tail(0), budget_tokens=budget)
    assert ids(choice.front) == ["f2", "f1", "f0"][3 - num_kept :]
    assert choice.num_left_out == 3 - num_kept


def test_nothing_ranked_below_a_fact_that_does_not_fit_any_more_is_taken() -> None:
    candidates = [*found("a"), *found("b", num_tokens=95), *found("c")]
    choice = choose(candidates, tail=Tail(0), budget_tokens=100)
    assert (len(choice.front), choice.num_left_out) == (1, 2)


def test_a_fact_that_fits_into_no_prompt_does_not_keep_out_the_others() -> None:
    candidates = [*found("a", num_tokens=500), *found("b", "c")]
    choice = choose(candidates, tail=Tail(0), budget_tokens=20)
    assert (len(choice.front), choice.num_left_out) == (2, 1)


def test_facts_left_out_are_neither_missing_nor_in_the_tail() -> None:
    choice = choose(found("a", None, None), tail=Tail(0), budget_tokens=20)
    assert (ids(choice.front), ids(choice.tail), ids(choice.missing)) == (["f0"], ["f1"], ["f1"])


def test_a_share_is_one_of_the_facts_that_fit() -> None:
    """Of 10 facts at 10 tokens, 30 % are 3; of the 5 that fit, 1."""
    share = Tail(5, share=0.3)
    assert choose(found(*"abcdefghij"), tail=share, budget_tokens=100, in_place=True).num_recomputed == 3
    small = choose(found(*"abcdefghij"), tail=share, budget_tokens=50, in_place=True)
    assert (small.num_recomputed, ids(small.injected)) == (1, ["f4", "f3", "f2", "f1"])


def said(*facts: tuple[int, str | None], run_id: str | None = None, keys: str = "") -> list[Candidate]:
    """Candidates, best first, named by their place in time, each with what it says of its day. keys: of those
    in the pool, all if empty."""
    return [
        Candidate(
            Fact(f"f{seq}", seq, Scope("ana", run_id=run_id), "", said_at=day, created_at=86_400.0 * seq),
            10,
            "k" if not keys or str(seq) in keys else None,
        )
        for seq, day in facts
    ]


MAY, JUNE, JULY = "1 pm on 8 May, 2023", "8 June 2023, 2 pm", "2023-07-08"
FACTS = ((5, JUNE), (1, MAY), (8, JULY), (3, JUNE), (2, MAY), (7, JULY), (4, "9 am on 8 June, 2023"))


@pytest.mark.parametrize(
    ("order", "tail", "front"),
    [
        ("best-last", 0, "4723815"),
        ("best-last", 2, "4723815"),
        ("chronological", 0, "1234578"),
        ("chronological", 2, "2347815"),
        ("chronological", 9, "1234578"),
        ("session", 0, "7812345"),
        ("session", 1, "7812345"),
        ("session", 2, "7823415"),
        ("session", 3, "7234815"),
        ("session", 9, "7812345"),
    ],
)
def test_facts_in_the_order_that_was_asked_for(order: FactOrder, tail: int, front: str) -> None:
    """The tail stands last, in that order as well; sessions by the best fact that was found of each."""
    for needs_residency in (True, False):
        choice = choose(
            said(*FACTS),
            tail=Tail(tail),
            budget_tokens=100,
            needs_residency=needs_residency,
            in_place=True,
            order=order,
        )
        assert "".join(ids(choice.front)).replace("f", "") == front
        assert choice.num_recomputed == min(tail, 7)
        recomputed = {item.fact.seq for item in choice.front[7 - choice.num_recomputed :]}
        assert recomputed == {seq for seq, _ in FACTS[:tail]}, "the best ones"


def test_the_order_decides_nothing_but_places() -> None:
    """What lacks KV goes into the tail, and the lowest-ranked facts are left out."""
    choice = choose(
        said(*FACTS, keys="13578"), tail=Tail(1), budget_tokens=69, in_place=True, order="chronological"
    )
    assert ids(choice.front) == ["f1", "f3", "f7", "f8"]
    assert ids(choice.tail) == ["f2", "f5"], "the best one is last"
    assert (ids(choice.missing), choice.num_left_out, choice.num_recomputed) == (["f2"], 1, 0)
    (block,) = said((99, None))
    with_block = choose(said(*FACTS), tail=Tail(0), budget_tokens=100, blocks=[block], order="chronological")
    assert ids(with_block.front)[:2] == ["f99", "f1"]


def test_a_session_is_a_day_of_one_scope() -> None:
    def front(*facts: tuple[int, str | None], run_ids: str = "") -> list[str]:
        found = [said(fact, run_id=run_ids[place : place + 1])[0] for place, fact in enumerate(facts)]
        return ids(choose(found, tail=Tail(0), budget_tokens=100, order="session").front)

    assert front((3, MAY), (4, JUNE), (1, MAY)) == ["f4", "f1", "f3"]
    assert front((3, MAY), (4, MAY), (1, MAY), run_ids="121") == ["f4", "f1", "f3"]
    assert front((3, MAY), (4, None), (1, MAY)) == ["f4", "f1", "f3"]
    stored_that_day = "3 January 1970"
    assert front((2, None), (4, MAY), (1, stored_that_day)) == ["f4", "f1", "f2"]
    assert front((2, "7 May"), (4, "7 May"), (1, stored_that_day)) == ["f4", "f1", "f2"], "names no year"
    local = "2023-05-08T23:30:00-07:00"
    assert front((2, local), (4, JUNE), (1, "2023-05-08T09:00:00-07:00")) == ["f4", "f1", "f2"]
