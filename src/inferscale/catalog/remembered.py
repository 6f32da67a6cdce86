"""Reads of a catalog that are remembered until any process writes to it.

A conversation asks for many of the same facts again. Everything remembered belongs to one change token: it
is forgotten as a whole once the token differs, and what is read is kept only if the token is still the
same afterwards, so that an answer is always of one state of the catalog. Callers get facts of their own:
what they write into one is not remembered.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from inferscale.catalog.catalog import Catalog
from inferscale.catalog.results import FoundBlocks, FoundFacts, ScopeMark
from inferscale.catalog.sql import ChangeToken
from inferscale.facts import Fact, Scope

MAX_FACTS = 100_000
"""All is forgotten when more facts than that are remembered."""
_MAX_TRIES = 3
"""Where somebody writes during so many reads in a row, the catalog is asked directly: in one transaction."""

_A = TypeVar("_A")


class RememberedReads:
    """Answers like the methods of the same names of a catalog and its feed. Safe from several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._token: ChangeToken | None = None
        self._has_asked = False
        self._clear()

    @property
    def _asked(self) -> Catalog:
        """For what is not remembered: whether somebody has written meanwhile is then looked up again."""
        self._has_asked = True
        return self._catalog

    def _clear(self) -> None:
        self._known: set[Scope] = set()
        self._codes: dict[Scope, list[int]] = {}
        self._epochs: dict[Scope, int] = {}
        self._marks: dict[Scope, list[ScopeMark]] = {}
        self._blocks: dict[tuple[Scope, str | None], FoundBlocks] = {}
        self._next_expiry: list[float | None] = []
        self._facts: dict[int, Fact] = {}
        self._keys: dict[str | None, dict[int, str | None]] = {}  # by model, of each fact that is known

    def has_facts(self, filter: Scope) -> bool:
        def read() -> bool:
            if filter not in self._known and self._asked.has_facts(filter):
                self._known.add(filter)
            return filter in self._known

        return self._of_one_state(read, lambda: self._catalog.has_facts(filter))

    def scope_codes(self, filter: Scope) -> list[int]:
        def read() -> list[int]:
            if filter not in self._codes:
                self._codes[filter] = self._asked.feed.scope_codes(filter)
            return self._codes[filter]

        return self._of_one_state(read, lambda: self._catalog.feed.scope_codes(filter))

    def scope_marks(self, scope: Scope) -> list[ScopeMark]:
        def read() -> list[ScopeMark]:
            if scope not in self._marks:
                self._marks[scope] = self._asked.feed.scope_marks(scope)
            return self._marks[scope]

        return self._of_one_state(read, lambda: self._catalog.feed.scope_marks(scope))

    def next_expiry(self) -> float | None:
        def read() -> float | None:
            if not self._next_expiry:
                self._next_expiry.append(self._asked.next_expiry())
            return self._next_expiry[0]

        return self._of_one_state(read, self._catalog.next_expiry)

    def blocks(self, scope: Scope, model: str | None = None) -> FoundBlocks:
        """Blocks that have expired meanwhile are left out: time passes without a write."""

        def read() -> FoundBlocks:
            if (scope, model) not in self._blocks:
                self._blocks[scope, model] = self._asked.blocks(scope, model)
            return self._blocks[scope, model]

        found = self._of_one_state(read, lambda: self._catalog.blocks(scope, model))
        now = time.time()
        live = tuple(_own(fact) for fact in found.blocks if not fact.has_expired(now))
        return found._replace(blocks=live)

    def found_facts(self, filter: Scope, seqs: Iterable[int], model: str | None = None) -> FoundFacts:
        wanted = list(seqs)

        def read() -> FoundFacts:
            keys = self._keys.setdefault(model, {})
            missing = [seq for seq in wanted if seq not in keys]
            if len(self._facts) + len(missing) > MAX_FACTS:
                self._facts, self._keys, missing = {}, {model: (keys := {})}, wanted
            if missing or filter not in self._epochs:
                found = self._asked.found_facts(filter, missing, model)
                self._facts.update(found.facts)
                self._epochs[filter] = found.epoch
                keys.update({seq: found.keys.get(fact.id) for seq, fact in found.facts.items()})
            facts = {seq: self._facts[seq] for seq in wanted if seq in keys}
            known = {fact.id: key for seq, fact in facts.items() if (key := keys[seq]) is not None}
            return FoundFacts(facts, known, self._epochs[filter])

        found = self._of_one_state(read, lambda: self._catalog.found_facts(filter, wanted, model))
        return found._replace(facts={seq: _own(fact) for seq, fact in found.facts.items()})

    def _of_one_state(self, read: Callable[[], _A], read_directly: Callable[[], _A]) -> _A:
        """What `read` answers if nobody writes meanwhile, else what `read_directly` does at once."""
        for _ in range(_MAX_TRIES):
            with self._lock:
                token = self._catalog.change_token()
                if token != self._token:
                    self._clear()
                    self._token = token
                self._has_asked = False
                answer = read()
                if not self._has_asked or self._catalog.change_token() == token:
                    return answer
                self._token = None
        return read_directly()


def _own(fact: Fact) -> Fact:
    """A copy that shares nothing that can be changed. (`dataclasses.replace` takes three times as long.)"""
    metadata = copy.deepcopy(fact.metadata) if fact.metadata else {}
    return Fact(
        fact.id,
        fact.seq,
        fact.scope,
        fact.text,
        fact.speaker,
        fact.said_at,
        fact.created_at,
        fact.updated_at,
        metadata,
        fact.expires_at,
        fact.happened_at,
        fact.block,
    )
