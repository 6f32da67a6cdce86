"""The self-check on real engines: what is moved rightly passes, what is moved wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.checkpoints import FAMILIES
from harness.mixes import Author
from harness.self_checking import self_check

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_passes_and_would_not_with_keys_moved_wrongly(
    author: Callable[..., Author], model: str
) -> None:
    a = author(model)
    text = tuple(range(60, 90))
    before = a.engine.stats()
    verdict = self_check(a.engine, text)
    assert verdict.state == "exact", verdict
    assert verdict.moved < verdict.allowed / 5, "there is room for larger models"
    assert verdict.position < verdict.allowed
    after = a.engine.stats()
    assert after["resident_segments"] == before["resident_segments"]
    assert (after["internal_errors"], after["plans_rejected"]) == (0, 0)
    try:
        for factor in (0.0, -1.0, 0.9):
            a.engine.turn_wrongly(factor)
            assert self_check(a.engine, text).state == "refused", factor
    finally:
        a.engine.turn_wrongly(1.0)
