"""What may come in from outside: our own fields are taken out of every body that goes on to vLLM.

A plan is signed, so a forged one would be refused by the connector as well; but nobody shall be able to
replay a plan that was seen, to send one where no one looks, or to share a prefix cache that is salted by us.
Knows no routes: a body is searched whatever it is for.
"""

from __future__ import annotations

import json
from typing import Any

from inferscale.errors import InvalidInput
from inferscale.plan import WIRE_KEY

_PARAMS = "kv_transfer_params"
_SALT = "cache_salt"
_OUR_SALT = "inferscale-"
_NAMES = (_PARAMS, _SALT)


def may_name(raw: bytes, *names: str) -> bool:
    """Whether a body may have a field of one of these names, written plainly or not.

    JSON has two other ways to write one: escapes, and the encodings of Unicode with more than one byte for
    each of its signs, which are read here as they are by vLLM.
    """
    plain = any(name.encode() in raw for name in names)
    return plain or b"\\u" in raw or not json.detect_encoding(raw).startswith("utf-8")


def read_json(raw: bytes) -> Any:
    """What vLLM will read. Raises ValueError for what is no JSON, InvalidInput for what vLLM may read."""
    try:
        return json.loads(raw)
    except RecursionError as error:  # how deep is too deep depends on who calls
        raise InvalidInput("The body is nested too deeply. Send one with fewer levels.") from error


def cleaned(raw: bytes) -> bytes:
    """A request's body without what only this server may say; the same object where nothing was found.

    What is no JSON object is let through: vLLM refuses it, or it is a form, whose fields hold no objects.
    Raises InvalidInput for a body that is nested too deeply.
    """
    if not may_name(raw, *_NAMES):
        return raw
    try:
        body = read_json(raw)
    except InvalidInput:
        raise
    except ValueError:
        return raw
    return json.dumps(body).encode() if isinstance(body, dict) and clean(body) else raw


def clean(body: dict[str, Any]) -> bool:
    """Take our fields out of a body; whether there were any."""
    found = _clean_params(body)
    extra = body.get("vllm_xargs")  # copied into the same place by vLLM
    if isinstance(extra, dict):
        found = _clean_arguments(extra) or found
    elif isinstance(extra, str) and may_name(extra.encode("utf-8", "surrogatepass"), *_NAMES):
        del body["vllm_xargs"]  # in a form it is text, and nothing that a form can say is of use there
        found = True
    sampling = body.get("sampling_params")  # of the token-in/token-out route
    if isinstance(sampling, dict):
        arguments = sampling.get("extra_args")
        found = (isinstance(arguments, dict) and _clean_arguments(arguments)) or found
    return found


def _clean_arguments(holder: dict[str, Any]) -> bool:
    """The same for arguments that vLLM does not look into: what is no object breaks whoever does."""
    found = holder.get(_PARAMS) is not None and not isinstance(holder[_PARAMS], dict)
    if found:
        del holder[_PARAMS]
    return _clean_params(holder) or found


def _clean_params(holder: dict[str, Any]) -> bool:
    found = False
    params = holder.get(_PARAMS)
    if isinstance(params, dict) and WIRE_KEY in params:
        holder[_PARAMS] = {name: value for name, value in params.items() if name != WIRE_KEY}
        if not holder[_PARAMS]:
            del holder[_PARAMS]
        found = True
    salt = holder.get(_SALT)
    if isinstance(salt, str) and salt.startswith(_OUR_SALT):
        holder[_SALT] = f"caller {salt}"
        found = True
    return found
