"""A segment that is injected where it was captured: the same bytes in the pages, the same logits.

Equal means equal in every bit, also against a plain prefill: the CPU kernels compute a token's row
in the same way whatever else is prefilled in the step. (Steps of one row and of a few differ in the
last bits, so here the decode steps that are compared hold one row each.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from harness.checkpoints import FAMILIES
from harness.engine import Engine
from harness.mixes import Author, ids_of, segments_of
from harness.protocol import FloatArray, Request

pytestmark = pytest.mark.engine

CUTS = [0, 50, 117, 300]


@pytest.mark.parametrize("model", FAMILIES)
def test_pages_are_bit_identical_and_logits_equal(author: Callable[..., Author], model: str) -> None:
    check(author(model), CUTS)


def test_pages_are_bit_identical_and_logits_equal_on_a_real_model(author: Callable[..., Author]) -> None:
    check(author("smollm2", block_size=32), [0, 9, 50, 100])


def test_compiled_injection_is_bit_identical(author: Callable[..., Author]) -> None:
    check(author("llama", compile_injection=True), CUTS)


def check(a: Author, cuts: list[int]) -> None:
    engine = a.engine
    num_memory, spans = cuts[-1], list(zip(cuts, cuts[1:], strict=False))
    memory, question = a.text(num_memory), a.text(40)
    stored = a.store([(memory, spans)])
    parts = [*stored, question]

    capture = pages_of(engine, engine.request(memory, engine.plan("encode")))
    for (start, end), s in zip(spans, stored, strict=True):
        assert np.array_equal(engine.pooled(s.key), capture.kv[:, :, start:end])

    injection = pages_of(engine, engine.request(ids_of(parts), engine.plan(segments=segments_of(parts))))
    assert [num_tokens for _, num_tokens in engine.claims()] == [num_memory]
    whole = num_memory // engine.facts.block_size
    assert whole >= 2
    assert injection.blocks[:whole] == capture.blocks[:whole]  # raw, whatever lies where in them
    assert np.array_equal(injection.kv[:, :, :num_memory], capture.kv)

    plain = pages_of(engine, engine.request(ids_of(parts)))
    assert np.array_equal(injection.kv, plain.kv)
    assert injection.blocks == plain.blocks

    engine.clear_pages()
    answer = a.ask(parts, num_steps=4)
    assert answer.outcome is not None
    assert (answer.outcome["injected_tokens"], answer.outcome["prefilled_tokens"]) == (num_memory, 40)
    assert np.array_equal(answer.logits, a.ask_plain(parts, num_steps=4).logits)
    assert a.difference(parts, answer, num_memory) <= 2 * a.baseline([num_memory + 40] * 3, num_steps=4)


class Pages(NamedTuple):
    """blocks: raw bytes of a request's blocks. kv: of its prompt, as `paged` gives it."""

    blocks: list[bytes]
    kv: FloatArray


def pages_of(engine: Engine, request: Request) -> Pages:
    """Prefill a prompt into an engine whose pages hold nothing else."""
    engine.clear_pages()
    name, running = engine.prefill(request)
    pages = Pages(engine.raw_blocks(running.block_ids), engine.paged(running.block_ids, len(request.ids)))
    engine.abort([name])
    return pages
