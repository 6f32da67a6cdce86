"""`inferscale export` and `inferscale import`: JSON lines on stdout, talk on stderr, one line an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fakes import WordEmbedder
from inferscale.cli.app import main

MEM0 = Path(__file__).parent / "data" / "mem0"


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.retrieval.open_embedder", lambda *_: WordEmbedder())


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def test_a_folder_goes_out_and_comes_in(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run("add", "My sister lives in Oslo.", "--user-id", "ana", "--speaker", "Ana", "--data-dir", one)
    run("add", "I like tea.", "--user-id", "bob", "--data-dir", one)
    exported = run("export", "--all", "--data-dir", one)
    assert exported.exit_code == 0, exported.output
    assert exported.stderr == "Exported 2 facts.\n"
    records = [json.loads(line) for line in exported.stdout.splitlines()]
    assert [(record["user_id"], record["text"]) for record in records] == [
        ("ana", "My sister lives in Oslo."),
        ("bob", "I like tea."),
    ]
    imported = run("import", "-", "--data-dir", other, stdin=exported.stdout)
    assert (imported.stdout, imported.exit_code) == ("2 added, 0 replaced, 0 skipped\n", 0)
    assert run("export", "--all", "--data-dir", other).stdout == exported.stdout
    again = run("import", "-", "--replace", "--json", "--data-dir", other, stdin=exported.stdout)
    assert json.loads(again.stdout) == {"added": 0, "replaced": 2, "skipped": 0}
    assert run("export", "--all", "--data-dir", other).stdout == exported.stdout
    anas = run("export", "--user-id", "ana", "--data-dir", other).stdout
    assert anas == exported.stdout.splitlines(keepends=True)[0]


def test_the_stores_of_mem0_come_in(tmp_path: Path) -> None:
    where = ("--data-dir", tmp_path)
    told = run("import", MEM0 / "qdrant", "--history-db", MEM0 / "history.db", *where)
    assert told.stdout == "4 added, 0 replaced, 0 skipped\n"
    exported = run("export", "--agent-id", "helper", "--history", *where)
    [record] = [json.loads(line) for line in exported.stdout.splitlines()]
    assert (record["text"], record["revisions"][0]["text"]) == ("second", "first")


def test_a_bad_line_is_one_line_and_says_how_far_it_came(tmp_path: Path) -> None:
    good = json.dumps({"id": "1", "text": "x", "created_at": 1, "user_id": "ana"})
    told = run("import", "-", "--batch", 1, "--data-dir", tmp_path, stdin=f"{good}\n{{}}\n")
    assert (told.exit_code, told.stdout) == (1, "")
    stopped, error = told.stderr.splitlines()
    assert stopped == (
        "Stopped: 1 added, 0 replaced, 0 skipped, up to line 1 of standard input. It can be run again."
    )
    assert error.startswith("Error: Line 2 of standard input is no fact: it lacks id, text, created_at")


@pytest.mark.parametrize("arguments", [(), ("--all", "--user-id", "ana")])
def test_an_export_says_whose_facts(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    told = run("export", *arguments, "--data-dir", tmp_path)
    assert told.exit_code == 1
    assert "either --all, or at least one of --user-id" in told.stderr


def test_an_owner_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    told = run("import", "-", "--user-id", " ", "--data-dir", tmp_path, stdin="")
    assert told.exit_code == 1
    assert "user_id has 1 characters" in told.stderr
