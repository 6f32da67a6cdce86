"""Models with sliding windows or chunks on vLLM's hybrid cache manager: prompts longer than what layers see.

By default one architecture; all of them with INFERSCALE_WINDOW_MODELS=all (docs/models.md).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from model_reference import ModelReference, Pass, Placed

from harness.engine import Engine, EngineCache
from harness.protocol import Answer, FloatArray
from inferscale.plan import Segment, Span

pytestmark = pytest.mark.engine

NAMES = ("Gemma 3",)
if os.environ.get("INFERSCALE_WINDOW_MODELS") == "all":
    NAMES += ("Gemma 2", "gpt-oss", "Mistral, sliding window", "Command R7B", "OLMo 3", "EXAONE 4", "Llama 4")
CHUNK_TOKENS = 128
"""Of chunked prefill: a step computes no more."""
STEPS = 3
ENVIRONMENT = (("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1"),)
"""Without it vLLM gives layers with chunks full block tables."""


class Windowed:
    """One engine and the reference of its model."""

    def __init__(self, architecture: Architecture, checkpoint: Any, engines: EngineCache) -> None:
        self.engine: Engine = engines(
            checkpoint,
            block_size=32,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=8,
            environment=ENVIRONMENT,
        )
        self.reference = ModelReference(checkpoint, architecture.max_model_len)
        self.random = random.Random(3)
        self.num_scopes = 0

    def text(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(5, VOCAB_SIZE) for _ in range(num_tokens))

    def store(self, whole: Pass, spans: Sequence[tuple[int, int]]) -> list[Segment]:
        ids = whole.ids
        segments = [Segment(self.engine.key(ids[:a], ids[a:b]), ids[a:b]) for a, b in spans]
        captures = tuple(Span(s.key, a, b) for s, (a, b) in zip(segments, spans, strict=True))
        self.engine.ask(ids, self.engine.plan("encode", captures=captures))
        assert all(self.engine.resident([s.key for s in segments]))
        return segments

    def ask(self, ids: Sequence[int], segments: Sequence[Segment], scope: str = "", **more: Any) -> Answer:
        self.num_scopes += 1
        plan = self.engine.plan(scope or f"scope {self.num_scopes}", segments=tuple(segments))
        return self.engine.ask(ids, plan, max_tokens=STEPS, **more)

    def expected(self, parts: Sequence[tuple[int, ...] | Placed], answer: Answer) -> FloatArray:
        return self.reference.logits([*parts, answer.token_ids[:-1]], len(answer.token_ids))

    def noise(self, num_tokens: int) -> float:
        """Of rounding: the largest difference of the engine to the reference for text of this length, and of
        that to itself further on."""
        largest = 0.0
        for ids in [self.text(num_tokens) for _ in range(4)]:
            answer = self.engine.ask(ids, max_tokens=STEPS)
            expected, whole = self.expected([ids], answer), [(*ids, *answer.token_ids[:-1])]
            largest = max(largest, apart(answer.logits, expected))
            for first_position in (256, 1024):
                further = self.reference.logits(whole, STEPS, first_position=first_position)
                largest = max(largest, apart(further, expected))
        return largest


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windowed]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.mktemp("windows")
    architecture = next(one for one in ARCHITECTURES if one.name == request.param)
    engines = EngineCache(folder, limit=1)
    try:
        yield Windowed(architecture, architecture.write(folder / "checkpoints"), engines)
    finally:
        engines.close()


@pytest.fixture(autouse=True)
def empty_pool(model: Windowed) -> None:
    model.engine.forget_everything()


def apart(a: FloatArray, b: FloatArray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())


def test_the_hybrid_manager_stays_on(model: Windowed) -> None:
    windows = model.engine.windows()
    assert any(window or chunk for _, window, chunk in windows), "vLLM keeps full block tables"


def test_injected_where_it_was_captured_is_text(model: Windowed) -> None:
    """Spans longer than the window, captured over several steps; layers see the last 160 or 256 of 640."""
    whole, question = Pass(model.text(640)), model.text(40)
    segments = model.store(whole, [(0, 70), (70, 500), (500, 509), (509, 640)])
    assert model.engine.stats()["captures_out_of_reach"] == 0
    model.engine.reset_prefix_cache()
    ids = (*whole.ids, *question)
    text = model.engine.ask(ids, max_tokens=STEPS)
    injected = model.ask(ids, segments)
    assert injected.outcome is not None
    assert (injected.outcome["injected_tokens"], injected.outcome["prefilled_tokens"]) == (640, 40)
    assert injected.token_ids == text.token_ids
    assert apart(injected.logits, text.logits) <= 2 * model.noise(len(ids))
    again = model.engine.ask(ids, max_tokens=STEPS)
    assert np.array_equal(again.logits, text.logits), "text finds nothing injected"


def test_moved_is_what_the_reference_has_there(model: Windowed) -> None:
    whole, other, question = Pass(model.text(560)), Pass(model.text(300)), model.text(40)
    first, second = model.store(whole, [(40, 140), (140, 560)])
    (third,) = model.store(other, [(10, 300)])
    ids = (*third.token_ids, *second.token_ids, *first.token_ids, *question)
    answer = model.ask(ids, [third, second, first])
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == len(ids) - 40
    placed = [Placed(other, 10, 300, 0), Placed(whole, 140, 560, 290), Placed(whole, 40, 140, 710)]
    right = model.expected([*placed, question], answer)
    tolerance = 2 * model.noise(len(ids))
    assert apart(answer.logits, right) <= tolerance
    model.engine.turn_wrongly(0.0)
    unmoved = model.ask(ids, [third, second, first])
    model.engine.turn_wrongly(1.0)
    assert apart(unmoved.logits[:1], right[:1]) > 100 * tolerance, "a wrong turn would be seen"
    assert apart(right, model.expected([ids], answer)) > 100 * tolerance, "text sees more"


def test_blocks_that_no_layer_sees_are_never_taken(model: Windowed) -> None:
    """The null block stands where a window has passed, from the first step on."""
    whole, question = Pass(model.text(640)), model.text(30)
    segments = model.store(whole, [(0, 640)])
    plan = model.engine.plan("blocks", segments=tuple(segments))
    name, _ = model.engine.prefill(model.engine.request((*whole.ids, *question), plan))
    for (size, window, chunk), blocks in zip(
        model.engine.windows(), model.engine.blocks_of_groups(name), strict=True
    ):
        seen_from = max(0, 640 - window + 1) if window else 640 // chunk * chunk if chunk else 0
        assert [block == 0 for block in blocks[: 640 // size]] == [
            index < seen_from // size for index in range(640 // size)
        ]
    model.engine.abort([name])


def test_the_prefix_cache_and_the_pool_together(model: Windowed) -> None:
    """A second question of the scope finds the facts in the prefix cache, a third one only some of them."""
    whole = Pass(model.text(640))
    segments = model.store(whole, [(0, 300), (300, 640)])
    model.engine.reset_prefix_cache()
    ids = (*whole.ids, *model.text(40))
    fresh = model.ask(ids, segments, "one")
    cached = model.ask(ids, segments, "one")
    assert cached.outcome is not None
    assert cached.outcome["injected_tokens"] == 0
    assert cached.outcome["cached_tokens"] >= 640
    assert apart(cached.logits, fresh.logits) <= 1e-3 * float(np.abs(fresh.logits).max())
    short = (*whole.ids[:300], *model.text(20))
    model.ask(short, segments[:1], "two")
    both = model.ask(ids, segments, "two")
    assert both.outcome is not None
    assert both.outcome["cached_tokens"] + both.outcome["injected_tokens"] == 640
    assert apart(both.logits, fresh.logits) <= 1e-3 * float(np.abs(fresh.logits).max())


def test_a_pass_that_the_prefix_cache_knows_is_captured_again(model: Windowed) -> None:
    whole = Pass(model.text(600))
    keys = [segment.key for segment in model.store(whole, [(0, 90), (90, 600)])]
    model.engine.forget(keys)
    segments = model.store(whole, [(0, 90), (90, 600)])
    ids = (*whole.ids, *model.text(20))
    text = model.engine.ask(ids, max_tokens=STEPS)
    injected = model.ask(ids, segments)
    assert injected.outcome is not None
    assert injected.outcome["injected_tokens"] == 600
    assert apart(injected.logits, text.logits) <= 1e-3 * float(np.abs(text.logits).max())


def test_preempted_and_resumed(model: Windowed) -> None:
    """A running request loses its blocks and takes its memory again."""
    whole, question = Pass(model.text(640)), model.text(40)
    segments = model.store(whole, [(0, 640)])
    ids = (*whole.ids, *question)
    plan = model.engine.plan("preempted", segments=tuple(segments))
    name = model.engine.add(model.engine.request(ids, plan, max_tokens=6))
    for _ in range(3):
        model.engine.step()
    model.engine.preempt_all()
    finished: dict[str, Answer] = {}
    while model.engine.has_unfinished():
        finished.update(model.engine.step())
    answer = next(a for key, a in finished.items() if key.startswith(name))
    plain = model.engine.ask(ids, max_tokens=6)
    assert answer.outcome is not None
    assert answer.outcome["resumes"] == 1
    assert answer.token_ids == plain.token_ids
    assert apart(answer.logits, plain.logits) <= 1e-3 * float(np.abs(plain.logits).max())
