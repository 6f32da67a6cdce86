"""`inferscale ingest`: formats, errors with their place, batches, what is there after a stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from fakes import WordEmbedder
from inferscale.cli import ingest as ingest_module
from inferscale.cli.app import main
from inferscale.cli.ingest_files import read_file
from inferscale.cli.output import rate_text
from inferscale.config import MemoryConfig
from inferscale.errors import EmptyText
from inferscale.facts import Fact, Turn
from inferscale.memory import Memory


class StoppingEmbedder(WordEmbedder):
    """Embeds so many texts, then the user presses Ctrl-C."""

    limit = 10**9

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self.num_texts + len(texts) > self.limit:
            raise KeyboardInterrupt
        return super().embed(texts)


@pytest.fixture
def embedder(monkeypatch: pytest.MonkeyPatch) -> StoppingEmbedder:
    one = StoppingEmbedder()
    monkeypatch.setattr(ingest_module, "Memory", lambda config: Memory(config, embedder=one))
    return one


@pytest.fixture
def folder(tmp_path: Path, embedder: StoppingEmbedder) -> Path:
    return tmp_path / "data"


def run(folder: Path, *arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    where = ["--data-dir", str(folder), "--user-id", "ana"]
    return CliRunner().invoke(main, ["ingest", *map(str, arguments), *where], input=stdin)


def stored(folder: Path) -> list[Fact]:
    with Memory(MemoryConfig(folder), embedder=WordEmbedder()) as memory:
        return memory.get_all(user_id="ana")


def write(folder: Path, name: str, *values: Any) -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n", encoding="utf-8")
    return path


MIXED = (
    "I like tea.",
    {"text": "I live in Oslo.", "speaker": "Bo", "said_at": "3 May", "metadata": {"id": 7}},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "name": "Cy", "time": "4 May", "content": "Hello\nthere"},
    {"role": "assistant", "content": [{"type": "text", "text": "Hi!"}]},
    {"text": "No speaker."},
)
TURNS = [
    Turn("I like tea.", "Ana", None),
    Turn("I live in Oslo.", "Bo", "3 May", {"id": 7}),
    Turn("Hello\nthere", "Cy", "4 May"),
    Turn("Hi!", "assistant", None),
    Turn("No speaker.", "Ana", None),
]


def test_lines_of_json(folder: Path, tmp_path: Path) -> None:
    result = run(folder, write(tmp_path, "facts.jsonl", *MIXED), "--speaker", "Ana")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("5 facts stored from 1 file in ")
    assert result.stdout.rstrip().endswith("; messages that are no utterances, not stored: 1")
    assert "  stored 5/5 facts, " in result.stderr
    found = stored(folder)
    assert [Turn(f.text, f.speaker, f.said_at, f.metadata) for f in found] == TURNS


def test_a_slow_rate_has_a_digit() -> None:
    assert [rate_text(rate) for rate in (0.04, 0.4, 9.949, 9.96, 12.3)] == ["0.0", "0.4", "9.9", "10", "12"]


def test_a_list_of_json_and_standard_input(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("\ufeff" + json.dumps(MIXED, indent=1), encoding="utf-8")
    assert read_file(str(path), "auto", "Ana", None).items == [
        (turn, f"item {number}") for turn, number in zip(TURNS, (1, 2, 4, 5, 6), strict=True)
    ]
    result = run(folder, "-", "--speaker", "Ana", "--json", stdin=path.read_bytes())
    report = json.loads(result.stdout)
    assert (report["facts"], report["skipped"], report["files"]) == (5, 1, 1)
    assert set(report) == {"files", "facts", "skipped", "seconds", "facts_per_s"}
    assert len(stored(folder)) == 5


def test_plain_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes('[3 May] I like tea.\r\n\r\n  - "quo\u2028ted" \n'.encode())
    assert run(folder, path, "--said-at", "today").exit_code == 0
    assert [fact.text for fact in stored(folder)] == ["[3 May] I like tea.", '- "quo\u2028ted"']
    assert {fact.said_at for fact in stored(folder)} == {"today"}


@pytest.mark.parametrize(
    ("name", "content", "number"),
    [
        ("x", '{"text": "a"}\n{"text": "b"}', 2),
        ("x", '"a"\n"b"\n\n"c"', 3),
        ("x", '["a",\n "b"]', 2),
        ("x", "[1] one\n[2] two", 2),
        ("x", '"Well," she said.\n"No."', 2),
        ("x", "", 0),
        ("x.TXT", '{"text": "a"}', 1),
        ("x.ndjson", '"a"', 1),
        ("x.json", '["a", "b", "c"]', 3),
    ],
)
def test_formats_are_guessed(tmp_path: Path, name: str, content: str, number: int) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert len(read_file(str(path), "auto", None, None).items) == number


def test_a_format_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    assert read_file(str(path), "text", None, None).items[0].turn.text == '{"text": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '"a"\n\n{"text": \n', "Line 3 of {path} is not JSON"),
        ("x", '{"text": "a"\n"b"', "Line 1 of {path} is not JSON"),
        ("x.jsonl", '"a"\n3', "Line 2 of {path}: it is a JSON int; allowed are text"),
        ("x.jsonl", '"a"\n{"txt": "b"}', "Line 2 of {path}: it is an object with 'txt'; allowed are 'text'"),
        ("x.jsonl", '{"text": "a", "user": "b"}', "with 'text', 'user'; allowed are"),
        ("x.jsonl", "{}", "an object with no fields"),
        ("x.jsonl", '"a"\n" "', "Line 2 of {path}: the text is blank"),
        ("x.jsonl", '{"text": 5}', "Line 1 of {path}: the text is a int; it must be text"),
        ("x.jsonl", '{"text": "a", "speaker": 5}', "Line 1 of {path}: speaker is 5"),
        (
            "x.jsonl",
            '{"text": "a", "metadata": [1]}',
            "Line 1 of {path}: the text has metadata of the type list",
        ),
        (
            "x.jsonl",
            '{"text": "a", "metadata": {"b": 1e999}}',
            "Line 1 of {path}: metadata is not plain JSON",
        ),
        (
            "x.jsonl",
            '{"text": "a", "metadata": {"b": "\\ud800"}}',
            "Line 1 of {path}: the text has metadata with half of a surrogate pair",
        ),
        (
            "x.jsonl",
            '{"text": "a", "metadata": {"b": ' + "[" * 50 + "]" * 50 + "}}",
            "Line 1 of {path}: the text has metadata of more than 50 levels",
        ),
        ("x.jsonl", '{"role": "robot", "content": "b"}', "Line 1 of {path}: the text has the role 'robot'"),
        ("x.json", '["a", "b", 3]', "Item 3 of {path}: it is a JSON int"),
        ("x.json", '"a"\n"b"', "{path} is not JSON: Extra data: line 2"),
        ("x.json", '{"text": "a"}', "{path} holds a JSON dict; a list of texts"),
    ],
)
def test_errors_name_the_place_and_store_nothing(
    folder: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    good = write(tmp_path, "good.jsonl", "fine")
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    result = run(folder, good, path)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message.format(path=path) in line
    assert line.endswith("Nothing was stored.")
    assert line.count("Nothing was stored.") == 1
    assert not folder.exists()


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\ntwo \xff\n")
    assert f"Line 2 of {path} is not UTF-8" in run(folder, path).stderr
    assert "none.txt cannot be read: No such file" in run(folder, tmp_path / "none.txt").stderr
    assert f"{tmp_path} cannot be read: Is a directory" in run(folder, tmp_path).stderr
    with pytest.raises(EmptyText):
        read_file(str(write(tmp_path, "y.jsonl", " ")), "auto", None, None)


def test_a_scope_is_needed_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["ingest", str(tmp_path / "none.txt")])
    assert "no scope was given" in result.stderr


def test_an_interruption_keeps_whole_batches_and_says_so(
    folder: Path, tmp_path: Path, embedder: StoppingEmbedder
) -> None:
    first = write(tmp_path, "a.jsonl", *(f"first {i}" for i in range(5)))
    second = write(tmp_path, "b.jsonl", *(f"second {i}" for i in range(5)))
    embedder.limit = 8
    result = run(folder, first, second, "--batch", "3")
    assert result.exit_code == 130
    assert f"Stopped: the first 6 of 10 facts are stored, up to line 1 of {second}." in result.stderr
    assert result.stdout == ""
    assert [fact.text for fact in stored(folder)] == [f"first {i}" for i in range(5)] + ["second 0"]


def test_progress_is_limited(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.jsonl", *map(str, range(10)))
    assert run(folder, path, "--batch", "1").stderr.count("stored") == 1
    monkeypatch.setattr(ingest_module, "_PROGRESS_EVERY_S", 0.0)
    assert run(folder, path, "--batch", "2").stderr.count("stored") == 5


def test_no_facts_are_no_error(folder: Path, tmp_path: Path) -> None:
    result = run(folder, write(tmp_path, "a.json", []))
    assert result.exit_code == 0
    assert result.stdout.startswith("0 facts stored from 1 file")


def test_texts_are_embedded_in_batches(folder: Path, tmp_path: Path, embedder: StoppingEmbedder) -> None:
    calls: list[int] = []
    embed = embedder.embed
    embedder.embed = lambda texts: calls.append(len(texts)) or embed(texts)  # type: ignore[method-assign, func-returns-value]
    run(folder, write(tmp_path, "a.jsonl", *map(str, range(300))))
    assert calls == [256, 44]
