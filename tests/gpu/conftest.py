"""Where the harness of the end-to-end tests is found, and one engine with a memory for all tests here.

The tests need a CUDA GPU. `INFERSCALE_GPU_TESTS_ON_CPU=1` runs them on the CPU, to work on the tests
themselves: in float32, or in the dtype that the variable names, with the portable injection and without
CUDA graphs. `INFERSCALE_TEST_MODEL` names the folder of the model, by default the demo model.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from real_engine import ON_CPU, Library, RealEngine, start


def pytest_configure(config: pytest.Config) -> None:
    """Also where pyproject.toml is not read."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of the real weights; skips where there is neither a GPU nor the leave to do without."""
    import torch

    if not ON_CPU and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    named = os.environ.get("INFERSCALE_TEST_MODEL")
    if named:
        return Path(named)
    from inferscale.errors import EngineMissing
    from inferscale.models import ensure_demo_model

    try:
        return ensure_demo_model()
    except EngineMissing as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def engine(model: Path) -> Iterator[RealEngine]:
    """The one engine of all tests, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        if ON_CPU:
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            patch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a function of its sampler
        running = start(model)
        yield running
        running.close()


@pytest.fixture(scope="session")
def known_library(engine: RealEngine, model: Path) -> Iterator[Library]:
    import torch

    num_threads = torch.get_num_threads()
    if ON_CPU:  # threads that wait for each other are slow where other processes run
        torch.set_num_threads(1)
    yield Library(engine, model)
    torch.set_num_threads(num_threads)


@pytest.fixture
def library(request: pytest.FixtureRequest, known_library: Library) -> Library:
    """A head and facts, all of the pool's content. What a test chooses of them is the same in every run."""
    known_library.fill_pool()
    known_library.random.seed(zlib.crc32(request.node.name.encode()))
    return known_library
