"""Ways to get facts into a prompt by injection, which quality benchmarks compare. Light to import.

sliding(20,20)+tail10      a window policy (see `windows`), and how many of the best facts are recomputed
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inferscale.config import EncodingConfig
from inferscale.errors import InvalidInput
from inferscale.windows import WindowPolicy, parse_policy

_ANCHOR = "anchor"


@dataclass(frozen=True)
class Policy:
    """window: what facts are encoded behind. tail: so many of the best, which stand last, are prefilled."""

    window: WindowPolicy
    tail: int = 0

    def __str__(self) -> str:
        """The form that `parse` reads."""
        return f"{self.window}" + (f"+tail{self.tail}" if self.tail else "")

    @classmethod
    def default(cls) -> Policy:
        """What memory does where nothing is set."""
        encoding = EncodingConfig()
        return cls(WindowPolicy(encoding.window, encoding.stride))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """`alone`, `window(5)`, `sliding(20,20)+tail10`; `anchor` is another name of `alone`. Raises
        InvalidInput."""
        pattern = r"([^+]*?)(?:\s*\+\s*tail\s*(\d+))?"
        match = re.fullmatch(pattern, text.strip(), flags=re.ASCII)
        if match is None:
            raise InvalidInput(
                f"the policy is {text!r}; allowed is a window policy, and behind it '+tailN' for N "
                "recomputed facts, for example 'sliding(20,20)+tail10'."
            )
        window = "alone" if match[1] == _ANCHOR else match[1]
        return cls(parse_policy(window), int(match[2] or 0))


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Policies separated by semicolons, each once. Raises InvalidInput."""
    policies = tuple(Policy.parse(part) for part in text.split(";") if part.strip())
    if not policies:
        raise InvalidInput(
            f"the policies are {text!r}; give at least one, such as {str(Policy.default())!r}."
        )
    return tuple(dict.fromkeys(policies))
