"""The encode passes of a catalog: which facts each one held, and the keys of what it captured.

Every method is one transaction. Contracts: `passes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.sql import Database
from inferscale.errors import UnknownFact
from inferscale.facts import Scope


class PassRecords:
    """`Catalog.passes`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self,
        model: str,
        scope: Scope,
        window_ids: Sequence[str],
        captured_ids: Sequence[str],
        keys: Sequence[str],
        directions: int = 1,
        neighbours: int = 1,
    ) -> int:
        """Store an encode pass over facts of one exact scope and return its id.

        keys: of the captured facts, in their order. Recorded before its KV is captured, so that a
        deletion in between finds the keys. Raises UnknownFact when one of the facts was deleted
        meanwhile or belongs to another scope, InvalidInput for a fact that stands there twice.
        """
        new = NewPass(window_ids, captured_ids, keys, directions, neighbours)
        with self._database.write() as connection:
            code = _rows.scope_code(connection, scope)
            return _passes.record_pass(connection, model, code, new)

    def record_all(
        self, model: str, scope: Scope, passes: Sequence[NewPass], epoch: int | None = None
    ) -> list[int | None]:
        """Store many passes in one transaction, each as by `record`; their ids in order.

        epoch: of `scope`, from before the facts' texts were read. None stands for a pass of which a
        fact was deleted meanwhile: the others are stored all the same. Where the epoch has risen since,
        none is stored: a fact may say something else by now, and the keys are those of its old text.
        """
        pass_ids: list[int | None] = []
        with self._database.write() as connection:
            if epoch is not None and _rows.read_epoch(connection, scope) != epoch:
                return [None] * len(passes)
            code = _rows.scope_code(connection, scope)
            for new in passes:
                try:
                    pass_ids.append(_passes.record_pass(connection, model, code, new))
                except UnknownFact:
                    pass_ids.append(None)
        return pass_ids

    def encodings(self, model: str, fact_ids: Iterable[str]) -> dict[str, Encoding]:
        """Fact id → its newest encoding for this model, of a pass of two directions where it has one that is
        done, and of one that is not where it has no other; facts without any are left out."""
        with self._database.read() as connection:
            return _passes.current_encodings(connection, model, fact_ids)

    def by_ids(self, pass_ids: Iterable[int]) -> dict[int, EncodePass]:
        """Pass id → pass; passes that do not exist (any more) are left out."""
        with self._database.read() as connection:
            return _passes.read_passes(connection, pass_ids)

    def mark_done(self, model: str, keys: Sequence[str]) -> None:
        """The KV under these keys is captured: from now on passes of two directions that have no other keys
        count more than what their facts had before."""
        with self._database.read() as connection:
            if not _passes.to_be_done(connection, model, keys):
                return
        with self._database.write() as connection:
            _passes.mark_done(connection, _passes.to_be_done(connection, model, keys))

    def superseded_keys(self, model: str, keys: Iterable[str]) -> list[str]:
        """Keys under which facts were encoded before a pass of two directions that is done gave them one of
        `keys`."""
        with self._database.read() as connection:
            return _passes.superseded_keys(connection, model, keys)

    def known_keys(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that a fact has, or had before it was encoded anew."""
        with self._database.read() as connection:
            return _passes.known_keys(connection, keys)

    def attended_to(self, key: str) -> list[str]:
        """Ids of all facts that the KV under `key` has seen, its own fact included."""
        with self._database.read() as connection:
            return _passes.attended_to(connection, key)

    def keys_attending(self, fact_id: str) -> list[str]:
        """All keys, of any model, whose KV has seen this fact: its own, and those captured behind it or in a
        pass of two directions with it."""
        with self._database.read() as connection:
            found = connection.execute("SELECT seq FROM facts WHERE id = ?", (fact_id,)).fetchone()
            return [] if found is None else _passes.keys_attending(connection, found[0])
