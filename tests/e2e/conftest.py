"""Fixtures of the end-to-end tests. Engines and references are shared by the whole session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.checkpoints import make_checkpoint
from harness.engine import EngineCache
from harness.mixes import Author
from harness.reference import Reference


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "e2e: runs stock vLLM")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model by name: a family of `checkpoints`, or "smollm2"."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(name: str) -> Path:
        return _demo_model() if name == "smollm2" else make_checkpoint(name, folder)

    return find


def _demo_model() -> Path:
    from inferscale.errors import EngineMissing
    from inferscale.models import ensure_demo_model

    try:
        return ensure_demo_model()
    except EngineMissing as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    """`engine(checkpoint, **options)` gives a running engine with these options (`EngineOptions`)."""
    engines = EngineCache(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Reference]]:
    """`reference(name)` gives the Hugging Face model of `checkpoint(name)`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for models this small
    known: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in known:
            known[name] = Reference(checkpoint(name))
        return known[name]

    yield find
    torch.set_num_threads(num_threads)


@pytest.fixture
def author(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    engine: EngineCache,
    reference: Callable[[str], Reference],
) -> Callable[..., Author]:
    """`author(name, **options)` gives an author for an engine of that model, with an empty pool.

    Its texts are the same in every run and differ from test to test.
    """
    import zlib

    seed = zlib.crc32(request.node.name.encode())

    def make(name: str, **options: object) -> Author:
        running = engine(checkpoint(name), **options)
        if running.options.pool_tokens:
            running.forget_all()
        running.reset_prefix_cache()
        return Author(running, reference(name), seed)

    return make
