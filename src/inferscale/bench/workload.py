"""What engine-level benchmarks run on: users with facts, and questions about them, as token ids.

    head │ facts │ rest
         └ k of the user's, in an order of the question's own

`head` is the text in front of all facts, the same for everybody; `rest` is the question with
all that stands before it and behind the facts. This module knows neither the engine nor texts;
`RandomWorkload` makes ids up, `spoken.SpokenWorkload` takes them from a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from inferscale.errors import InvalidInput
from inferscale.tail import NO_TAIL, Tail

Ids = tuple[int, ...]

_FIRST_ID = 10  # below are control tokens of most vocabularies
_SHORTEST, _LONGEST = 20, 60
_SCALE = 10.8  # of the exponential distribution above the shortest: a mean of 30
_MAX_DRAWS = 4096


class Asked(NamedTuple):
    """One question with its facts.

    items: which of the user's facts can be injected, in prompt order; facts: their ids. rest: the facts that
    are recomputed, with num_recomputed_tokens, and the question. hit_rest: what `hit` asks behind the same
    facts; another question of the same length where that can be had, so that it prefills what `inject` does
    when nothing is recomputed. none: the prompt without memory.
    """

    user: int
    head: Ids
    items: tuple[int, ...]
    facts: tuple[Ids, ...]
    rest: Ids
    hit_rest: Ids
    none: Ids
    num_recomputed_tokens: int = 0

    @property
    def memory(self) -> Ids:
        """Head and facts: what can be injected."""
        return tuple(token for part in (self.head, *self.facts) for token in part)


class Workload(Protocol):
    """Token ids of all users. num_facts: of each user."""

    @property
    def name(self) -> str: ...

    @property
    def head(self) -> Ids: ...

    @property
    def num_users(self) -> int: ...

    @property
    def num_facts(self) -> int: ...

    def facts(self, user: int) -> Sequence[Ids]:
        """All facts of a user, in the order in which they were said."""
        ...

    def ask(self, user: int, number: int, k: int, tail: Tail = NO_TAIL) -> Asked:
        """Question `number` of a user with `k` facts, the best of which are recomputed where they stand."""
        ...

    def describe(self) -> dict[str, Any]:
        """What rows say of it."""
        ...


class RandomWorkload:
    """Random ids, the same for the same arguments.

    Facts have 20 to 60 tokens, 30 on average. A question takes facts and an order of its own. The
    choice is drawn again until head and facts fill whole blocks of vLLM's prefix cache: then `hit`
    finds all of them there and prefills exactly the question, as `inject` does.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        num_users: int,
        num_facts: int,
        head_tokens: int = 32,
        question_tokens: int = 32,
        seed: int = 0,
    ) -> None:
        if vocab_size <= 2 * _FIRST_ID:
            raise InvalidInput(f"the vocabulary has {vocab_size} tokens; random ids need more than 20.")
        self.name = "random"
        self.num_users = num_users
        self.num_facts = num_facts
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._question_tokens = question_tokens
        self._seed = seed
        self.head: Ids = self._ids(np.random.default_rng([seed, 0]), head_tokens)
        self.facts = lru_cache(maxsize=None)(self._facts)

    def _facts(self, user: int) -> tuple[Ids, ...]:
        generator = np.random.default_rng([self._seed, 1, user])
        lengths = fact_lengths(generator, self.num_facts)
        # Questions that take all facts cannot be aligned by another choice.
        lengths[-1] += -(len(self.head) + int(lengths.sum())) % self._block_size
        return tuple(self._ids(generator, int(length)) for length in lengths)

    def ask(self, user: int, number: int, k: int, tail: Tail = NO_TAIL) -> Asked:
        if k > self.num_facts:
            raise InvalidInput(f"k={k} was asked for; a user has {self.num_facts} facts.")
        generator = np.random.default_rng([self._seed, 2, user, number, k])
        facts = self.facts(user)
        front, behind = self._choose(generator, facts, k, tail)
        question, other = (self._ids(generator, self._question_tokens) for _ in range(2))
        tail_ids = tuple(token for item in behind for token in facts[item])
        return Asked(
            user,
            self.head if k else (),
            front,
            tuple(facts[item] for item in front),
            tail_ids + question,
            tail_ids + other,
            question,
            len(tail_ids),
        )

    def _choose(
        self, generator: np.random.Generator, facts: Sequence[Ids], k: int, tail: Tail
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Facts to inject, and facts to recompute, which are the best: the last ones."""
        lengths = np.array([len(ids) for ids in facts])
        for _ in range(_MAX_DRAWS):
            items = generator.permutation(len(facts))[:k]
            num_front = k - tail.count(lengths[items[::-1]].tolist())
            num_tokens = len(self.head) + int(lengths[items[:num_front]].sum())
            if num_front == 0 or num_tokens % self._block_size == 0:
                break
        chosen = tuple(int(item) for item in items)
        return chosen[:num_front], chosen[num_front:]

    def _ids(self, generator: np.random.Generator, num: int) -> Ids:
        return tuple(generator.integers(_FIRST_ID, self._vocab_size, size=num).tolist())

    def describe(self) -> dict[str, Any]:
        return {
            "workload": "random token ids, facts of 20 to 60 tokens, 30 on average",
            "seed": self._seed,
            "head_tokens": len(self.head),
            "question_tokens": self._question_tokens,
            "facts_per_user": self.num_facts,
            "alignment": (
                f"head and facts fill whole blocks of {self._block_size} tokens where a choice of facts can, "
                "so hit prefills what inject does; hit asks another question of the same length"
            ),
        }


def fact_lengths(generator: np.random.Generator, num: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of `num` facts: 20 to 60, 30 on average."""
    extra = np.floor(generator.exponential(_SCALE, size=num)).astype(np.int64)
    return _SHORTEST + np.minimum(extra, _LONGEST - _SHORTEST)
