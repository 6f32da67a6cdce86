"""Which KV to load ahead of requests: of given facts, and of a scope's core blocks and newest facts.

Only what lies in a tier below the pool; what is nowhere is encoded when a chat misses it. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferscale.chat_plan import digest_of
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.plan import Order
from inferscale.runtime.residency import ResidencyClient

NUM_NEWEST = 200
"""Facts of a scope that are loaded when its user begins."""


def prefetch_order(
    encoder: Encoder,
    residency: ResidencyClient,
    scope: Scope,
    fact_ids: Iterable[str] = (),
    *,
    with_newest: bool = False,
) -> Order | None:
    """The order that loads these facts, then core blocks and the newest facts; None where nothing is below.

    The epoch is read before the keys: where something is deleted meanwhile, the order loads nothing. Raises
    EngineError where the engine does not answer.
    """
    catalog = encoder.catalog
    epoch = catalog.epoch(scope)
    ids = list(fact_ids)
    if with_newest:
        ids += [block.id for block in catalog.blocks(scope).blocks]
        ids += catalog.newest_ids(scope, NUM_NEWEST)
    found = encoder.keys(ids)
    keys = list(dict.fromkeys(found[fact_id] for fact_id in ids if fact_id in found))
    below = [key for key, flag in zip(keys, residency.below(keys), strict=True) if flag]
    return Order("prefetch", tuple(below), ((digest_of(scope), epoch),)) if below else None
