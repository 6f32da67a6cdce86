"""What the catalog answers with, where facts and numbers alone do not say it all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.facts import ChangeEvent, Fact, Scope, SearchHit


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


class ScopeMark(NamedTuple):
    """How far an exact scope is: it says the same as long as its epoch and its last fact are the same."""

    code: int
    epoch: int
    last_seq: int
    num_facts: int


class StoredText(NamedTuple):
    """What a fact says."""

    seq: int
    text: str
    speaker: str | None
    said_at: str | None


class FoundBlocks(NamedTuple):
    """Core blocks as one read of the catalog saw them; keys and epoch as in `FoundFacts`."""

    blocks: tuple[Fact, ...]
    keys: dict[str, str]
    epoch: int


class InferMark(NamedTuple):
    """An exact scope says the same as long as this is the same."""

    epoch: int
    last_seq: int


class SimilarFacts(NamedTuple):
    """Facts of an exact scope, most similar first, and its mark, as one read saw them."""

    hits: tuple[SearchHit, ...]
    mark: InferMark


class Applied(NamedTuple):
    """What became of a decision. fact: which says it now. is_new: whether it was stored for it. retired: what
    ended; its keys and epochs go to the engine."""

    fact: Fact | None
    is_new: bool
    retired: Deletion | None


class Added(list[Fact]):
    """The facts that were stored, in order, and what else became of an addition.

    events: one for each fact that was extracted or turn that was stored, also where nothing was. keys,
    epochs: as of a deletion, of what was superseded or ended. warning: why turns were stored as they were
    said, where facts were to be extracted.
    """

    def __init__(
        self,
        facts: Iterable[Fact] = (),
        events: Iterable[ChangeEvent] = (),
        keys: Iterable[str] = (),
        epochs: Iterable[ScopeEpoch] = (),
        warning: str | None = None,
    ) -> None:
        super().__init__(facts)
        self.events = tuple(events)
        self.keys = tuple(keys)
        self.epochs = tuple(epochs)
        self.warning = warning
