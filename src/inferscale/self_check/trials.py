"""The requests of a check, in the order in which they run, and what they make of its answers."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any, NamedTuple

from inferscale.plan import Order, Plan, Segment, Span, segment_key
from inferscale.self_check.verdict import Distances, Verdict, distance, judge, passed_over

logger = logging.getLogger(__name__)

TEXT = (
    "Yesterday my sister Ines walked along the old harbour with her dog, bought two red apples and some "
    "bread, then wrote a long letter about music, winter and money to our doctor in Oslo."
)
"""Its tokens are the question, and those that are repeated."""

_RUNS = (16, 20, 24)
"""Tokens of the moved span in each trial; the run is four times as long."""
_PLACES = 4
_NUM_QUESTION = 12
_ANSWER_TOKENS = 4
_MISPLACED_BLOCKS = 3
_SCOPE = "self-check"


class Subject(NamedTuple):
    """What is checked, and how its engine was started.

    model: fingerprint. text_ids: of `TEXT`. max_tokens: of prompt and answer together. dtype: of the model,
    such as `bfloat16`. max_logprobs: that a request may ask for, -1 for all. is_raw: log-probabilities are
    those of the model, whatever tokens a request allows.
    """

    model: str
    text_ids: tuple[int, ...]
    max_tokens: int
    dtype: str
    max_logprobs: int
    is_raw: bool


class Probe(NamedTuple):
    """A request, greedy. allowed: the only token that it may answer with; None for any."""

    token_ids: tuple[int, ...]
    plan: Plan
    max_tokens: int = 1
    num_logprobs: int | None = None
    allowed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Further fields of vLLM's SamplingParams."""
        given: dict[str, Any] = {"detokenize": False, "ignore_eos": True}
        if self.num_logprobs is not None:
            given["logprobs"] = self.num_logprobs
        if self.allowed is not None:
            given["allowed_token_ids"] = [self.allowed]
        return given


class Seen(NamedTuple):
    """What came back. steps: log-probabilities of the most likely tokens, for each token of the answer.
    outcome: the connector's account, None where there was none."""

    steps: tuple[dict[int, float], ...]
    outcome: dict[str, Any] | None


class _Trial(NamedTuple):
    """One token in runs of one length."""

    token: int
    num_span: int
    question: tuple[int, ...]
    subject: Subject
    name: str

    @property
    def run(self) -> tuple[int, ...]:
        return (self.token,) * (_PLACES * self.num_span)

    @property
    def span(self) -> tuple[int, ...]:
        return (self.token,) * self.num_span

    def key(self, what: str) -> str:
        """Of no text, so never that of a fact: the name takes the place of what stands in front."""
        return segment_key(f"{_SCOPE} {self.name} {what}", (), self.run)

    def plan(self, what: str, segments: Sequence[Segment] = (), captures: Sequence[Span] = ()) -> Plan:
        """A scope each: none finds another's blocks in the prefix cache."""
        scope = f"{_SCOPE} {self.name} {what}"
        return Plan(self.subject.model, scope, segments=tuple(segments), captures=tuple(captures))

    def captures(self) -> tuple[Span, ...]:
        start = 3
        end = start + self.num_span
        return (
            Span(self.key("own"), 0, len(self.run)),
            Span(self.key("moved"), start, end),
            Span(self.key("wrong"), start, end, _MISPLACED_BLOCKS),
        )

    def passes(self) -> list[Probe]:
        """The pass, and a shorter run to compare what follows it with."""
        num = _num_logprobs(self.subject)
        capturing = self.plan("pass", captures=self.captures())
        return [Probe(self.run, capturing, 1, num), Probe(self.span, self.plan("short"), 1, num)]

    def questions(self) -> list[Probe]:
        """text, own, moved, wrong."""
        subject, ids = self.subject, (*self.run, *self.question)
        parts: dict[str, list[Segment]] = {
            "text": [],
            "own": [Segment(self.key("own"), self.run, "text")],
            "moved": [Segment(self.key("moved"), self.span, "text")] * _PLACES,
            "wrong": [Segment(self.key("wrong"), self.span, "text")] * _PLACES,
        }
        num_tokens, allowed = (_ANSWER_TOKENS, self.question[0]) if subject.is_raw else (1, None)
        return [
            Probe(ids, self.plan(what, segments), num_tokens, _num_logprobs(subject), allowed)
            for what, segments in parts.items()
        ]


