"""`inferscale bench kernels`: injection and capture beside a device copy of as many bytes, on a GPU.

Facts of 20 to 60 tokens lie in scattered pages of a slab of several GiB and go to scattered blocks of
the paged caches; every repetition moves other facts to other blocks, so that nothing is found in the L2
cache. All times are of the device alone, by events behind a wait that lets the host run ahead; copies
and kernels are timed in turn in one run. Bandwidth counts bytes read plus bytes written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from inferscale.bench.harness import BenchRun, command, environment
from inferscale.config import PoolDtype
from inferscale.errors import InferScaleError
from inferscale.kernels.fused import CAPTURE, INJECT, FusedMover, Tuning
from inferscale.kernels.geometry import geometry_of
from inferscale.pool.moves import Moves, single_run
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary
from inferscale.row_size import RowShape

LARGE_COPY_BYTES = 2 * 10**9
_WAIT_CYCLES = 400_000
_FACT_TOKENS = (20, 60)
BLOCK_TOKENS = 64
"""Of the paged caches of a scene."""


class KernelShape(NamedTuple):
    """KV of one token: layers · 2 · heads · dim elements of bfloat16."""

    layers: int
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.dim * 2


LLAMA_8B = KernelShape(32, 8, 128)


class _Scene(NamedTuple):
    slab: Slab
    caches: list[torch.Tensor]
    rotary: Rotary
    num_slots: int


def run_kernels(
    run: BenchRun,
    tokens: Sequence[int],
    say: Callable[[str], None],
    *,
    shape: KernelShape = LLAMA_8B,
    pool_dtype: PoolDtype = "auto",
    page_sizes: Sequence[int] = (4, 16),
    repeats: int = 30,
) -> None:
    """Rows `kernel_bandwidth` (GB/s) and `kernel_of_copy` (share of the copy of as many bytes).

    tokens: how many one launch moves. page_sizes: of the slab, in tokens. Raises InferScaleError without
    a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise InferScaleError(
            "The kernels run on CUDA GPUs only, and torch sees none. On a CPU, injection is portable."
        )
    run.config |= {"command": command(), "environment": environment()}
    for page_size in page_sizes:
        scene = make_scene(shape, page_size, pool_dtype)
        for n in tokens:
            _measure(run, scene, shape, n, page_size, repeats, say)
        del scene
        torch.cuda.empty_cache()


def make_scene(
    shape: KernelShape, page_size: int, pool_dtype: PoolDtype = "auto", slab_bytes: int = 4 * 2**30
) -> _Scene:
    """A slab and caches as FlashAttention lays them out (NHD), with random contents."""
    device = torch.device("cuda")
    row_format = RowFormat(RowShape(((shape.heads, shape.dim),) * shape.layers), torch.bfloat16, pool_dtype)
    slab = Slab(slab_bytes // (page_size * row_format.row_bytes), page_size, row_format, device)
    if row_format.is_quantized:  # bytes and scales that are numbers of an ordinary size
        slab.data.random_(0x30, 0x40)
    else:
        slab.data.normal_()
    blocks = slab_bytes // (BLOCK_TOKENS * shape.token_bytes)
    caches = [
        torch.zeros((blocks, 2, BLOCK_TOKENS, shape.heads, shape.dim), dtype=torch.bfloat16, device=device)
        for _ in range(shape.layers)
    ]
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, shape.dim, 2, dtype=torch.float64) / shape.dim)
    return _Scene(slab, caches, Rotary(inv_freq, shape.dim, shape.dim, False), blocks * BLOCK_TOKENS)


