"""`Memory.add(…, infer=True)` with a model that answers as a test wants it: what facts do to each other."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, decision, facts

from fakes import WordEmbedder, open_memory
from inferscale.catalog import Added
from inferscale.config import ExtractionConfig, MemoryConfig
from inferscale.errors import ExtractionError, InvalidInput, QuotaExceeded
from inferscale.extraction import Inference
from inferscale.facts import ChangeEvent, Scope
from inferscale.memory import Memory

OSLO = "Ana lives in Oslo."
BERGEN = "Ana lives in Bergen."


def saying(question: str) -> dict[str, Any]:
    """The line itself is the fact."""
    return facts((1, question.split(': "')[1].split('"\nAnswer')[0]))


def texts(memory: Memory, **ids: str) -> list[str]:
    return [fact.text for fact in memory.get_all(**(ids or {"user_id": "ana"}))] if memory.count(
        **(ids or {"user_id": "ana"})
    ) else []  # fmt: skip


def tell(memory: Memory, text: str, **ids: str) -> Added:
    return memory.add([{"role": "user", "content": text}], infer=True, **(ids or {"user_id": "ana"}))


def test_without_a_model_nothing_is_inferred(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    with pytest.raises(InvalidInput, match="infer=True needs a model"):
        tell(memory, OSLO)
    assert memory.count(user_id="ana") == 0


def test_turns_are_stored_as_ever_by_default(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel())
    added = memory.add([OSLO, OSLO], user_id="ana")
    assert [fact.text for fact in added] == [OSLO, OSLO]
    assert added.events == tuple(ChangeEvent("ADD", fact.id, OSLO) for fact in added)
    assert memory.add([], user_id="ana", infer=True) == []


def test_a_fact_is_added_with_its_speaker(tmp_path: Path) -> None:
    model = FakeModel([facts((1, OSLO))])
    memory = open_memory(tmp_path, extraction=model)
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "I live in Oslo.", "name": "Ana"},
        {"role": "assistant", "content": "Nice.", "name": "Bot"},
    ]
    added = memory.add(talk, user_id="ana", said_at="7 May 2023", infer=True)
    [fact] = added
    assert (fact.text, fact.speaker, fact.said_at) == (OSLO, "Ana", "7 May 2023")
    assert added.events == (ChangeEvent("ADD", fact.id, OSLO),)
    assert memory.get_all(user_id="ana") == [fact]
    assert "\nBot: " in model.asked["extract"][0]  # without a number


def test_a_contradiction_supersedes(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying, [decision("UPDATE", 1, reason="She moved.")]))
    [old] = tell(memory, OSLO)
    memory.catalog.passes.record("model", old.scope, [], [old.id], ["key"])
    added = tell(memory, BERGEN)
    [new] = added
    assert added.events == (ChangeEvent("UPDATE", new.id, BERGEN, OSLO, "She moved.", old.id),)
    assert added.keys == ("key",)
    assert [(item.scope, item.epoch) for item in added.epochs] == [(Scope("ana"), 1)]
    assert texts(memory) == [BERGEN]
    assert [hit.fact.id for hit in memory.search("Oslo", user_id="ana")] == [new.id]
    assert [(event.event, event.previous_text, event.reason) for event in memory.history(new.id)] == [
        ("ADD", None, None),
        ("SUPERSEDE", OSLO, "She moved."),
    ]
    assert [event.event for event in memory.history(old.id)] == ["ADD", "END"]


def test_a_completed_fact_has_the_words_of_the_model_where_they_are_true(tmp_path: Path) -> None:
    good = "Ana's sister Ines lives in Bergen."
    for number, (wording, stored) in enumerate(
        [
            (good, good),
            ("Ines lives in Paris.", BERGEN),
            ("", BERGEN),
            ("x" * 600, BERGEN),
            (good + " 7", BERGEN),
        ]
    ):
        model = FakeModel(saying, [decision("UPDATE", 1, wording)])
        memory = open_memory(tmp_path / str(number), extraction=model)
        tell(memory, "Ana's sister Ines lives in Oslo.")
        tell(memory, BERGEN)
        assert texts(memory) == [stored], wording


def test_what_is_no_longer_so_ends(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying, [decision("DELETE", 1)]))
    [old] = tell(memory, OSLO)
    added = tell(memory, "Ana no longer lives in Oslo.")
    assert added == []
    assert added.events == (ChangeEvent("DELETE", old.id, OSLO, OSLO, "so"),)
    assert texts(memory) == []
    assert [event.event for event in memory.history(old.id)] == ["ADD", "END"]


def test_the_model_says_that_it_is_known(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying, [decision("NONE", 1)]))
    [old] = tell(memory, OSLO)
    added = tell(memory, "Ana lives in the city of Oslo.")
    assert (list(added), [event.event for event in added.events]) == ([], ["NONE"])
    assert added.events[0].id == old.id


def test_repetitions_are_none_without_the_model(tmp_path: Path) -> None:
    model = FakeModel(saying)
    memory = open_memory(tmp_path, extraction=Inference(model, ExtractionConfig(same_above=0.8)))
    [old] = tell(memory, "Ana lives in Oslo with two dogs")
    for again in ("ana lives in  OSLO with two dogs.", "Ana now lives in Oslo with two dogs"):
        added = tell(memory, again)
        assert [(event.event, event.id) for event in added.events] == [("NONE", old.id)]
    assert model.asked["decide"] == []
    assert memory.count(user_id="ana") == 1


@pytest.mark.parametrize(
    ("stored", "new"),
    [
        ("Ana has 2 dogs at home in the city", "Ana has 3 dogs at home in the city"),
        ("Ana likes the red house near Oslo", "Ana likes the red house near Bergen"),
        ("Ana can eat nuts with her tea", "Ana can not eat nuts with her tea"),
    ],
)
def test_what_differs_in_a_detail_is_for_the_model(tmp_path: Path, stored: str, new: str) -> None:
    model = FakeModel(saying, [decision("UPDATE", 1)])
    memory = open_memory(tmp_path, extraction=Inference(model, ExtractionConfig(same_above=0.5)))
    tell(memory, stored)
    assert [event.event for event in tell(memory, new).events] == ["UPDATE"]
    assert texts(memory) == [new]


def test_what_is_about_something_else_is_not_asked_about(tmp_path: Path) -> None:
    model = FakeModel(saying)
    memory = open_memory(tmp_path, extraction=model)
    tell(memory, OSLO)
    tell(memory, "Walnuts make him sneeze")
    assert model.asked["decide"] == []
    assert memory.count(user_id="ana") == 2


BAD: list[Any] = [
    ExtractionError("timeout"),
    {},
    decision("CHANGE", 1),
    decision("UPDATE", 0),
    decision("UPDATE", 2),
    decision("DELETE", -1),
    {"event": "DELETE", "id": True},
    {"event": "DELETE", "id": "1"},
    {"event": "NONE"},
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_decision_ends_nothing(tmp_path: Path, bad: Any) -> None:
    model = FakeModel(saying, [bad])
    memory = open_memory(tmp_path, extraction=model)
    tell(memory, OSLO)
    added = tell(memory, BERGEN)
    assert [(event.event, event.reason) for event in added.events] == [
        ("ADD", "the model did not say what it changes")
    ]
    assert texts(memory) == [OSLO, BERGEN]
    assert model.temperatures[-3:] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    "other",
    [
        {"user_id": "ben"},
        {"user_id": "ana", "run_id": "1"},
        {"user_id": "ana", "agent_id": "bot"},
        {"agent_id": "bot"},
    ],
)
def test_facts_of_another_scope_are_neither_shown_nor_touched(tmp_path: Path, other: dict[str, str]) -> None:
    model = FakeModel(saying, [decision("DELETE", 1)])
    memory = open_memory(tmp_path, extraction=model)
    [foreign] = tell(memory, OSLO, **other)
    added = tell(memory, "Ana lives in Oslo with a dog.")
    assert [event.event for event in added.events] == ["ADD"]
    assert model.asked["decide"] == []
    assert memory.get(foreign.id) == foreign
    again = tell(memory, OSLO)  # the same words are no repetition either
    assert [event.event for event in again.events] == ["DELETE"]  # of the one that was shown
    assert memory.get(foreign.id) == foreign
    assert OSLO not in model.asked["decide"][0].split("New fact")[0]


def test_turns_that_failed_are_stored_and_not_twice(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel([ExtractionError("the server is away.")]))
    talk = [{"role": "user", "content": OSLO}, {"role": "assistant", "content": "Fine."}]
    added = memory.add(talk, user_id="ana", said_at="7 May 2023", infer=True)
    assert [(fact.text, fact.speaker) for fact in added] == [(OSLO, "user"), ("Fine.", "assistant")]
    assert added.warning is not None
    assert "the server is away." in added.warning
    again = memory.add(talk, user_id="ana", said_at="7 May 2023", infer=True)
    assert (list(again), [event.event for event in again.events]) == ([], ["NONE", "NONE"])
    assert len(memory.add(talk, user_id="ana", said_at="8 May 2023", infer=True)) == 2


def test_what_is_too_long_is_refused_before_the_model_is_asked(tmp_path: Path) -> None:
    model = FakeModel(saying)

    def refuse(turn: object) -> None:
        raise InvalidInput("too long")

    memory = open_memory(tmp_path, extraction=model, check_text=refuse)
    with pytest.raises(InvalidInput, match="too long"):
        tell(memory, OSLO)
    assert model.asked["extract"] == []


def test_what_is_expired_or_a_core_block_is_not_compared(tmp_path: Path) -> None:
    model = FakeModel(saying)
    memory = open_memory(tmp_path, extraction=model)
    memory.set_block("profile", OSLO, user_id="ana")
    memory.add(OSLO, user_id="ana", expires_at=1.0)
    assert [event.event for event in tell(memory, OSLO).events] == ["ADD"]
    assert model.asked["decide"] == []


def test_an_extracted_fact_expires_with_what_it_was_said_in(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying))
    [fact] = memory.add(OSLO, user_id="ana", expires_at=4e9, infer=True)
    assert fact.expires_at == 4e9


def test_a_quota_holds_for_extracted_facts(tmp_path: Path) -> None:
    config = MemoryConfig(tmp_path, max_facts_per_user=1)
    memory = Memory(config, embedder=WordEmbedder(), extraction=FakeModel(saying, [decision("UPDATE", 1)]))
    tell(memory, OSLO)
    with pytest.raises(QuotaExceeded):
        tell(memory, "Walnuts make him sneeze")
    assert [event.event for event in tell(memory, BERGEN).events] == ["UPDATE"]
    assert texts(memory) == [BERGEN]


def test_what_was_stored_before_a_refusal_is_told(tmp_path: Path) -> None:
    """A fact that ended has keys that the engine must forget, although a later fact is refused."""
    config = MemoryConfig(tmp_path, max_facts_per_user=1)
    walnuts = "Walnuts make him sneeze."
    model = FakeModel(
        [facts((1, OSLO)), facts((1, BERGEN), (1, walnuts))], [decision("UPDATE", 1), decision("ADD")]
    )
    memory = Memory(config, embedder=WordEmbedder(), extraction=model)
    [oslo] = tell(memory, OSLO)
    memory.catalog.passes.record("m", Scope(user_id="ana"), [], [oslo.id], ["key"])
    added = tell(memory, "Much has changed.")
    assert texts(memory) == [BERGEN]
    assert added.keys == ("key",)
    assert added.epochs
    assert added.warning is not None
    assert added.warning.startswith("1 of 2 facts were not stored: this user would hold 2 facts")


@pytest.mark.parametrize(("said_until", "lasts_until"), [(None, None), (5e9, 5e9), (3e9, 4e9)])
def test_a_fact_that_is_said_again_lasts_as_long_as_either(
    tmp_path: Path, said_until: float | None, lasts_until: float | None
) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying))
    [fact] = memory.add(OSLO, user_id="ana", expires_at=4e9)
    added = memory.add(OSLO, user_id="ana", expires_at=said_until, infer=True)
    assert [event.event for event in added.events] == ["NONE"]
    assert memory.get(fact.id).expires_at == lasts_until


def test_a_turn_that_is_kept_again_lasts_as_long_as_either(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel([ExtractionError("no")]))
    [fact] = memory.add(OSLO, user_id="ana", expires_at=4e9)
    assert memory.add(OSLO, user_id="ana", infer=True) == []
    assert memory.get(fact.id).expires_at is None


# at the same time ---------------------------------------------------------------------------------


def test_32_threads_that_add_one_fact_make_one(tmp_path: Path) -> None:
    memory = open_memory(tmp_path, extraction=FakeModel(saying))
    start = threading.Barrier(32)
    found: list[Added] = []

    def add() -> None:
        start.wait()
        found.append(tell(memory, OSLO))

    threads = [threading.Thread(target=add) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.event for added in found for event in added.events) == ["ADD"] + ["NONE"] * 31
    assert len({event.id for added in found for event in added.events}) == 1
    assert texts(memory) == [OSLO]


def test_a_decision_about_what_is_gone_is_made_anew(tmp_path: Path) -> None:
    """Another process stores the same fact in other words while the model thinks."""
    other = open_memory(tmp_path)
    paraphrase = "Ana has her home in Bergen."

    def meanwhile(question: str) -> dict[str, Any]:
        if paraphrase in question:
            return decision("NONE", 2 if f'[2] "{paraphrase}"' in question else 1)
        other.add(paraphrase, user_id="ana")
        return decision("UPDATE", 1)

    model = FakeModel(saying, meanwhile)
    memory = open_memory(tmp_path, extraction=Inference(model, ExtractionConfig(ask_above=-1.0)))
    tell(memory, OSLO)
    added = tell(memory, BERGEN)
    assert [event.event for event in added.events] == ["NONE"]
    assert texts(memory) == [OSLO, paraphrase]


def test_a_fact_that_is_deleted_while_the_model_thinks(tmp_path: Path) -> None:
    other = open_memory(tmp_path)

    def meanwhile(question: str) -> dict[str, Any]:
        other.delete_all(user_id="ana")
        return decision("DELETE", 1)

    memory = open_memory(tmp_path, extraction=FakeModel(saying, meanwhile))
    tell(memory, OSLO)
    assert [event.event for event in tell(memory, BERGEN).events] == ["ADD"]
    assert texts(memory) == [BERGEN]


def _add_in_a_process(folder: str, start: Any, answers: Any) -> None:
    memory = open_memory(Path(folder), extraction=FakeModel(saying))
    start.wait()
    events = [event.event for text in (OSLO, BERGEN * 2) for event in tell(memory, text).events]
    memory.close()
    answers.put(events)


def test_two_processes_that_add_the_same_facts_make_one_of_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_add_in_a_process, args=(str(tmp_path), start, answers)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    events = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(zip(*events, strict=True)) in (
        [("ADD", "NONE"), ("ADD", "NONE")],
        [("ADD", "NONE"), ("NONE", "ADD")],
        [("NONE", "ADD"), ("NONE", "ADD")],
    )
    assert sorted(texts(open_memory(tmp_path))) == sorted([OSLO, BERGEN * 2])
