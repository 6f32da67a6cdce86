"""What benchmarks measure by default. Light to import: the command line shows these in its help."""

from __future__ import annotations

from dataclasses import dataclass

from inferscale.config import DEFAULT_TAIL
from inferscale.tail import Tail

_DEFAULT_TAIL = Tail.parse(DEFAULT_TAIL)


@dataclass(frozen=True)
class TtftOptions:
    """What is measured. ks: numbers of facts; num_questions: measured questions for each k and mode;
    tail: best facts that are recomputed."""

    ks: tuple[int, ...] = (0, 5, 20, 50, 100)
    num_questions: int = 10
    tail: Tail = _DEFAULT_TAIL


@dataclass(frozen=True)
class ThroughputOptions:
    """What is measured. users: clients at once, each with a memory of its own; rounds: measured requests
    of each on average; repeats: how often all modes run in turn; tail: facts that are recomputed."""

    users: int = 100
    k: int = 50
    output_tokens: int = 50
    rounds: int = 2
    repeats: int = 3
    tail: Tail = _DEFAULT_TAIL


@dataclass(frozen=True)
class EncodeOptions:
    """What is measured. num_facts: to encode; in_flight: passes that the engine has at once; baseline:
    also compute the same passes without keeping anything."""

    num_facts: int = 4000
    in_flight: int = 256
    baseline: bool = True


@dataclass(frozen=True)
class DecodeOptions:
    """What is measured. batches: requests at once; k: facts that they decode behind in the third
    comparison; alternations: how often both engines are started in turn."""

    batches: tuple[int, ...] = (1, 64)
    output_tokens: int = 128
    k: int = 50
    repeats: int = 3
    alternations: int = 1


@dataclass(frozen=True)
class TiersOptions:
    """What is measured. tier: `host` or `disk`; num_questions: of each of two users."""

    tier: str = "host"
    k: int = 50
    num_questions: int = 15


@dataclass(frozen=True)
class E2eOptions:
    """What is measured. devices: where the embedder runs, measured one after the other. tail: best facts that
    are recomputed."""

    k: int = 50
    num_questions: int = 20
    devices: tuple[str, ...] = ("cpu",)
    tail: Tail = _DEFAULT_TAIL


@dataclass(frozen=True)
class FidelityOptions:
    """What is measured. num_questions: of each conversation, evenly spread; None: all. instruction: behind
    every question. num_timed: questions whose time to first token is measured; num_checked: that a reference
    computes as well. in_flight: requests that the engine has at once."""

    k: int = 50
    num_questions: int | None = None
    categories: tuple[int, ...] = (1, 2, 3, 4)
    instruction: str = "Answer in a few words."
    num_timed: int = 10
    num_checked: int = 0
    in_flight: int = 64


@dataclass(frozen=True)
class LocomoOptions:
    """What is measured. ks: numbers of facts. num_questions: of each conversation, evenly spread; None: all.
    instruction: behind every question; adversarial_note: behind that one for questions of category 5. facts:
    `turns` as they were said, or `extracted` of them by the model. in_flight: requests that the engine has at
    once."""

    ks: tuple[int, ...] = (5, 10, 20, 50)
    num_questions: int | None = None
    categories: tuple[int, ...] = (1, 2, 3, 4, 5)
    instruction: str = "Answer with as few words as possible, not in a sentence."
    adversarial_note: str = "If it was never said, answer: not mentioned."
    max_tokens: int = 32
    facts: str = "turns"
    in_flight: int = 256


@dataclass(frozen=True)
class JudgeOptions:
    """Which model reads answers, and how strictly. url: of any server with OpenAI's chat completions, such as
    `http://127.0.0.1:8001/v1`. api_key: None sends none."""

    url: str
    model: str
    styles: tuple[str, ...] = ("strict", "generous")
    api_key: str | None = None
    in_flight: int = 8


@dataclass(frozen=True)
class RandomTokens:
    """A workload of random token ids. facts_per_user: default: a fifth more than a question takes."""

    facts_per_user: int | None = None
    head_tokens: int = 32
    question_tokens: int = 32
    seed: int = 0

    def facts_for(self, k: int) -> int:
        """Facts that a user needs for questions of `k` facts."""
        return max(self.facts_per_user or 0, k) if self.facts_per_user else max(1, -(-k * 6 // 5))
