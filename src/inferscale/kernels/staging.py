"""Step tables on their way to the device: pinned buffers used in turn, one asynchronous copy each.

A table is written into the next pinned buffer and copied to the device on the current stream, so the
kernel behind it on that stream finds it. A pinned buffer is written again only after its copy is done:
an event behind each half of the buffers says so for all of that half, since recording one for every
table would take longer than the copy's own launch. Nothing is allocated once the buffers are made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferscale.pool.moves import Int32Array

NUM_BUFFERS = 8
_STAGED_NUMBERS = 2**19
"""Room of each buffer at first: 256 requests of 1,500 tokens in one step."""
_STEP = 1024
"""Copies are of so many numbers, or of twice as many, four times …: their views are made once."""


class _Buffer(NamedTuple):
    """pinned and its numpy view on the host, and their counterpart on the device; int32 [capacity].

    views: by size, the first so many numbers of both.
    """

    pinned: torch.Tensor
    host: Int32Array
    device: torch.Tensor
    views: dict[int, tuple[torch.Tensor, torch.Tensor]]


class Staging:
    """Room for tables of `capacity` int32 numbers; a larger one makes room for itself."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._copied: list[torch.cuda.Event] = []
        self._next = 0
        self._allocate(capacity)

    @classmethod
    def for_cache(cls, max_tokens: int, device: torch.device) -> Staging:
        """For steps of a paged cache of so many tokens."""
        return cls(min(2 * max_tokens, _STAGED_NUMBERS), device)

    def _allocate(self, capacity: int) -> None:
        capacity = _rounded(capacity)
        self._buffers, self._next = [], 0
        for _ in range(NUM_BUFFERS):
            pinned = torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_cuda)
            device = torch.zeros_like(pinned, device=self._device) if self._is_cuda else pinned
            self._buffers.append(_Buffer(pinned, pinned.numpy(), device, {}))
        self._copied = [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]

    def put(self, table: Int32Array) -> torch.Tensor:
        """The numbers [n] on the device; good until all streams that use them have joined the current one."""
        total = len(table)
        if total > len(self._buffers[0].host):
            if self._is_cuda:
                torch.cuda.current_stream(self._device).synchronize()  # the old buffers may be in use
            self._allocate(2 * total)
        index = self._next
        self._next = (index + 1) % NUM_BUFFERS
        half, place = divmod(index, NUM_BUFFERS // 2)
        if place == 0 and self._is_cuda:
            self._copied[half].synchronize()  # of the lap before; long done but in a very long queue
        buffer = self._buffers[index]
        buffer.host[:total] = table
        if self._is_cuda:
            size = _rounded(total)
            if size not in buffer.views:
                buffer.views[size] = (buffer.device[:size], buffer.pinned[:size])
            target, source = buffer.views[size]
            target.copy_(source, non_blocking=True)
            if place == NUM_BUFFERS // 2 - 1:
                self._copied[half].record()
        return buffer.device


def _rounded(size: int) -> int:
    """`_STEP` times a power of two."""
    return _STEP << max(0, (size - 1) // _STEP).bit_length()
