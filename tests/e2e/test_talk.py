"""A conversation whose facts change from turn to turn: earlier turns come from the pool, and are what they
should be: computed behind the head and the turns before them, without any fact.

SmolLM2 in float32, real prompts and plans; the passes are run by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.mixes import Author, Part, Stored
from harness.protocol import Answer
from harness.reference import largest_difference
from inferscale.chat_plan import ChatPlanner, PreparedChat, Residents
from inferscale.encode_jobs import JobChooser
from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Fact, Scope
from inferscale.memory import Memory
from inferscale.plan import Order, Segment
from inferscale.prompt import PromptBuilder
from inferscale.tokenization import load_tokenizer
from inferscale.windows import WindowPolicy

sys.path.append(str(Path(__file__).parents[1]))
from fakes import open_memory

pytestmark = pytest.mark.engine

SAID = (
    "My sister Ines lives in Oslo and works as a baker.",
    "My dog is called Rex, he is six years old.",
    "I play the violin in a small orchestra.",
    "We moved to a flat near the harbour in March.",
    "My bicycle was stolen in front of the library.",
)
QUESTIONS = (
    "Where does my sister Ines live?",
    "Thanks. How old is my dog Rex?",
    "What did I play in a small orchestra?",
    "And where was my bicycle stolen?",
)
NUM_STEPS = 6


class Resident(NamedTuple):
    """`ResidencyClient`, asked through the test's pipe."""

    resident: Callable[[Sequence[str]], list[bool]]


class Talk:
    """One conversation of a scope, on an engine whose pool is empty. The engine keeps the scope's epoch."""

    def __init__(self, a: Author, memory: Memory, scope: Scope) -> None:
        self.scope = scope
        self.a = a
        self.engine = a.engine
        self.memory = memory
        self.tokenizer = load_tokenizer(self.engine.options.checkpoint)
        prompts = PromptBuilder(self.tokenizer)
        self.encoder = Encoder(memory.catalog, prompts, self.engine.facts.model, WindowPolicy(2, 3), 2000)
        self.jobs = JobChooser(self.encoder, Resident(self.engine.resident))  # type: ignore[arg-type]
        self.planner = ChatPlanner(memory, self.encoder, 2048, self._ask, keeps_turns=True)
        self.messages: list[dict[str, Any]] = []
        self.stored: dict[str, Stored] = {}

    def _ask(self, head: tuple[int, ...], head_key: str, keys: Sequence[str]) -> Residents:
        return Residents(self.jobs.resident(list(keys)))

    def encode(self, jobs: Sequence[EncodeJob]) -> list[dict[str, Any]]:
        """Run passes one by one; what they capture, as the reference computes it. Their outcomes."""
        outcomes = []
        for job in jobs:
            kv = self.a.reference.encode(job.token_ids)
            for span in job.captures:
                ids = job.token_ids[span.start : span.end]
                self.stored[span.key] = Stored(span.key, ids, span.start, kv.span(span.start, span.end))
            answer = self.engine.ask(job.token_ids, self.encoder.plan_of(job))
            assert answer.outcome is not None
            assert answer.outcome["captured"] == len(job.captures)
            outcomes.append(answer.outcome)
        return outcomes

    def ask(self, question: str) -> tuple[PreparedChat, Answer]:
        """The next question, and its answer in the history."""
        self.messages.append({"role": "user", "content": question})
        prepared = self.planner.prepare(
            self.planner.prompts.draft(self.messages), self.scope, 2, "inject", None, 64
        )
        assert prepared.plan is not None
        answer = self.engine.ask(prepared.prompt.token_ids, prepared.plan, max_tokens=NUM_STEPS)
        text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        return prepared, answer

    def keep(self, prepared: PreparedChat) -> list[EncodeJob]:
        """The pass for the turn that was just answered."""
        assert prepared.plan is not None
        draft = self.planner.prompts.draft(self.messages[:-1])
        answer = self.messages[-1]["content"]
        return self.jobs.for_turns(self.planner.conversation(draft, prepared.plan, self.scope, answer))

    def parts(self, prepared: PreparedChat) -> list[Part]:
        """The prompt with all of its segments as stored."""
        found = segments(prepared)
        question = prepared.prompt.token_ids[prepared.prompt.history[1] :]
        return [*(self.stored[segment.key] for segment in found), question]


def segments(prepared: PreparedChat) -> list[Segment]:
    assert prepared.plan is not None
    return list(prepared.plan.segments)


def turns(prepared: PreparedChat) -> list[Segment]:
    return [segment for segment in segments(prepared) if segment.kind == "turn"]


