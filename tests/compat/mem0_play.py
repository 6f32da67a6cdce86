"""One list of calls, played on Mem0's own `Memory` and on ours, and what they answer in comparable form.

    INFERSCALE_MEM0=DIR python tests/compat/mem0_play.py FOLDER > tests/compat/data/mem0.json

plays it on the `mem0ai` that is installed, or lies in DIR (`pip install --target DIR mem0ai`), with stand-ins
for its embedder and model. Ids, times and scores are replaced by what they are: they differ from run to run.
FOLDER then holds Mem0's stores, as in tests/transfer/data/mem0.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERBS = ("add", "get", "get_all", "search", "update", "delete", "delete_all", "history", "reset")
BOB = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "zebra crossing walks", "name": "bob"},
    {"role": "assistant", "content": "quiet harbour lights"},
]
NOBODY = "00000000-0000-0000-0000-000000000000"


def play(memory: Any) -> list[list[Any]]:
    """[verb, answer] of each call; the answer of one that raises is `refused`."""
    answers: list[list[Any]] = []

    def call(verb: str, *arguments: Any, **options: Any) -> Any:
        try:
            answer = getattr(memory, verb)(*arguments, **options)
        except Exception:  # noqa: BLE001  # Mem0's errors are of many kinds
            answers.append([verb, "refused"])
            return None
        answers.append([verb, comparable(answer)])
        return answer

    _add_and_read(call)
    _filter(call)
    _change(call)
    _refuse(call)
    _delete(call)
    return answers


def _add_and_read(call: Callable[..., Any]) -> None:
    bob = {"user_id": "bob"}
    call("add", BOB, user_id="bob", metadata={"topic": "walks", "n": 1}, infer=False)
    call("add", {"role": "user", "content": "one purple umbrella"}, user_id="bob", run_id="r1", infer=False)
    call("add", "plain text", user_id="ann", agent_id="helper", infer=False)
    call("add", "trimmed", user_id="  spaces ", infer=False)
    call("add", "number", user_id=7, infer=False)
    call("add", "lasts", user_id="dan", infer=False, expiration_date="2999-12-31")
    call("add", "is over", user_id="dan", infer=False, expiration_date="2001-01-01")
    call("add", "who am I", user_id="eve", metadata={"user_id": "bob", "k": True}, infer=False)
    call("add", [], user_id="bob", infer=False)
    call("add", [{"role": "user"}, {"content": "x"}], user_id="bob", infer=False)
    call("get", NOBODY)
    for filters in (bob, {"user_id": "ann"}, {"user_id": "7"}, {"user_id": "spaces"}, {"agent_id": "helper"}):
        call("get_all", filters=filters)
    call("get_all", filters={"user_id": "dan"})
    call("get_all", filters={"user_id": "eve"})
    call("get_all", filters={"user_id": "nobody"})
    call("search", "zebra crossing walks", filters=bob, top_k=1)
    call("search", "zebra crossing walks", filters=bob, top_k=1, explain=True)
    call("search", "zebra", filters=bob, threshold=1.0)
    call("search", "zebra", filters={"user_id": "nobody"})
    call("search", "over", filters={"user_id": "dan"}, threshold=0.0, top_k=1)


def _filter(call: Callable[..., Any]) -> None:
    for n in range(4):
        metadata = {"n": n, "topic": "even" if n % 2 == 0 else "odd", "tags": ["all", f"t{n}"]}
        call("add", f"item {n}", user_id="flo", infer=False, metadata=metadata)
    for filters in (
        {"n": 2},
        {"n": {"gte": 1, "lt": 3}},
        {"topic": "even"},
        {"topic": {"in": ["odd"]}},
        {"topic": ["odd", "even"]},
        {"topic": {"ne": "odd"}},
        {"topic": {"nin": ["odd"]}},
        {"topic": "*"},
        {"role": "user"},
        {"actor_id": "bob"},
        {"OR": [{"n": 0}, {"n": 3}]},
        {"AND": [{"topic": "odd"}, {"n": {"gt": 1}}]},
        {"NOT": [{"n": 0}]},
    ):
        call("search", "item", filters={"user_id": "flo", **filters}, threshold=0.0)
        call("get_all", filters={"user_id": "flo", **filters})


def _change(call: Callable[..., Any]) -> None:
    [added] = call("add", "first words", user_id="gil", infer=False, metadata={"a": 1, "b": 2})["results"]
    call("get", added["id"])
    call("update", added["id"], text="second words", metadata={"b": 3, "c": 4, "user_id": "bob"})
    call("update", added["id"], expiration_date="2999-01-31")
    call("get", added["id"])
    call("update", added["id"], expiration_date=None, data="third words")
    call("get", added["id"])
    [added] = call("add", "alpha", user_id="hal", infer=False)["results"]
    call("update", added["id"], "beta")
    call("history", added["id"])
    call("history", NOBODY)


def _refuse(call: Callable[..., Any]) -> None:
    call("add", "no owner")
    call("add", 5, user_id="bob", infer=False)
    call("add", "x", user_id="  ", infer=False)
    call("add", "x", user_id="a b", infer=False)
    call("add", "x", user_id="bob", memory_type="dream", infer=False)
    call("add", "x", user_id="bob", expiration_date="soon", infer=False)
    call("search", " ", filters={"user_id": "bob"})
    call("search", "x", user_id="bob")
    call("search", "x")
    call("search", "x", filters={"topic": "walks"})
    call("search", "x", filters={"user_id": "bob"}, threshold=2)
    call("search", "x", filters={"user_id": "bob"}, top_k=-1)
    call("search", "x", filters={"user_id": "bob"}, top_k="3")
    call("search", "x", filters={"user_id": "bob"}, reference_date="2023-01-01")
    call("get_all")
    call("get_all", user_id="bob")
    call("update", NOBODY, text="x")
    call("update", NOBODY)
    call("delete", NOBODY)
    call("delete_all")


def _delete(call: Callable[..., Any]) -> None:
    [added] = call("add", "to be gone", user_id="ida", infer=False)["results"]
    call("delete", added["id"])
    call("get", added["id"])
    call("delete", added["id"])
    call("delete_all", user_id="flo")
    call("delete_all", user_id="flo")
    call("get_all", filters={"user_id": "flo"})
    call("get_all", filters={"user_id": "bob"})
    call("reset")
    call("get_all", filters={"user_id": "bob"})


def comparable(value: Any, name: str = "") -> Any:
    """`value` with ids, times and scores replaced by what they are; results in the order of their texts."""
    if isinstance(value, dict):
        shown = {key: inner for key, inner in value.items() if (key, inner) != ("expiration_date", None)}
        found = {key: comparable(inner, key) for key, inner in sorted(shown.items())}
        if isinstance(found.get("results"), list):
            found["results"].sort(key=lambda result: str(result["memory"]))
        return found
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    if name in ("id", "memory_id") and isinstance(value, str):
        return "id" if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value) else value
    if name in ("created_at", "updated_at") and isinstance(value, str):
        return "time" if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", value) else value
    if name.endswith("score") and isinstance(value, float):
        return "score" if 0 <= value <= 1.000001 else value
    return value


def signatures(kind: type) -> dict[str, list[str]]:
    """Of each verb the parameters, with the defaults that can be compared."""
    found = {}
    for verb in (*VERBS, "from_config"):
        parameters = inspect.signature(getattr(kind, verb)).parameters.values()
        found[verb] = [_parameter(each) for each in parameters if each.name != "self"]
    return found


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.kind.name.lower()} {parameter.name}"
    if parameter.default is inspect.Parameter.empty:
        return text
    plain = parameter.default is None or isinstance(parameter.default, bool | int | float | str)
    return f"{text}={parameter.default!r}" if plain else f"{text}=unset"


class _Model:
    def generate_response(self, **_: Any) -> str:
        return json.dumps({"memory": [{"text": "Likes tea.", "attributed_to": "user"}]})


class _Embedder:
    """Mem0's interface to the embedder that the tests of `Memory` use."""

    def __init__(self) -> None:
        from fakes import WordEmbedder

        self._words = WordEmbedder()

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        return [float(number) for number in self._words.embed([text])[0]]

    def embed_batch(self, texts: list[str], memory_action: str | None = None) -> list[list[float]]:
        return [self.embed(text) for text in texts]


