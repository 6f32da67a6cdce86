"""Which of the facts found go in front, which into the tail, which are left out. Pure.

Only a leading run of the prompt can be injected, so one fact without KV in front would turn all
facts behind it into text. Facts that are not resident therefore go into the tail, right before the
question. In both places core blocks stand first, and the facts in the order that was asked for
(`fact_order`): with `best-last`, the best one last.

The best facts, as many as the `Tail` says, are recomputed on purpose: they see all other facts. They do so
at the end of the front, so that the prompt is that of text memory: with `best-last` they stand there anyway,
and with another order they do so in mode `text` as well. They go into the tail where other facts do, so that
the best one is last all the same, and where earlier turns follow the front, which could then not be injected
either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from typing import NamedTuple

from inferscale.dates import read_date
from inferscale.fact_order import FactOrder
from inferscale.facts import Fact, Scope
from inferscale.tail import Tail


class Candidate(NamedTuple):
    """A fact found for the question; num_tokens: of its rendered line; key: of its KV, if resident."""

    fact: Fact
    num_tokens: int
    key: str | None


class Choice(NamedTuple):
    """Facts in prompt order. missing: facts that are in the tail only because they are not resident.
    num_recomputed: so many at the end of the front are not injected. unencoded: facts that are not resident,
    with those that are recomputed all the same: a next question may need their KV."""

    front: tuple[Candidate, ...]
    tail: tuple[Candidate, ...]
    missing: tuple[Candidate, ...]
    num_left_out: int
    num_recomputed: int = 0
    unencoded: tuple[Candidate, ...] = ()

    @property
    def injected(self) -> tuple[Candidate, ...]:
        """What is to be injected, where anything is."""
        return self.front[: len(self.front) - self.num_recomputed]


def choose(
    candidates: Sequence[Candidate],
    *,
    tail: Tail,
    budget_tokens: int,
    needs_residency: bool = True,
    in_place: bool = False,
    blocks: Sequence[Candidate] = (),
    order: FactOrder = "best-last",
) -> Choice:
    """Order facts for a prompt.

    candidates: best first. tail: how many of the best are recomputed, in_place: at the end of the front
    instead of in the tail, unless others are in that. budget_tokens: room for facts; the lowest-ranked ones
    that do not fit are left out, and any that would not fit alone.
    needs_residency: False where all facts are prefilled anyway (mode `text`), so that they stand
    where injected ones would. blocks: core blocks, in their order; they get room first and stand before
    the facts of their place, and none is recomputed for its rank. order: of the facts in each place, in which
    those that are recomputed stand behind the others.
    """
    pinned: list[Candidate] = []
    for block in blocks:
        if block.num_tokens <= budget_tokens:
            budget_tokens -= block.num_tokens
            pinned.append(block)
    kept: list[Candidate] = []
    whole_budget = budget_tokens
    for candidate in candidates:
        if candidate.num_tokens > whole_budget:
            continue  # fits into no prompt; it must not keep out the facts behind it
        budget_tokens -= candidate.num_tokens
        if budget_tokens < 0:
            break
        kept.append(candidate)
    num_recomputed = tail.count([candidate.num_tokens for candidate in kept])
    best, others = kept[:num_recomputed], kept[num_recomputed:]
    lacking, present = _split(pinned, needs_residency)
    behind, front = _split(others, needs_residency)
    missing = (*lacking, *behind)
    unencoded = (*missing, *_split(best, needs_residency)[0])
    stays = in_place and not missing
    places = _places(kept, order)
    front, behind, best = (_sorted(some, places) for some in (front, behind, best))
    if stays:
        front += best
    else:
        behind += best
    num_left_out = len(blocks) - len(pinned) + len(candidates) - len(kept)
    return Choice(
        (*present, *front),
        (*lacking, *behind),
        missing,
        num_left_out,
        num_recomputed if stays else 0,
        unencoded,
    )


def _places(candidates: Sequence[Candidate], order: FactOrder) -> dict[str, tuple[int, int]]:
    """Where each of them, best first, stands among the others: a key to sort by, for its fact's id."""
    facts = [candidate.fact for candidate in candidates]
    if order == "chronological":
        return {fact.id: (fact.seq, 0) for fact in facts}
    if order == "best-last":
        return {fact.id: (-rank, 0) for rank, fact in enumerate(facts)}
    best: dict[tuple[Scope, date], int] = {}
    return {fact.id: (-best.setdefault(_session(fact), rank), fact.seq) for rank, fact in enumerate(facts)}


def _session(fact: Fact) -> tuple[Scope, date]:
    """What was said under one user, agent and run on one day: that of `said_at` where this names one, else
    that on which the fact was stored."""
    return fact.scope, read_date(fact.said_at) or datetime.fromtimestamp(fact.created_at, UTC).date()


def _sorted(candidates: Iterable[Candidate], places: dict[str, tuple[int, int]]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: places[candidate.fact.id])


def _split(candidates: Sequence[Candidate], needs_residency: bool) -> tuple[list[Candidate], list[Candidate]]:
    """Those that lack KV which they need, and the others."""
    lacking = [one for one in candidates if needs_residency and one.key is None]
    return lacking, [one for one in candidates if not needs_residency or one.key is not None]