def front(prepared: PreparedChat) -> list[Fact]:
    return [candidate.fact for candidate in prepared.choice.front]


@pytest.fixture
def talk(request: pytest.FixtureRequest, author: Callable[..., Author], tmp_path: Path) -> Iterator[Talk]:
    scope = Scope(request.node.name)
    with open_memory(tmp_path) as memory:
        memory.add(list(SAID), user_id=scope.user_id)
        started = Talk(author("smollm2", block_size=32), memory, scope)
        started.encode(started.encoder.new_jobs(scope))
        yield started


def supplied(outcome: dict[str, Any] | None) -> int:
    assert outcome is not None
    return int(outcome["injected_tokens"]) + int(outcome["cached_tokens"])


def test_a_conversation_stays_flat(talk: Talk) -> None:
    tolerance = 2 * talk.a.baseline([110, 170], NUM_STEPS)
    chosen: list[list[Fact]] = []
    for number, question in enumerate(QUESTIONS):
        prepared, answer = talk.ask(question)
        outcome, history = answer.outcome, prepared.prompt.history
        assert outcome is not None
        num_question = len(prepared.prompt.token_ids) - history[1]
        print(
            f"turn {number + 1}: prompt {outcome['prompt_tokens']}, injected {outcome['injected_tokens']}, "
            f"cached {outcome['cached_tokens']}, prefilled {outcome['prefilled_tokens']}, "
            f"question {num_question}: {talk.messages[-1]['content']!r}"
        )
        chosen.append(front(prepared))
        # Of the first question's prompt the opening of the user's message is in no pool yet.
        assert supplied(outcome) == history[number > 0]
        assert outcome["covered_segments"] == len(segments(prepared)) - (number == 0)
        if number:
            assert outcome["prefilled_tokens"] == num_question < 20
            assert talk.a.difference(talk.parts(prepared), answer, history[1]) <= tolerance
            assert talk.a.difference(talk.parts(prepared), answer, history[0]) > 100 * tolerance
        jobs = talk.keep(prepared)
        [done] = talk.encode(jobs)
        num_new = sum(span.end - span.start for span in jobs[0].captures)
        print(
            f"    pass of {done['prompt_tokens']} tokens: prefilled {done['prefilled_tokens']}, new {num_new}"
        )
        assert done["prefilled_tokens"] <= num_new < 60
        assert talk.keep(prepared) == []
    assert all(one != other for one, other in zip(chosen, chosen[1:], strict=False)), "the facts changed"
    limit = 2 * talk.a.kv_baseline([100, 150])
    for segment in turns(prepared):
        pooled = talk.engine.pooled(segment.key)
        assert largest_difference(pooled, talk.stored[segment.key].kv.numpy()) <= limit


def test_turns_outlive_the_deletion_of_a_fact(talk: Talk) -> None:
    for question in QUESTIONS[:2]:
        prepared, _ = talk.ask(question)
        talk.encode(talk.keep(prepared))
    gone = front(prepared)[-1]
    deletion = talk.memory.delete(gone.id)
    assert not set(deletion.keys) & {segment.key for segment in turns(prepared)}
    epochs = tuple((prepared.plan.scope, item.epoch) for item in deletion.epochs if prepared.plan)
    talk.engine.ask((0,), talk.engine.plan("", order=Order("forget", tuple(deletion.keys), epochs)))
    talk.encode(talk.encoder.new_jobs(talk.scope))
    prepared, answer = talk.ask(QUESTIONS[1])
    assert gone not in front(prepared)
    assert len(turns(prepared)) == 3
    assert supplied(answer.outcome) == prepared.prompt.history[1]


def test_a_turn_that_was_evicted_is_prefilled(talk: Talk) -> None:
    for question in QUESTIONS[:3]:
        prepared, _ = talk.ask(question)
        talk.encode(talk.keep(prepared))
    known = turns(prepared)
    talk.engine.forget([known[1].key])
    tolerance = 2 * talk.a.baseline([110, 170], NUM_STEPS)
    prepared, answer = talk.ask(QUESTIONS[3])
    kept = prepared.prompt.history[0] + len(known[0].token_ids)
    assert supplied(answer.outcome) == kept
    assert talk.a.difference(talk.parts(prepared), answer, kept) <= tolerance
    assert prepared.num_lost_tokens(kept) == 0
    [job] = talk.keep(prepared)
    assert [span.key for span in job.captures][:-1] == [known[1].key]
    assert [segment.key for segment in job.segments][1:] == [known[0].key]
    talk.encode([job])
    prepared, answer = talk.ask("Goodbye, and say hello to my sister Ines.")
    assert supplied(answer.outcome) == prepared.prompt.history[1]
