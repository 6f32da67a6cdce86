"""vLLM's features beside injected memory: each is right, or refused by name (docs/engine-features.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import make_adapter, make_quantized
from harness.engine import EngineCache, EngineFailed
from harness.mixes import Author, Part, ids_of, segments_of
from harness.protocol import Answer
from harness.reference import Reference
from inferscale.adapters import model_with_adapter
from inferscale.plan import Segment, Span, segment_key
from inferscale.windows import sliding
from memory_server import free_port

pytestmark = pytest.mark.engine

LORA = json.dumps({"enable_lora": True, "max_lora_rank": 8, "max_loras": 2})
NGRAM = json.dumps(
    {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1
        },
        "enable_chunked_prefill": False,
    }
)  # fmt: skip


# LoRA -------------------------------------------------------------------------------------------


class Adapted:
    """An author whose requests run under an adapter, beside the reference with that adapter merged."""

    def __init__(self, engine: Any, folder: Path, name: str, number: int) -> None:
        self.engine = engine
        self.adapter = (name, number, str(folder))
        model = model_with_adapter(engine.facts.model, *self.adapter)
        assert model is not None
        self.model = model
        self.reference = Reference(folder / "merged")

    def capture(self, ids: tuple[int, ...], start: int) -> Any:
        """Store `ids[start:]` behind `ids[:start]`."""
        key = segment_key(self.model, ids[:start], ids[start:])
        plan = replace(self.engine.plan("encode", captures=(Span(key, start, len(ids)),)), model=self.model)
        self.engine.ask(ids, plan, adapter=self.adapter)
        return key

    def ask(self, ids: tuple[int, ...], segments: tuple[Segment, ...], model: str | None = None) -> Answer:
        plan = replace(self.engine.plan("test", segments=segments), model=model or self.model)
        answer: Answer = self.engine.ask(ids, plan, max_tokens=3, adapter=self.adapter)
        return answer


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(checkpoint("llama"), folder, seed) for seed in (1, 2)]


def test_facts_are_injected_under_the_adapter_that_encoded_them(
    author: Callable[..., Author], adapters: list[Path]
) -> None:
    a = author("llama", block_size=32, engine_args=LORA)
    one, two = (Adapted(a.engine, path, f"lora {i}", i) for i, path in enumerate(adapters, start=1))
    before, fact, question = a.text(25), a.text(40), a.text(9)
    tolerance = 2 * a.baseline([80] * 4, 3)
    ids = (*fact, *question)
    for adapted in (one, two):
        key = adapted.capture((*before, *fact), 25)
        assert a.engine.resident([key]) == [True]
        answer = adapted.ask(ids, (Segment(key, fact),))
        assert answer.outcome is not None
        assert (answer.outcome["injected_tokens"], answer.outcome["cached_tokens"]) == (40, 0)
        twin = Author(a.engine, adapted.reference, 0)
        [stored] = [replace(s, key=key) for s in twin.expect((*before, *fact), [(25, 65)])]
        assert twin.difference([stored, question], answer, 40) <= tolerance
        plain = a.reference.logits((*ids, *answer.token_ids[:-1]), 3)
        assert np.abs(plain - answer.logits).max() > 100 * tolerance  # the adapter makes a difference
    assert one.model != two.model


def test_kv_of_another_adapter_or_of_none_is_not_injected(
    author: Callable[..., Author], adapters: list[Path]
) -> None:
    a = author("llama", block_size=32, engine_args=LORA)
    one, two = (Adapted(a.engine, path, f"lora {i}", i) for i, path in enumerate(adapters, start=1))
    fact, question = a.text(40), a.text(9)
    ids, key = (*fact, *question), one.capture(fact, 0)
    tolerance = 2 * a.baseline([80] * 4, 3)
    for asker, model in ((two, one.model), (two, a.engine.facts.model), (one, a.engine.facts.model)):
        answer = asker.ask(ids, (Segment(key, fact),), model)
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == 0
        assert "another model or adapter" in answer.outcome["reason"]
        twin = Author(a.engine, asker.reference, 0)
        assert twin.difference([ids], answer, 0) <= tolerance
        a.engine.reset_prefix_cache()
    base = a.engine.ask(ids, replace(a.engine.plan("t", segments=(Segment(key, fact),)), model=one.model))
    assert base.outcome is not None
    assert base.outcome["injected_tokens"] == 0
    assert a.difference([ids], base, 0) <= tolerance


def test_an_adapter_whose_files_are_unknown_is_served_as_text(
    author: Callable[..., Author], adapters: list[Path]
) -> None:
    """Here: the plan names what the adapter was before its folder lost its weights."""
    a = author("llama", block_size=32, engine_args=LORA)
    one = Adapted(a.engine, adapters[0], "lora 1", 1)
    fact, question = a.text(40), a.text(9)
    key = one.capture(fact, 0)
    one.adapter = ("lora 1", 1, str(adapters[0] / "gone"))  # the engine has loaded number 1 already
    answer = one.ask((*fact, *question), (Segment(key, fact),))
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 0
    assert "load it under a new name" in answer.outcome["reason"]


# several answers --------------------------------------------------------------------------------


def test_several_answers_of_one_request(author: Callable[..., Author]) -> None:
    """`n`: each is a request of its own with the same plan; the first one's account counts."""
    a = author("llama", block_size=32)
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    plan = a.engine.plan(segments=segments_of(parts))
    request = a.engine.request(ids_of(parts), plan, max_tokens=3, num_answers=3)
    answers = a.engine.ask_all(request)
    assert len({answer.token_ids for answer in answers}) > 1
    tolerance = 2 * a.baseline([103] * 4, 3)
    for answer in answers:
        a.check(parts, replace(answer, outcome=a.engine.outcome(plan.id)), tolerance)
    stats = a.engine.stats()
    assert (stats["open_requests"], stats["internal_errors"]) == (0, 0)


