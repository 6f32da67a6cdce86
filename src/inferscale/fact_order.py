"""The order of facts in a prompt, as a setting; `planner` puts them into it.

    best-last       the better a fact fits the question, the nearer it stands to that
    chronological   in the order in which they were stored, which as a rule is that in which they were said
    session         facts of one session together, in the order in which they were stored; the better the best
                    fact of a session fits, the nearer the session stands to the question

A session is what was said under one user, agent and run on one day (`planner`).
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from inferscale.errors import InvalidInput

FactOrder = Literal["best-last", "chronological", "session"]


def parse_order(value: object, name: str = "order") -> FactOrder:
    """name: of the setting, for InvalidInput."""
    if value not in get_args(FactOrder):
        raise InvalidInput(f"{name} is {value!r:.100}; allowed are {', '.join(get_args(FactOrder))}.")
    return cast(FactOrder, value)
