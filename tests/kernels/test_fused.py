"""The Triton kernels against the portable path: on the CPU in Triton's interpreter, on a GPU compiled.

The interpreter rounds to bfloat16 by cutting bits off, so keys that move may differ by one unit in the
last place there; on a GPU too, where the product of a rotation is fused with its sum.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import LAYOUTS, Sizes, check_capture, check_injection, make

from inferscale.config import PoolDtype
from inferscale.errors import UnsupportedLayout
from inferscale.kernels.fused import FusedMover
from inferscale.kernels.geometry import geometry_of
from inferscale.kernels.staging import NUM_BUFFERS, Staging
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.row_size import RowShape

pytest.importorskip("triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [
    Sizes(dim=64, heads=3, layers=2, tokens=21),
    Sizes(dim=80, heads=1, block=32, page=4, tokens=19),
    Sizes(dim=96, heads=2, rotary=48, page=16, layers=2, tokens=23),
    Sizes(dim=128, heads=8, block=128, blocks=2, layers=2, tokens=21),
    Sizes(dim=256, heads=16, layers=1, tokens=5, page=1),
    Sizes(dim=80, heads=12, rotary=32, block=1, blocks=60, tokens=11),
    Sizes(dim=64, heads=4, rotary=2, tokens=1),
    Sizes(dim=6, heads=5, block=4, blocks=20, layers=5, page=3, tokens=13),
]
DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def _needs_device(request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}-rotary{s.rotary}-block{s.block}")
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_injection_equals_the_portable_path(device: str, sizes: Sizes, interleaved: bool) -> None:
    for number, dtype in enumerate(DTYPES):
        layout = LAYOUTS[(number + sizes.heads + int(interleaved)) % len(LAYOUTS)]
        case = make(layout, sizes, dtype, interleaved=interleaved, seed=number, device=device)
        check_injection(case, interpret=device == "cpu", ulps=16 if dtype == torch.float32 else 1.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_layers_with_frequencies_of_their_own(device: str, interleaved: bool) -> None:
    for seed, sizes in enumerate(SHAPES[:3]):
        case = make(
            "nhd", sizes, torch.float32, interleaved=interleaved, seed=seed, device=device, by_layer=True
        )
        check_injection(case, interpret=device == "cpu", ulps=16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SHAPES[::3], ids=lambda s: f"{s.heads}x{s.dim}")
def test_capture_is_bit_identical(device: str, layout: str, sizes: Sizes) -> None:
    for number, dtype in enumerate(DTYPES):
        case = make(layout, sizes, dtype, interleaved=False, seed=number, device=device)
        check_capture(case, interpret=device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pool_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}-rotary{s.rotary}")
def test_quantized_rows(device: str, pool_dtype: PoolDtype, sizes: Sizes) -> None:
    """Captured to the last bit as the portable path quantizes, and injected as it reads them."""
    for number, dtype in enumerate(DTYPES):
        if device == "cpu" and number != SHAPES.index(sizes) % len(DTYPES):
            continue  # the interpreter is slow
        layout = LAYOUTS[(number + sizes.heads) % len(LAYOUTS)]
        for interleaved in (False, True):
            case = make(
                layout,
                sizes,
                dtype,
                interleaved=interleaved,
                seed=number,
                device=device,
                pool_dtype=pool_dtype,
            )
            check_injection(case, interpret=device == "cpu", ulps=16 if dtype == torch.float32 else 1.01)
        check_capture(case, interpret=device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_injects(device: str, layout: str) -> None:
    case = make(layout, Sizes(heads=2, dim=64), torch.bfloat16, interleaved=False, seed=3, device=device)
    check_injection(case, interpret=device == "cpu", ulps=1.01)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_larger_than_its_staging_buffer(device: str) -> None:
    case = make("nhd", Sizes(tokens=20, layers=1), torch.float32, interleaved=False, seed=1, device=device)
    mover = case.mover(interpret=device == "cpu", max_tokens=4)
    expected = case.expected()
    for _ in range(3):
        mover.inject(case.moves)
    found = case.logical[0].reshape(expected[0].shape)
    torch.testing.assert_close(found, expected[0], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_zeroed_pages_and_no_others(device: str) -> None:
    case = make("nhd", Sizes(dim=80, heads=3), torch.bfloat16, interleaved=False, seed=1, device=device)
    before = case.slab.data.clone()
    case.mover(interpret=device == "cpu").zero(np.array([4, 0], dtype=np.int32))
    for page in range(len(before) // case.slab.page_size_tokens):
        rows = slice(page * 8, page * 8 + 8)
        expected = torch.zeros_like(before[rows]) if page in (0, 4) else before[rows]
        assert torch.equal(case.slab.data[rows], expected), page


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [1, 5000])
def test_tables_reach_the_device_whatever_their_size(device: str, capacity: int) -> None:
    """More of them than there are buffers, of growing and shrinking sizes."""
    staging = Staging(capacity, torch.device(device))
    rng = np.random.default_rng(0)
    for size in [1, 3, 1024, 1025, 7, 2049, 30_000, 5, *rng.integers(1, 4000, 3 * NUM_BUFFERS)]:
        table = rng.integers(-(2**31), 2**31, size).astype(np.int32)
        assert (staging.put(table)[:size].cpu().numpy() == table).all(), size


def test_a_layout_that_is_no_sum_of_strides_has_no_geometry() -> None:
    places = torch.arange(4 * 2 * 2 * 8).view(4, 2, 2, 8)
    assert geometry_of(places, 64) is not None
    swapped = places.clone()
    swapped[3, 1, 1, 6], swapped[3, 1, 1, 7] = places[3, 1, 1, 7], places[3, 1, 1, 6]
    assert geometry_of(swapped, 64) is None
    assert geometry_of(places.flip(-1), 64) is None, "dimensions must be neighbours, ascending"


def test_layers_of_different_shapes_are_refused() -> None:
    case = make("nhd", Sizes(), torch.float32, interleaved=False, seed=0)
    row_format = RowFormat(RowShape(((2, 64), (1, 64))), torch.float32)
    slab = Slab(2, 4, row_format, torch.device("cpu"))
    with pytest.raises(UnsupportedLayout, match="different shapes"):
        FusedMover(slab, case.caches, case.geometry, case.rotary, 16, 8, interpret=True)
