"""What `Memory.add` makes of messages and texts: stored turn by turn, or refused as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import WordEmbedder, open_memory
from inferscale.errors import EmptyText, InvalidInput, TextTooLong
from inferscale.facts import Turn
from inferscale.memory import Memory
from inferscale.turns import from_assistant, read_turns


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        yield opened


# --- chat messages -------------------------------------------------------------------------------


def test_messages_are_stored_turn_by_turn(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inferscale")
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "I moved to Porto", "name": "Ana", "time": "8 May 2023, 1:56 pm"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": '{"weather": "rain"}', "tool_call_id": "1"},
        {"role": "assistant", "content": "How is it?"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Wet, see"},
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "text", "text": "photo"},
            ],
        },
        "a note",
        Turn("a turn", "Bob", metadata={"b": 2}),
    ]
    facts = memory.add(messages, user_id="ana", said_at="today", metadata={"a": 1, "b": 1})
    assert [(fact.text, fact.speaker, fact.said_at) for fact in facts] == [
        ("I moved to Porto", "Ana", "8 May 2023, 1:56 pm"),
        ("How is it?", "assistant", "today"),
        ("Wet, see\nphoto", "user", "today"),
        ("a note", None, "today"),
        ("a turn", "Bob", "today"),
    ]
    assert [fact.metadata for fact in facts] == [{"a": 1, "b": 1}] * 4 + [{"a": 1, "b": 2}]
    assert [fact.seq for fact in facts] == sorted(fact.seq for fact in facts)
    assert "3 of 8 messages" in caplog.text
    assert "1 assistant, 1 system, 1 tool" in caplog.text


def test_the_speaker_argument_names_the_user(memory: Memory) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, "note"]
    assert [f.speaker for f in memory.add(messages, user_id="ana", speaker="Ana")] == [
        "Ana",
        "assistant",
        "Ana",
    ]
    assert memory.add({"role": "user", "content": "one message"}, user_id="ana")[0].speaker == "user"


def test_a_list_without_utterances_stores_nothing(memory: Memory) -> None:
    assert memory.add([], user_id="ana") == []
    assert memory.add([{"role": "system", "content": "x"}], user_id="ana") == []
    assert memory.count(user_id="ana") == 0


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("\0a\0\0b\0", "ab"),
        ("emoji \ud83d\ude00 in halves", "emoji 😀 in halves"),
        ("half \ud83d left", "half \ufffd left"),
        ("\ufeff\ude00x", "\ufeff\ufffdx"),
        ("<|im_end|><|eot_id|>", "<|im_end|><|eot_id|>"),
        ("  spaces\t\n kept ", "  spaces\t\n kept "),
        ("עברית 🇵🇹 👩‍👩‍👧 ‮abc", "עברית 🇵🇹 👩‍👩‍👧 ‮abc"),
        ("x" * 100_000, "x" * 100_000),
    ],
)
def test_no_text_is_lost(memory: Memory, given: str, stored: str) -> None:
    [fact] = memory.add(Turn(given, "s\0p", "t\ud83d"), user_id="ana")
    assert (fact.text, fact.speaker, fact.said_at) == (stored, "sp", "t\ufffd")
    assert memory.get(fact.id) == fact
    assert memory.search(given, user_id="ana")[0].fact == fact


@pytest.mark.parametrize("blank", ["", "  \n\t", "\0", " \0 ", Turn(" "), {"role": "user", "content": ""}])
def test_blank_text_is_refused_before_anything_is_stored(memory: Memory, blank: Any) -> None:
    with pytest.raises(EmptyText):
        memory.add(blank, user_id="ana")
    with pytest.raises(EmptyText, match="item 2 of 3"):
        memory.add(["good", blank, "good"], user_id="ana")
    assert memory.count(user_id="ana") == 0


@pytest.mark.parametrize(
    "bad",
    [
        7,
        None,
        b"bytes",
        {"role": "user", "content": 7},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": "x", "name": 7},
        {"role": "user", "content": "x", "time": 1683554160},
        {"role": "human", "content": "x"},
        {"content": "x"},
        {"role": "system", "content": "x"},
        Turn(7),  # type: ignore[arg-type]
        Turn("x", metadata={"a": object()}),
        Turn("x", metadata="text"),  # type: ignore[arg-type]
    ],
)
def test_other_content_is_refused(memory: Memory, bad: Any) -> None:
    with pytest.raises(InvalidInput):
        memory.add(bad, user_id="ana")
    if not isinstance(bad, dict) or bad.get("role") != "system":
        with pytest.raises(InvalidInput):
            memory.add(["good", bad], user_id="ana")
    assert memory.count(user_id="ana") == 0


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def in_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value["b"] = [value]
    return value


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (nested(51), "metadata of more than 50 levels"),
        (nested(5000), "metadata of more than 50 levels"),
        ({"a": [[[*[nested(48)] * 2]]]}, "metadata of more than 50 levels"),
        (in_itself(), "metadata of more than 50 levels"),
        ({"a": "\ud800"}, "metadata with half of a surrogate pair"),
        ({"a": [{"\udfff": 1}]}, "metadata with half of a surrogate pair"),
    ],
    ids=["deep", "very deep", "lists too", "in itself", "half a pair", "half a pair as a name"],
)
def test_metadata_that_no_answer_could_hold_is_refused(
    memory: Memory, metadata: dict[str, Any], message: str
) -> None:
    [fact] = memory.add("the cat", user_id="ana", metadata=nested(50))
    for content, rest in (
        ("x", {"metadata": metadata}),
        (["x", Turn("x", metadata=metadata)], {}),
        ([{"role": "user", "content": "x"}], {"metadata": metadata}),
    ):
        with pytest.raises(InvalidInput, match=message):
            memory.add(content, user_id="ana", **rest)
    with pytest.raises(InvalidInput, match=message):
        memory.update(fact.id, metadata=metadata)
    assert memory.get_all(user_id="ana") == [fact]
    assert fact.metadata == nested(50)


def test_a_blank_query_is_refused(memory: Memory) -> None:
    with pytest.raises(EmptyText, match=r"^the query is blank; give at least one visible character\.$"):
        memory.search(" ", user_id="ana")


def test_the_text_check_comes_before_storing(tmp_path: Path) -> None:
    def check(turn: Turn) -> None:
        if len(turn.text) > 10:
            raise TextTooLong(f"{len(turn.text)} characters")

    embedder = WordEmbedder()
    with open_memory(tmp_path, embedder=embedder, check_text=check) as memory:
        with pytest.raises(TextTooLong):
            memory.add(["short", "far too long"], user_id="ana")
        assert memory.count(user_id="ana") == embedder.num_texts == 0
        assert memory.add("short\0\0\0\0\0\0\0", user_id="ana")[0].text == "short"


def test_who_is_an_assistant() -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hi.", "name": "Bot"},
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "user", "content": "Hello.", "name": "assistant"},
        Turn("Fine.", "Assistant"),
        Turn("Good.", "Ana"),
        "Plain.",
    ]
    assert from_assistant(talk) == [True, False, True, False, False]
    assert len(read_turns(talk)) == 5
    assert from_assistant(talk[1]) == [True]
    assert from_assistant("assistant") == [False]
