"""A segment that is injected where it was captured: the same bytes in the pages, the same logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness.checkpoints import FAMILIES
from harness.mixes import Author, ids_of, segments_of

pytestmark = pytest.mark.e2e

MODELS = [*FAMILIES, "smollm2"]


@pytest.mark.parametrize("model", MODELS)
def test_pages_are_bit_identical_and_logits_equal(author: Callable[..., Author], model: str) -> None:
    a = author(model)
    engine = a.engine
    memory = a.text(300)
    question = a.text(40)
    cuts = [(0, 50), (50, 117), (117, 300)]

    engine.clear_pages()
    stored = a.store([(memory, cuts)])
    capture = engine.request(memory, engine.plan("encode"))
    engine.clear_pages()
    name, captured = engine.prefill(capture)
    captured_blocks = engine.raw_blocks(captured.block_ids)
    captured_pages = engine.paged(captured.block_ids, 300)
    engine.abort([name])

    for (start, end), s in zip(cuts, stored, strict=True):
        assert np.array_equal(engine.pooled(s.key), captured_pages[:, :, start:end])

    engine.clear_pages()
    parts = [*stored, question]
    name, injected = engine.prefill(engine.request(ids_of(parts), engine.plan(segments=segments_of(parts))))
    injected_blocks = engine.raw_blocks(injected.block_ids)
    injected_pages = engine.paged(injected.block_ids, 340)
    engine.abort([name])
    assert [n for _, n in engine.claims()][-1] == 300
    assert injected_blocks[:2] == captured_blocks[:2]  # whole blocks, however the backend packs them
    assert np.array_equal(injected_pages[:, :, :300], captured_pages)

    engine.clear_pages()
    name, plain = engine.prefill(engine.request(ids_of(parts)))
    plain_pages = engine.paged(plain.block_ids, 340)
    engine.abort([name])
    print("pages", np.abs(plain_pages - injected_pages).max(), np.abs(plain_pages - injected_pages)[:,:,:300].max())

    engine.clear_pages()
    answer = a.ask(parts, num_steps=4)
    engine.clear_pages()
    expected = a.ask_plain(parts, num_steps=4)
    print("logits", np.abs(answer.logits - expected.logits).max(), a.difference(parts, answer, 300), a.baseline([340] * 4, 4))
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 300
