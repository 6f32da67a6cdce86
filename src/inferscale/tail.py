"""The tail: which of the best facts of a prompt are recomputed instead of injected.

A setting, as people write it (`Tail.parse`):

    5           at most 5 facts
    10%         facts with at most 10 % of the tokens of all facts found that are in the prompt
    300t        facts with at most 300 tokens
    6,12%       the smallest of these
    6,12%,min256t
                the same, but as many as 256 tokens hold in any case
    0           none

A share stands in for one of text memory's time to first token, which nobody knows before it is measured: most
of that time goes with the tokens that are computed. It counts neither the question and core blocks, nor what
it costs to attend to the facts in front.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inferscale.errors import InvalidInput

_PART = re.compile(
    r"\s*(?:(?P<facts>\d{1,9})|(?:(?P<tokens>\d{1,9})|min\s*(?P<floor>\d{1,9}))\s*(?:t|tokens?)|"
    r"(?P<share>\d{1,3}(?:\.\d{1,4})?)\s*%)\s*",
    re.ASCII,
)


@dataclass(frozen=True)
class Tail:
    """At most so many facts, so many tokens, and such a share (0 to 1) of all facts' tokens; None: no limit.

    Where none of them is 0, the best fact is recomputed however long it is. Where one is 0 nothing is: all
    such tails are `Tail(0)`. floor: as many of the best facts as have at most so many tokens are recomputed
    whatever the limits; a small memory is prefilled nearly as fast as injected.
    """

    facts: int | None = None
    tokens: int | None = None
    share: float | None = None
    floor: int = 0

    def __post_init__(self) -> None:
        limits = (self.facts, self.tokens, self.share)
        given = [limit for limit in limits if limit is not None]
        counts = (self.facts, self.tokens)
        if (
            not given
            or isinstance(self.floor, bool)
            or not isinstance(self.floor, int)
            or self.floor < 0
            or any(isinstance(limit, bool) or not isinstance(limit, int | float) for limit in given)
            or any(isinstance(count, float) for count in counts)
            or not all(limit >= 0 for limit in given)
            or (self.share is not None and self.share > 1)
        ):
            raise InvalidInput(
                f"a tail has facts={self.facts!r}, tokens={self.tokens!r}, share={self.share!r}, "
                f"floor={self.floor!r}; allowed are whole numbers of facts and tokens from 0, and a share "
                "from 0 to 1. Give at least one of the first three."
            )
        if self.share is not None:
            object.__setattr__(self, "share", round(self.share, 6))  # as it is written
        if 0 in (self.facts, self.tokens, self.share):
            for name, value in (("facts", 0), ("tokens", None), ("share", None), ("floor", 0)):
                object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, value: int | str | Tail, name: str = "tail") -> Tail:
        """`5`, `"10%"`, `"300 tokens"`, `"6,12%"`. name: of the setting, for InvalidInput."""
        if isinstance(value, Tail):
            return value
        text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
        parts = [_PART.fullmatch(part) for part in text.split(",")]
        found: dict[str, list[float]] = {"facts": [], "tokens": [], "floor": [], "share": []}
        for part in parts:
            for kind, digits in () if part is None else part.groupdict().items():
                if digits is not None:
                    found[kind].append(float(digits))
        has_limit = any(found[kind] for kind in ("facts", "tokens", "share"))
        if None in parts or not has_limit or any(share > 100 for share in found["share"]):
            raise InvalidInput(
                f"{name} is {value!r:.100}; allowed are a whole number of facts such as 5, a share of their "
                "tokens up to 100 such as '10%', tokens such as '300t', several of them, of which the "
                "smallest counts, such as '6,12%', and behind them tokens that are recomputed in any case, "
                "such as '6,12%,min256t'. 0: none."
            )
        facts, tokens = (min(map(int, found[kind]), default=None) for kind in ("facts", "tokens"))
        share = min(found["share"], default=None)
        floor = max(map(int, found["floor"]), default=0)
        return cls(facts, tokens, None if share is None else share / 100, floor)

    def __str__(self) -> str:
        """The form that `parse` reads."""
        facts = [] if self.facts is None else [str(self.facts)]
        share = [] if self.share is None else [f"{self.share * 100:g}%"]
        tokens = [] if self.tokens is None else [f"{self.tokens}t"]
        floor = [f"min{self.floor}t"] if self.floor else []
        return ",".join(facts + share + tokens + floor)

    @property
    def is_none(self) -> bool:
        """Whether nothing is recomputed."""
        return self.facts == 0

    def count(self, num_tokens: Sequence[int]) -> int:
        """How many of the best facts are recomputed. num_tokens: of all facts in the prompt, best first."""
        num = len(num_tokens) if self.facts is None else min(self.facts, len(num_tokens))
        budget = float("inf") if self.tokens is None else float(self.tokens)
        if self.share is not None:
            budget = min(budget, self.share * sum(num_tokens) + 1e-6)  # 0.29 * 100 is below 29
        within = _num_within(num_tokens[:num], budget)
        return max(min(1, num), within, 0 if self.is_none else _num_within(num_tokens, self.floor))


def _num_within(num_tokens: Sequence[int], budget: float) -> int:
    """How many of the first have no more than `budget` tokens together."""
    used = 0
    for place, tokens in enumerate(num_tokens):
        used += tokens
        if used > budget:
            return place
    return len(num_tokens)


NO_TAIL = Tail(0)
TailLike = int | str | Tail
"""What `Tail.parse` takes."""