def make_mover(
    scene: _Scene, max_tokens: int, inject: Tuning = INJECT, capture: Tuning = CAPTURE
) -> FusedMover:
    cache = scene.caches[0]
    block = cache.permute(0, 2, 1, 3, 4)[0]
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(block.shape, block.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    geometry = geometry_of(places, cache.stride(0))
    assert geometry is not None
    return FusedMover(
        scene.slab,
        scene.caches,
        geometry,
        scene.rotary,
        BLOCK_TOKENS,
        max_tokens,
        inject_tuning=inject,
        capture_tuning=capture,
    )


class Staged(NamedTuple):
    """Moves, and their table on the device."""

    moves: Moves
    table: torch.Tensor


def make_moves(scene: _Scene, n: int, count: int) -> list[Staged]:
    """`count` different moves of n tokens: one run, made of facts, as a request with memory has it."""
    rng = np.random.default_rng(n)
    moves = [_random_moves(scene, n, rng) for _ in range(count)]
    return [Staged(m, torch.frombuffer(bytearray(m.table), dtype=torch.int32).cuda()) for m in moves]


def _random_moves(scene: _Scene, n: int, rng: np.random.Generator) -> Moves:
    size = scene.slab.page_size_tokens
    free_pages = rng.permutation(scene.slab.data.shape[0] // size)
    rows: list[np.ndarray[Any, Any]] = []
    used = total = 0
    while total < n:
        length = min(int(rng.integers(_FACT_TOKENS[0], _FACT_TOKENS[1] + 1)), n - total)
        pages = free_pages[used : used + -(-length // size)]
        used += len(pages)
        offsets = np.arange(length)
        rows.append(pages[offsets // size] * size + offsets % size)
        total += length
    blocks = rng.permutation(scene.num_slots // BLOCK_TOKENS)[: -(-n // BLOCK_TOKENS)]
    return single_run(np.concatenate(rows), 0, blocks.tolist(), BLOCK_TOKENS)


def device_times_ms(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Device time of each call, the host running ahead of the device."""
    times = []
    for call in calls:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _measure(
    run: BenchRun,
    scene: _Scene,
    shape: KernelShape,
    n: int,
    page_size: int,
    repeats: int,
    say: Callable[[str], None],
) -> None:
    mover = make_mover(scene, n)
    staged = make_moves(scene, n, repeats + 3)
    captured = torch.randint_like(scene.slab.origins, 8000)
    scene.slab.origins.copy_(captured)
    # Half of what is read and written together, as a copy has it.
    moved_bytes = n * (scene.slab.format.row_bytes + shape.token_bytes) // 2
    source = torch.empty(LARGE_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    elements = moved_bytes // 2
    spread = max(1, (len(source) - elements) // (repeats + 3))
    kinds: dict[str, list[Callable[[], object]]] = {
        name: [] for name in ("copy", "copy_2gb", "inject", "capture")
    }
    for i in range(repeats + 3):
        part = slice(i * spread, i * spread + elements)
        kinds["copy"].append(lambda part=part: target[part].copy_(source[part]))  # type: ignore[misc]
        kinds["copy_2gb"].append(lambda: target.copy_(source))
        kinds["inject"].append(lambda i=i: mover.launch_inject(staged[i].table, staged[i].moves))  # type: ignore[misc]
        kinds["capture"].append(lambda i=i: mover.launch_capture(staged[i].table, staged[i].moves))  # type: ignore[misc]
    for calls in kinds.values():
        device_times_ms(calls[:3])  # compiles and warms up
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(3, repeats + 3):
        for name, calls in kinds.items():
            times[name] += device_times_ms([calls[i]])
    config = {
        "tokens": n,
        "bytes": moved_bytes,
        "page_size_tokens": page_size,
        "pool_dtype": scene.slab.format.pool_dtype,
        "row_bytes": scene.slab.format.row_bytes,
        "block_size": BLOCK_TOKENS,
        "shape": shape._asdict(),
        "baseline": "torch copy_ of as many bytes, device to device, in turn with the kernels",
        "tuning": {"inject": INJECT._asdict(), "capture": CAPTURE._asdict()},
    }
    for name, values in times.items():
        size = LARGE_COPY_BYTES if name == "copy_2gb" else moved_bytes
        rates = [2 * size / (ms * 1e-3) / 1e9 for ms in values]
        run.add("kernel_bandwidth", "GB/s", rates, mode=name, k=n, config=config)
    for name in ("inject", "capture"):
        for base in ("copy", "copy_2gb"):
            scale = LARGE_COPY_BYTES / moved_bytes if base == "copy_2gb" else 1.0
            per_byte = [ms / scale for ms in times[base]]
            run.add_ratio("kernel", f"{base}/{name}", per_byte, times[name], k=n, config=config)
    medians = {name: float(np.median(values)) * 1e3 for name, values in times.items()}
    say(
        f"{n} tokens, pages of {page_size}: "
        + ", ".join(f"{name} {us:.0f} µs" for name, us in medians.items())
        + f"; inject {medians['copy'] / medians['inject']:.2f}, "
        + f"capture {medians['copy'] / medians['capture']:.2f} of copy"
    )
