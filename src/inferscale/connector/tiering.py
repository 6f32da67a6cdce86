"""The scheduler side's decisions about the tiers below the pool (`pool.tiers`).

    captured ──▶ save ordered with the capture ──▶ saved on all ranks: may be loaded from now on
    request  ──▶ `prepare`: pages for what its prompt can use and lies below ──▶ it waits (vLLM asks again
                 in every step) ──▶ loaded on all ranks: committed; the request is matched as any other
    order    ──▶ `prefetch`: the same for what requests may ask for next; only the order itself waits

What cannot be loaded, or not in time, is prefilled: a request waits at most `MAX_WAIT_S`, for each segment
once, and not at all where it would be prefilled sooner (`pace`): then the loads are for the next one. Called
from the engine's scheduler thread, except `find`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from inferscale.config import TierWait
from inferscale.connector.locate import Placement
from inferscale.connector.pace import Pace
from inferscale.pool.disk import Listed
from inferscale.pool.shared_tier import SharedTier
from inferscale.pool.table import Entry, PageTable
from inferscale.pool.tiers import (
    Answers,
    AnyTier,
    Copy,
    Drop,
    Load,
    Save,
    Saved,
    Tier,
    TierAnswers,
    TierName,
    TierOrders,
    sizes_of,
)
from inferscale.runtime.folder_lock import FolderLock

logger = logging.getLogger(__name__)

MAX_WAIT_S = 10.0
"""A request waits no longer for segments: by then they would have been computed."""

PREFETCH_SHARE = 0.25
"""Of the pool's pages, what one order may load ahead of requests."""


@dataclass
class _Loading:
    """source: the tier that is read. kept: also going into host memory. is_forgotten: meanwhile. is_ahead: no
    request asked for it when it was ordered."""

    source: AnyTier
    kept: bool
    start_s: float
    is_forgotten: bool = False
    is_ahead: bool = False


@dataclass
class Wait:
    """What one request waits for. keys: all that was asked for it; until_s: at the latest. size_bytes: by
    tier, where all of it was ordered for this request."""

    keys: frozenset[str]
    until_s: float
    size_bytes: dict[TierName, int] = field(default_factory=dict)
    start_s: float = field(default_factory=time.monotonic)


