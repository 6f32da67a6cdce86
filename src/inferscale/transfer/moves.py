"""Facts of a memory → records, and facts → a memory, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from inferscale.catalog import Imported
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.transfer.records import record_of
from inferscale.transfer.sources import Item

_EXPORT_BATCH = 1000
DEFAULT_BATCH = 256


def export_facts(memory: Memory, scope: Scope, *, with_history: bool = False) -> Iterator[dict[str, Any]]:
    """A JSON object for every fact under `scope` (everybody's for an empty one), in the order of storage.

    Core blocks are among them, what has expired is not. with_history: also former texts, and at the end facts
    that are no longer so. Facts that are added or deleted meanwhile may or
    may not be among them.
    """
    after = 0
    while batch := memory.catalog.stored_facts(scope, _EXPORT_BATCH, after):
        for stored in batch:
            if not stored.fact.has_expired(time.time()):
                yield record_of(stored, with_history)
        after = batch[-1].fact.seq
    after_id = ""
    while with_history and (batch := memory.catalog.past_facts(scope, _EXPORT_BATCH, after_id)):
        yield from (record_of(stored, with_history) for stored in batch)
        after_id = batch[-1].fact.id


def import_facts(
    memory: Memory,
    items: Iterable[Item],
    *,
    replaces: bool = False,
    batch_size: int = DEFAULT_BATCH,
    progress: Callable[[Imported, Item], None] | None = None,
) -> Imported:
    """Store facts with the ids and times that they have, `batch_size` at a time: all of a batch or none.

    A fact whose id or core block is there already is passed over; replaces: it takes that one's place. So
    an import that was interrupted can be run again. progress: called after each batch, with all that is
    done so far and the last item. Where an item cannot be read, the batches before it stay stored.
    """
    done = Imported(0, 0, 0)
    batch: list[Item] = []

    def store() -> None:
        nonlocal done
        new = memory.import_facts([item.stored for item in batch], replaces=replaces)
        done = done.plus(new)
        if progress is not None:
            progress(done, batch[-1])
        batch.clear()

    for item in items:
        batch.append(item)
        if len(batch) >= batch_size:
            store()
    if batch:
        store()
    return done
