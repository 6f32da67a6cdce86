"""Prompts made of stored segments and plain text, beside what the reference needs to expect of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checkpoints import VOCAB_SIZE
from harness.engine import Engine
from harness.protocol import Answer, FloatArray, Request
from harness.reference import KV, Injected, Reference, Text, largest_difference
from inferscale.plan import Segment, SegmentKind, Span
from inferscale.windows import WindowPolicy, pass_tokens, plan_passes


@dataclass(frozen=True, eq=False)
class Stored:
    """A segment that the pool was told to capture. kv: what the reference computes for it in the
    same pass, its first token at position `origin` there."""

    key: str
    ids: tuple[int, ...]
    origin: int
    kv: KV

    def segment(self, kind: SegmentKind = "fact") -> Segment:
        return Segment(self.key, self.ids, kind)


Part = Stored | tuple[int, ...]
"""A piece of a prompt: a stored segment, or the ids of plain text."""


def ids_of(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple(i for part in parts for i in (part.ids if isinstance(part, Stored) else part))


def segments_of(parts: Sequence[Part]) -> tuple[Segment, ...]:
    return tuple(part.segment() for part in parts if isinstance(part, Stored))


def expected_parts(parts: Sequence[Part], num_injected: int, start: int = 0) -> list[Text | Injected]:
    """What the engine should have computed: tokens `[start, start + num_injected)` come from the pool."""
    expected: list[Text | Injected] = []
    at = 0
    for part in parts:
        ids = part.ids if isinstance(part, Stored) else part
        first = min(max(start - at, 0), len(ids))
        last = min(max(start + num_injected - at, first), len(ids))
        if last > first:
            assert isinstance(part, Stored), "plain text cannot come from the pool"
        expected.append(Text(ids[:first]))
        if isinstance(part, Stored) and last > first:
            expected.append(Injected(part.kv.span(first, last), part.origin + first))
        expected.append(Text(ids[last:]))
        at += len(ids)
    return [e for e in expected if not isinstance(e, Text) or e.ids]


class Author:
    """Makes texts and stores them: in the engine's pool by encode requests, in the reference as KV."""

    def __init__(
        self, engine: Engine, reference: Reference, seed: int, words: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        self.engine = engine
        self.reference = reference
        self.random = random.Random(seed)
        self._is_trained = words is not None
        self._words = words or [(i,) for i in range(5, VOCAB_SIZE)]

    def text(self, num_tokens: int) -> tuple[int, ...]:
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids.extend(self.random.choice(self._words))
        return tuple(ids[:num_tokens])

    def shuffled(self, parts: Sequence[Stored]) -> list[Stored]:
        return self.random.sample(list(parts), len(parts))

    def expect(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Stored]:
        """What a pass over `ids` would capture, without sending it."""
        kv = self.reference.encode(ids)
        return [
            Stored(
                self.engine.key(ids[:start], ids[start:end]),
                tuple(ids[start:end]),
                start,
                kv.span(start, end),
            )
            for start, end in spans
        ]

    def store(self, passes: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> list[Stored]:
        """Encode requests `(ids, spans)`, all at once; what they captured, in order."""
        stored = [self.expect(ids, spans) for ids, spans in passes]
        self.engine.generate([self._capture(ids, of) for (ids, _), of in zip(passes, stored, strict=True)])
        return [one for of in stored for one in of]

    def add_capture(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Stored]:
        """Queue one encode request; steps are left to the caller."""
        stored = self.expect(ids, spans)
        self.engine.add(self._capture(ids, stored))
        return stored

    def _capture(self, ids: Sequence[int], stored: Sequence[Stored]) -> Request:
        captures = tuple(Span(s.key, s.origin, s.origin + len(s.ids), shared=True) for s in stored)
        return self.engine.request(ids, self.engine.plan("encode", captures=captures))

    def store_texts(self, lengths: Sequence[int]) -> list[Stored]:
        """Texts that open a prompt, each in a pass of its own."""
        return self.store([(self.text(length), [(0, length)]) for length in lengths])

    def store_facts(self, lengths: Sequence[int], policy: WindowPolicy, num_anchor: int = 12) -> list[Stored]:
        """Facts said one after the other, encoded behind an anchor as `policy` says."""
        anchor = self.text(num_anchor)
        items = [self.text(length) for length in lengths]
        passes = plan_passes(
            lengths,
            [True] * len(lengths),
            policy,
            anchor_tokens=num_anchor,
            max_tokens=self.engine.options.max_model_len,
        )
        encoded = [pass_tokens(anchor, items, p) for p in passes]
        return self.store([(e.token_ids, [(s.start, s.end) for s in e.spans]) for e in encoded])

    # comparing ----------------------------------------------------------------------------------

    def ask(self, parts: Sequence[Part], *, scope: str = "test", num_steps: int = 1) -> Answer:
        """One request with these parts, its stored ones as segments."""
        plan = self.engine.plan(scope, segments=segments_of(parts))
        return self.engine.ask(ids_of(parts), plan, max_tokens=num_steps)

    def ask_plain(self, parts: Sequence[Part], *, num_steps: int = 1) -> Answer:
        return self.engine.ask(ids_of(parts), max_tokens=num_steps)

    def expected(
        self, parts: Sequence[Part], answer: Answer, num_injected: int, start: int = 0
    ) -> FloatArray:
        """Logits of the reference at the steps of `answer`, behind the tokens that the engine chose."""
        known = expected_parts([*parts, answer.token_ids[:-1]], num_injected, start)
        return self.reference.logits_of(known, len(answer.token_ids))

    def difference(self, parts: Sequence[Part], answer: Answer, num_injected: int, start: int = 0) -> float:
        return largest_difference(answer.logits, self.expected(parts, answer, num_injected, start))

    def check(self, parts: Sequence[Part], answer: Answer, tolerance: float, *, cached: int = 0) -> None:
        """The answer injected all stored parts (behind `cached` tokens) and equals the reference."""
        num_stored = sum(len(part.ids) for part in parts if isinstance(part, Stored))
        num_stored = min(num_stored, len(ids_of(parts)) - 1)
        assert answer.outcome is not None
        found = (answer.outcome["cached_tokens"], answer.outcome["injected_tokens"])
        assert found == (cached, num_stored - cached), answer.outcome
        assert self.difference(parts, answer, num_stored) <= tolerance

    def baseline(self, lengths: Sequence[int], num_steps: int = 1) -> float:
        """The engine's largest difference to the reference without any injection.

        Over prompts of these lengths, at least eight of a tiny model: the largest of a few is often small.
        """
        repeats = 1 if self._is_trained else -(-8 // len(lengths))
        prompts = [self.text(length) for length in list(lengths) * repeats]
        answers = self.engine.generate([self.engine.request(ids, max_tokens=num_steps) for ids in prompts])
        return max(self.difference([ids], a, 0) for ids, a in zip(prompts, answers, strict=True))

    def kv_baseline(self, lengths: Sequence[int]) -> float:
        """The same for keys and values: the engine's pages of plain prompts beside the reference."""
        largest = 0.0
        for length in lengths:
            ids = self.text(length)
            name, running = self.engine.prefill(self.engine.request(ids))
            pages = self.engine.paged(running.block_ids, length)
            self.engine.abort([name])
            largest = max(largest, largest_difference(pages, self.reference.encode(ids).numpy()))
        return largest
