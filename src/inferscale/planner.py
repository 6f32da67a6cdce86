"""Which of the facts found go in front, which into the tail, which are left out. Pure.

Only a leading run of the prompt can be injected, so one fact without KV in front would turn all
facts behind it into text. Facts that are not resident therefore go into the tail, right before the
question, together with the `tail` best ones, which are recomputed there on purpose: they see all
other facts. In both places the best fact stands last.
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
    """Facts in prompt order. missing: facts that are in the tail only because they are not resident."""

    front: tuple[Candidate, ...]
    tail: tuple[Candidate, ...]
    missing: tuple[Candidate, ...]
    num_left_out: int


def choose(
    candidates: Sequence[Candidate], *, tail: int, budget_tokens: int, needs_residency: bool = True
) -> Choice:
    """Order facts for a prompt.

    candidates: best first. tail: how many of the best are recomputed. budget_tokens: room for
    facts; the lowest-ranked ones that do not fit are left out, and any that would not fit alone.
    needs_residency: False where all facts are prefilled anyway (mode `text`), so that they stand
    where injected ones would.
    """
    if isinstance(tail, bool) or not isinstance(tail, int) or tail < 0:
        raise InvalidInput(f"tail is {tail!r}; allowed are whole numbers from 0.")
    kept: list[Candidate] = []
    whole_budget = budget_tokens
    for candidate in candidates:
        if candidate.num_tokens > whole_budget:
            continue  # fits into no prompt; it must not keep out the facts behind it
        budget_tokens -= candidate.num_tokens
        if budget_tokens < 0:
            break
        kept.append(candidate)
    front: list[Candidate] = []
    behind: list[Candidate] = []
    missing: list[Candidate] = []
    for rank, candidate in enumerate(kept):
        if rank < tail:
            behind.append(candidate)
        elif needs_residency and candidate.key is None:
            behind.append(candidate)
            missing.append(candidate)
        else:
            front.append(candidate)
    return Choice(
        tuple(reversed(front)), tuple(reversed(behind)), tuple(missing), len(candidates) - len(kept)
    )
