"""Two engines with nothing in common but a store: the second one injects what the first one encoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.engine import EngineCache
from harness.mixes import Author, Part
from inferscale.plan import Order
from inferscale.windows import window

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", ["llama"])
def test_another_server_injects_what_was_encoded_here(
    author: Callable[..., Author],
    engine: EngineCache,
    checkpoint: Callable[[str], Path],
    model: str,
    tmp_path: Path,
) -> None:
    options = {"block_size": 32, "cold": str(tmp_path / "shared")}
    a = author(model, **options)
    facts = a.store_facts([40] * 4, window(2))
    keys = [fact.key for fact in facts]
    parts: list[Part] = [*facts, a.text(20)]
    first = a.ask(parts, num_steps=2)
    a.engine.close()

    a.engine = engine(checkpoint(model), **options)
    assert a.engine.resident(keys) == [True] * 4
    again = a.ask(parts, num_steps=2)
    assert again.outcome is not None
    assert again.outcome["injected_tokens"] == 160
    assert np.array_equal(again.logits, first.logits)
    stats = a.engine.stats()
    assert (stats["cold_hits"], stats["captures"], stats["internal_errors"]) == (4, 0, 0)

    a.engine.ask([1], a.engine.plan(order=Order("forget", tuple(keys[3:]))))
    a.engine.close()  # what is being removed is
    left = {path.name for path in (tmp_path / "shared").rglob("*") if path.parent.parent.name == "rank-0"}
    assert left == set(keys[:3])
