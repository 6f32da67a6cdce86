"""Where a benchmark's token ids come from, and how large an engine they need.

An engine is sized before it starts, and random ids are drawn for the vocabulary and block size of an
engine that runs; so a source first tells sizes and then makes the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from inferscale.bench.conversation import BenchConversation
from inferscale.bench.encode import Encoding
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.options import RandomTokens
from inferscale.bench.spoken import SpokenWorkload, prompt_builder
from inferscale.bench.workload import RandomWorkload, Workload, fact_lengths
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy

_TOKENS_PER_FACT = 34  # mean and a margin, so that prompts of many facts fit
_PROMPT_MARGIN = 512
_LARGEST_BLOCK = 128


class Need(NamedTuple):
    """What a benchmark asks of a workload. num_facts: of each user, None for what questions of `max_k`
    facts take; output_tokens: of the longest answer."""

    max_k: int
    num_users: int = 1
    num_facts: int | None = None
    num_questions: int = 20
    output_tokens: int = 1


class Source(Protocol):
    def segments(self, need: Need) -> Sequence[int]:
        """Tokens of everything that the pool must hold, one number a segment."""
        ...

    def longest(self, need: Need) -> int:
        """Tokens of the longest prompt with its answer."""
        ...

    def workload(self, engine: BenchEngine, need: Need) -> Workload: ...


@dataclass(frozen=True)
class RandomSource:
    """Random ids; see `RandomWorkload`."""

    tokens: RandomTokens

    def _num_facts(self, need: Need) -> int:
        return need.num_facts or self.tokens.facts_for(need.max_k)

    def segments(self, need: Need) -> Sequence[int]:
        lengths = [self.tokens.head_tokens]
        for user in range(need.num_users):
            generator = np.random.default_rng([self.tokens.seed, 1, user])  # as the workload draws them
            lengths += [int(num) for num in fact_lengths(generator, self._num_facts(need))]
            lengths.append(_LARGEST_BLOCK)  # the last one is filled up to a block
        return lengths

    def longest(self, need: Need) -> int:
        fixed = self.tokens.head_tokens + self.tokens.question_tokens + need.output_tokens
        return need.max_k * _TOKENS_PER_FACT + fixed + _PROMPT_MARGIN

    def workload(self, engine: BenchEngine, need: Need) -> RandomWorkload:
        return RandomWorkload(
            vocab_size=engine.vocab_size,
            block_size=engine.block_size,
            num_users=need.num_users,
            num_facts=self._num_facts(need),
            head_tokens=self.tokens.head_tokens,
            question_tokens=self.tokens.question_tokens,
            seed=self.tokens.seed,
        )


class SpokenSource:
    """A conversation; see `SpokenWorkload`. tokenizer: a folder or hub name; facts_per_user: turns."""

    def __init__(
        self, conversation: BenchConversation, tokenizer: str, facts_per_user: int | None = None
    ) -> None:
        self.conversation = conversation
        self.tokenizer = tokenizer
        self.facts_per_user = facts_per_user
        self._made: dict[Need, SpokenWorkload] = {}

    @cached_property
    def prompts(self) -> PromptBuilder:
        return prompt_builder(self.tokenizer)

    def _workload(self, need: Need) -> SpokenWorkload:
        if need not in self._made:
            self._made[need] = SpokenWorkload(
                self.conversation,
                self.prompts,
                num_users=need.num_users,
                num_facts=need.num_facts or self.facts_per_user,
                num_questions=need.num_questions,
                max_k=need.max_k,
            )
        return self._made[need]

    def segments(self, need: Need) -> Sequence[int]:
        made = self._workload(need)
        return [
            len(made.head),
            *(len(ids) for user in range(need.num_users) for ids in made.facts(user)),
        ]

    def longest(self, need: Need) -> int:
        made = self._workload(need)
        asked = [made.ask(0, number, need.max_k) for number in range(need.num_questions)]
        return max(len(one.memory) + len(one.rest) for one in asked) + need.output_tokens

    def workload(self, engine: BenchEngine, need: Need) -> SpokenWorkload:
        return self._workload(need)


def sized(spec: EngineSpec, source: Source, needs: Sequence[Need]) -> EngineSpec:
    """An engine that is large enough for each of these needs, one after the other."""
    largest = max((source.segments(need) for need in needs), key=sum)
    return spec.sized(largest, max(source.longest(need) for need in needs))


def encoding_for(engine: BenchEngine, source: Source, need: Need, policy: WindowPolicy) -> Encoding:
    """The workload's passes and keys on this engine; nothing is encoded yet."""
    workload = source.workload(engine, need)
    return Encoding(workload, engine.offline.fingerprint, policy, engine.offline.max_model_len - 1)
