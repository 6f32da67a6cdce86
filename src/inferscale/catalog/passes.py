"""Which facts each key attended to: encode passes and their encodings.

An encode pass is an ordered list of facts of one exact scope. The first `num_window` are the
window (computed, thrown away); each of the rest is captured under a key and *attends to* every
fact before it in the pass, and to itself. Deleting a fact therefore invalidates its own keys and
those of all captured facts behind it; so does changing what it says. A pass of two directions has no
window; each of its facts attends to all of them, and goes with any of them. It is *done* once all of its KV
was captured; until then any other encoding of its facts counts more. Knows nothing of tokens and KV.

All functions work inside the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inferscale.catalog.sql import NUMBERS, TEXTS, Connection
from inferscale.errors import InvalidInput, UnknownFact
from inferscale.facts import Scope


class Encoding(NamedTuple):
    """Where a fact's KV comes from: its key, and its place in the pass that computes it.

    `position` counts the facts of the pass from 0, window included.
    """

    key: str
    pass_id: int
    position: int


class EncodePass(NamedTuple):
    """One encode pass, as it has to be run again when its KV was lost.

    fact_ids: all facts in order, `num_window` facts of window first. keys: fact id → key, for
    the captured facts. directions: 2 where it runs in the other one as well, in which `neighbours` facts keep
    their order.
    """

    id: int
    model: str
    scope: Scope
    fact_ids: tuple[str, ...]
    num_window: int
    keys: dict[str, str]
    directions: int = 1
    neighbours: int = 1


class NewPass(NamedTuple):
    """A pass to be stored. keys: of the captured facts, in their order. directions: 1 or 2."""

    window_ids: Sequence[str]
    captured_ids: Sequence[str]
    keys: Sequence[str]
    directions: int = 1
    neighbours: int = 1


_RANK = "p.directions * p.is_done"
"""Of an encoding among those of its fact, by its pass `p`; the newest of the highest counts."""


class _Row(NamedTuple):
    """A fact in a pass; `key` is None in the window."""

    fact_seq: int
    key: str | None


def record_pass(connection: Connection, model: str, scope_code: int, new: NewPass) -> int:
    """Store a pass and return its id; the same pass as the current one of its facts is not stored twice, nor
    one of two directions that is to be done yet.

    Raises UnknownFact when a fact does not exist (any more) in this exact scope, InvalidInput
    when a fact stands twice in the pass, nothing is captured, keys are missing, or a pass of two
    directions has a window; nothing of the pass is stored then.
    """
    window_ids, captured_ids, keys, directions, neighbours = new
    if not captured_ids or len(captured_ids) != len(keys):
        raise InvalidInput(
            f"a pass captures {len(captured_ids)} facts under {len(keys)} keys; "
            "it needs at least one, each with a key."
        )
    if directions not in (1, 2) or (directions == 2 and window_ids):
        raise InvalidInput(
            f"a pass has {directions} directions and {len(window_ids)} facts of window; "
            "allowed are 1, and 2 without a window."
        )
    fact_ids = [*window_ids, *captured_ids]
    if len(set(fact_ids)) != len(fact_ids):
        raise InvalidInput("a fact stands twice in one encode pass; each may stand there once.")
    # The plus keeps SQLite from the index on scopes: it would read every fact of the scope for every pass.
    found = connection.execute(
        f"SELECT id, seq FROM facts WHERE +scope = ? AND id IN {TEXTS}",
        (scope_code, json.dumps(fact_ids)),
    )
    seqs: dict[str, int] = dict(found.fetchall())
    missing = [fact_id for fact_id in fact_ids if fact_id not in seqs]
    if missing:
        raise UnknownFact(
            f"{len(missing)} of the {len(fact_ids)} facts of a pass do not exist in its scope, the first is "
            f"{missing[0]}. They were deleted meanwhile, or belong to another scope: forget the keys of this "
            "pass and encode anew."
        )
    rows = [_Row(seqs[fact_id], None) for fact_id in window_ids]
    rows += [_Row(seqs[fact_id], key) for fact_id, key in zip(captured_ids, keys, strict=True)]
    find = _current_pass_with if directions == 1 else _mixed_pass_with
    same = find(connection, model, rows)
    if same is not None:
        return same
    return _insert_pass(connection, model, scope_code, rows, directions, neighbours)


def _current_pass_with(connection: Connection, model: str, rows: list[_Row]) -> int | None:
    """The one-way pass with exactly these rows, if it is the newest of each fact that it captures."""
    captured = [row.fact_seq for row in rows if row.key is not None]
    newest = connection.execute(
        f"SELECT max(pass) FROM encodings WHERE model = ? AND fact IN {NUMBERS} GROUP BY fact",
        (model, json.dumps(captured)),
    ).fetchall()
    if len(newest) != len(captured) or len(set(newest)) != 1:
        return None
    pass_id = int(newest[0][0])
    found = connection.execute("SELECT directions FROM passes WHERE id = ?", (pass_id,)).fetchone()
    return pass_id if found == (1,) and _rows(connection, pass_id) == rows else None


def _mixed_pass_with(connection: Connection, model: str, rows: list[_Row]) -> int | None:
    """The two-way pass with exactly these rows, if none of its facts has a newer one that is done."""
    found = connection.execute(
        "SELECT p.id FROM encodings e JOIN passes p ON p.id = e.pass WHERE e.model = ? AND e.fact = ? "
        "AND e.key = ? AND p.directions = 2 ORDER BY p.id DESC",
        (model, rows[0].fact_seq, rows[0].key),
    )
    pass_id = next((id for (id,) in found.fetchall() if _rows(connection, id) == rows), None)
    newer = connection.execute(
        "SELECT 1 FROM encodings e JOIN passes p ON p.id = e.pass WHERE e.model = ? AND e.pass > ? "
        f"AND {_RANK} = 2 AND e.fact IN {NUMBERS}",
        (model, pass_id, json.dumps([row.fact_seq for row in rows])),
    )
    return pass_id if newer.fetchone() is None else None


def _insert_pass(
    connection: Connection,
    model: str,
    scope_code: int,
    rows: list[_Row],
    directions: int,
    neighbours: int,
) -> int:
    num_window = sum(row.key is None for row in rows)
    pass_id = connection.insert(
        "INSERT INTO passes (model, scope, num_window, directions, neighbours, is_done) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (model, scope_code, num_window, directions, neighbours, int(directions == 1)),
        "id",
    )
    connection.executemany(
        "INSERT INTO pass_facts (pass, position, fact) VALUES (?, ?, ?)",
        [(pass_id, position, row.fact_seq) for position, row in enumerate(rows)],
    )
    connection.executemany(
        "INSERT INTO encodings (model, fact, key, pass, position) VALUES (?, ?, ?, ?, ?)",
        [(model, row.fact_seq, row.key, pass_id, i) for i, row in enumerate(rows) if row.key is not None],
    )
    return pass_id


def _rows(connection: Connection, pass_id: int) -> list[_Row]:
    found = connection.execute(
        "SELECT p.fact, e.key FROM pass_facts p LEFT JOIN encodings e USING (pass, position) "
        "WHERE pass = ? ORDER BY position",
        (pass_id,),
    )
    return [_Row(*row) for row in found.fetchall()]


def current_encodings(connection: Connection, model: str, fact_ids: Iterable[str]) -> dict[str, Encoding]:
    """Fact id → its newest encoding for this model, of a pass of two directions where it has one that is
    done, and of one that is not where it has no other; facts without any are left out."""
    found = connection.execute(
        "SELECT f.id, e.key, e.pass, e.position FROM facts f JOIN encodings e ON e.fact = f.seq "
        "JOIN passes p ON p.id = e.pass "
        f"WHERE e.model = ? AND f.id IN {TEXTS} ORDER BY {_RANK}, e.pass",
        (model, json.dumps(list(fact_ids))),
    )
    return {fact_id: Encoding(key, pass_id, position) for fact_id, key, pass_id, position in found.fetchall()}


def current_keys(connection: Connection, model: str, fact_seqs: Iterable[int]) -> dict[int, str]:
    """Sequence number of a fact → key of its encoding for this model as in `current_encodings`, if any."""
    found = connection.execute(
        "SELECT e.fact, e.key FROM encodings e JOIN passes p ON p.id = e.pass "
        f"WHERE e.model = ? AND e.fact IN {NUMBERS} ORDER BY {_RANK}, e.pass",
        (model, json.dumps(list(fact_seqs))),
    )
    return dict(found.fetchall())


def read_passes(connection: Connection, pass_ids: Iterable[int]) -> dict[int, EncodePass]:
    """Pass id → pass; passes that do not exist (any more) are left out."""
    wanted = json.dumps(list(pass_ids))
    passes = connection.execute(
        "SELECT p.id, p.model, p.num_window, p.directions, p.neighbours, s.user_id, s.agent_id, s.run_id "
        f"FROM passes p JOIN scopes s ON s.id = p.scope WHERE p.id IN {NUMBERS} ORDER BY p.id",
        (wanted,),
    ).fetchall()
    members = connection.execute(
        "SELECT pass, f.id, e.key FROM pass_facts p JOIN facts f ON f.seq = p.fact "
        "LEFT JOIN encodings e USING (pass, position) "
        f"WHERE pass IN {NUMBERS} ORDER BY pass, position",
        (wanted,),
    ).fetchall()
    fact_ids: dict[int, list[str]] = {}
    keys: dict[int, dict[str, str]] = {}
    for pass_id, fact_id, key in members:
        fact_ids.setdefault(pass_id, []).append(fact_id)
        if key is not None:
            keys.setdefault(pass_id, {})[fact_id] = key
    return {
        pass_id: EncodePass(
            pass_id,
            model,
            Scope(*scope),
            tuple(fact_ids[pass_id]),
            num_window,
            keys[pass_id],
            directions,
            neighbours,
        )
        for pass_id, model, num_window, directions, neighbours, *scope in passes
    }


def to_be_done(connection: Connection, model: str, keys: Iterable[str]) -> list[int]:
    """Passes of two directions that are not done and have no other keys than these."""
    captured = json.dumps(list(keys))
    found = connection.execute(
        "SELECT id FROM passes WHERE model = ? AND is_done = 0 "
        f"AND id IN (SELECT pass FROM encodings WHERE key IN {TEXTS}) "
        "AND NOT EXISTS (SELECT 1 FROM encodings e WHERE e.pass = passes.id "
        f"AND e.key NOT IN {TEXTS}) ORDER BY id",
        (model, captured, captured),
    )
    return [row[0] for row in found.fetchall()]


def mark_done(connection: Connection, pass_ids: Iterable[int]) -> None:
    sql = f"UPDATE passes SET is_done = 1 WHERE id IN {NUMBERS}"
    connection.execute(sql, (json.dumps(list(pass_ids)),))


def superseded_keys(connection: Connection, model: str, keys: Iterable[str]) -> list[str]:
    """Keys under which the facts of `keys` were encoded otherwise, as far as these are of passes of two
    directions that are done."""
    found = connection.execute(
        "SELECT old.key FROM encodings new JOIN passes q ON q.id = new.pass "
        "JOIN encodings old ON old.fact = new.fact AND old.model = new.model AND old.key <> new.key "
        f"JOIN passes p ON p.id = old.pass WHERE new.model = ? AND q.is_done = 1 AND {_RANK} < q.directions "
        f"AND new.key IN {TEXTS} ORDER BY old.pass, old.position",
        (model, json.dumps(list(keys))),
    )
    return list(dict.fromkeys(row[0] for row in found.fetchall()))


def known_keys(connection: Connection, keys: Sequence[str]) -> set[str]:
    """Those of the keys that any encoding has."""
    return set(keys) - set(_not_held(connection, keys))


def attended_to(connection: Connection, key: str) -> list[str]:
    """Ids of all facts that the KV under `key` has seen, its own fact included, in pass order."""
    found = connection.execute(
        "SELECT f.id FROM encodings e JOIN passes q ON q.id = e.pass JOIN pass_facts p ON p.pass = e.pass "
        "AND (p.position <= e.position OR q.directions = 2) "
        "JOIN facts f ON f.seq = p.fact WHERE e.key = ? ORDER BY p.pass, p.position",
        (key,),
    )
    return list(dict.fromkeys(row[0] for row in found.fetchall()))


def keys_attending(connection: Connection, fact_seq: int) -> list[str]:
    """All keys, of any model, whose KV has seen this fact: its own and those captured behind it, of a pass
    of two directions all."""
    found = connection.execute(
        "SELECT e.key FROM pass_facts p JOIN passes q ON q.id = p.pass JOIN encodings e ON e.pass = p.pass "
        "AND (e.position >= p.position OR q.directions = 2) WHERE p.fact = ? ORDER BY e.pass, e.position",
        (fact_seq,),
    )
    return list(dict.fromkeys(row[0] for row in found.fetchall()))


def invalidate(connection: Connection, fact_seq: int) -> list[str]:
    """Remove every encoding that has seen this fact and return the keys that nobody needs any more.

    A pass keeps the captured facts before this one; a pass that has none goes, as one of two directions
    does. A key that another
    fact with the same tokens behind the same tokens still holds is not returned.
    """
    keys = keys_attending(connection, fact_seq)
    places = connection.execute(
        "SELECT p.id, f.position, p.num_window, p.directions FROM pass_facts f "
        "JOIN passes p ON p.id = f.pass WHERE f.fact = ?",
        (fact_seq,),
    ).fetchall()
    for pass_id, position, num_window, directions in places:
        if position > num_window and directions == 1:
            connection.execute("DELETE FROM pass_facts WHERE pass = ? AND position >= ?", (pass_id, position))
        else:
            connection.execute("DELETE FROM passes WHERE id = ?", (pass_id,))
    return _not_held(connection, keys)


def invalidate_all(connection: Connection, scope_codes: Iterable[int]) -> list[str]:
    """Remove all encodings of exact scopes and return the keys that nobody needs any more.

    A pass holds facts of one exact scope only, so none is shortened: they all go.
    """
    passes = f"IN (SELECT p.pass FROM facts f JOIN pass_facts p ON p.fact = f.seq WHERE f.scope IN {NUMBERS})"
    codes = json.dumps(list(scope_codes))
    found = connection.execute(
        f"SELECT key FROM encodings WHERE pass {passes} ORDER BY pass, position", (codes,)
    )
    keys = list(dict.fromkeys(row[0] for row in found.fetchall()))
    connection.execute(f"DELETE FROM passes WHERE id {passes}", (codes,))
    return _not_held(connection, keys)


def _not_held(connection: Connection, keys: Sequence[str]) -> list[str]:
    """Those of the keys that no encoding has."""
    held = connection.execute(
        f"SELECT DISTINCT key FROM encodings WHERE key IN {TEXTS}",
        (json.dumps(keys),),
    )
    still_held = {row[0] for row in held.fetchall()}
    return [key for key in keys if key not in still_held]
