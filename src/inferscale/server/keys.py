"""Who asks: vLLM's API keys, further ones that are bound to a tenant, and which scopes each may name.

Middleware runs outside of vLLM's own check, so it is made here for every route, for vLLM's as well: only then
can a key of ours stand for one of vLLM's. A tenant's ids get its name in front, so that no id that it can
give names the memory of another; a key without a tenant is the operator's and names ids as they are stored.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from inferscale.errors import InvalidConfig, InvalidInput
from inferscale.facts import Scope
from inferscale.turns import MAX_ID_CHARS, read_scope

_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SEPARATOR = "/"


_UNKNOWN_KEY = "This API key is not known here; send a valid one as `Authorization: Bearer KEY`."


class Unauthorized(Exception):
    """No API key was given (without a message), or one that is not known."""


class Forbidden(Exception):
    """The caller is known, but may not do this; the message says why."""


@dataclass(frozen=True)
class Caller:
    """tenant: of the key that was given, None for the operator's. Without keys everybody is the operator."""

    tenant: str | None = None

    def stored(self, scope: Scope) -> Scope:
        """The scope as it is stored. Raises InvalidInput for ids that cannot be, or no more with the tenant's
        name in front, and for a scope without any."""
        given = read_scope(scope.user_id, scope.agent_id, scope.run_id)
        if self.tenant is None:
            return given
        prefix = f"{self.tenant}{_SEPARATOR}"
        allowed = MAX_ID_CHARS - len(prefix)
        ids = {"user_id": given.user_id, "agent_id": given.agent_id, "run_id": given.run_id}
        for name, id in ids.items():
            if id is not None and len(id) > allowed:
                raise InvalidInput(
                    f"{name} has {len(id)} characters; allowed are 1 to {allowed} with this key."
                )
        return Scope(*(None if id is None else prefix + id for id in ids.values()))

    def shown(self, scope: Scope) -> Scope:
        """A stored scope as the caller knows it."""
        if self.tenant is None:
            return scope
        prefix = f"{self.tenant}{_SEPARATOR}"
        ids = (scope.user_id, scope.agent_id, scope.run_id)
        return Scope(*(None if id is None else id.removeprefix(prefix) for id in ids))

    def may_see(self, scope: Scope) -> bool:
        """Whether a fact stored under this scope is the caller's."""
        if self.tenant is None:
            return True
        prefix = f"{self.tenant}{_SEPARATOR}"
        ids = [id for id in (scope.user_id, scope.agent_id, scope.run_id) if id is not None]
        return bool(ids) and all(id.startswith(prefix) for id in ids)

    def check_operator(self) -> None:
        if self.tenant is not None:
            raise Forbidden("This API key is bound to a tenant; only keys without one may do this.")


OPERATOR = Caller()


class Keys:
    """The API keys of a server. engine_keys: vLLM's own; tenants: key → tenant, for further ones."""

    def __init__(self, engine_keys: Iterable[str], tenants: Mapping[str, str]) -> None:
        self._engine_keys = [key for key in engine_keys if key]
        for key in self._engine_keys:
            _check_key(key, "an API key")
        self._callers = {_digest(key): OPERATOR for key in self._engine_keys}
        for key, tenant in tenants.items():
            if not _TENANT.fullmatch(tenant):
                raise InvalidConfig(
                    f"a tenant is called {tenant!r}; allowed are 1 to 64 letters, digits, '_', '.' and '-'."
                )
            _check_key(key, f"an API key of the tenant {tenant!r}")
            if self._callers.setdefault(_digest(key), Caller(tenant)) != Caller(tenant):
                raise InvalidConfig(
                    f"an API key of the tenant {tenant!r} is one of vLLM's as well, so the operator's; give "
                    "the tenant another key."
                )

    @property
    def is_open(self) -> bool:
        """Whether there are no keys at all."""
        return not self._callers

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this `Authorization` header. Raises Unauthorized."""
        if self.is_open:
            return OPERATOR
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found: Caller | None = None
        for digest, caller in self._callers.items():  # all of them, in the same time whichever it is
            if secrets.compare_digest(digest, given):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise Unauthorized(_UNKNOWN_KEY if key.strip() else "")
        return found

    def for_engine(self) -> str | None:
        """The header with which vLLM lets a caller through that was checked here; None where it asks none."""
        return f"Bearer {self._engine_keys[0]}" if self._engine_keys else None


def check_readable(scope: Scope, share_agents: bool) -> None:
    """Raise InvalidInput for a scope without ids, and for one without a user where users do not share."""
    if scope.is_empty():
        raise InvalidInput("no scope was given; give at least one of user_id, agent_id and run_id.")
    if scope.user_id is None and not share_agents:
        raise InvalidInput(
            f"{scope.describe()} without user_id names what all users told; give the user_id. To share "
            "memory between users on purpose, start the server with --share-agents."
        )


def check_near(
    client: str | None, host: str | None, origin: str | None, *, anyone: bool, origins: Collection[str]
) -> None:
    """Without keys everybody who reaches the port is the operator: raise Forbidden for who should not.

    client: its address. host, origin: these headers. anyone: clients of other machines are welcome. origins:
    pages of which are, beside those of this server and this machine.

    A web page from anywhere reaches this machine's ports through the browser that shows it. Its requests
    name it as their origin; where it has made its own name point here, that is the host.
    """
    if not anyone and not (is_loopback(client) and (host is None or _is_own_name(host))):
        raise Forbidden(
            "This server has no API key, so memory is for this machine only, under its own name or address. "
            "Start it with --api-key (or VLLM_API_KEY), or allow it with --allow-remote-without-key."
        )
    if origin is None or origin in origins:
        return
    page = origin.partition("://")[2]
    if not page or not (page == host or _is_loopback_name(_host_of(page))):
        raise Forbidden(
            "This server has no API key, so web pages from elsewhere may not use its memory. Start it with "
            "--api-key (or VLLM_API_KEY), or name the page's origin in --allowed-origins."
        )


def is_loopback(host: str | None) -> bool:
    """Whether an address is of this machine alone; a Unix socket (None) is."""
    if host is None or host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # a client of IPv4 on a socket of IPv6
    return bool((mapped or address).is_loopback)


def _is_own_name(host: str) -> bool:
    """Whether a `Host` header is one that no page from elsewhere can have: an address, or this machine."""
    name = _host_of(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _is_loopback_name(name) or name == socket.gethostname().lower()
    return True


def _is_loopback_name(name: str) -> bool:
    return name.endswith(".localhost") or is_loopback(name)


def _host_of(netloc: str) -> str:
    """`localhost:8000` → `localhost`, `[::1]:8000` → `::1`; blank for what is no host."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _check_key(key: str, what: str) -> None:
    """Raise InvalidConfig for a key that no `Authorization` header can carry. Says nothing of the key."""
    try:
        key.encode("latin-1")
    except UnicodeEncodeError:
        is_good = False
    else:
        is_good = bool(key) and key.isprintable() and key == key.strip()
    if not is_good:
        raise InvalidConfig(
            f"{what} cannot be sent in a header; allowed are visible characters of ASCII or Latin-1, with no "
            "blanks at either end."
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