# speculation, no chunks -------------------------------------------------------------------------


def test_speculative_decoding_gives_the_same_answers(author: Callable[..., Author]) -> None:
    """Without chunked prefill, too: an injected prompt is larger than what a step may compute."""
    a = author("llama", block_size=32, engine_args=NGRAM, max_model_len=512, max_num_batched_tokens=512)
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    a.engine.ask(a.text(3))  # what a step captured is reported in the next one
    assert all(a.engine.resident([fact.key for fact in facts]))
    parts: list[Part] = [*a.shuffled(facts), a.text(4) * 5]
    tolerance = 2 * a.baseline([182] * 4, 40)
    answer = a.ask(parts, num_steps=40)
    a.check(parts, answer, tolerance)
    assert a.engine.num_draft_tokens() > 0


# sleep ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_the_pool_is_empty_and_filled_anew(author: Callable[..., Author], level: int) -> None:
    a = author("llama", block_size=32)
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    first = a.ask(parts, num_steps=2)
    a.engine.sleep_and_wake(level)
    assert a.engine.resident([fact.key for fact in facts]) == [False] * 3
    tolerance = 2 * a.baseline([103] * 4, 2)
    answer = a.ask(parts, num_steps=2)
    assert (answer.outcome or {})["injected_tokens"] == 0
    assert a.difference(parts, answer, 0) <= tolerance
    a.random.seed(zlib.crc32(b"again"))
    again = a.store_facts([20, 33, 40], sliding(2, 5))
    parts = [*again, parts[-1]]
    a.check(parts, a.ask(parts, num_steps=2, scope="again"), tolerance)
    assert first.outcome is not None
    a.engine.check_table()


# other weights ----------------------------------------------------------------------------------


