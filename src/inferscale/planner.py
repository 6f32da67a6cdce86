"""Which of the facts found go in front, which into the tail, which are left out. Pure.

Only a leading run of the prompt can be injected, so one fact without KV in front would turn all
facts behind it into text. Facts that are not resident therefore go into the tail, right before the
question. In both places core blocks stand first and the best fact last.

The `tail` best facts are recomputed on purpose: they see all other facts. They do so where they stand, at
the end of the front, so that the prompt is that of text memory; only behind earlier turns, which could then
not be injected either, they go into the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inferscale.errors import InvalidInput
from inferscale.facts import Fact


class Candidate(NamedTuple):
    """A fact found for the question; num_tokens: of its rendered line; key: of its KV, if resident."""

    fact: Fact
    num_tokens: int
    key: str | None


class Choice(NamedTuple):
    """Facts in prompt order. missing: facts that are in the tail only because they are not resident.
    num_recomputed: so many at the end of the front are not injected."""

    front: tuple[Candidate, ...]
    tail: tuple[Candidate, ...]
    missing: tuple[Candidate, ...]
    num_left_out: int
    num_recomputed: int = 0

    @property
    def injected(self) -> tuple[Candidate, ...]:
        """What is to be injected, where anything is."""
        return self.front[: len(self.front) - self.num_recomputed]


def choose(
    candidates: Sequence[Candidate],
    *,
    tail: int,
    budget_tokens: int,
    needs_residency: bool = True,
    in_place: bool = False,
    blocks: Sequence[Candidate] = (),
) -> Choice:
    """Order facts for a prompt.

    candidates: best first. tail: how many of the best are recomputed, in_place: at the end of the front
    instead of in the tail. budget_tokens: room for
    facts; the lowest-ranked ones that do not fit are left out, and any that would not fit alone.
    needs_residency: False where all facts are prefilled anyway (mode `text`), so that they stand
    where injected ones would. blocks: core blocks, in their order; they get room first and stand before
    the facts of their place, and none is recomputed for its rank.
    """
    if isinstance(tail, bool) or not isinstance(tail, int) or tail < 0:
        raise InvalidInput(f"tail is {tail!r}; allowed are whole numbers from 0.")
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
    lacking = [block for block in pinned if needs_residency and block.key is None]
    front: list[Candidate] = []
    behind: list[Candidate] = []
    missing: list[Candidate] = list(lacking)
    for rank, candidate in enumerate(kept):
        if rank < tail:
            (front if in_place else behind).append(candidate)
        elif needs_residency and candidate.key is None:
            behind.append(candidate)
            missing.append(candidate)
        else:
            front.append(candidate)
    num_left_out = len(blocks) - len(pinned) + len(candidates) - len(kept)
    return Choice(
        (*(block for block in pinned if block not in lacking), *reversed(front)),
        (*lacking, *reversed(behind)),
        tuple(missing),
        num_left_out,
        min(tail, len(kept)) if in_place else 0,
    )
