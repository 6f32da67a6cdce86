"""What one engine knows of the segments in a shared store: bookkeeping of the scheduler side.

Others save and delete there too, so what is known is learned: from own saves, and by looking keys up when
the front end asks for them. Looking up runs in threads of its own and is waited for briefly; what comes
later is known the next time. A segment that is gone by the time it is loaded is prefilled. Nothing is ever
evicted: how long objects are kept, the store's operator says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from inferscale.pool.shared_store import SharedStore
from inferscale.pool.tiers import Copy, TierName

logger = logging.getLogger(__name__)

MAX_KNOWN = 1_000_000
"""Segments that are known at once; those that were used longest ago are forgotten, not removed."""
MISSED_FOR_S = 30.0
"""So long a key that was not found is not looked up again."""
LOOK_UP_S = 0.25
"""How long an answer to the front end waits for keys that are being looked up."""
_THREADS = 16


class SharedTier:
    """As `pool.tiers.Tier`, of which it is the last. Safe from several threads."""

    def __init__(self, store: SharedStore) -> None:
        self.name: TierName = "cold"
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.num_evicted = 0
        self.num_hits = 0
        self.num_prefetched = 0
        self.load_s = 0.0
        self.is_off = False
        self._store = store
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, Copy] = OrderedDict()
        self._missed: dict[str, float] = {}
        self._asked: dict[str, Future[None]] = {}
        self._executor = ThreadPoolExecutor(_THREADS, "inferscale-look-up")
        self._fails = False
        self._late: set[Future[None]] = set()  # what was waited for in vain

    def __len__(self) -> int:
        return len(self._copies)

    def all_keys(self) -> list[str]:
        """None: what is known is neither all nor this engine's own."""
        return []

    def get(self, key: str) -> Copy | None:
        return self._copies.get(key)

    def find(self, key: str, num_tokens: int) -> bool:
        copy = self._copies.get(key)
        return copy is not None and copy.is_ready and copy.num_tokens == num_tokens

    def admit(self, copy: Copy) -> list[str] | None:
        """Note what is about to be saved; None where it is there already, or nothing is saved any more."""
        with self._lock:
            if self.is_off or copy.key in self._copies:
                return None
            self._note(copy)
            return []

    def ready(self, key: str) -> None:
        copy = self._copies.get(key)
        if copy is not None:
            copy.is_ready = True

    def use(self, key: str) -> None:
        self.num_hits += 1
        self._touch(key)

    def use_ahead(self, key: str) -> None:
        self.num_prefetched += 1
        self._touch(key)

    def remove(self, key: str) -> bool:
        with self._lock:
            copy = self._copies.pop(key, None)
            if copy is not None:
                self.used_bytes -= copy.size_bytes
            return copy is not None

    def miss(self, key: str) -> None:
        """It could not be loaded, though the first rank may have it: for a while it is not looked up again,
        so that it is encoded, and saved where it is missing."""
        with self._lock:
            self._note_missed(key)

    def switch_off(self) -> None:
        """Use nothing of it any more: what lies there may be of other weights than the engine has now."""
        with self._lock:
            self.is_off = True
            self._copies.clear()
            self.used_bytes = 0

    def keys_in(self, part: str) -> list[str]:
        """All in one of `shared_store.PARTS`. For other threads than the engine's. Raises OSError."""
        return list(self._store.keys(part))

    def belongs_to(self, catalog: str) -> bool:
        """Whether what lies there is of this catalog. As `keys_in`."""
        return self._store.belongs_to(catalog)

    def look_up(self, keys: Sequence[str]) -> None:
        """Find out which of the keys others have saved. Waits for `LOOK_UP_S` at most, and not at all while
        the store is late with others: who asks holds up all who ask."""
        now_s = time.monotonic()
        with self._lock:
            if self.is_off:
                return
            unknown = [
                key
                for key in dict.fromkeys(keys)
                if key not in self._copies and now_s - self._missed.get(key, -MISSED_FOR_S) >= MISSED_FOR_S
            ]
            for key in unknown:
                if key not in self._asked:
                    self._asked[key] = self._executor.submit(self._find_out, key)
            if not all(future.done() for future in self._late):
                return
            asked = [self._asked[key] for key in unknown if key in self._asked]
        self._late = wait(asked, LOOK_UP_S).not_done

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _find_out(self, key: str) -> None:
        num_tokens = None
        try:
            num_tokens = self._store.num_tokens(key)
            self._fails = False
        except Exception as error:  # noqa: BLE001 - the root of this thread; file systems have errors of their own
            if not self._fails:
                logger.warning("Shared KV cannot be looked up; facts are encoded here: %s", error)
            self._fails = True
        with self._lock:
            if num_tokens is not None and not self.is_off and key not in self._copies:
                size = self._store.size_of(num_tokens)
                self._note(Copy(key, num_tokens, size, "", is_ready=True))
            elif num_tokens is None:
                self._note_missed(key)
            self._asked.pop(key, None)

    def _note_missed(self, key: str) -> None:
        if len(self._missed) >= MAX_KNOWN:
            self._missed.clear()
        self._missed[key] = time.monotonic()

    def _note(self, copy: Copy) -> None:
        self._missed.pop(copy.key, None)
        self._copies[copy.key] = copy
        self.used_bytes += copy.size_bytes
        while len(self._copies) > MAX_KNOWN:
            oldest = next(iter(self._copies.values()))
            if oldest.is_loading or not oldest.is_ready:
                self._copies.move_to_end(oldest.key)
                break
            del self._copies[oldest.key]
            self.used_bytes -= oldest.size_bytes

    def _touch(self, key: str) -> None:
        with self._lock:
            if key in self._copies:
                self._copies.move_to_end(key)
