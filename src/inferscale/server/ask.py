"""The `memory` object of a chat body, read and checked. Knows nothing of HTTP and of what is found."""

from __future__ import annotations

from typing import Any, NamedTuple, cast, get_args

from inferscale.chat_plan import Mode
from inferscale.errors import InvalidInput
from inferscale.fact_order import FactOrder, parse_order
from inferscale.facts import Scope
from inferscale.filters import Filter, read_filter
from inferscale.server_config import ServerConfig
from inferscale.tail import Tail
from inferscale.turns import read_scope

_FIELDS = ("user_id", "agent_id", "run_id", "top_k", "mode", "tail", "order", "store", "filters")
_MAX_TOP_K = 1000


class MemoryAsk(NamedTuple):
    """What a chat asks of its memory."""

    scope: Scope
    top_k: int
    mode: Mode
    tail: Tail | None
    """None: the server's, where nothing was said before the question."""
    store: bool
    """Whether what is new is remembered after the answer."""
    within: Filter | None = None
    infers: bool = False
    """What is remembered are facts that are extracted of it."""
    order: FactOrder | None = None
    """None: the server's."""


def take_ask(body: dict[str, Any], config: ServerConfig) -> MemoryAsk | None:
    """Take `memory` out of a chat body; None for a chat without it. Raises InvalidInput."""
    given = body.pop("memory", None)
    user = body.get("user") if config.use_user_field else None
    if given is None:
        if not isinstance(user, str) or not user:
            return None
        given = {}
    if not isinstance(given, dict):
        raise InvalidInput(f"memory is {given!r:.100}; allowed is an object with {', '.join(_FIELDS)}.")
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise InvalidInput(
            f"memory has unknown fields {', '.join(unknown)!r:.200}; allowed are {', '.join(_FIELDS)}."
        )
    mode = given.get("mode", "inject")
    if mode not in get_args(Mode):
        raise InvalidInput(f"memory.mode is {mode!r:.100}; allowed are {', '.join(get_args(Mode))}.")
    store = given.get("store", False)
    infers = isinstance(store, str) and store == "infer"
    if not (infers or isinstance(store, bool)):
        raise InvalidInput(f"memory.store is {store!r:.100}; allowed are true, false and 'infer'.")
    user_id = given.get("user_id", user)
    scope = read_scope(user_id, given.get("agent_id"), given.get("run_id"))
    top_k = _top_k(given.get("top_k", config.top_k))
    tail = Tail.parse(given["tail"], "memory.tail") if "tail" in given else None
    order = parse_order(given["order"], "memory.order") if "order" in given else None
    within = read_filter(given.get("filters"))
    return MemoryAsk(scope, top_k, cast(Mode, mode), tail, bool(store), within, infers, order)


def _top_k(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TOP_K:
        raise InvalidInput(
            f"memory.top_k is {value!r:.100}; allowed are whole numbers from 0 to {_MAX_TOP_K}."
        )
    return value
