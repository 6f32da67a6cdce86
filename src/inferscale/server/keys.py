"""Who asks: vLLM's API keys, further ones that are bound to a tenant, and which scopes each may name.

Middleware runs outside of vLLM's own check, so it is made here for every route, for vLLM's as well: only then
can a key of ours stand for one of vLLM's. A tenant's ids get its name in front, so that no id that it can
give names the memory of another; a key without a tenant is the operator's and names ids as they are stored.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inferscale.errors import InvalidConfig, InvalidInput
from inferscale.facts import Scope

_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SEPARATOR = "/"


class Unauthorized(Exception):
    """No API key was given, or one that is not known."""


class Forbidden(Exception):
    """The caller is known, but may not do this; the message says why."""


@dataclass(frozen=True)
class Caller:
    """tenant: of the key that was given, None for the operator's. Without keys everybody is the operator."""

    tenant: str | None = None

    def stored(self, scope: Scope) -> Scope:
        """The scope as it is stored. Raises InvalidInput for ids that are too long with the tenant's name."""
        if self.tenant is None:
            return scope
        ids = (scope.user_id, scope.agent_id, scope.run_id)
        return Scope(*(None if id is None else f"{self.tenant}{_SEPARATOR}{id}" for id in ids))

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
        ids = (scope.user_id, scope.agent_id, scope.run_id)
        return all(id is None or id.startswith(prefix) for id in ids)

    def check_operator(self) -> None:
        if self.tenant is not None:
            raise Forbidden("This API key is bound to a tenant; only keys without one may do this.")


OPERATOR = Caller()


class Keys:
    """The API keys of a server. engine_keys: vLLM's own; tenants: key → tenant, for further ones."""

    def __init__(self, engine_keys: Iterable[str], tenants: Mapping[str, str]) -> None:
        self._engine_keys = [key for key in engine_keys if key]
        self._callers = {_digest(key): OPERATOR for key in self._engine_keys}
        for key, tenant in tenants.items():
            if not _TENANT.fullmatch(tenant):
                raise InvalidConfig(
                    f"a tenant is called {tenant!r}; allowed are 1 to 64 letters, digits, '_', '.' and '-'."
                )
            self._callers[_digest(key)] = Caller(tenant)

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
            raise Unauthorized
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