def conduct(subject: Subject) -> Generator[list[Probe], list[Seen], Verdict]:
    """Yields requests that may run together, wants what they brought in their order, returns the verdict.

    An error of theirs is to be thrown in: one of the second round leaves the refusal of the first.
    """
    words = tuple(dict.fromkeys(subject.text_ids))
    needed = _PLACES * max(_RUNS) + _NUM_QUESTION + _ANSWER_TOKENS
    if subject.max_tokens < needed:
        return passed_over(f"it needs {needed} tokens of context, and the model has {subject.max_tokens}")
    num_words = 2 * len(_RUNS) + _NUM_QUESTION
    if len(words) < num_words:
        return passed_over(f"its text has {len(words)} different tokens, and {num_words} are needed")
    if _num_logprobs(subject) < 2:
        return passed_over("the engine tells no log-probabilities (--max-logprobs)")
    verdict = yield from _round(subject, words, 0)
    if verdict.is_refusal:
        verdict = yield from _made_sure(verdict, subject, words)
    return verdict


def _made_sure(
    refused: Verdict, subject: Subject, words: tuple[int, ...]
) -> Generator[list[Probe], list[Seen], Verdict]:
    """The verdict of a second round; where that cannot be carried out, the refusal stays."""
    try:
        second = yield from _round(subject, words, len(_RUNS))
    except Exception as error:  # whatever it is, it does not speak for the model
        logger.exception("The second round of the self-check failed")
        second = passed_over(f"it failed ({type(error).__name__})")
    return replace(refused, why=second.why) if second.state == "unknown" else second


def _num_logprobs(subject: Subject) -> int:
    return 20 if subject.max_logprobs < 0 else min(20, subject.max_logprobs)


def _round(
    subject: Subject, words: tuple[int, ...], first: int
) -> Generator[list[Probe], list[Seen], Verdict]:
    question, check = words[2 * len(_RUNS) :][:_NUM_QUESTION], token_hex(8)
    trials = [
        _Trial(words[first + number], num_span, question, subject, f"{check} {number}")
        for number, num_span in enumerate(_RUNS)
    ]
    passes = yield [probe for trial in trials for probe in trial.passes()]
    num_captured = sum(int((seen.outcome or {}).get("captured", 0)) for seen in passes)
    keys = tuple(span.key for trial in trials for span in trial.captures())
    forget = Probe((0,), Plan(subject.model, scope="", order=Order("forget", keys)))
    if num_captured < len(keys):
        yield [forget]
        return passed_over(f"the pool took {num_captured} of its {len(keys)} segments; is it too small?")
    questions = [probe for trial in trials for probe in trial.questions()]
    asked = yield questions
    yield [forget]
    num_told = _num_logprobs(subject)
    if any(len(seen.steps) != probe.max_tokens for seen, probe in zip(asked, questions, strict=True)):
        return passed_over("the engine failed a request of it")
    found = []
    for number, trial in enumerate(trials):
        text, own, moved, wrong = asked[4 * number : 4 * number + 4]
        for seen in (own, moved, wrong):
            injected = int((seen.outcome or {}).get("injected_tokens", 0))
            if injected != len(trial.run):
                return passed_over(f"the engine injected {injected} of {len(trial.run)} tokens")
        long, short = passes[2 * number : 2 * number + 2]
        found.append(
            Distances(
                own=distance(text.steps, own.steps, num_told),
                moved=distance(text.steps, moved.steps, num_told),
                wrong=distance(text.steps, wrong.steps, num_told),
                position=distance(long.steps, short.steps, num_told),
            )
        )
    return judge(found, subject.dtype)
