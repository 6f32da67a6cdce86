"""Step tables on their way to the device: pinned buffers used in turn, one asynchronous copy each.

A table is written into the next pinned buffer and copied to the device on the current stream, so the
kernel behind it on that stream finds it. A pinned buffer is written again only after its copy is done;
with several of them the host never waits in practice, and nothing is allocated once they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]

NUM_BUFFERS = 4


class _Buffer(NamedTuple):
    """pinned and its numpy view on the host, and their counterpart on the device; int32 [capacity]."""

    pinned: torch.Tensor
    host: Int32Array
    device: torch.Tensor
    copied: torch.cuda.Event | None


class Staging:
    """Room for tables of `capacity` int32 numbers; a larger one makes room for itself."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        is_cuda = self._device.type == "cuda"
        self._buffers = []
        for _ in range(NUM_BUFFERS if is_cuda else 1):
            pinned = torch.zeros(capacity, dtype=torch.int32, pin_memory=is_cuda)
            device = torch.zeros(capacity, dtype=torch.int32, device=self._device) if is_cuda else pinned
            self._buffers.append(
                _Buffer(pinned, pinned.numpy(), device, torch.cuda.Event() if is_cuda else None)  # type: ignore[no-untyped-call]
            )

    def put(self, columns: Sequence[Int32Array]) -> torch.Tensor:
        """Columns one behind the other, int32, on the device; good until the current stream has used it."""
        total = sum(len(column) for column in columns)
        if total > len(self._buffers[0].host):
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # the old buffers may be in use
            self._allocate(2 * total)
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.copied is not None:
            buffer.copied.synchronize()  # returns at once, but where the device is several steps behind
        start = 0
        for column in columns:
            buffer.host[start : start + len(column)] = column
            start += len(column)
        if buffer.copied is not None:
            buffer.device[:total].copy_(buffer.pinned[:total], non_blocking=True)
            buffer.copied.record()
        return buffer.device