def open_mem0(folder: Path) -> Any:
    """Mem0's `Memory` with its default stores in `folder`, and stand-ins for embedder and model."""
    os.environ.update(MEM0_TELEMETRY="False", MEM0_DIR=str(folder / "mem0"), OPENAI_API_KEY="none")
    if os.environ.get("INFERSCALE_MEM0"):
        sys.path.append(os.environ["INFERSCALE_MEM0"])
    from mem0 import Memory

    store = {"provider": "qdrant", "config": {"path": str(folder / "qdrant"), "embedding_model_dims": 32}}
    memory = Memory.from_config({"vector_store": store, "history_db_path": str(folder / "history.db")})
    memory.embedding_model, memory.llm = _Embedder(), _Model()
    return memory


def main(folder: Path) -> None:
    memory = open_mem0(folder)
    from mem0 import AsyncMemory

    told = {
        "answers": play(memory),
        "inferred": comparable(memory.add("I like tea.", user_id="ida")),
        "signatures": signatures(type(memory)),
        "async_signatures": signatures(AsyncMemory),
    }
    # What an import reads is left in the folder.
    memory.add(BOB, user_id="bob", metadata={"topic": "walks", "n": 1}, infer=False)
    [kept] = memory.add("first", user_id="ann", agent_id="helper", infer=False)["results"]
    memory.update(kept["id"], text="second", expiration_date="2999-12-31")
    [gone] = memory.add("gone", user_id="ann", infer=False)["results"]
    memory.delete(gone["id"])
    told["everything"] = memory.get_all(filters={"user_id": "ann"})
    memory.vector_store.client.close()
    memory.close()
    lines = ",\n".join(json.dumps(answer, sort_keys=True) for answer in told.pop("answers"))
    rest = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in told.items()
    )
    print(f'{{"answers": [\n{lines}\n],\n{rest}}}')


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    main(Path(sys.argv[1]))
