"""A worker's bytes below the pool: segments in host memory and on disk, and their ways up and down.

Down (`save`): rows are gathered on the engine's stream, in step order, and copied to host memory; a thread
waits for the copy and writes the file. Up (`load`): from host memory on a stream of its own, beside the
forward pass, from disk by a thread. What is done is told by `take_answers`, in whichever step that is.
Rows that a load goes to belong to nobody else until it is answered, so no other work has to wait for it.

Down and removal go through one thread in the order they came: a segment that is forgotten while it is
written does not stay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from inferscale.pool.disk import DiskStore
from inferscale.pool.moves import Int32Array
from inferscale.pool.slab import Slab
from inferscale.pool.tiers import Drop, Load, Save, TierAnswers

logger = logging.getLogger(__name__)

_READERS = 2
_MAX_PENDING_BYTES = 2**30
"""Of segments that wait to be written: more come than the disk takes, and the rest stays in the pool only."""


class HostCopy(NamedTuple):
    """rows: [n, elements of a token] in (pinned) host memory; origin: position of the first token."""

    rows: torch.Tensor
    origin: int


class LowerTiers:
    """Of one worker. note_origins: told where loaded rows were captured, rows int32 [n] and positions
    int32 [n]. disk: None without that tier."""

    def __init__(
        self, slab: Slab, disk: DiskStore | None, note_origins: Callable[[Int32Array, Int32Array], None]
    ) -> None:
        self._slab = slab
        self._disk = disk
        self._note_origins = note_origins
        self._device = slab.data.device
        self._is_cuda = self._device.type == "cuda"
        self._stream: Any = _stream(self._device)
        self._host: dict[str, HostCopy] = {}
        self._row_bytes = slab.shape.num_elements * slab.data.element_size()
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._answers = TierAnswers()
        self._coming: list[tuple[Load, Any]] = []  # loads whose copy on the device is under way
        self._writer = ThreadPoolExecutor(1, "inferscale-save")
        self._readers = ThreadPoolExecutor(_READERS, "inferscale-load")

    def drop(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            self._writer.submit(self._drop, drop)

    def load(self, loads: Iterable[Load]) -> None:
        """Once the pages that these segments go to are zeroed."""
        for load in loads:
            if load.source == "disk":
                self._readers.submit(self._guarded, partial(self._read, load), "not_loaded", load.key)
            else:
                self._guarded(partial(self._load_host, load), "not_loaded", load.key)

    def save(self, saves: Iterable[Save]) -> None:
        """Right behind the capture of these segments."""
        for save in saves:
            self._guarded(partial(self._save, save), "not_saved", save.key)

    def take_answers(self) -> TierAnswers | None:
        """What was done since the last call; None where nothing was."""
        with self._lock:
            waiting = []
            for load, event in self._coming:
                if event.query():
                    self._answers.loaded.append(load.key)
                else:
                    waiting.append((load, event))
            self._coming = waiting
            if not self._answers:
                return None
            answers, self._answers = self._answers, TierAnswers()
        return answers

    def close(self) -> None:
        """Finish what is being written."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self._host.clear()

    # down -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _save(self, save: Save) -> None:
        rows = np.frombuffer(save.packed_rows, dtype=np.int32)
        size = len(rows) * self._row_bytes
        with self._lock:
            has_room = self._pending_bytes + size <= _MAX_PENDING_BYTES
            self._pending_bytes += size if has_room else 0
        if not has_room:
            self._tell("not_saved", save.key)
            return
        index = torch.from_numpy(rows.astype(np.int64)).to(self._device, non_blocking=True)
        gathered = self._slab.data.index_select(0, index)
        event = None
        if self._is_cuda:
            on_host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            on_host.copy_(gathered, non_blocking=True)
            event = _event()
            event.record()
        else:
            on_host = gathered
        self._writer.submit(self._guarded, partial(self._write, save, on_host, event), "not_saved", save.key)

    def _write(self, save: Save, rows: torch.Tensor, event: Any) -> None:
        try:
            if event is not None:
                event.synchronize()
            if "disk" in save.tiers:
                assert self._disk is not None
                self._disk.write(save.key, _bytes_of(rows), save.origin)
            if "host" in save.tiers:
                self._host[save.key] = HostCopy(rows, save.origin)
        finally:
            with self._lock:
                self._pending_bytes -= rows.nbytes
        self._tell("saved", save.key)

    def _drop(self, drop: Drop) -> None:
        for key in drop.keys:
            if drop.tier == "disk" and self._disk is not None:
                self._disk.remove(key)
            elif drop.tier == "host" and (copy := self._host.pop(key, None)) is not None:
                copy.rows.zero_()  # the allocator may keep the memory

    # up ---------------------------------------------------------------------------------------

    def _load_host(self, load: Load) -> None:
        copy = self._host.get(load.key)
        if copy is None:
            self._tell("not_loaded", load.key)
        else:
            self._put(load, copy)

    def _read(self, load: Load) -> None:
        assert self._disk is not None
        num_tokens = len(load.packed_rows) // 4
        stored = self._disk.read(load.key, num_tokens)
        if stored is None:
            self._tell("not_loaded", load.key)
            return
        rows = torch.frombuffer(stored.rows, dtype=torch.uint8).view(self._slab.data.dtype)
        rows = rows.view(num_tokens, -1)
        copy = HostCopy(rows.pin_memory() if self._is_cuda else rows, stored.origin)
        if load.keep:
            self._host[load.key] = copy
        self._put(load, copy)

    @torch.inference_mode()
    def _put(self, load: Load, copy: HostCopy) -> None:
        """Host rows → rows of the pool."""
        rows = np.frombuffer(load.packed_rows, dtype=np.int32)
        origins = np.arange(copy.origin, copy.origin + len(rows), dtype=np.int32)
        if self._stream is not None:
            # The rows may still be read by work that was queued before they were given away.
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            index = torch.from_numpy(rows.astype(np.int64)).to(self._device, non_blocking=True)
            self._slab.data[index] = copy.rows.to(self._device, non_blocking=True)
            self._slab.origins[index] = torch.from_numpy(origins).to(self._device, non_blocking=True)
            self._note_origins(rows, origins)
            if self._stream is None:
                self._tell("loaded", load.key)
                return
            event = _event()
            event.record(self._stream)
        with self._lock:
            self._coming.append((load, event))

    def _tell(self, what: str, key: str) -> None:
        with self._lock:
            getattr(self._answers, what).append(key)

    def _guarded(self, work: Callable[[], None], otherwise: str, key: str) -> None:
        """KV below the pool is a copy of a cache: what fails costs an encoding, never an answer."""
        try:
            work()
        except Exception:  # also the root of the threads
            logger.exception("A segment could not be moved between the pool and a lower tier")
            self._tell(otherwise, key)


def _bytes_of(rows: torch.Tensor) -> memoryview:
    return rows.contiguous().view(torch.uint8).flatten().numpy().data


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
