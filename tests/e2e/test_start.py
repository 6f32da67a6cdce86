"""What is refused at start-up, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine import EngineCache, EngineFailed

pytestmark = pytest.mark.engine


def test_pool_below_one_page_is_refused(checkpoint: Callable[[str], Path], engine: EngineCache) -> None:
    with pytest.raises(EngineFailed, match=r"InvalidConfig: .*Set pool_size_bytes to at least"):
        engine(checkpoint("llama"), pool_tokens=15)


def test_pool_above_free_memory_is_refused(checkpoint: Callable[[str], Path], engine: EngineCache) -> None:
    with pytest.raises(EngineFailed, match=r"PoolTooLarge: .*Set pool_size_bytes to at most"):
        engine(checkpoint("llama"), pool_tokens=2**40)
