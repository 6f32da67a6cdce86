"""A real model behind `OfflineEngine`: requests with log-probabilities, and how far those are apart.

Log-probabilities come out of vLLM's public interface, from the engine's own process.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.mixes import Part, Stored, ids_of, segments_of
from harness.protocol import FloatArray
from harness.reference import Reference
from inferscale.config import ConnectorConfig
from inferscale.offline import OfflineEngine
from inferscale.plan import Plan, Segment, Span, salt_of, segment_key, to_wire
from inferscale.windows import pass_tokens, plan_passes, sliding

ON_CPU = os.environ.get("INFERSCALE_GPU_TESTS_ON_CPU", "0") not in ("", "0")

STEP_TOKENS = 256
"""Most tokens that a step computes: longer prompts are prefilled in chunks."""
CACHE_TOKENS = 14_400
"""The paged cache: holds all requests of the crowd at once, and not those of the preemption test."""
MAX_LENGTH = 4096

LIKELY = 1e-4
"""Log-probabilities are compared of tokens that are at least so probable: those of the others are of no
consequence for an answer, and the rounding of their logits hides what is looked for."""

SUM_ERROR = 1e-6
"""Probabilities come as float32 logarithms: what a sum of them leaves to 1 is known no better than this."""


class Ask(NamedTuple):
    """A request. salt: of the prefix cache, for a request without a plan."""

    ids: tuple[int, ...]
    plan: Plan | None = None
    salt: str | None = None
    max_tokens: int = 1


@dataclass(frozen=True)
class Served:
    """What came back. flat: vLLM's log-probabilities of all steps."""

    token_ids: tuple[int, ...]
    flat: Any
    vocab_size: int
    outcome: dict[str, Any]
    num_cached_tokens: int

    def logprobs(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """Of the steps [start, stop); float32 [steps, vocabulary], NaN for tokens that were not listed."""
        steps = range(len(self.token_ids))[start:stop]
        found = np.full((len(steps), self.vocab_size), np.nan, dtype=np.float32)
        for row, step in enumerate(steps):
            part = slice(self.flat.start_indices[step], self.flat.end_indices[step])
            found[row, self.flat.token_ids[part]] = self.flat.logprobs[part]
        return found


class RealEngine:
    """An `OfflineEngine` and what the tests ask of it."""

    def __init__(self, offline: OfflineEngine) -> None:
        self.offline = offline
        self.model = offline.fingerprint
        self.block_size = int(offline.llm.llm_engine.vllm_config.cache_config.block_size)
        self._vocab_size = int(offline.llm.model_config.get_vocab_size())
        self._numbers = itertools.count()

    def serve(self, asks: Sequence[Ask], num_logprobs: int = -1) -> list[Served]:
        """All at once, greedily, to the full number of tokens. num_logprobs: listed a step; -1 is all."""
        from vllm import SamplingParams

        prompts: list[dict[str, Any]] = []
        params = []
        for ask in asks:
            plan, salt = ask.plan, ask.salt
            extra = None
            if plan is not None:
                extra = {"kv_transfer_params": to_wire(plan, self.offline.secret)}
                salt = salt_of(plan, self.offline.secret)
            # Without a salt of its own, a plain prompt would be found in the prefix cache the next time.
            salt = salt or f"plain {next(self._numbers)}"
            prompts.append({"prompt_token_ids": list(ask.ids), "cache_salt": salt})
            params.append(
                SamplingParams(
                    max_tokens=ask.max_tokens,
                    temperature=0,
                    logprobs=num_logprobs,
                    flat_logprobs=True,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra,
                )
            )
        return [self._served(output) for output in self.offline.llm.generate(prompts, params, use_tqdm=False)]

    def _served(self, output: Any) -> Served:
        completion = output.outputs[0]
        return Served(
            tuple(completion.token_ids),
            completion.logprobs,
            self._vocab_size,
            (output.kv_transfer_params or {}).get("inferscale") or {},
            output.num_cached_tokens or 0,
        )

    def alone(self, asks: Iterable[Ask]) -> list[Served]:
        """One after the other, each alone in the engine."""
        return [self.serve([ask])[0] for ask in asks]

    def plan(self, **parts: Any) -> Plan:
        """In a scope of its own, so that no other request's blocks are found."""
        return Plan(self.model, f"scope {next(self._numbers)}", **parts)

    def with_memory(self, parts: Sequence[Part], max_tokens: int = 1) -> Ask:
        """The stored parts as segments to inject."""
        return Ask(ids_of(parts), self.plan(segments=segments_of(parts)), max_tokens=max_tokens)

    def capturing(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Ask:
        """An encode pass."""
        spans_ = tuple(Span(self.key(ids[:start], ids[start:end]), start, end) for start, end in spans)
        return Ask(tuple(ids), self.plan(captures=spans_))

    def key(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        return segment_key(self.model, prefix_ids, ids)

    def segments(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
        """Of what `capturing` captures."""
        return tuple(Segment(self.key(ids[:s], ids[s:e]), tuple(ids[s:e])) for s, e in spans)

    def stats(self) -> dict[str, Any]:
        """Counters, once the reports of all steps have arrived; nothing has gone wrong so far."""
        self.serve([Ask((5, 6, 7))], 0)
        stats = self.offline.residency.stats()
        bad = ("internal_errors", "captures_failed", "plans_rejected", "plans_stale", "segments_lost")
        assert {name: stats[name] for name in bad} == dict.fromkeys(bad, 0)
        assert (stats["open_requests"], stats["open_steps"]) == (0, 0)
        return stats

    def what_runs(self) -> dict[str, Any]:
        reply: dict[str, Any] = self.offline.llm.collective_rpc("what_runs")[0]
        return reply

    def close(self) -> None:
        self.offline.close()


def start(model: Path) -> RealEngine:
    """vLLM with its defaults, but for small steps and a small cache."""
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": 16,
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": 128,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_logprobs": -1,
        "skip_tokenizer_init": True,
        "seed": 0,
        "worker_extension_cls": "real_engine.LookingWorker",
    }
    path: Any = "fused"
    if ON_CPU:
        named = os.environ["INFERSCALE_GPU_TESTS_ON_CPU"]
        path = "portable"
        arguments["dtype"] = "float32" if named == "1" else named
        arguments["block_size"] = 32  # the smallest that vLLM's CPU kernels take
        arguments["enforce_eager"] = True
    arguments["num_gpu_blocks_override"] = CACHE_TOKENS // arguments["block_size"]
    connector = ConnectorConfig(injection_path=path, pool_size_bytes="256MiB", compile_injection=not ON_CPU)
    return RealEngine(OfflineEngine(model, connector, arguments))


class LookingWorker:
    """What vLLM adds to its worker class (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: Any

    def what_runs(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side: Any = get_kv_transfer_group()
        side = side.worker
        attention = side.layers[0].layer.impl
        return {
            "attention": type(attention).__name__,
            "flash_attention": getattr(attention, "vllm_flash_attn_version", None),
            "mover": type(side.mover).__name__,
            "runner": type(self.model_runner).__module__,
            "graphs": self.vllm_config.compilation_config.cudagraph_mode.name,
            "is_async": self.vllm_config.scheduler_config.async_scheduling,
            "is_chunked": self.vllm_config.scheduler_config.enable_chunked_prefill,
        }


# texts ------------------------------------------------------------------------------------------


class Library:
    """The opening of a prompt and a hundred facts in the pool, with what the reference computes for them.

    Facts are encoded behind the head in passes that are longer than a step, each behind a window of ten
    others.
    """

    NUM_FACTS = 100
    POLICY = sliding(10, 10)

    def __init__(self, engine: RealEngine, model: Path) -> None:
        from transformers import AutoTokenizer

        self.engine = engine
        self.reference = Reference(model)
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.random = random.Random(0)
        head = self.ids("<|im_start|>system\nWhat is known, in the order in which it was said:\n")
        items = [self.ids(text) for text in _facts(self.random, self.NUM_FACTS)]
        lengths = [len(item) for item in items]
        passes = plan_passes(
            lengths, [True] * len(items), self.POLICY, anchor_tokens=len(head), max_tokens=MAX_LENGTH
        )
        encoded = [pass_tokens(head, items, one) for one in passes]
        self._passes = [(head, [(0, len(head))])] + [
            (one.token_ids, [(span.start, span.end) for span in one.spans]) for one in encoded
        ]
        assert max(len(ids) for ids, _ in self._passes) > STEP_TOKENS
        stored = [self._expected(ids, spans) for ids, spans in self._passes]
        self.head: Stored = stored[0][0]
        self.facts: list[Stored] = [fact for facts in stored[1:] for fact in facts]

    def _expected(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Stored]:
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

    def fill_pool(self) -> None:
        """The pool holds the head and the facts then, and nothing else."""
        keys = [self.head.key, *(fact.key for fact in self.facts)]
        residency = self.engine.offline.residency
        if not all(residency.resident(keys)) or residency.stats()["resident_segments"] > len(keys):
            assert self.engine.offline.llm.llm_engine.reset_prefix_cache(reset_connector=True)
            self.engine.serve([self.engine.capturing(ids, spans) for ids, spans in self._passes], 0)
        self.engine.stats()  # their last reports have arrived then
        assert all(residency.resident(keys))

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def question(self, text: str) -> tuple[int, ...]:
        return self.ids(f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def retelling(self, order: str) -> tuple[int, ...]:
        """An end that makes the model repeat facts by their places, so that it shows where they stand."""
        return self.ids(f"The same again, from the {order}:\n-")

    def chosen(self, num: int) -> list[Stored]:
        """Some of the facts, in some order."""
        return self.random.sample(self.facts, num)

    def talk(self, num_tokens: int) -> tuple[int, ...]:
        """Plain text of exactly so many tokens, which is never in the pool."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += self.ids(_facts(self.random, 1)[0])
        return tuple(ids[:num_tokens])


_PEOPLE = ["Ana", "Ben", "Chloe", "David", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Luis"]
_PLACES = ["Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Quito", "Accra", "Dublin", "Hanoi", "Turin", "Perth"]
_THINGS = ["violin", "bicycle", "camera", "telescope", "kayak", "piano", "tent", "lamp", "mirror", "clock"]
_COLORS = ["red", "green", "blue", "yellow", "black", "white", "brown", "purple"]
_MONTHS = ["January", "March", "April", "May", "June", "July", "August", "October", "November", "December"]


def _facts(rng: random.Random, num: int) -> list[str]:
    """Sentences with names in them, a line each; no two are equal within one call."""
    found: dict[str, None] = {}
    while len(found) < num:
        a, b = rng.sample(_PEOPLE, 2)
        place, thing, color, month = (rng.choice(w) for w in (_PLACES, _THINGS, _COLORS, _MONTHS))
        number = rng.randrange(12, 98)
        text = rng.choice(
            [
                f"{a} moved to {place} in {month} and lives with {b} now.",
                f"{a} bought a {color} {thing} for {number} euros in {place}.",
                f"{a} gave {b} a {thing} on the {number % 28 + 1}th of {month}.",
                f"The {thing} of {a} is {color}.",
                f"{b} is the sister of {a}, and was born in {place} {number} years ago.",
                f"{a} will meet {b} in {place} in {month}, at {number % 12 + 1} o'clock.",
            ]
        )
        found[f"- {text}\n"] = None
    return list(found)


# distances --------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """How far log-probabilities are from those expected.

    largest: the largest difference of one that is likely (`LIKELY`). kl: the mean over positions of the
    divergence of what was found from what was expected, in nats.
    """

    largest: float
    kl: float

    def __str__(self) -> str:
        return f"largest {self.largest:.2e}, divergence {self.kl:.2e}"

    def times(self, factor: float) -> Distance:
        return Distance(factor * self.largest, factor * self.kl)

    def is_within(self, tolerance: Distance) -> bool:
        return self.largest <= tolerance.largest and self.kl <= tolerance.kl


def distance(found: FloatArray, expected: FloatArray) -> Distance:
    """Of positions [n, vocabulary]. expected: complete. found: may be of the most probable tokens only.

    Tokens that were not listed are known to be at most as probable as the least listed one, and are one
    event together in the divergence; both make the distance smaller than it is, never larger.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert not np.isnan(expected).any(), "what is expected must be complete"
    largest, divergences = 0.0, []
    for f, e in zip(found.astype(np.float64), expected.astype(np.float64), strict=True):
        is_listed = ~np.isnan(f)
        floor = f[is_listed].min()
        gap = np.where(is_listed, np.abs(f - e), np.maximum(e - floor, 0.0))
        largest = max(largest, float(gap[e > np.log(LIKELY)].max()))
        p, q = np.exp(e[is_listed]), np.exp(f[is_listed])
        # With q - p added, every term is at least zero, and errors of the sums to 1 cancel.
        divergence = float((p * (e[is_listed] - f[is_listed]) + q - p).sum())
        if not is_listed.all():
            rest_p, rest_q = (max(1.0 - float(x.sum()), SUM_ERROR) for x in (p, q))
            divergence += rest_p * float(np.log(rest_p / rest_q)) + rest_q - rest_p
        divergences.append(divergence)
    return Distance(largest, float(np.mean(divergences)))


def together(distances: Sequence[Distance]) -> Distance:
    """The largest of all; the mean divergence, where each has as many positions."""
    return Distance(max(d.largest for d in distances), float(np.mean([d.kl for d in distances])))


def log_softmax(logits: FloatArray) -> FloatArray:
    result: FloatArray = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    return result
