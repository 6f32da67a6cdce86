"""The exactness tests of one architecture, through a real engine, and the row that they make.

- A segment injected where it was captured gives the logits of the prefilled text.
- Segments injected elsewhere, captured behind windows of other facts, give the logits of the reference,
  within twice the rounding: what the engine differs from the reference for plain text, and what the reference
  differs from itself when all positions are counted from another number. The same engine with keys that are
  not turned must be far outside, and so must the text, which attends to more: else the comparison would see
  nothing.
- Text after injection gives what it gave before: vLLM's prefix cache holds nothing injected.
- The product's own self-check agrees.

An architecture that is refused must answer as stock vLLM does where it is started without injection.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from architectures import VOCAB_SIZE, Architecture
from model_reference import ModelReference, Pass, Placed

from harness.engine import Engine, EngineCache, EngineFailed
from harness.protocol import Answer, FloatArray
from harness.self_checking import self_check
from inferscale.connector import compat
from inferscale.errors import UnsupportedLayout
from inferscale.plan import Segment, Span
from inferscale.windows import pass_tokens, plan_passes, sliding

_STEPS = 3
_FAR = 100.0
"""A mistake has to be so many times as far as is allowed."""


@dataclass(frozen=True)
class Row:
    """result: `exact`, `exact except …` or `refused: …`; anything else is a failure. notes: what was
    measured, for whoever runs it."""

    architecture: Architecture
    result: str
    notes: str = ""

    @property
    def is_allowed(self) -> bool:
        return self.result == "exact" or self.result.startswith(("exact except ", "refused: "))


class _Stored(NamedTuple):
    key: str
    of: Pass
    start: int
    end: int

    @property
    def ids(self) -> tuple[int, ...]:
        return self.of.ids[self.start : self.end]


_Part = _Stored | tuple[int, ...]


def check(architecture: Architecture, checkpoint: Any, engines: EngineCache) -> Row:
    """Starts the engine and makes the row. An architecture that is refused must run with memory as text."""
    options = {
        "max_model_len": architecture.max_model_len,
        "block_size": architecture.block_size,
        "enable_prefix_caching": architecture.prefix_caching,
    }
    try:
        engine = engines(checkpoint, **options)
    except EngineFailed as error:
        reason = refusal_in(str(error))
        if reason is None:
            return Row(architecture, f"failed to start: {str(error).strip().splitlines()[-1]}")
        check_text(checkpoint, options, engines)
        return Row(architecture, f"refused: {reason}")
    reference = ModelReference(checkpoint, architecture.max_model_len)
    return _Trial(architecture, engine, reference).row()


def check_text(checkpoint: Any, options: dict[str, Any], engines: EngineCache) -> None:
    """Started without injection, the engine answers as stock vLLM does."""
    generator = random.Random(5)
    ids = tuple(generator.randrange(5, VOCAB_SIZE) for _ in range(200))
    stock = engines(checkpoint, **options, pool_tokens=0).ask(ids, max_tokens=_STEPS)
    engine = engines(checkpoint, **options, injection_path="none")
    memory = ids[:150]
    key = engine.key((), memory)
    engine.ask(memory, engine.plan("encode", captures=(Span(key, 0, len(memory)),)))
    plan = engine.plan(segments=(Segment(key, memory, "fact"),))
    answer = engine.ask(ids, plan, max_tokens=_STEPS)
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 0, answer.outcome
    assert np.array_equal(answer.logits, stock.logits), "text with the connector differs from text without"


def refusal_in(told: str) -> str | None:
    """The reason in an engine's traceback, without the advice behind it."""
    found = re.findall(r"^inferscale\.errors\.\w+: (.+)$", told, re.MULTILINE)
    if not found:
        return None
    return str(re.split(r"(?<=[^.])[.;] (?=[A-Z]|its |InferScale )", found[-1])[0]).rstrip(".")


