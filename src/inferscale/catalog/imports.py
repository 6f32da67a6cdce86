"""Facts as they were in another catalog, with id, times and history, inside the caller's transaction.

A fact whose id is known already, or whose core block is taken, is a duplicate: it is passed over, or
takes the place of what is there. Knows nothing of files and of vectors' content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import changes as _changes
from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.results import ScopeEpoch
from inferscale.catalog.sql import TEXTS, Connection
from inferscale.dates import read_time
from inferscale.facts import Fact, Scope


class Revision(NamedTuple):
    """A former text of a fact, and the Unix time at which another replaced it."""

    text: str
    replaced_at: float


class Ended(NamedTuple):
    """Until when a fact was so (Unix time), the id of the one that took its place, if any, and why."""

    until: float
    successor: str | None = None
    reason: str | None = None


class StoredFact(NamedTuple):
    """A fact and its former texts, oldest first; ended: of one that is no longer so.

    An import gives it a sequence number of its own.
    """

    fact: Fact
    revisions: tuple[Revision, ...] = ()
    ended: Ended | None = None

    @property
    def has_vector(self) -> bool:
        """Whether it can be found."""
        return self.fact.block is None and self.ended is None


class Imported(NamedTuple):
    """How many facts of an import were new, took another's place and were passed over.

    keys, epochs: as of a deletion, of what was replaced.
    """

    num_added: int
    num_replaced: int
    num_skipped: int
    keys: tuple[str, ...] = ()
    epochs: tuple[ScopeEpoch, ...] = ()

    def plus(self, other: Imported) -> Imported:
        """Both together, `other` the later one."""
        return Imported(
            self.num_added + other.num_added,
            self.num_replaced + other.num_replaced,
            self.num_skipped + other.num_skipped,
            (*self.keys, *other.keys),
            (*self.epochs, *other.epochs),
        )


def with_revisions(connection: Connection, facts: Sequence[Fact]) -> list[StoredFact]:
    """The facts with their former texts."""
    if not facts:
        return []
    found: dict[int, list[Revision]] = {}
    for seq, text, replaced_at in connection.execute(
        "SELECT fact, text, replaced_at FROM revisions WHERE fact BETWEEN ? AND ? ORDER BY fact, number",
        (min(fact.seq for fact in facts), max(fact.seq for fact in facts)),
    ):
        found.setdefault(seq, []).append(Revision(text, replaced_at))
    return [StoredFact(fact, tuple(found.get(fact.seq, ()))) for fact in facts]


def past_facts(connection: Connection, filter: Scope, limit: int, after: str) -> list[StoredFact]:
    """Facts under `filter` that are no longer so, with ids above `after`, by id."""
    where, values = _rows.covered(filter)
    found = connection.execute(
        "SELECT p.id, s.user_id, s.agent_id, s.run_id, p.text, p.speaker, p.said_at, p.created_at, "
        "p.revisions, p.until, p.successor, p.reason FROM past p JOIN scopes s ON s.id = p.scope "
        f"WHERE p.scope IN (SELECT id FROM scopes WHERE {where}) AND p.id > ? ORDER BY p.id LIMIT ?",
        (*values, after, limit),
    ).fetchall()
    return [
        StoredFact(
            Fact(fact_id, 0, Scope(*ids), text, speaker, said_at, created_at, created_at),
            tuple(Revision(*revision) for revision in json.loads(revisions)),
            Ended(until, successor, reason),
        )
        for fact_id, *ids, text, speaker, said_at, created_at, revisions, until, successor, reason in found
    ]


def known_ids(connection: Connection, fact_ids: Iterable[str]) -> set[str]:
    """Those of the ids that a fact has, or had before it was retired."""
    wanted = json.dumps(list(fact_ids))
    known = f"SELECT id FROM facts WHERE id IN {TEXTS} UNION ALL SELECT id FROM past WHERE id IN {TEXTS}"
    return {row[0] for row in connection.execute(known, (wanted, wanted)).fetchall()}


def import_facts(
    connection: Connection,
    stored: Sequence[StoredFact],
    vectors: NDArray[np.float32],
    replaces: bool,
) -> Imported:
    """Store facts in order; what is replaced is deleted. vectors: float32 [n, dim], of those with one."""
    embedder = _vectors.fitting_embedder(connection, vectors, sum(item.has_vector for item in stored))
    rows = iter(vectors)
    num_added = num_replaced = num_skipped = 0
    keys: dict[str, None] = {}
    epochs: dict[object, ScopeEpoch] = {}
    for item in stored:
        vector = next(rows) if item.has_vector else None
        code = _rows.scope_code(connection, item.fact.scope)
        others = _in_its_place(connection, item.fact, code)
        is_retired = not others and bool(known_ids(connection, [item.fact.id]))
        if (others or is_retired) and not replaces:
            num_skipped += 1
            continue
        for other in others:
            deletion = _changes.delete(connection, other.id)
            keys.update(dict.fromkeys(deletion.keys))
            epochs.update({epoch.scope: epoch for epoch in deletion.epochs})
        connection.execute("DELETE FROM past WHERE id = ?", (item.fact.id,))
        if item.ended is not None:
            _insert_past(connection, item, item.ended, code)
        else:
            seq = _insert(connection, item, code, _place(item.fact, others))
            if vector is not None:
                _vectors.store(connection, embedder, seq, vector)
        if others or is_retired:
            num_replaced += 1
        else:
            num_added += 1
    return Imported(num_added, num_replaced, num_skipped, tuple(keys), tuple(epochs.values()))


def _in_its_place(connection: Connection, fact: Fact, code: int) -> list[Fact]:
    """The fact with its id, and the one that its block names."""
    return _rows.select_facts(
        connection, "WHERE f.id = ? OR (f.scope = ? AND f.block = ?)", fact.id, code, fact.block
    )


def _place(fact: Fact, others: Sequence[Fact]) -> int | None:
    """The sequence number of the fact that is replaced. Its removal is noted as a change: readers of vectors
    find a fact there still, and read its vector again (`catalog/vectors.py`). A core block has none."""
    same = [
        other for other in others if other.id == fact.id and (other.block is None) == (fact.block is None)
    ]
    return same[0].seq if same else None


def _insert(connection: Connection, item: StoredFact, code: int, seq: int | None) -> int:
    """seq: a place of its own for None."""
    fact, revisions, _ = item
    updated_at = fact.updated_at if fact.updated_at != fact.created_at or revisions else None
    said = (fact.text, fact.speaker, fact.said_at, fact.created_at, updated_at)
    rest = (_rows.metadata_json(fact.metadata), fact.expires_at, read_time(fact.said_at), fact.block)
    place, number = ("", ()) if seq is None else (", seq", (seq,))
    values = (fact.id, code, *said, *rest, *number)
    stored_seq = connection.insert(
        "INSERT INTO facts (id, scope, text, speaker, said_at, created_at, updated_at, metadata, "
        f"expires_at, happened_at, block{place}) VALUES ({', '.join('?' * len(values))})",
        values,
        "seq",
    )
    connection.executemany(
        "INSERT INTO revisions (fact, number, text, replaced_at) VALUES (?, ?, ?, ?)",
        [(stored_seq, number, *revision) for number, revision in enumerate(revisions)],
    )
    return stored_seq


def _insert_past(connection: Connection, item: StoredFact, ended: Ended, code: int) -> None:
    fact = item.fact
    connection.execute(
        "INSERT INTO past "
        "(id, scope, text, speaker, said_at, created_at, revisions, until, successor, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(fact.id, code, fact.text, fact.speaker, fact.said_at, fact.created_at),
            *(json.dumps(item.revisions), *ended),
        ),
    )
