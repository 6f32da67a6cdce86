"""Ways to get facts into a prompt by injection, which quality benchmarks compare. Light to import.

    mixed(60)+tail6,12%

is a window policy (see `windows`) and what is behind each `+`: a suffix's name and its value, if it has one.

    tail                    which of the best facts are recomputed (see `tail`); none without it
    chronological, session  the order of the facts (see `fact_order`), without a value; best-last without it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast, get_args

from inferscale.config import DEFAULT_ORDER, DEFAULT_TAIL, EncodingConfig
from inferscale.errors import InvalidInput
from inferscale.fact_order import FactOrder
from inferscale.tail import NO_TAIL, Tail
from inferscale.windows import WindowPolicy, parse_policy

_ANCHOR = "anchor"
_BEST_LAST: FactOrder = "best-last"


class Arrangement(NamedTuple):
    """Which prompt the facts found make: in this order, those of the tail behind the others. With `best-last`
    they stand there anyway, so no tail is named."""

    order: FactOrder = _BEST_LAST
    tail: Tail = NO_TAIL

    def __str__(self) -> str:
        return _suffixes(self.order, self.tail).removeprefix("+") or self.order


USUAL = Arrangement()
"""The best fact last."""


@dataclass(frozen=True)
class Policy:
    """window: what facts are encoded behind. tail: which of the best are prefilled, behind the others. order:
    of the facts."""

    window: WindowPolicy
    tail: Tail = NO_TAIL
    order: FactOrder = _BEST_LAST

    def __str__(self) -> str:
        """The form that `parse` reads; one form for all policies that are equal, by which scores are kept."""
        return f"{self.window}{_suffixes(self.order, self.tail)}"

    @property
    def arrangement(self) -> Arrangement:
        """Policies with the same one have the same prompts."""
        return USUAL if self.order == _BEST_LAST else Arrangement(self.order, self.tail)

    @classmethod
    def default(cls) -> Policy:
        """What memory does where nothing is set, with facts that it has many of."""
        encoding = EncodingConfig()
        window = WindowPolicy.of(encoding)
        return cls(window, Tail.parse(DEFAULT_TAIL), DEFAULT_ORDER)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`alone`, `sliding(20,20)`, `mixed(60)+tail6,12%+session`, …; `anchor` is another name of `alone`.
        Raises InvalidInput."""
        window, *suffixes = (part.strip() for part in text.split("+"))
        orders = [suffix for suffix in suffixes if suffix in get_args(FactOrder)]
        suffixes = [suffix for suffix in suffixes if suffix not in orders]
        names = [next(filter(suffix.startswith, _SUFFIXES), "") for suffix in suffixes]
        values = [suffix.removeprefix(name).strip() for name, suffix in zip(names, suffixes, strict=True)]
        if not all(names) or not all(values) or len(set(names)) < len(names) or len(orders) > 1:
            known = ", ".join(f"+{order}" for order in get_args(FactOrder))
            raise InvalidInput(
                f"the policy is {text!r}; allowed is a window policy, and behind it, each once, "
                f"{', '.join(f'+{name}' for name in _SUFFIXES)} with a value and one of {known}, for example "
                f"{str(cls.default())!r}."
            )
        chosen = cast(FactOrder, orders[0]) if orders else _BEST_LAST
        policy = cls(parse_policy("alone" if window == _ANCHOR else window), order=chosen)
        for name, value in zip(names, values, strict=True):
            policy = _SUFFIXES[name](policy, value)
        return policy


_SUFFIXES: Mapping[str, Callable[[Policy, str], Policy]] = {
    "tail": lambda policy, value: replace(policy, tail=Tail.parse(value, "the policy's tail")),
}
"""Name → the policy with this value, which raises InvalidInput."""


def _suffixes(order: FactOrder, tail: Tail) -> str:
    return ("" if tail.is_none else f"+tail{tail}") + ("" if order == _BEST_LAST else f"+{order}")


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Policies separated by semicolons, each once. Raises InvalidInput."""
    policies = tuple(Policy.parse(part) for part in text.split(";") if part.strip())
    if not policies:
        raise InvalidInput(
            f"the policies are {text!r}; give at least one, such as {str(Policy.default())!r}."
        )
    return tuple(dict.fromkeys(policies))
