"""Where segments lie below the pool: host memory and disk. Pure bookkeeping of the scheduler side.

What several servers share lies in a third one (`pool/shared_tier`).

    pool ──save: once, with its capture──▶ host memory and disk
     ▲                                          │
     └──load: when a request waits for it───────┘   host memory first

A segment that leaves the pool is not moved: it has its copies already, so pages are given away at once.
Lookup, preparation and completion are separate steps: `find` says whether a segment can be loaded and
mutates nothing; an order reserves pages of the pool; the workers' reports commit or abandon. Each rank
answers by itself, in whichever step it is done.

A tier keeps what was loaded again before what never was, and the most recent of each (segmented LRU). No
owner, such as a user, keeps more than its share of a tier while others want room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

TierName = Literal["host", "disk", "cold"]
_PROTECTED_SHARE = 0.8
"""Of a tier, what segments that were loaded again may keep from those that never were."""


@dataclass(slots=True)
class Copy:
    """One segment in one tier. owner: whose share it counts to; is_ready: written on every rank;
    is_loading: being read, so it stays. save: number of the order that writes it; 0 for none."""

    key: str
    num_tokens: int
    size_bytes: int
    owner: str
    is_ready: bool = False
    is_protected: bool = False
    is_loading: bool = False
    save: int = 0


class Tier:
    """One lower tier. Not thread-safe, except `find`, which reads one dictionary entry.

    capacity_bytes: on each rank. max_share: of it, what one owner may hold while others want room.
    """

    def __init__(self, name: TierName, capacity_bytes: int, max_share: float = 0.5) -> None:
        self.name: TierName = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_evicted = 0
        self.num_hits = 0
        """Loads that requests asked for."""
        self.num_prefetched = 0
        """Loads ahead of requests."""
        self.load_s = 0.0
        """From the order of a load to its answer, which comes with a step; of all hits together."""
        self._max_share = max_share
        self._copies: dict[str, Copy] = {}
        # Least recently used first, of each owner: what never was loaded again, and what was.
        self._new: OrderedDict[str, Copy] = OrderedDict()
        self._protected: OrderedDict[str, Copy] = OrderedDict()
        self._protected_bytes = 0
        self._owned_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def all_keys(self) -> list[str]:
        return list(self._copies)

    def get(self, key: str) -> Copy | None:
        return self._copies.get(key)

    def find(self, key: str, num_tokens: int) -> bool:
        """Whether the segment can be loaded from here."""
        copy = self._copies.get(key)
        return copy is not None and copy.is_ready and copy.num_tokens == num_tokens

    def admit(self, copy: Copy) -> list[str] | None:
        """Make room for a copy and note it; keys of those that go for it, None where there is no room.

        An owner above its share makes room itself, also where that is more than the rest would do.
        """
        if copy.size_bytes > self.capacity_bytes * self._max_share or copy.key in self._copies:
            return None
        share = self._max_share * self.capacity_bytes
        is_greedy = self._owned_bytes.get(copy.owner, 0) + copy.size_bytes > share
        needed = self.used_bytes + copy.size_bytes - self.capacity_bytes
        victims: list[Copy] = []
        for victim in self._in_order(copy.owner if is_greedy else None):
            if needed <= 0:
                break
            victims.append(victim)
            needed -= victim.size_bytes
        if needed > 0:
            return None
        for victim in victims:
            self.remove(victim.key)
        self.num_evicted += len(victims)
        self._copies[copy.key] = copy
        (self._protected if copy.is_protected else self._new)[copy.key] = copy
        self.used_bytes += copy.size_bytes
        self._protected_bytes += copy.size_bytes if copy.is_protected else 0
        self._owned_bytes[copy.owner] = self._owned_bytes.get(copy.owner, 0) + copy.size_bytes
        return [victim.key for victim in victims]

    def _in_order(self, owner: str | None) -> Iterator[Copy]:
        """What may go, the first to go first; of one owner, or of all."""
        for queue in (self._new, self._protected):
            for copy in queue.values():
                if not copy.is_loading and (owner is None or copy.owner == owner):
                    yield copy

    def ready(self, key: str) -> None:
        """It is written everywhere."""
        copy = self._copies.get(key)
        if copy is not None:
            copy.is_ready = True

    def use(self, key: str) -> None:
        """It is loaded: from now on it is kept before what never was."""
        copy = self._copies.get(key)
        if copy is None:
            return
        self.num_hits += 1
        if copy.is_protected:
            self._protected.move_to_end(key)
            return
        del self._new[key]
        copy.is_protected = True
        self._protected[key] = copy
        self._protected_bytes += copy.size_bytes
        while self._protected_bytes > _PROTECTED_SHARE * self.capacity_bytes and len(self._protected) > 1:
            oldest = self._protected.popitem(last=False)[1]
            oldest.is_protected = False
            self._protected_bytes -= oldest.size_bytes
            self._new[oldest.key] = oldest

    def use_ahead(self, key: str) -> None:
        """It is loaded ahead of a request: the most recent of its kind, but kept no longer than others."""
        copy = self._copies.get(key)
        if copy is not None:
            self.num_prefetched += 1
            (self._protected if copy.is_protected else self._new).move_to_end(key)

    def remove(self, key: str) -> bool:
        """Forget a copy; whether there was one."""
        copy = self._copies.pop(key, None)
        if copy is None:
            return False
        del (self._protected if copy.is_protected else self._new)[key]
        self._protected_bytes -= copy.size_bytes if copy.is_protected else 0
        self.used_bytes -= copy.size_bytes
        self._owned_bytes[copy.owner] -= copy.size_bytes
        if not self._owned_bytes[copy.owner]:
            del self._owned_bytes[copy.owner]
        return True

    def check(self) -> None:
        """Assert that all sums are right; for tests."""
        copies = self._copies.values()
        assert self.used_bytes == sum(copy.size_bytes for copy in copies)
        assert self._protected_bytes == sum(copy.size_bytes for copy in copies if copy.is_protected)
        assert self._new.keys() | self._protected.keys() == self._copies.keys()
        assert len(self._new) + len(self._protected) == len(self._copies)
        assert sum(self._owned_bytes.values()) == self.used_bytes


class Saved(NamedTuple):
    """What a rank says of one tier of a save. number: of the order; a segment can be saved again."""

    tier: TierName
    key: str
    number: int


class Save(NamedTuple):
    """Copy a resident segment down. packed_rows: int32 [n] as bytes; origin: position of its first token."""

    key: str
    packed_rows: bytes
    origin: int
    tiers: tuple[TierName, ...]
    number: int = 0

    def answers(self) -> list[Saved]:
        """One for each tier."""
        return [Saved(tier, self.key, self.number) for tier in self.tiers]


class Load(NamedTuple):
    """Bring a segment into these rows of the pool. keep: also into host memory, where it comes from disk."""

    key: str
    packed_rows: bytes
    source: TierName
    keep: bool = False


class Drop(NamedTuple):
    """Remove copies from a tier. for_good: what they were made of is deleted."""

    tier: TierName
    keys: tuple[str, ...]
    for_good: bool = False


@dataclass
class TierOrders:
    """What workers do below the pool in one step: drop, load, (forward pass, capture,) save."""

    drops: list[Drop] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.drops or self.loads or self.saves)


@dataclass
class TierAnswers:
    """Orders that a rank has carried out, or could not; each stands there once for each rank."""

    saved: list[Saved] = field(default_factory=list)
    not_saved: list[Saved] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    not_loaded: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saved or self.not_saved or self.loaded or self.not_loaded)

    def merge(self, other: TierAnswers) -> TierAnswers:
        return TierAnswers(
            self.saved + other.saved,
            self.not_saved + other.not_saved,
            self.loaded + other.loaded,
            self.not_loaded + other.not_loaded,
        )


_Order = TypeVar("_Order", bound=Hashable)


class Answers(Generic[_Order]):
    """Counts what the ranks say of orders, until all have."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._told: dict[_Order, tuple[int, bool]] = {}

    def note(self, done: Iterable[_Order], failed: Iterable[_Order]) -> list[tuple[_Order, bool]]:
        """Orders that all ranks have answered by now, and whether all could carry them out."""
        complete = []
        for order, is_good in [*((order, True) for order in done), *((order, False) for order in failed)]:
            num, so_far = self._told.get(order, (0, True))
            num, so_far = num + 1, so_far and is_good
            if num < self._num_ranks:
                self._told[order] = (num, so_far)
            else:
                self._told.pop(order, None)
                complete.append((order, so_far))
        return complete


class AnyTier(Protocol):
    """What `Tier` and `SharedTier` have in common."""

    name: TierName
    capacity_bytes: int
    used_bytes: int
    num_evicted: int
    num_hits: int
    num_prefetched: int
    load_s: float

    def __len__(self) -> int: ...

    def all_keys(self) -> list[str]: ...

    def get(self, key: str) -> Copy | None: ...

    def find(self, key: str, num_tokens: int) -> bool: ...

    def admit(self, copy: Copy) -> list[str] | None: ...

    def ready(self, key: str) -> None: ...

    def use(self, key: str) -> None: ...

    def use_ahead(self, key: str) -> None: ...

    def remove(self, key: str) -> bool: ...


def sizes_of(tiers: Sequence[AnyTier]) -> dict[str, int]:
    """The tiers' part of the statistics."""
    return {
        f"{tier.name}_{name}": value
        for tier in tiers
        for name, value in (
            ("segments", len(tier)),
            ("bytes", tier.used_bytes),
            ("capacity_bytes", tier.capacity_bytes),
            ("hits", tier.num_hits),
            ("prefetched", tier.num_prefetched),
            ("evictions", tier.num_evicted),
            ("load_ms", round(tier.load_s * 1e3)),
        )
    }
