"""A workload of a real conversation: facts and questions as the memory renders and finds them.

Facts are searched with the memory's own embedder, and prompts are made by `PromptBuilder`, so the
token ids are those that `MemoryLLM` would send. Every user after the first has the same turns under other
names of the speakers, so that each has a memory of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferscale.bench.conversation import BenchConversation
from inferscale.bench.workload import Asked, Ids
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.errors import EngineMissing, InvalidInput
from inferscale.facts import Fact
from inferscale.memory import Memory
from inferscale.prompt import PromptBuilder
from inferscale.retrieval import Embedder
from inferscale.tail import NO_TAIL, Tail

_USER = "bench"


class SpokenWorkload:
    """The first `num_facts` turns of a conversation (all by default), and its questions.

    max_k: facts that are found for each of the first `num_questions` questions, which then repeat.
    embedder: instead of the default one.
    """

    def __init__(
        self,
        conversation: BenchConversation,
        prompts: PromptBuilder,
        *,
        num_users: int = 1,
        num_facts: int | None = None,
        num_questions: int = 20,
        max_k: int = 100,
        embedder: Embedder | None = None,
    ) -> None:
        self.name = conversation.name
        self.num_users = num_users
        self._prompts = prompts
        self._questions = conversation.questions[:num_questions]
        turns = list(conversation.turns[:num_facts])
        conversation.check_k(max_k, num_facts)
        self.head: Ids = tuple(prompts.anchor_ids)
        with tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder:
            opened = Memory(MemoryConfig(folder, catalog=IN_FOLDER), embedder=embedder)
            try:
                self._facts: Sequence[Fact] = opened.add(turns, user_id=_USER)
                self._found = [self._search(opened, question, max_k) for question in self._questions]
            finally:
                opened.close()
        self.num_facts = len(self._facts)
        self._ids: dict[int, tuple[Ids, ...]] = {}

    def _search(self, memory: Memory, question: str, k: int) -> list[int]:
        places = {fact.id: place for place, fact in enumerate(self._facts)}
        hits = memory.search(question, user_id=_USER, top_k=k)
        return [places[hit.fact.id] for hit in hits]

    def facts(self, user: int) -> Sequence[Ids]:
        if user not in self._ids:
            self._ids[user] = tuple(self._prompts.fact_ids(self._of(user, fact)) for fact in self._facts)
        return self._ids[user]

    def _of(self, user: int, fact: Fact) -> Fact:
        return replace(fact, speaker=f"{fact.speaker or 'Someone'} {user}") if user else fact

    def ask(self, user: int, number: int, k: int, tail: Tail = NO_TAIL) -> Asked:
        """The best `k` facts, the best one last, as the planner orders them; the tail is recomputed."""
        place = (number + user) % len(self._questions)
        found = self._found[place][:k]
        if len(found) < k:
            raise InvalidInput(f"k={k} was asked for; {self.name} was searched for {len(found)} facts.")
        messages = [{"role": "user", "content": self._questions[place]}]
        prompt = self._prompts.build(messages, [self._of(user, self._facts[item]) for item in found[::-1]])
        none = prompt if not found else self._prompts.build(messages)
        num_recomputed = tail.count([len(self.facts(user)[item]) for item in found])
        spans = prompt.fact_spans
        front = spans[: len(spans) - num_recomputed]
        rest = prompt.token_ids[front[-1].end if front else len(prompt.head_ids) :]
        return Asked(
            user,
            tuple(prompt.head_ids),
            tuple(found[num_recomputed:][::-1]),
            tuple(prompt.token_ids[span.start : span.end] for span in front),
            rest,
            rest,
            none.token_ids,
            spans[-1].end - spans[-num_recomputed].start if num_recomputed else 0,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "workload": "a conversation, facts found by embedding; hit asks the same prompt a second time",
            "conversation": self.name,
            "turns": self.num_facts,
            "questions": len(self._questions),
            "head_tokens": len(self.head),
        }


def prompt_builder(folder: str | Path) -> PromptBuilder:
    """For the tokenizer in a folder, or of a hub name. Raises EngineMissing."""
    from transformers import AutoTokenizer

    try:
        return PromptBuilder(AutoTokenizer.from_pretrained(str(folder)))
    except (OSError, ValueError) as error:
        raise EngineMissing(
            f"The tokenizer of {str(folder)!r} cannot be loaded ({str(error).splitlines()[0]}); give the "
            "folder of one with --tokenizer."
        ) from error
