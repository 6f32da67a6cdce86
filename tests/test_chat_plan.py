"""A chat's plan: head, facts, earlier turns; and what is encoded for the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import open_memory
from inferscale.chat_plan import ChatPlanner, PreparedChat, Residents
from inferscale.encode_jobs import JobChooser
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.plan import Segment, scope_digest, segment_key
from inferscale.prompt import PromptBuilder
from inferscale.tail import NO_TAIL, Tail
from inferscale.windows import WindowPolicy
from test_conversation import Pool
from test_prompt import CHATML, said, tokenizer_with, user

ANA, BOB = Scope("ana"), Scope("bob")
FACTS = ["My sister Ines lives in Oslo.", "My dog is called Rex.", "I play the violin."]


class Chats:
    """A planner beside a pool that holds whatever is encoded."""

    def __init__(self, memory: Memory, **options: Any) -> None:
        prompts = PromptBuilder(tokenizer_with(CHATML))
        self.encoder = Encoder(memory.catalog, prompts, "m", WindowPolicy(2, 3), 4000)
        self.pool = Pool()
        self.jobs = JobChooser(self.encoder, self.pool)  # type: ignore[arg-type]
        self.planner = ChatPlanner(memory, self.encoder, 4096, self._ask, **options)
        self.computed = 0

    def _ask(self, head: tuple[int, ...], head_key: str, keys: Sequence[str]) -> Residents:
        self.pool.keys.add(head_key)
        return Residents(self.pool.keys & set(keys))

    def encode_facts(self, scope: Scope) -> None:
        self.pool.keys |= {span.key for job in self.encoder.new_jobs(scope) for span in job.captures}

    def prepare(
        self, messages: list[dict[str, Any]], scope: Scope = ANA, top_k: int = 2, **options: Any
    ) -> PreparedChat:
        settings: dict[str, Any] = {"mode": "inject", "tail": NO_TAIL, "max_tokens": 16, **options}
        draft = self.planner.prompts.draft(messages)
        return self.planner.prepare(draft, scope, top_k, **settings)

    def keep(
        self,
        messages: list[dict[str, Any]],
        prepared: PreparedChat,
        answer: str | None,
        scope: Scope = ANA,
    ) -> None:
        """What the server does behind an answer."""
        assert prepared.plan is not None
        draft = self.planner.prompts.draft(messages)
        conversation = self.planner.conversation(draft, prepared.plan, scope, answer)
        for job in self.jobs.for_turns(conversation):
            self.computed += len(job.token_ids) - sum(len(segment.token_ids) for segment in job.segments)
            self.pool.keys |= {span.key for span in job.captures}

    def num_injected(self, prepared: PreparedChat) -> int:
        """Tokens of the leading run that the pool holds."""
        num_tokens = 0
        for segment in segments(prepared):
            if segment.key not in self.pool.keys:
                break
            num_tokens += len(segment.token_ids)
        return num_tokens


def segments(prepared: PreparedChat) -> list[Segment]:
    assert prepared.plan is not None
    return list(prepared.plan.segments)


def turns(prepared: PreparedChat) -> list[Segment]:
    return [segment for segment in segments(prepared) if segment.kind == "turn"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        for scope in (ANA, BOB):
            opened.add(FACTS, user_id=scope.user_id)
        yield opened


@pytest.fixture
def chats(memory: Memory) -> Chats:
    made = Chats(memory, keeps_turns=True)
    made.encode_facts(Scope())
    return made


TALK = [*said("Hello", "Hi.", "Who is Rex?", "Your dog."), user("Where does my sister Ines live?")]


def test_the_segments_open_the_prompt_in_its_order(chats: Chats) -> None:
    prepared = chats.prepare(TALK)
    found = segments(prepared)
    assert [segment.kind for segment in found] == ["text", "fact", "fact", "turn", "turn", "turn"]
    opening = sum((segment.token_ids for segment in found), ())
    assert prepared.prompt.token_ids[: len(opening)] == opening
    assert len(opening) == prepared.prompt.history[1]
    assert tuple(segment.token_ids for segment in found[3:]) == prepared.prompt.turns
    digest = scope_digest("ana", None, None)
    head = prepared.prompt.head_ids
    first, second = prepared.prompt.turns[:2]
    assert found[3].key == segment_key(f"m+{digest}", head, first)
    assert found[4].key == segment_key(f"m+{digest}", head + first, second)


def test_the_prompt_is_the_same_with_and_without_turns(chats: Chats, memory: Memory) -> None:
    plain = Chats(memory)
    plain.pool.keys |= chats.pool.keys
    without, prepared = plain.prepare(TALK), chats.prepare(TALK)
    assert without.prompt == prepared.prompt
    assert segments(without) == segments(prepared)[:3]
    assert chats.prepare(TALK, mode="text").prompt.token_ids == prepared.prompt.token_ids
    assert chats.prepare(TALK, mode="text").plan is None


def test_other_facts_leave_the_turns_as_they_are(chats: Chats) -> None:
    wanted = turns(chats.prepare(TALK))
    assert turns(chats.prepare([*TALK[:-1], user("Who plays the violin?")], top_k=1)) == wanted
    assert turns(chats.prepare(TALK, tail=Tail(1))) == wanted
    assert turns(chats.prepare(TALK[:3])) == wanted[:2]


def test_the_best_facts_are_recomputed_where_text_has_them(chats: Chats) -> None:
    question = [user("Where does my sister Ines live?")]
    whole, prepared = chats.prepare(question), chats.prepare(question, tail=Tail(1))
    assert prepared.prompt == whole.prompt == chats.prepare(question, tail=Tail(1), mode="text").prompt
    assert segments(prepared) == segments(whole)[:2], "the head and the other fact"
    assert chats.prepare(question, tail=Tail(2)).plan is None
    assert chats.prepare(question, tail=Tail(2)).prompt == whole.prompt


def test_the_setting_holds_for_questions_without_earlier_turns(memory: Memory) -> None:
    """Behind turns the recomputed facts would stand elsewhere than text memory has them."""
    chats = Chats(memory, keeps_turns=True, tail=Tail(5, share=0.1))
    chats.encode_facts(Scope())
    question = [{"role": "system", "content": "Be brief."}, user("Where does my sister Ines live?")]
    prepared = chats.prepare(question, top_k=3, tail=None)
    assert prepared.choice.num_recomputed == 1, "a tenth of the tokens is less than a fact: the best one"
    assert prepared.prompt == chats.prepare(question, top_k=3).prompt
    assert [segment.kind for segment in segments(prepared)] == ["text", "fact", "fact"]
    injected = segments(chats.prepare(question, top_k=3, tail=NO_TAIL))
    assert [segment.kind for segment in injected].count("fact") == 3
    talk = chats.prepare(TALK, top_k=3, tail=None)
    assert talk.prompt == chats.prepare(TALK, top_k=3).prompt
    assert [segment.kind for segment in segments(talk)].count("fact") == 3
    assert Chats(memory).planner.tail is NO_TAIL


def test_why_nothing_is_injected_where_all_facts_are_recomputed(chats: Chats) -> None:
    question = [user("Where does my sister Ines live?")]
    assert chats.prepare(question, top_k=1, tail=Tail(1)).reason == "all facts found are recomputed (tail)"
    assert chats.prepare(TALK, tail=Tail(9)).reason == "all facts found are recomputed (tail)"
    assert chats.prepare(question, tail=Tail(1)).reason is None
    assert chats.prepare(question, tail=Tail(9), mode="text").reason is None
    assert chats.prepare(question, Scope("nobody"), tail=Tail(9)).reason is None
    chats.pool.keys.clear()
    assert chats.prepare(question, tail=Tail(1)).reason is None, "one is missing"


def test_another_order_is_the_same_as_text_and_injected(memory: Memory) -> None:
    chats = Chats(memory, keeps_turns=True, order="chronological")
    chats.encode_facts(Scope())
    question = [user("Where does my sister Ines live?")]
    for order, tail in (("chronological", 0), ("chronological", 1), ("session", 1), ("best-last", 1)):
        told: dict[str, Any] = {"order": order, "tail": Tail(tail), "top_k": 3}
        injected, text = chats.prepare(question, **told), chats.prepare(question, mode="text", **told)
        assert injected.prompt == text.prompt
        assert sum(segment.kind == "fact" for segment in segments(injected)) == 3 - tail
    said = [candidate.fact.text for candidate in chats.prepare(question, top_k=3).choice.front]
    assert said == FACTS, "as the planner was told"
    assert [c.fact.text for c in chats.prepare(question, top_k=3, tail=Tail(1)).choice.front] == [
        *FACTS[1:],
        FACTS[0],
    ]
    best_last = chats.prepare(question, top_k=3, order="best-last")
    assert [c.fact.text for c in best_last.choice.front][-1] == FACTS[0]


def test_behind_earlier_turns_they_stand_before_the_question(chats: Chats) -> None:
    """In front of the turns they would turn these into text."""
    prepared = chats.prepare(TALK, tail=Tail(1))
    assert [span.fact_id for span in prepared.prompt.tail_spans] == [prepared.hits[0].fact.id]
    assert [segment.kind for segment in segments(prepared)] == ["text", "fact", "turn", "turn", "turn"]


def test_whose_conversation_it_is_makes_the_key(chats: Chats) -> None:
    system = {"role": "system", "content": "Be brief."}
    several = [
        turns(chats.prepare(TALK)),
        turns(chats.prepare(TALK, BOB)),
        turns(chats.prepare(TALK, caller_salt="a")),
        turns(chats.prepare(TALK, caller_salt="b")),
        turns(chats.prepare([system, *TALK])),
    ]
    assert {tuple(segment.token_ids for segment in found) for found in several} == {
        tuple(segment.token_ids for segment in several[0])
    }
    assert len({segment.key for found in several for segment in found}) == 5 * 3
    other = turns(chats.prepare([user("Hello!"), *TALK[1:]]))
    assert other[0] == several[0][0]
    assert other[2].token_ids == several[0][2].token_ids
    assert other[2].key != several[0][2].key


def test_without_facts_in_front_there_is_no_plan(chats: Chats) -> None:
    """vLLM's own prefix cache finds the turns then."""
    assert chats.prepare(TALK, Scope("nobody")).plan is None
    assert chats.prepare(TALK, tail=Tail(2)).plan is None
    assert chats.prepare(TALK, mode="none").plan is None


