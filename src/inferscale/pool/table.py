"""Page table of the KV pool: which segment lies in which pages, least recently used first.

Pure bookkeeping, owned by the scheduler side; it knows neither torch nor vLLM nor where the slab
is. A page holds `page_size_tokens` rows, one row per token; rows of a segment are in token order,
its pages need not be neighbours.

Life of an entry::

    reserve ──▶ WRITING ──commit──▶ RESIDENT ──evict or drop──▶ gone
                 │  ▲ └──abandon──▶ gone
                 │  └────resume────┐
                 └──commit_half──▶ HALF ──evict or drop──▶ gone

A HALF entry has the first of two captures; it cannot be used. Only RESIDENT and HALF entries are evicted,
for nobody writes into them. None needs to be held while it is injected: a step's injection is
ordered before it zeroes or captures anything, and workers carry out steps in order, so pages that
are given away in the scheduling of a step are read by that step's injections first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from inferscale.pool.moves import Int32Array

_MAX_NOTED = 256
"""Uses that are noted before they are put in order."""


@dataclass(slots=True)
class Entry:
    """One segment in the pool.

    pages: page numbers in token order. packed_rows: int32 [num_tokens] as bytes, slab row of each token.
    owner: whose share it counts to, such as a user. is_half: a second capture is still to be ordered.
    is_idle: nobody writes into it.
    """

    key: str
    num_tokens: int
    pages: Int32Array
    packed_rows: bytes
    num_pages: int
    owner: str = ""
    is_half: bool = False
    is_idle: bool = False
    is_resident: bool = False
    is_dropped: bool = False

    @property
    def rows(self) -> Int32Array:
        return np.frombuffer(self.packed_rows, dtype=np.int32)


class _Owned:
    """Entries of one owner, least recently used first. evictable_pages: of those that are idle."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.pages = 0
        self.evictable_pages = 0


