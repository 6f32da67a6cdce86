"""Whose memory a request names → the key by which it finds its replica.

Only where a user's facts are hot depends on the key, never what is answered: a request that cannot be read
has no key, goes to any replica, and is refused there as by a single server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.server.keys import Caller

CHAT = "/v1/chat/completions"
MEMORIES = "/v1/memories"
_IDS = ("user_id", "agent_id", "run_id")


def affinity_key(
    method: str, path: str, query: bytes, body: bytes, caller: Caller, *, use_user_field: bool
) -> str | None:
    """The key of a request; None for one that names nobody's memory, or names a fact by its id alone.

    All requests for a user have one key, whatever agent and run they name beside: they see the same facts.
    path: below the application's root. Says nothing of the ids: keys go into the logs of other programs.
    """
    if path == CHAT and method == "POST":
        ids = _chat_ids(body, use_user_field)
    elif path == MEMORIES or path.startswith(f"{MEMORIES}/"):
        ids = _query_ids(query) or _json(body)
    else:
        return None
    return _key(ids, caller)


def _chat_ids(body: bytes, use_user_field: bool) -> Mapping[str, Any]:
    """As `server.ask.take_ask` reads them."""
    read = _json(body)
    memory, user = read.get("memory"), read.get("user") if use_user_field else None
    if memory is None:
        return {"user_id": user}
    return {"user_id": user, **memory} if isinstance(memory, dict) else {}


def _query_ids(query: bytes) -> dict[str, str]:
    found = parse_qs(query.decode("latin-1"))
    return {name: found[name][-1] for name in _IDS if name in found}


def _json(body: bytes) -> dict[str, Any]:
    try:
        read = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _key(ids: Mapping[str, Any], caller: Caller) -> str | None:
    given = [ids.get(name) for name in _IDS]
    if not all(isinstance(id, str | None) for id in given):
        return None
    try:
        stored = caller.stored(Scope(*given))
    except InvalidInput:
        return None
    for name, id in zip(_IDS, (stored.user_id, stored.agent_id, stored.run_id), strict=True):
        if id is not None:
            return hashlib.blake2b(f"{name}:{id}".encode(), digest_size=16).hexdigest()
    return None