def test_a_conversation_stays_flat(chats: Chats) -> None:
    """From turn to turn only the question is prefilled, and only the new turn encoded."""
    talk: list[dict[str, Any]] = []
    questions = ["Where does Ines live?", "And who is Rex?", "Who plays?", "Where is my sister?", "Bye Rex"]
    prefilled, computed = [], []
    for number, question in enumerate(questions):
        talk.append(user(question))
        prepared = chats.prepare(talk)
        num_history = prepared.prompt.history[1]
        prefilled.append(len(prepared.prompt.token_ids) - chats.num_injected(prepared))
        if number:
            assert chats.num_injected(prepared) == num_history
        before, chats.computed = chats.computed, 0
        chats.keep(talk, prepared, f"Answer number {number}.")
        computed.append(chats.computed)
        chats.computed = before
        talk.append({"role": "assistant", "content": f"Answer number {number}."})
    assert max(prefilled[1:]) < 40
    assert max(computed[1:]) < 80
    assert len({segment.key for segment in turns(chats.prepare([*talk, user("?")]))}) == 6


def test_an_answer_that_the_client_changed_is_encoded_after_the_next(chats: Chats) -> None:
    talk = [user("Where does Ines live?")]
    chats.keep(talk, chats.prepare(talk), " In Oslo. ")
    talk += [{"role": "assistant", "content": "In Oslo."}, user("Who is Rex?")]
    prepared = chats.prepare(talk)
    head_and_facts = prepared.prompt.history[0]
    assert chats.num_injected(prepared) == head_and_facts + len(prepared.prompt.turns[0])
    chats.keep(talk, prepared, None)  # as with tool calls: this answer cannot be foretold
    assert chats.num_injected(prepared) == prepared.prompt.history[1]
    chats.computed = 0
    chats.keep(talk, prepared, None)
    assert chats.computed == 0


def test_turns_count_as_no_missing_facts(chats: Chats) -> None:
    prepared = chats.prepare(TALK)
    head_and_facts = prepared.prompt.history[0]
    assert prepared.num_missing_tokens == 0
    assert prepared.num_lost_tokens(len(prepared.prompt.token_ids) - 1) == 0
    assert prepared.num_lost_tokens(head_and_facts) == 0
    assert prepared.num_lost_tokens(head_and_facts - 7) == 7
    assert chats.prepare(TALK, mode="text").num_lost_tokens(0) == 0