class PageTable:
    """Fixed-size pages and an eviction order. Not thread-safe, except that
    `is_resident` and `holds` may be called from any thread (they read one dictionary entry).

    max_share: an owner that has more of the pages than this makes room of its own, once no page is free.
    """

    def __init__(self, num_pages: int, page_size_tokens: int, max_share: float = 1.0) -> None:
        assert num_pages > 0 and page_size_tokens > 0
        self._max_owned_pages = max_share * num_pages
        self._owned: dict[str, _Owned] = {}
        self.num_pages = num_pages
        self.page_size_tokens = page_size_tokens
        self._offsets = np.arange(page_size_tokens, dtype=np.int32)
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # least recently used first
        self._used: list[Sequence[Entry]] = []  # uses that `_entries` is not in the order of yet
        self._freed: list[int] = []
        self.num_evicted = 0
        self.num_resident = 0
        self._num_evictable_pages = 0  # those of all idle entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def get(self, key: str) -> Entry | None:
        """The live entry of `key`, being written or resident. Does not count as a use."""
        entry = self._entries.get(key)
        return None if entry is None or entry.is_dropped else entry

    def is_live(self, entry: Entry) -> bool:
        """Whether this entry is in the table, and not gone or another one of its key."""
        return self._entries.get(entry.key) is entry

    def is_resident(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_resident

    def resident_run(self, keys: Sequence[str], lengths: Sequence[int]) -> list[Entry]:
        """Entries of the leading keys that are resident with these numbers of tokens. No mutation."""
        entries = self._entries
        run: list[Entry] = []
        for key, num_tokens in zip(keys, lengths, strict=True):
            entry = entries.get(key)
            if entry is None or not entry.is_resident or entry.num_tokens != num_tokens:
                break
            run.append(entry)
        return run

    def touch(self, entries: Sequence[Entry]) -> None:
        """Count a use of resident entries: the last of them becomes the most recently used.

        Only noted here, and put in order when the order is asked for: this is on the path to a first token.
        """
        self._used.append(entries)
        if len(self._used) > _MAX_NOTED:
            self._put_in_order()

    def _put_in_order(self) -> None:
        entries = self._entries
        for used in self._used:
            for entry in used:
                if entries.get(entry.key) is entry:
                    entries.move_to_end(entry.key)
                    self._owned[entry.owner].entries.move_to_end(entry.key)
        self._used.clear()

    def can_reserve(self, num_tokens: int, num_kept_pages: int = 0) -> bool:
        return self._pages_for(num_tokens) <= len(self._free) + self._num_evictable_pages - num_kept_pages

    def reserve(
        self,
        key: str,
        num_tokens: int,
        num_kept_pages: int = 0,
        owner: str = "",
        *,
        is_half: bool = False,
    ) -> Entry | None:
        """Pages for a new segment, evicting the least recently used; None where there is no room.

        num_kept_pages: of the most recently used resident entries, which are not evicted. Those of an owner
        above its share go before others, as far as they are enough. Mutates nothing when it returns None.
        `key` must not be in the table. is_half: for the first of two captures.
        """
        assert num_tokens > 0 and key not in self._entries
        if not self.can_reserve(num_tokens, num_kept_pages):
            return None
        needed = self._pages_for(num_tokens)
        self._put_in_order()
        queue = self._queue_for(owner, needed, num_kept_pages)
        while len(self._free) < needed:
            victim = next(e for e in queue.values() if e.is_idle)
            self._release(victim)
            self.num_evicted += 1
        pages = np.array([self._free.pop() for _ in range(needed)], dtype=np.int32)
        rows = (pages[:, None] * self.page_size_tokens + self._offsets).ravel()[:num_tokens]
        entry = Entry(key, num_tokens, pages, rows.tobytes(), needed, owner, is_half)
        self._entries[key] = entry
        owned = self._owned.setdefault(owner, _Owned())
        owned.entries[key] = entry
        owned.pages += needed
        return entry

    def _queue_for(self, owner: str, needed: int, num_kept_pages: int) -> OrderedDict[str, Entry]:
        """What makes room for so many pages of this owner: its own entries, or all."""
        owned = self._owned.get(owner)
        if owned is None or owned.pages + needed <= self._max_owned_pages:
            return self._entries
        is_enough = needed <= len(self._free) + owned.evictable_pages - num_kept_pages
        return owned.entries if is_enough else self._entries

    def holds(self, key: str) -> bool:
        """Whether `key` occupies pages, even if it was dropped while it is written."""
        return key in self._entries

    def can_load(self, key: str) -> bool:
        """Whether a copy may be loaded: no pages are taken, or by the first of two captures. Any thread."""
        entry = self._entries.get(key)
        return entry is None or (entry.is_half and entry.is_idle)

    def make_way(self, key: str) -> None:
        """Give up the first of two captures of `key`, where there is one, for a copy of the whole segment."""
        entry = self._entries.get(key)
        if entry is not None and entry.is_half and entry.is_idle:
            self._release(entry)

    def commit(self, key: str) -> None:
        """The pages of `key` are written: it may be injected from now on."""
        entry = self._entries.get(key)
        if entry is None or entry.is_idle or entry.is_half:
            return
        entry.is_resident = True
        self.num_resident += 1
        self._set_idle(entry, True)

    def commit_half(self, key: str) -> None:
        """The first of two captures of `key` is written; nothing where the second was ordered meanwhile."""
        entry = self._entries.get(key)
        if entry is not None and entry.is_half and not entry.is_idle:
            self._set_idle(entry, True)

    def resume(self, entry: Entry) -> None:
        """The second of two captures of a live half entry is ordered."""
        assert entry.is_half and not entry.is_dropped
        entry.is_half = False
        if entry.is_idle:
            self._set_idle(entry, False)

    def _set_idle(self, entry: Entry, is_idle: bool) -> None:
        entry.is_idle = is_idle
        pages = entry.num_pages if is_idle else -entry.num_pages
        self._num_evictable_pages += pages
        self._owned[entry.owner].evictable_pages += pages
        if is_idle and entry.is_dropped:
            self._release(entry)

    def abandon(self, key: str) -> None:
        """The pages of `key` were not written: give them back."""
        entry = self._entries.get(key)
        if entry is not None and not entry.is_resident:
            self._release(entry)

    def drop(self, keys: Iterable[str]) -> int:
        """Forget `keys` at once, those being written when that is done. Returns how many were known."""
        dropped = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.is_dropped:
                continue
            dropped += 1
            if entry.is_idle:
                self._release(entry)
            else:
                entry.is_dropped = True
        return dropped

    def clear(self) -> int:
        return self.drop(list(self._entries))

    def take_freed_pages(self) -> Int32Array | None:
        """Pages freed since the last call, int32 [n], for the worker to zero; None where none was."""
        if not self._freed:
            return None
        freed, self._freed = self._freed, []
        return np.array(freed, dtype=np.int32)

    def check(self) -> None:
        """Assert that every page has exactly one owner and that counts are right; for tests and debugging."""
        owned = [int(page) for entry in self._entries.values() for page in entry.pages]
        assert sorted(owned + self._free) == list(range(self.num_pages))
        evictable = [entry.num_pages for entry in self._entries.values() if entry.is_idle]
        assert self._num_evictable_pages == sum(evictable)
        assert sum(one.pages for one in self._owned.values()) == len(owned)
        assert sum(one.evictable_pages for one in self._owned.values()) == self._num_evictable_pages
        for name, one in self._owned.items():
            mine = [entry.key for entry in self._entries.values() if entry.owner == name]
            assert list(one.entries) == mine

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size_tokens)

    def _release(self, entry: Entry) -> None:
        del self._entries[entry.key]
        owned = self._owned[entry.owner]
        del owned.entries[entry.key]
        owned.pages -= entry.num_pages
        if not owned.entries:
            del self._owned[entry.owner]
        if entry.is_resident:
            entry.is_resident = False
            self.num_resident -= 1
        if entry.is_idle:
            entry.is_idle = False
            self._num_evictable_pages -= entry.num_pages
            owned.evictable_pages -= entry.num_pages
        pages = [int(page) for page in entry.pages]
        self._free.extend(pages)
        self._freed.extend(pages)