class _Trial:
    """One engine and one reference."""

    def __init__(self, architecture: Architecture, engine: Engine, reference: ModelReference) -> None:
        self._architecture = architecture
        self._engine = engine
        self._reference = reference
        self._random = random.Random(5)
        self._num_scopes = 0

    def row(self) -> Row:
        tolerance = 2 * self._noise([60, 200, 340])
        failures: list[str] = []
        notes = [f"allowed {tolerance:.1e}"]
        same = self._same_place()
        notes.append(f"same place {same:.1e}")
        if same > tolerance:
            failures.append("a segment injected where it was captured differs from text")
        facts = self._store_facts([31, 5, 17, 40, 33, 128, 1, 64])
        prompts = self._prompts(facts)
        moved = [self._distances(parts) for parts in prompts]
        farthest, nearest_text = max(own for own, _ in moved), min(text for _, text in moved)
        self._engine.turn_wrongly(0.0)
        unmoved = max(own for own, _ in (self._distances(parts) for parts in prompts))
        self._engine.turn_wrongly(1.0)
        notes.append(f"moved {farthest:.1e}, not turned {unmoved:.1e}, text {nearest_text:.1e}")
        if farthest > tolerance:
            failures.append("moved segments differ from the reference")
        if unmoved < _FAR * tolerance or nearest_text < _FAR * tolerance:
            failures.append("the comparison sees too little")
        verdict = self_check(self._engine, tuple(range(60, 90)))
        notes.append(f"self-check {verdict.state} ({verdict.moved:.1e} of {verdict.allowed:.1e})")
        if failures:
            return Row(self._architecture, "not exact: " + "; ".join(failures), ", ".join(notes))
        return Row(self._architecture, self._result(verdict.state), ", ".join(notes))

    def _result(self, state: str) -> str:
        if state == "refused":
            return "refused: moved segments are exact, but the check at the first start cannot tell"
        config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=self._architecture.config()))
        try:
            compat.refuse_pool_dtype(config, "fp8")
        except UnsupportedLayout:
            return "exact except with `pool_dtype` fp8, which is refused (bias on keys)"
        return "exact"

    # requests -----------------------------------------------------------------------------------

    def _text(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(5, VOCAB_SIZE) for _ in range(num_tokens))

    def _ask(self, parts: Sequence[_Part]) -> Answer:
        """In a scope of its own, so that it finds nobody's blocks."""
        segments = tuple(Segment(part.key, part.ids, "fact") for part in parts if isinstance(part, _Stored))
        self._num_scopes += 1
        plan = self._engine.plan(f"scope {self._num_scopes}", segments=segments)
        answer = self._engine.ask(_ids(parts), plan, max_tokens=_STEPS)
        num_stored = sum(len(segment.token_ids) for segment in segments)
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == num_stored, answer.outcome
        return answer

    def _ask_plain(self, ids: tuple[int, ...]) -> Answer:
        return self._engine.ask(ids, max_tokens=_STEPS)

    def _store(self, passes: Sequence[tuple[Pass, Sequence[tuple[int, int]]]]) -> list[_Stored]:
        stored: list[_Stored] = []
        for of, spans in passes:
            own = [_Stored(self._engine.key(of.ids[:a], of.ids[a:b]), of, a, b) for a, b in spans]
            captures = tuple(Span(s.key, s.start, s.end) for s in own)
            self._engine.ask(of.ids, self._engine.plan("encode", captures=captures))
            stored += own
        assert all(self._engine.resident([s.key for s in stored])), "not captured"
        return stored

    def _store_facts(self, lengths: Sequence[int]) -> list[_Stored]:
        """A head that opens prompts, and facts behind windows of the three before them."""
        head = self._store([(Pass(self._text(lengths[0])), [(0, lengths[0])])])
        anchor, items = self._text(12), [self._text(length) for length in lengths[1:]]
        passes = plan_passes(
            lengths[1:], [True] * len(items), sliding(3, 3), anchor_tokens=12, max_tokens=1024
        )
        encoded = [pass_tokens(anchor, items, one) for one in passes]
        return head + self._store(
            [(Pass(tuple(e.token_ids)), [(span.start, span.end) for span in e.spans]) for e in encoded]
        )

    def _prompts(self, facts: Sequence[_Stored]) -> list[list[_Part]]:
        head, *others = facts
        shuffled = self._random.sample(others, len(others))
        return [
            [head, *shuffled, self._text(30)],
            [head, *others[::-1], self._text(9)],
            [*others[3:6], head, *others[:3], self._text(2)],
        ]

    # comparing ----------------------------------------------------------------------------------

    def _noise(self, lengths: Sequence[int]) -> float:
        """Of rounding: the largest difference without any injection, of the engine to the reference, and of
        that to itself further on."""
        largest = 0.0
        for ids in [self._text(length) for length in list(lengths) * 3]:
            answer = self._ask_plain(ids)
            expected, whole = self._expected([ids], answer), [(*ids, *answer.token_ids[:-1])]
            further = self._reference.logits(whole, _STEPS, first_position=300)
            largest = max(largest, _apart(answer.logits, expected), _apart(further, expected))
        return largest

    def _expected(self, parts: Sequence[tuple[int, ...] | Placed], answer: Answer) -> FloatArray:
        return self._reference.logits([*parts, *_nonempty(answer.token_ids[:-1])], len(answer.token_ids))

    def _same_place(self) -> float:
        """Largest difference to the text; the text is asked before and after, and must say the same."""
        whole = Pass(self._text(300))
        question = self._text(40)
        before = self._ask_plain((*whole.ids, *question))
        stored = self._store([(whole, [(0, 50), (50, 117), (117, 300)])])
        self._engine.reset_prefix_cache()
        injected = self._ask([*stored, question])
        after = self._ask_plain((*whole.ids, *question))
        assert np.array_equal(after.logits, before.logits), "injected KV is in the prefix cache"
        assert not after.num_cached_tokens, "text finds injected blocks"
        return _apart(injected.logits, before.logits)

    def _distances(self, parts: Sequence[_Part]) -> tuple[float, float]:
        """Of the engine's answer to what is right, and of that to the text."""
        answer = self._ask(parts)
        right: list[tuple[int, ...] | Placed] = []
        at = 0
        for part in parts:
            ids = part.ids if isinstance(part, _Stored) else part
            right.append(Placed(part.of, part.start, part.end, at) if isinstance(part, _Stored) else part)
            at += len(ids)
        expected = self._expected(right, answer)
        text = self._expected([_ids(parts)], answer)
        return _apart(answer.logits, expected), _apart(text, expected)


def _ids(parts: Sequence[_Part]) -> tuple[int, ...]:
    return tuple(i for part in parts for i in (part.ids if isinstance(part, _Stored) else part))


def _nonempty(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [ids] if ids else []


def _apart(a: FloatArray, b: FloatArray) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