class Tiering:
    """tiers: nearest first. shared: the last one, where it is of several servers. size_of: bytes that a
    segment of so many tokens takes in a tier, on each rank. wait: whether requests wait for loads, as in
    `ConnectorConfig.tier_wait`. steps_at_once: as in `Pace`."""

    def __init__(
        self,
        table: PageTable,
        tiers: Sequence[Tier],
        size_of: Callable[[TierName, int], int],
        num_ranks: int,
        wait: TierWait = "auto",
        steps_at_once: int = 1,
        shared: SharedTier | None = None,
    ) -> None:
        self.table = table
        self.shared = shared
        self.tiers: list[AnyTier] = [*tiers, *(() if shared is None else (shared,))]
        self._size_of = size_of
        self._wait = wait
        self._saved: Answers[Saved] = Answers(num_ranks)
        self._loaded: Answers[str] = Answers(num_ranks)
        self._num_saves = 0
        self._loading: dict[str, _Loading] = {}
        self._orders = TierOrders()
        self.lock: FolderLock | None = None
        self.pace = Pace(steps_at_once)
        self.loads_failed = 0
        self.saves_failed = 0
        self.waits_refused = 0

    def find(self, key: str, num_tokens: int | None = None) -> AnyTier | None:
        """The nearest tier that a segment can be loaded from. Safe from any thread."""
        for tier in self.tiers:
            copy = tier.get(key)
            if copy is not None and tier.find(key, copy.num_tokens if num_tokens is None else num_tokens):
                return tier
        return None

    def look_up(self, keys: Iterable[str]) -> None:
        """Find out which of the keys other servers have saved, of those that are nowhere here. For other
        threads than the engine's: it may wait."""
        if self.shared is not None:
            self.shared.look_up(
                [key for key in keys if not self.table.is_resident(key) and self.find(key) is None]
            )

    # up ---------------------------------------------------------------------------------------

    def prepare(self, placement: Placement, num_computed: int, owner: str = "") -> Wait | None:
        """Order the loads that this prompt can use; None where nothing has to be waited for.

        It can use what continues the leading run: behind the first segment that is nowhere, or finds no room,
        nothing is. Room is made of what other prompts left, then of the end of this one. owner: of the share
        of the pool that is taken.
        """
        needed: list[tuple[str, int, Entry | None]] = []
        for key, length, end in zip(placement.keys, placement.lengths, placement.ends, strict=True):
            if end <= num_computed:
                continue
            entry = self.table.get(key)
            if entry is not None and entry.is_resident and entry.num_tokens == length:
                needed.append((key, length, entry))
            elif key in self._loading or self.find(key, length) is not None:
                needed.append((key, length, None))
            else:
                break
        resident = [entry for _, _, entry in needed if entry is not None]
        if len(resident) == len(needed):
            return None
        self.table.touch(resident[::-1])
        num_kept = num_tokens = 0
        num_before = len(self._orders.loads)
        waited: list[str] = []
        size_bytes: dict[TierName, int] = {}
        for key, length, entry in needed:
            if entry is not None and entry.is_resident:
                num_kept += entry.num_pages
            elif entry is None and (
                key in self._loading or self._load_for(key, length, num_kept, resident, owner)
            ):
                waited.append(key)
                num_tokens += length
                source = self._loading[key].source.name
                size_bytes[source] = size_bytes.get(source, 0) + self._size_of(source, length)
            else:
                break
        if not waited:
            return None
        is_worth_it = self._wait == "always" or (
            self._wait == "auto" and self.pace.is_worth_waiting(num_tokens, size_bytes, time.monotonic())
        )
        if not is_worth_it:
            self.waits_refused += 1
            return None
        is_own = len(self._orders.loads) - num_before == len(waited)
        return Wait(frozenset(waited), time.monotonic() + MAX_WAIT_S, size_bytes if is_own else {})

    def is_below(self, key: str) -> bool:
        """Whether a segment has to be loaded before it can be injected, and can be. Safe from any thread."""
        return self.table.can_load(key) and self.find(key) is not None

    def prefetch(self, keys: Iterable[str], owner: str) -> Wait | None:
        """Order the loads of what lies below, in this order and as far as there is room.

        Room is made of what none of the keys has. owner: whose share of the pool is taken. Only what waits
        makes an idle engine take the steps that bring the answers.
        """
        wanted = list(dict.fromkeys(keys))
        there = [entry for entry in map(self.table.get, wanted) if entry is not None and entry.is_resident]
        self.table.touch(there[::-1])
        num_kept = sum(entry.num_pages for entry in there)
        num_pages = int(PREFETCH_SHARE * self.table.num_pages)
        loading: list[str] = []
        for key in wanted:
            tier = self.find(key)
            copy = None if tier is None else tier.get(key)
            if copy is None or not self.table.can_load(key):
                continue
            num_pages -= -(-copy.num_tokens // self.table.page_size_tokens)
            if num_pages < 0 or not self._load(key, copy.num_tokens, num_kept, owner):
                break
            self._loading[key].is_ahead = True
            loading.append(key)
        return Wait(frozenset(loading), time.monotonic() + MAX_WAIT_S) if loading else None

    def _load_for(
        self, key: str, num_tokens: int, num_kept_pages: int, needed: list[Entry], owner: str
    ) -> bool:
        """Order a load for a prompt, with the room of others if there is any, or else of its end.

        num_kept_pages: of what stands in front of it; needed: all that the prompt has in the pool."""
        num_needed = sum(entry.num_pages for entry in needed if entry.is_resident)
        return any(self._load(key, num_tokens, kept, owner) for kept in (num_needed, num_kept_pages))

    def is_over(self, wait: Wait) -> bool:
        """Whether all has come, or no more is waited for."""
        now_s = time.monotonic()
        if self._loading.keys().isdisjoint(wait.keys):
            if len(wait.size_bytes) == 1:
                [(tier, size_bytes)] = wait.size_bytes.items()
                self.pace.note_load(tier, size_bytes, now_s - wait.start_s, now_s)
            return True
        return now_s > wait.until_s

    def _load(self, key: str, num_tokens: int, num_kept_pages: int, owner: str) -> bool:
        tier = self.find(key, num_tokens)
        copy = None if tier is None else tier.get(key)  # other threads may forget what servers share
        if tier is None or copy is None or not self.table.can_load(key):
            return False
        self.table.make_way(key)
        entry = self.table.reserve(key, num_tokens, num_kept_pages, owner)
        if entry is None:
            return False
        copy.is_loading = True
        keep = tier.name != "host" and self._admit("host", key, num_tokens, copy.owner)
        if keep:  # it is read on its way up: were it to make room, what is there would be overwritten
            self._set_loading("host", key, True)
        self._loading[key] = _Loading(tier, keep, time.monotonic())
        self._orders.loads.append(Load(key, entry.packed_rows, tier.name, keep))
        return True

    def _set_loading(self, name: TierName, key: str, is_loading: bool) -> None:
        for tier in self.tiers:
            copy = tier.get(key)
            if tier.name == name and copy is not None:
                copy.is_loading = is_loading

    # down -------------------------------------------------------------------------------------

    def save(self, entry: Entry, origin: int, owner: str, *, shared: bool = False) -> None:
        """Order copies of a segment that this step captures, where no tier has one. shared: one for other
        servers too."""
        self._num_saves += 1
        number = self._num_saves
        names = [
            tier.name
            for tier in self.tiers
            if (shared or tier is not self.shared)
            and self._admit(tier.name, entry.key, entry.num_tokens, owner, number)
        ]
        if names:
            self._orders.saves.append(Save(entry.key, entry.packed_rows, origin, tuple(names), number))

    def restore(self, found: Iterable[Listed]) -> None:
        """Note what lies on disk, least recently used first; whose it is, nobody knows any more."""
        disk = next(tier for tier in self.tiers if tier.name == "disk")
        gone: list[str] = []
        for file in found:
            evicted = disk.admit(Copy(file.key, file.num_tokens, file.size_bytes, "", is_ready=True))
            gone += [file.key] if evicted is None else evicted
        if gone:
            self._orders.drops.append(Drop("disk", tuple(gone)))

    def cancel_saves(self, keys: Iterable[str]) -> None:
        """Their capture was not ordered after all."""
        gone = set(keys)
        cancelled = [save.key for save in self._orders.saves if save.key in gone]
        self._orders.saves = [save for save in self._orders.saves if save.key not in gone]
        if self.shared is not None:
            for key in cancelled:
                self.shared.remove(key)
        self._forget(cancelled, [tier for tier in self.tiers if tier is not self.shared])

    def _admit(self, name: TierName, key: str, num_tokens: int, owner: str, save: int = 0) -> bool:
        for tier in self.tiers:
            if tier.name == name:
                copy = Copy(key, num_tokens, self._size_of(name, num_tokens), owner, save=save)
                evicted = tier.admit(copy)
                if evicted:
                    self._orders.drops.append(Drop(name, tuple(evicted)))
                    self._orders.saves = _without(self._orders.saves, name, evicted)
                return evicted is not None
        return False

    # orders and answers -----------------------------------------------------------------------

    def take_orders(self) -> TierOrders | None:
        """Of this step."""
        if not self._orders:
            return None
        orders, self._orders = self._orders, TierOrders()
        return orders

    def complete(self, answers: TierAnswers) -> None:
        """What ranks have carried out, in this step or before."""
        for saved, is_good in self._saved.note(answers.saved, answers.not_saved):
            self.saves_failed += not is_good
            tier = next(tier for tier in self.tiers if tier.name == saved.tier)
            copy = tier.get(saved.key)
            if copy is None or copy.save != saved.number:  # gone meanwhile, or being saved again
                continue
            if is_good:
                tier.ready(saved.key)
            else:
                tier.remove(saved.key)
                if tier is self.shared:  # another server's may be there, and is as good
                    continue
                self._orders.drops.append(Drop(tier.name, (saved.key,)))
        for key, is_good in self._loaded.note(answers.loaded, answers.not_loaded):
            self._complete_load(key, is_good)

    def _complete_load(self, key: str, is_good: bool) -> None:
        loading = self._loading.pop(key, None)
        if loading is None:
            return
        self._set_loading(loading.source.name, key, False)
        if loading.kept:
            self._set_loading("host", key, False)
        if is_good:
            self.table.commit(key)
            if loading.is_ahead:
                loading.source.use_ahead(key)
            else:
                loading.source.use(key)
                loading.source.load_s += time.monotonic() - loading.start_s
            for tier in self.tiers:
                kept = tier.get(key)
                if kept is not None and not kept.save:
                    tier.ready(key)
        else:
            self.loads_failed += 1
            self.table.abandon(key)
        is_lost = not is_good or loading.is_forgotten
        names = {loading.source.name} | ({"host"} if loading.kept else set())
        for tier in self.tiers:
            # A copy that had to make room while it came is in the worker's memory all the same.
            if tier.name in names and (is_lost or tier.get(key) is None):
                tier.remove(key)
                if self.shared is not None and tier is self.shared:  # others may read what could not be read
                    if not is_good:
                        self.shared.miss(key)
                    continue
                self._orders.drops.append(Drop(tier.name, (key,)))

    def forget(self, keys: Iterable[str]) -> int:
        """Remove all copies, for good; how many segments had one. A load under way comes to nothing."""
        return self._forget(list(keys), self.tiers)

    def clear(self) -> int:
        """Forget everything, as where the engine has other weights from now on."""
        if self.shared is not None and not self.shared.is_off:
            logger.warning("KV that servers share is not used any more by this one: its cache was reset")
            self.shared.switch_off()
        tiers = [tier for tier in self.tiers if tier is not self.shared]
        return self._forget(list({key for tier in tiers for key in tier.all_keys()}), tiers)

    def _forget(self, wanted: list[str], tiers: Iterable[AnyTier]) -> int:
        known: set[str] = set()
        for key in wanted:
            if key in self._loading:
                self._loading[key].is_forgotten = True
        for tier in tiers:
            gone = [key for key in wanted if tier.remove(key)]
            known.update(gone)
            # Also those that nothing is known of: a file may lie there from another start, or server.
            ordered = gone if tier.name == "host" else wanted
            if ordered:
                self._orders.drops.append(Drop(tier.name, tuple(ordered), for_good=True))
        return len(known)

    def close(self) -> None:
        """Let others have the files."""
        if self.lock is not None:
            self.lock.release()
        if self.shared is not None:
            self.shared.close()

    def stats(self) -> dict[str, int]:
        return {
            **sizes_of(self.tiers),
            "tier_loads_failed": self.loads_failed,
            "tier_saves_failed": self.saves_failed,
            "tier_loads_open": len(self._loading),
            "tier_waits_refused": self.waits_refused,
        }


def _without(saves: list[Save], name: TierName, keys: Iterable[str]) -> list[Save]:
    """The saves of a step without those that make room for others of it: drops come before saves."""
    gone = set(keys)
    kept = [
        save._replace(tiers=tuple(tier for tier in save.tiers if tier != name)) if save.key in gone else save
        for save in saves
    ]
    return [save for save in kept if save.tiers]
