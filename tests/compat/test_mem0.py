"""Mem0's interface: the same calls give the same answers as Mem0's own, and what is different on purpose."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mem0_play import comparable, play, signatures

from fakes import WordEmbedder, open_memory
from inferscale.compat.mem0 import AsyncMemory, Memory
from inferscale.config import MemoryConfig
from inferscale.errors import EmptyText, InvalidConfig, InvalidInput, UnknownFact

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "data" / "mem0.json").read_text(encoding="utf-8"))
"""What mem0ai 2.2.1 answered (mem0_play.py)."""


@pytest.fixture
def mem0(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory, Memory(memory=memory) as opened:
        yield opened


# --- as Mem0 ---------------------------------------------------------------------------------------


def test_the_same_calls_give_the_same_answers_as_mem0(mem0: Memory) -> None:
    answers = json.loads(json.dumps(play(mem0)))
    assert len(answers) == len(RECORDED["answers"])
    for number, (answer, expected) in enumerate(zip(answers, RECORDED["answers"], strict=True)):
        assert answer == expected, f"call {number}"


def test_verbs_take_the_same_arguments_as_mem0() -> None:
    assert signatures(Memory) == RECORDED["signatures"]
    assert signatures(AsyncMemory) == RECORDED["async_signatures"]


def test_the_recording_is_what_the_installed_mem0_answers(tmp_path: Path) -> None:
    if find_spec("mem0") is None and not os.environ.get("INFERSCALE_MEM0"):
        pytest.skip(
            "mem0ai is not here. It needs protobuf below 7, so it is no dependency; to compare with it: "
            "`pip install --target DIR mem0ai` and INFERSCALE_MEM0=DIR"
        )
    told = subprocess.run(
        [sys.executable, str(HERE / "mem0_play.py"), str(tmp_path)],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    live = json.loads(told.stdout)
    for name in ("answers", "inferred", "signatures", "async_signatures"):
        assert live[name] == RECORDED[name]


# --- facts from conversations ----------------------------------------------------------------------


class Scripted:
    """A model that answers what it was given, in order."""

    def __init__(self, *answers: Mapping[str, Any]) -> None:
        self.answers = list(answers)

    def complete(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict(self.answers.pop(0))


def facts(*texts: str) -> dict[str, Any]:
    return {"facts": [{"line": 1, "text": text} for text in texts], "nothing": not texts}


def events(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(result["event"], result["memory"]) for result in results["results"]]


def test_infer_with_a_model_stores_facts_in_mem0s_shape(tmp_path: Path) -> None:
    with open_memory(tmp_path, extraction=Scripted(facts("Likes tea."))) as memory:
        mem0 = Memory(memory=memory)
        added = mem0.add([{"role": "user", "content": "I like tea."}], user_id="ida", metadata={"k": 1})
        assert comparable(added) == RECORDED["inferred"]
        [found] = mem0.get_all(filters={"user_id": "ida"})["results"]
        assert (found["memory"], found["metadata"]["k"]) == ("Likes tea.", 1)


def test_a_contradiction_is_an_update_of_the_fact_that_was_there(tmp_path: Path) -> None:
    decision = {"event": "UPDATE", "id": 1, "text": "Lives in the big city of Graz.", "reason": "moved"}
    told = (facts("Lives in the big city of Linz."), facts("Lives in the big city of Graz."), decision)
    with open_memory(tmp_path, extraction=Scripted(*told)) as memory:
        mem0 = Memory(memory=memory)
        mem0.add("I live in the big city of Linz.", user_id="ida")
        [linz] = mem0.get_all(filters={"user_id": "ida"})["results"]
        [result] = mem0.add("I live in the big city of Graz.", user_id="ida")["results"]
        assert (result["event"], result["memory"]) == ("UPDATE", "Lives in the big city of Graz.")
        assert result["previous_memory"] == "Lives in the big city of Linz."
        rows = mem0.history(result["id"])
        assert [(row["event"], row["old_memory"], row["new_memory"]) for row in rows] == [
            ("ADD", None, "Lives in the big city of Graz."),
            ("UPDATE", "Lives in the big city of Linz.", "Lives in the big city of Graz."),
        ]
        last = mem0.history(linz["id"])[-1]
        assert (last["event"], last["old_memory"], last["new_memory"], last["is_deleted"]) == (
            "DELETE",
            "Lives in the big city of Linz.",
            None,
            True,
        )


def test_infer_without_a_model_stores_what_was_said_and_warns_once(
    mem0: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for text in ("I like tea.", "I like rain."):
            [result] = mem0.add(text, user_id="ida")["results"]
            assert set(result) == {"id", "memory", "event"}
    assert [record.getMessage() for record in caplog.records] == [
        "add(): infer=True is not used: no model extracts facts here: what was said is stored turn by turn"
    ]
    assert mem0.get(result["id"])["memory"] == "I like rain."  # type: ignore[index]


# --- what differs ----------------------------------------------------------------------------------


def test_a_deleted_memory_leaves_no_history(mem0: Memory) -> None:
    [added] = mem0.add("secret", user_id="ida", infer=False)["results"]
    mem0.update(added["id"], "other")
    mem0.delete(added["id"])
    assert mem0.history(added["id"]) == []


def test_a_memory_keeps_when_it_was_said(mem0: Memory) -> None:
    for given in (1683504000, datetime(2023, 5, 8, tzinfo=UTC), "2023-05-08T00:00:00+00:00"):
        mem0.add("I am in Rome today.", user_id="ida", infer=False, timestamp=given)
    found = mem0.get_all(filters={"user_id": "ida", "happened_at": {"lt": "2023-05-09"}})["results"]
    assert [memory["said_at"] for memory in found] == ["2023-05-08T00:00:00+00:00"] * 3
    with pytest.raises(InvalidInput, match="timestamp"):
        mem0.add("x", user_id="ida", timestamp=[])


def test_names_of_facts_of_others_are_their_actors(mem0: Memory) -> None:
    mem0.memory.add("I am Tom.", user_id="ida", speaker="Tom")
    [found] = mem0.get_all(filters={"user_id": "ida"})["results"]
    assert found["actor_id"] == "Tom"


def test_limit_is_another_name_of_top_k_and_other_arguments_are_refused(mem0: Memory) -> None:
    for number in range(3):
        mem0.add(f"item {number}", user_id="ida", infer=False)
    mine = {"user_id": "ida"}
    assert len(mem0.get_all(filters=mine, limit=2)["results"]) == 2
    assert len(mem0.search("item", filters=mine, limit=1, threshold=0.0)["results"]) == 1
    assert mem0.get_all(filters=mine, top_k=0)["results"] == []
    with pytest.raises(TypeError, match="colour"):
        mem0.search("item", filters=mine, colour="red")
    with pytest.raises(InvalidInput, match="show_expired"):
        mem0.get_all(filters=mine, show_expired=True)


@pytest.mark.parametrize("name", ["user_id", "agent_id", "run_id"])
def test_no_id_stands_for_everybody(mem0: Memory, name: str) -> None:
    mem0.add("secret", user_id="ida", infer=False)
    with pytest.raises(InvalidInput, match=name):
        mem0.get_all(filters={name: "*"})


def test_any_value_of_one_alternative_passes_everything(mem0: Memory) -> None:
    mem0.add("x", user_id="ida", infer=False, metadata={"n": 1})
    either = {"user_id": "ida", "OR": [{"n": 2}, {"m": "*"}]}
    assert len(mem0.get_all(filters=either)["results"]) == 1


def test_ids_select_in_all_combinations(mem0: Memory) -> None:
    owners = [
        {"user_id": "a"},
        {"user_id": "a", "agent_id": "x"},
        {"user_id": "a", "agent_id": "x", "run_id": "1"},
    ]
    owners += [{"agent_id": "x"}, {"user_id": "b", "agent_id": "x"}]
    for owner in owners:
        mem0.add(json.dumps(owner), **owner, infer=False)
    for selected in [*owners, {"run_id": "1"}, {"user_id": "b"}]:
        found = mem0.get_all(filters=selected)["results"]
        expected = [owner for owner in owners if selected.items() <= owner.items()]
        assert [json.loads(memory["memory"]) for memory in found] == expected
    mem0.delete_all(user_id="a", agent_id="x")
    left = [mem0.get_all(filters=owner)["results"] for owner in ({"user_id": "a"}, {"agent_id": "x"})]
    assert [[json.loads(memory["memory"]) for memory in listed] for listed in left] == [
        [owners[0]],
        [owners[3], owners[4]],
    ]


def test_errors_say_what_to_do_and_are_value_errors(mem0: Memory) -> None:
    with pytest.raises(ValueError, match=r"search\(\) takes no user_id; give filters=\{'user_id': 'ida'\}"):
        mem0.search("x", user_id="ida")
    with pytest.raises(ValueError, match="delete everything by reset"):
        mem0.delete_all()
    with pytest.raises(EmptyText):
        mem0.add(" ", user_id="ida", infer=False)
    with pytest.raises(UnknownFact):
        mem0.update("nothing", text="x")
    with pytest.raises(InvalidInput, match="memory_type"):
        mem0.add("x", agent_id="a", memory_type="procedural_memory")


def test_all_messages_of_a_call_are_stored_or_none(mem0: Memory) -> None:
    with pytest.raises(InvalidInput, match="role"):
        mem0.add(
            [{"role": "user", "content": "x"}, {"role": "bard", "content": "y"}], user_id="ida", infer=False
        )
    assert mem0.get_all(filters={"user_id": "ida"})["results"] == []


# --- opening ---------------------------------------------------------------------------------------


def test_configuration_of_mem0_is_read_as_far_as_it_means_something(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "data_dir": str(tmp_path),
        "vector_store": {"provider": "qdrant", "config": {"path": "/nowhere"}},
        "embedder": {"provider": "huggingface", "config": {"model": "some/model"}},
        "llm": {"provider": "vllm", "config": {"model": "m", "vllm_base_url": "http://127.0.0.1:1/v1"}},
    }
    with caplog.at_level(logging.WARNING), Memory.from_config(settings) as mem0:
        assert (mem0.config.embedder, mem0.config.data_dir) == ("some/model", str(tmp_path))
        assert mem0.memory.extraction is not None
    assert [record.getMessage() for record in caplog.records] == [
        "not used of Mem0's configuration: vector_store"
    ]
    hosted = {"llm": {"provider": "openai", "config": {"model": "m"}}}  # which names no server
    with Memory.from_config({"data_dir": str(tmp_path), **hosted}) as mem0:
        assert mem0.memory.extraction is None
    with pytest.raises(InvalidConfig, match="colour"):
        Memory.from_config({"colour": "red"})
    with pytest.raises(InvalidInput, match="from_config"):
        Memory({"data_dir": str(tmp_path)})  # type: ignore[arg-type]


def test_a_memory_that_was_given_stays_open(tmp_path: Path) -> None:
    with open_memory(tmp_path) as memory:
        with Memory(memory=memory) as mem0:
            mem0.add("x", user_id="ida", infer=False)
        assert memory.count(user_id="ida") == 1


def test_async_verbs_do_the_same(tmp_path: Path) -> None:
    async def talk() -> None:
        async with AsyncMemory(MemoryConfig(tmp_path)) as mem0:
            mem0.memory._search._embedder = WordEmbedder()
            [added] = (await mem0.add("tea", user_id="ida", infer=False))["results"]
            await mem0.update(added["id"], text="green tea")
            found = await mem0.search("green tea", filters={"user_id": "ida"})
            assert found["results"][0]["memory"] == "green tea"
            assert (await mem0.get(added["id"]))["memory"] == "green tea"  # type: ignore[index]
            assert len(await mem0.history(added["id"])) == 2
            await mem0.delete(added["id"])
            await mem0.delete_all(user_id="ida")
            await mem0.reset()
            assert await mem0.get_all(filters={"user_id": "ida"}) == {"results": []}

    asyncio.run(talk())


def test_mem0_itself_is_not_imported() -> None:
    code = "import sys, inferscale.compat.mem0, inferscale.transfer\n"
    code += "print([m for m in ('mem0', 'torch', 'vllm', 'qdrant_client') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
