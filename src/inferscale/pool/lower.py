"""A worker's bytes below the pool: in host memory, on disk and in a shared store, and their ways up and down.

Down (`save`): rows are gathered on the engine's stream, in step order, and copied to host memory; a thread
waits for the copy and writes the file. Up (`load`): from host memory on a stream of its own, beside the
forward pass, from disk by a thread. What is done is told by `take_answers`, in whichever step that is.
Rows that a load goes to belong to nobody else until it is answered, so no other work has to wait for it.

Down and removal go through one thread in the order they came: a segment that is forgotten while it is
written does not stay. A shared store is slow and has threads of its own, one for each part of the keys.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from inferscale.pool.disk import DiskStore
from inferscale.pool.moves import Int32Array
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.slab import Slab
from inferscale.pool.tiers import Drop, Load, Save, Saved, TierAnswers, TierName

logger = logging.getLogger(__name__)

_READERS = min(8, os.cpu_count() or 1)
"""Threads that read files and check them, which takes longer than the disk."""
_BATCH_BYTES = 64 * 2**20
"""Of segments that go up from host memory together, which takes as much device memory meanwhile."""
_COLD_WRITERS = 4
_COLD_READERS = 16
_PLACES: dict[TierName, str] = {"disk": "on disk", "cold": "in the shared store"}
_MAX_PENDING_BYTES = 2**30
"""Of segments that wait to be written, on this machine and to a shared store: more come than it takes, and
the rest is not kept there."""


class HostCopy(NamedTuple):
    """rows: [n, columns of the slab] in (pinned) host memory; origin: position of the first token."""

    rows: torch.Tensor
    origin: int


class LowerTiers:
    """Of one worker. note_origins: told where loaded rows were captured, rows int32 [n] and positions
    int32 [n]. disk, cold: None without that tier."""

    def __init__(
        self,
        slab: Slab,
        disk: DiskStore | None,
        note_origins: Callable[[Int32Array, Int32Array], None],
        cold: SharedStore | None = None,
    ) -> None:
        self._slab = slab
        self._disk = disk
        self._cold = cold
        self._note_origins = note_origins
        self._device = slab.data.device
        self._is_cuda = self._device.type == "cuda"
        self._stream: Any = _stream(self._device)
        self._host: dict[str, HostCopy] = {}
        self._row_bytes = slab.format.row_bytes
        self._pending_bytes = {True: 0, False: 0}  # whether for the shared store
        self._lock = threading.Lock()
        self._answers = TierAnswers()
        self._coming: list[tuple[Load, Any]] = []  # loads whose copy on the device is under way
        self._failing: set[TierName] = set()
        self._sent: set[int] = set()  # ids of rows in host memory that a shared store is still to be given
        self._to_wipe: set[int] = set()  # of these, what left host memory meanwhile
        self._writer = ThreadPoolExecutor(1, "inferscale-save")
        self._readers = ThreadPoolExecutor(_READERS, "inferscale-load")
        num_cold = 0 if cold is None else _COLD_WRITERS
        self._cold_writers = [ThreadPoolExecutor(1, "inferscale-cold-save") for _ in range(num_cold)]
        self._cold_readers = ThreadPoolExecutor(_COLD_READERS, "inferscale-cold-load")

    def drop(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            if drop.tier == "cold":
                for key in drop.keys:
                    work = partial(self._drop_shared, key, drop.for_good)
                    self._cold_writer(key).submit(self._guarded, work, lambda: None)
            else:
                self._writer.submit(self._guarded, partial(self._drop, drop), lambda: None)

    def load(self, loads: Iterable[Load]) -> None:
        """Once the pages that these segments go to are zeroed, by work of the stream that calls this."""
        wanted = list(loads)
        if not wanted:
            return
        before = None
        if self._is_cuda:
            before = _event()
            before.record()
        for load in wanted:
            if load.source != "host":
                refused = partial(self._tell, "not_loaded", load.key)
                readers = self._readers if load.source == "disk" else self._cold_readers
                readers.submit(self._guarded, partial(self._read, load, before), refused)
        for batch in self._batches(load for load in wanted if load.source == "host"):
            refused = partial(self._tell, "not_loaded", *(load.key for load, _ in batch))
            self._guarded(partial(self._put, batch, before), refused)

    def save(self, saves: Iterable[Save]) -> None:
        """Right behind the capture of these segments."""
        for save in saves:
            self._guarded(partial(self._save, save), partial(self._tell, "not_saved", *save.answers()))

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
        for readers in (self._readers, self._cold_readers):
            readers.shutdown(wait=True, cancel_futures=True)
        for writer in (self._writer, *self._cold_writers):
            writer.shutdown(wait=True)
        self._host.clear()

    # down -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _save(self, save: Save) -> None:
        rows = np.frombuffer(save.packed_rows, dtype=np.int32)
        size = len(rows) * self._row_bytes
        parts: list[Save] = []
        refused: list[Saved] = []
        for part in _ways(save):
            is_far = _is_far(part)
            with self._lock:
                has_room = self._pending_bytes[is_far] + size <= _MAX_PENDING_BYTES
                self._pending_bytes[is_far] += size if has_room else 0
            if has_room:
                parts.append(part)
            else:
                refused += part.answers()
        try:
            if parts:
                self._send(parts, rows)
        except BaseException:  # as where no pinned memory is left
            with self._lock:
                for part in parts:
                    self._pending_bytes[_is_far(part)] -= size
            raise
        self._tell("not_saved", *refused)

    def _send(self, parts: Sequence[Save], rows: Int32Array) -> None:
        """Copy to host memory behind all that the engine's stream does so far, then to the writer."""
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
        if any(map(_is_far, parts)):
            with self._lock:
                self._sent.add(id(on_host))
        for part in parts:
            writer, write = (
                (self._cold_writer(part.key), self._write_far)
                if _is_far(part)
                else (self._writer, self._write)
            )
            refused = partial(self._tell, "not_saved", *part.answers())
            writer.submit(self._guarded, partial(write, part, on_host, event), refused)

    def _write_far(self, save: Save, rows: torch.Tensor, event: Any) -> None:
        try:
            self._write(save, rows, event)
        finally:
            with self._lock:
                self._sent.discard(id(rows))
                is_left = id(rows) in self._to_wipe
                self._to_wipe.discard(id(rows))
            if is_left:
                _wipe(rows)

    def _leave(self, rows: torch.Tensor) -> None:
        """Overwrite what left host memory, but not before the shared store has it: it would get zeros."""
        with self._lock:
            if id(rows) in self._sent:
                self._to_wipe.add(id(rows))
                return
        _wipe(rows)

    def _write(self, save: Save, rows: torch.Tensor, event: Any) -> None:
        failed: list[Saved] = []
        try:
            if event is not None:
                event.synchronize()
            for answer in save.answers():
                if answer.tier == "host":
                    self._host[save.key] = HostCopy(rows, save.origin)
                elif not self._write_file(answer.tier, save, rows):
                    failed.append(answer)
        finally:
            with self._lock:
                self._pending_bytes[_is_far(save)] -= rows.nbytes
        with self._lock:
            self._answers.saved += [answer for answer in save.answers() if answer not in failed]
            self._answers.not_saved += failed

    def _write_file(self, tier: TierName, save: Save, rows: torch.Tensor) -> bool:
        """Whether the tier took it. Of failures one behind the other only the first is logged."""
        is_taken = True
        try:
            if tier == "disk":
                assert self._disk is not None
                self._disk.write(save.key, _bytes_of(rows), save.origin)
            else:
                assert self._cold is not None
                is_taken = self._cold.write(save.key, _bytes_of(rows), save.origin)
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            if tier not in self._failing:
                logger.warning("Segments are not kept %s: %s", _PLACES[tier], error)
            self._failing.add(tier)
            return False
        if tier in self._failing:
            logger.warning("Segments are kept %s again", _PLACES[tier])
        self._failing.discard(tier)
        return is_taken

    def _drop_shared(self, key: str, for_good: bool) -> None:
        """Of what was deleted, an object that stays is nobody's: the front end finds it at its next start."""
        assert self._cold is not None
        self._cold.remove(key, for_good=for_good)

    def _cold_writer(self, key: str) -> ThreadPoolExecutor:
        return self._cold_writers[zlib.crc32(key.encode()) % len(self._cold_writers)]

    def _drop(self, drop: Drop) -> None:
        for key in drop.keys:
            if drop.tier == "disk" and self._disk is not None:
                self._disk.remove(key)
            elif drop.tier == "host" and (copy := self._host.pop(key, None)) is not None:
                self._leave(copy.rows)

    # up ---------------------------------------------------------------------------------------

    def _batches(self, loads: Iterable[Load]) -> Iterator[list[tuple[Load, HostCopy]]]:
        """Segments in host memory, as many as go up at once; what is not there is answered."""
        batch: list[tuple[Load, HostCopy]] = []
        size = 0
        for load in loads:
            copy = self._host.get(load.key)
            if copy is None:
                self._tell("not_loaded", load.key)
                continue
            if batch and size + copy.rows.nbytes > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((load, copy))
            size += copy.rows.nbytes
        if batch:
            yield batch

    def _read(self, load: Load, before: Any) -> None:
        store = self._disk if load.source == "disk" else self._cold
        assert store is not None
        num_tokens = len(load.packed_rows) // 4
        stored = store.read(load.key, num_tokens)
        if stored is None:
            self._tell("not_loaded", load.key)
            return
        rows = torch.frombuffer(stored.rows, dtype=torch.uint8).view(self._slab.data.dtype)
        rows = rows.view(num_tokens, -1)
        copy = HostCopy(rows.pin_memory() if self._is_cuda else rows, stored.origin)
        if load.keep:
            self._host[load.key] = copy
        self._put([(load, copy)], before)

    @torch.inference_mode()
    def _put(self, batch: Sequence[tuple[Load, HostCopy]], before: Any) -> None:
        """Host rows → rows of the pool: a copy a segment into one piece of device memory, and one scatter.

        before: what the engine's stream does with these rows first, None on a CPU; a thread that reads files
        does not know that stream."""
        rows = np.concatenate([np.frombuffer(load.packed_rows, dtype=np.int32) for load, _ in batch])
        origins = np.concatenate(
            [np.arange(copy.origin, copy.origin + len(copy.rows), dtype=np.int32) for _, copy in batch]
        )
        if self._stream is not None:
            self._stream.wait_event(before)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            index = torch.from_numpy(rows.astype(np.int64)).to(self._device, non_blocking=True)
            self._slab.data.index_copy_(0, index, self._on_device([copy.rows for _, copy in batch]))
            self._slab.origins[index] = torch.from_numpy(origins).to(self._device, non_blocking=True)
            self._note_origins(rows, origins)
            if self._stream is None:
                self._tell("loaded", *(load.key for load, _ in batch))
                return
            event = _event()
            event.record(self._stream)
        with self._lock:
            self._coming += [(load, event) for load, _ in batch]

    def _on_device(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if not self._is_cuda:
            return torch.cat(parts)
        whole = torch.empty(
            (sum(map(len, parts)), parts[0].shape[1]), dtype=parts[0].dtype, device=self._device
        )
        start = 0
        for part in parts:
            whole[start : start + len(part)].copy_(part, non_blocking=True)
            start += len(part)
        return whole

    def _tell(self, what: str, *answers: object) -> None:
        with self._lock:
            getattr(self._answers, what).extend(answers)

    def _guarded(self, work: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """KV below the pool is a copy of a cache: what fails costs an encoding, never an answer."""
        try:
            work()
        except Exception:  # also the root of the threads
            logger.exception("A segment could not be moved between the pool and a lower tier")
            otherwise()


def _ways(save: Save) -> list[Save]:
    """A save to this machine's tiers, and one to the shared store, each where there is any."""
    near = tuple(tier for tier in save.tiers if tier != "cold")
    far = tuple(tier for tier in save.tiers if tier == "cold")
    parts: list[tuple[TierName, ...]] = [near, far]
    return [save._replace(tiers=part) for part in parts if part]


def _is_far(part: Save) -> bool:
    """Of `_ways`: that to the shared store."""
    return part.tiers == ("cold",)


@torch.inference_mode()  # as the rows were made: others may not write to them
def _wipe(rows: torch.Tensor) -> None:
    """The allocator may keep the memory."""
    rows.zero_()


def _bytes_of(rows: torch.Tensor) -> memoryview:
    return rows.contiguous().view(torch.uint8).flatten().numpy().data


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
