"""What may come in from outside: our own fields are taken out of every body that goes on to vLLM.

A plan is signed, so a forged one would be refused by the connector as well; but nobody shall be able to
replay a plan that was seen, to send one where no one looks, or to share a prefix cache that is salted by us.
Knows no routes: a body is searched whatever it is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inferscale.plan import WIRE_KEY

_PARAMS = "kv_transfer_params"
_SALT = "cache_salt"
_OUR_SALT = "inferscale-"
_NAMES = (_PARAMS.encode(), _SALT.encode())


def cleaned(raw: bytes) -> bytes:
    """A request's body without what only this server may say; the same object where nothing was found.

    What is no JSON object is let through: vLLM refuses it.
    """
    if not any(name in raw for name in _NAMES) and b"\\u" not in raw:
        return raw  # escapes are the only other way to write these names
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return json.dumps(body).encode() if isinstance(body, dict) and clean(body) else raw


def clean(body: dict[str, Any]) -> bool:
    """Take our fields out of a body; whether there were any."""
    found = _clean_params(body)
    extra = body.get("vllm_xargs")  # copied into the same place by vLLM
    if isinstance(extra, dict):
        found = _clean_params(extra) or found
    sampling = body.get("sampling_params")  # of the token-in/token-out route
    if isinstance(sampling, dict):
        found = clean_arguments(sampling) or found
    return found


def clean_arguments(sampling: dict[str, Any]) -> bool:
    """The same for sampling parameters, which carry them in `extra_args`."""
    arguments = sampling.get("extra_args")
    return isinstance(arguments, dict) and _clean_params(arguments)


def _clean_params(holder: dict[str, Any]) -> bool:
    found = False
    params = holder.get(_PARAMS)
    if isinstance(params, Mapping) and WIRE_KEY in params:
        holder[_PARAMS] = {name: value for name, value in params.items() if name != WIRE_KEY}
        if not holder[_PARAMS]:
            del holder[_PARAMS]
        found = True
    elif isinstance(params, str):  # `vllm_xargs` allows texts, which no connector can use
        del holder[_PARAMS]
        found = True
    salt = holder.get(_SALT)
    if isinstance(salt, str) and salt.startswith(_OUR_SALT):
        holder[_SALT] = f"caller {salt}"
        found = True
    return found