def test_other_weights_make_other_keys(
    author: Callable[..., Author], adapters: list[Path], checkpoint: Callable[[str], Path]
) -> None:
    """Nothing of before is injected, whether or not its caller empties vLLM's caches."""
    a = author("llama", block_size=32, engine_args=NGRAM, max_model_len=512, max_num_batched_tokens=512)
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    plan = a.engine.plan("before", segments=segments_of(parts))
    a.engine.ask(a.text(3))
    a.engine.reload_weights(str(adapters[0] / "merged"))
    try:
        merged = Author(a.engine, Reference(adapters[0] / "merged"), 3)
        failed = a.engine.ask(ids_of(parts), plan)
        assert failed.finish_reason == "error"  # the first one was planned before anybody knew
        assert a.engine.resident([fact.key for fact in facts]) == [False] * 3
        tolerance = 2 * merged.baseline([103] * 4)
        late = a.engine.ask(ids_of(parts), a.engine.plan("late", segments=segments_of(parts)))
        assert late.outcome is not None
        assert (late.outcome["injected_tokens"], late.outcome["captured"]) == (0, 0)
        assert "another model" in late.outcome["reason"]
        assert merged.difference(parts, late, 0) <= tolerance
        assert a.engine.stats()["weight_reloads"] == 1
        renewed = a.engine.model()
        assert renewed != a.engine.facts.model
        a.engine.facts = replace(a.engine.facts, model=renewed)
        again = merged.store_facts([20, 33, 40], sliding(2, 5))
        a.engine.ask(a.text(3))
        parts = [*again, a.text(10)]
        merged.check(parts, merged.ask(parts), tolerance)
    finally:
        a.engine.close()


# quantized weights ------------------------------------------------------------------------------


@pytest.mark.wide
def test_quantized_weights(
    checkpoint: Callable[[str], Path], engine: EngineCache, tmp_path: Path, reference: Callable[[str], Any]
) -> None:
    """KV is what the quantized model computes: in its own place it gives the answer of text."""
    path = make_quantized(checkpoint("llama"), tmp_path)
    running = engine(path, block_size=32, engine_args=json.dumps({"dtype": "bfloat16"}))
    a = Author(running, reference("llama"), 5)
    ids, question = a.text(64), a.text(9)
    [fact] = a.store([(ids, [(0, 64)])])
    parts: list[Part] = [fact, question]
    text = a.ask_plain(parts, num_steps=3)
    injected = a.ask(parts, num_steps=3)
    assert injected.outcome is not None
    assert (injected.outcome["injected_tokens"], injected.outcome["cached_tokens"]) == (64, 0)
    assert injected.token_ids == text.token_ids
    assert np.abs(injected.logits - text.logits).max() < 0.02 * text.logits.std()
    assert a.difference(parts, text, 0) > 0.02 * text.logits.std()  # it is another model than the plain one


# refused at the start ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}, "the KV cache dtype fp8"),
        pytest.param(
            {"runner": "pooling", "convert": "embed"}, "models served for pooling", marks=pytest.mark.wide
        ),
    ],
)
def test_what_is_refused_at_the_start(
    checkpoint: Callable[[str], Path], engine: EngineCache, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineFailed, match=f"InferScale does not support {reason}"):
        engine(checkpoint("llama"), engine_args=json.dumps(arguments))


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["data", "pipeline"])
def test_parallelism_that_is_refused_by_the_connector(checkpoint: Callable[[str], Path], kind: str) -> None:
    """Where vLLM's own flags ask for it; engines of a dense model are told that each is alone, but for their
    number."""
    transfer = {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale.connector",
        "kv_role": "kv_both",
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(checkpoint("llama")),
    ]
    command += f"--skip-tokenizer-init --enforce-eager --max-model-len 512 --port {free_port()}".split()
    command += [f"--{kind}-parallel-size", "2", "--kv-transfer-config", json.dumps(transfer)]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    if kind == "pipeline":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=800)
    assert ended.returncode != 0
    assert f"InferScale does not support {kind} parallelism" in ended.stdout + ended.stderr
