"""What the catalog answers with, where facts and numbers alone do not say it all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.facts import Fact, Scope


class ScopeEpoch(NamedTuple):
    """A scope, as a filter, and its epoch."""

    scope: Scope
    epoch: int


class Deletion(NamedTuple):
    """What a deletion took away.

    fact: as it was. keys: invalidated and to be forgotten by the engine, of all models. epochs:
    the new epoch of every filter that covered the fact.
    """

    fact: Fact
    keys: tuple[str, ...]
    epochs: tuple[ScopeEpoch, ...]


class ScopeDeletion(NamedTuple):
    """What the deletion of a whole scope took away; keys and epochs as in `Deletion`, of all facts."""

    num_facts: int
    keys: tuple[str, ...]
    epochs: tuple[ScopeEpoch, ...]


class Update(NamedTuple):
    """What an update left and took away.

    fact: as it is now. keys and epochs as in `Deletion`, for everything that has seen the old
    wording; both are empty where the wording stayed, and the engine then has nothing to forget.
    """

    fact: Fact
    keys: tuple[str, ...]
    epochs: tuple[ScopeEpoch, ...]


class FoundFacts(NamedTuple):
    """Facts as one read of the catalog saw them.

    facts: by sequence number. keys: fact id → key of its KV, for those encoded for the model asked
    for. epoch: of the filter.
    """

    facts: dict[int, Fact]
    keys: dict[str, str]
    epoch: int


class VectorMark(NamedTuple):
    """How far a reader of vectors has come: the last fact and the last change of others that it knows."""

    seq: int = 0
    change: int = 0


class VectorChanges(NamedTuple):
    """Vectors stored or replaced and facts removed since a mark, in storage order.

    vectors: float32 [n, dim], as they are now. is_complete: whether nothing newer exists; otherwise
    ask again.
    """

    mark: VectorMark
    fact_seqs: list[int]
    scope_codes: list[int]
    vectors: NDArray[np.float32]
    removed_seqs: list[int]
    is_complete: bool
