"""Changing and removing stored facts, inside the caller's transaction.

Every KV that has seen what is changed or removed is invalidated by the same transaction, and the
epochs of all filters over it rise: a crash leaves all of a change or nothing. A deletion takes the
history along, for it holds the fact's former texts, and the facts whose place it took. Knows nothing of
tokens and KV.

A fact that is no longer so is *retired*: for everything but a history it is deleted. It moves to the table
`past` with the time until which it held, so that whatever reads `facts` need not know of it.

**An update keeps the fact's sequence number.** A new one would let other processes learn of the new
vector as of a deletion and an addition, but the number is also the order in which things were said:
a corrected turn would move behind its conversation and be encoded with other turns before it, and
who pages through a scope and changes what he reads would meet the same facts again and never come
to an end. So the number goes into the same log as that of a deleted fact, and a reader that finds
the fact still there reads its vector again (`catalog/vectors.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.results import Deletion, ScopeDeletion, ScopeEpoch, Update
from inferscale.catalog.sql import NUMBERS, TEXTS, Connection
from inferscale.dates import read_time
from inferscale.errors import UnknownFact
from inferscale.facts import Fact, HistoryEvent, Scope, Turn, Wording


def is_same(fact: Fact, turn: Turn) -> bool:
    """Whether an update to `turn` would change nothing. Raises InvalidInput for metadata that is not JSON."""
    # Compared as JSON: in Python 1, 1.0 and True are equal.
    metadata = _rows.metadata_json(turn.metadata)
    return Wording.of(turn) == Wording.of(fact) and metadata == _rows.metadata_json(fact.metadata)


def update(
    connection: Connection, fact: Fact, turn: Turn, vector: NDArray[np.float32] | None
) -> Update | None:
    """Change `fact` to `turn`; None where it is no longer as given. Raises UnknownFact where it is gone.

    vector: float32 [dim], of the new wording; not used where the wording stays, and by no core block.
    """
    if read_fact(connection, fact.id) != fact:
        return None
    now = max(time.time(), fact.updated_at)  # a clock that was set back must not turn history round
    forgotten = Update(fact, (), ())
    if Wording.of(turn) != Wording.of(fact):
        keys = tuple(_passes.invalidate(connection, fact.seq))
        if fact.block is None:
            assert vector is not None
            embedder = _vectors.fitting_embedder(connection, vector.reshape(1, -1), 1)
            _vectors.store(connection, embedder, fact.seq, vector)
            _vectors.note_change(connection, fact.seq)
        forgotten = Update(fact, keys, _raised_epochs(connection, {_code(connection, fact): fact.scope}))
    connection.execute(
        "INSERT INTO revisions (fact, number, text, replaced_at) "
        "SELECT ?, count(*), ?, ? FROM revisions WHERE fact = ?",
        (fact.seq, fact.text, now, fact.seq),
    )
    metadata = _rows.metadata_json(turn.metadata)
    connection.execute(
        "UPDATE facts SET text = ?, speaker = ?, said_at = ?, metadata = ?, updated_at = ?, happened_at = ? "
        "WHERE seq = ?",
        (turn.text, turn.speaker, turn.said_at, metadata, now, read_time(turn.said_at), fact.seq),
    )
    changed = replace(
        fact,
        text=turn.text,
        speaker=turn.speaker,
        said_at=turn.said_at,
        updated_at=now,
        metadata=json.loads(metadata),
        happened_at=read_time(turn.said_at),
    )
    return forgotten._replace(fact=changed)


def delete(connection: Connection, fact_id: str) -> Deletion:
    """Remove a fact, its vector, its history and every encoding that has seen it. Raises UnknownFact."""
    deletion = _remove(connection, read_fact(connection, fact_id))
    _remove_past(connection, [fact_id])
    return deletion


def delete_facts(connection: Connection, facts: Sequence[Fact]) -> ScopeDeletion:
    """Remove these facts, read in this transaction, as `delete` does."""
    scopes = {_code(connection, fact): fact.scope for fact in facts}
    keys = [key for fact in facts for key in _passes.invalidate(connection, fact.seq)]
    epochs = _raised_epochs(connection, scopes)
    seqs = json.dumps([fact.seq for fact in facts])
    connection.execute(f"INSERT INTO changes (fact) SELECT value FROM {NUMBERS} AS given", (seqs,))
    connection.execute(f"DELETE FROM facts WHERE seq IN {NUMBERS}", (seqs,))
    _remove_past(connection, [fact.id for fact in facts])
    return ScopeDeletion(len(facts), tuple(dict.fromkeys(keys)), epochs)


def _remove_past(connection: Connection, fact_ids: Sequence[str]) -> None:
    """Remove what these facts superseded, and what that did."""
    connection.execute(
        f"WITH RECURSIVE gone (id) AS (SELECT value FROM {TEXTS} AS given UNION SELECT p.id FROM past p "
        "JOIN gone g ON p.successor = g.id) DELETE FROM past WHERE id IN (SELECT id FROM gone)",
        (json.dumps(list(fact_ids)),),
    )


def retire(connection: Connection, fact_id: str, successor: str | None, reason: str | None) -> Deletion:
    """Remove a fact as `delete` does, but keep what it said for its history. Raises UnknownFact."""
    fact = read_fact(connection, fact_id)
    if successor is not None:
        read_fact(connection, successor)
    replaced = connection.execute(
        "SELECT text, replaced_at FROM revisions WHERE fact = ? ORDER BY number", (fact.seq,)
    ).fetchall()
    now = max(time.time(), fact.updated_at)
    connection.execute(
        "INSERT INTO past "
        "(id, scope, text, speaker, said_at, created_at, revisions, until, successor, reason) "
        "SELECT id, scope, text, speaker, said_at, created_at, ?, ?, ?, ? FROM facts WHERE seq = ?",
        (json.dumps(replaced), now, successor, reason, fact.seq),
    )
    return _remove(connection, fact)


def _remove(connection: Connection, fact: Fact) -> Deletion:
    keys = _passes.invalidate(connection, fact.seq)
    epochs = _raised_epochs(connection, {_code(connection, fact): fact.scope})
    connection.execute("DELETE FROM facts WHERE seq = ?", (fact.seq,))
    _vectors.note_change(connection, fact.seq)
    return Deletion(fact, tuple(keys), epochs)


def delete_all(connection: Connection, filter: Scope) -> ScopeDeletion:
    """Remove all facts under `filter` as `delete` does; none where it covers none."""
    where, values = _rows.covered(filter)
    connection.execute(f"DELETE FROM past WHERE scope IN (SELECT id FROM scopes WHERE {where})", values)
    found = connection.execute(
        f"SELECT id, user_id, agent_id, run_id FROM scopes WHERE {where} "
        "AND EXISTS (SELECT 1 FROM facts WHERE facts.scope = scopes.id)",
        values,
    ).fetchall()
    scopes = {code: Scope(*ids) for code, *ids in found}
    codes = json.dumps(list(scopes))
    keys = _passes.invalidate_all(connection, scopes)
    epochs = _raised_epochs(connection, scopes)
    of_these = f"FROM facts WHERE scope IN {NUMBERS}"
    connection.execute(f"INSERT INTO changes (fact) SELECT seq {of_these} ORDER BY seq", (codes,))
    num_facts = connection.execute(f"DELETE {of_these}", (codes,)).rowcount
    return ScopeDeletion(num_facts, tuple(keys), epochs)


def history(connection: Connection, fact_id: str) -> list[HistoryEvent]:
    """What became of a fact, oldest first; of a retired one too. Raises UnknownFact.

    Its addition is not stored: the first text that was replaced, or else the text of today, was added.
    """
    past = connection.execute(
        "SELECT p.text, p.created_at, p.revisions, p.until, p.reason, coalesce(f.text, q.text, p.text) "
        "FROM past p LEFT JOIN facts f ON f.id = p.successor LEFT JOIN past q ON q.id = p.successor "
        "WHERE p.id = ?",
        (fact_id,),
    ).fetchone()
    if past is not None:
        text, created_at, revisions, until, reason, successor = past
        events = _said(created_at, json.loads(revisions), text)
        events.append(HistoryEvent("END", successor, text, until, reason))
    else:
        fact = read_fact(connection, fact_id)
        replaced = connection.execute(
            "SELECT text, replaced_at FROM revisions WHERE fact = ? ORDER BY number", (fact.seq,)
        ).fetchall()
        events = _said(fact.created_at, replaced, fact.text)
    replacing = connection.execute(
        "SELECT text, until, reason FROM past WHERE successor = ? ORDER BY until, id", (fact_id,)
    ).fetchall()
    first = events[0].text
    events += [HistoryEvent("SUPERSEDE", first, text, until, reason) for text, until, reason in replacing]
    return [events[0], *sorted(events[1:], key=lambda event: event.at)]


def _said(created_at: float, replaced: Iterable[tuple[str, float]], text: str) -> list[HistoryEvent]:
    """Additions and updates; replaced: former texts and until when, oldest first."""
    former = list(replaced)
    texts = [*(previous for previous, _ in former), text]
    events = [HistoryEvent("ADD", texts[0], None, created_at)]
    for (previous, at), new in zip(former, texts[1:], strict=True):
        events.append(HistoryEvent("UPDATE", new, previous, at))
    return events


def read_fact(connection: Connection, fact_id: str) -> Fact:
    """The fact with this id. Raises UnknownFact."""
    found = _rows.select_facts(connection, "WHERE f.id = ?", fact_id)
    if not found:
        raise UnknownFact(f"no fact has the id {fact_id!r}; it may have been deleted already.")
    return found[0]


def _code(connection: Connection, fact: Fact) -> int:
    """Of the exact scope of a stored fact."""
    return int(connection.execute("SELECT scope FROM facts WHERE seq = ?", (fact.seq,)).fetchone()[0])


def _raised_epochs(connection: Connection, scopes: Mapping[int, Scope]) -> tuple[ScopeEpoch, ...]:
    """Raise the epochs of exact scopes, by code; the new one of every filter that covers any of them."""
    connection.execute(
        f"UPDATE scopes SET epoch = epoch + 1 WHERE id IN {NUMBERS}",
        (json.dumps(list(scopes)),),
    )
    filters = dict.fromkeys(filter for scope in scopes.values() for filter in _rows.filters_over(scope))
    return tuple(_rows.read_epochs(connection, filters))
