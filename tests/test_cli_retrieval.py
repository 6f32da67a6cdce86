"""Filters, expiry and core blocks on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import inferscale.retrieval
from fakes import WordEmbedder
from inferscale.cli.app import main


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inferscale.retrieval, "open_embedder", lambda *_: WordEmbedder())


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_filters_and_expiry(tmp_path: Path) -> None:
    scope = ("--user-id", "ana", "--data-dir", str(tmp_path))
    [kept] = lines(
        run("add", "tea is hot", *scope, "--speaker", "Ana", "--expires-at", "2100-01-01", "--json")
    )
    assert kept["expires_at"] == 4102444800.0
    run("add", "tea is green", *scope, "--speaker", "Ben")
    assert run("add", "tea is gone", *scope, "--expires-at", "5").exit_code == 0
    of_ana = json.dumps({"speaker": {"icontains": "an"}})
    assert [hit["id"] for hit in lines(run("search", "tea", *scope, "--filter", of_ana, "--json"))] == [
        kept["id"]
    ]
    assert [fact["id"] for fact in lines(run("list", *scope, "--filter", of_ana, "--json"))] == [kept["id"]]
    assert len(lines(run("list", *scope, "--json"))) == 2
    for bad in ("{", "[1]", '{"a": {"like": 1}}'):
        refused = run("search", "tea", *scope, "--filter", bad)
        assert (refused.exit_code, "--filter" in refused.stderr) == (2, True)
    refused = run("search", "tea", *scope, "--filter", "not json")
    assert "'not json' is no JSON" in refused.stderr
    assert '{"topic": "travel"' in refused.stderr
    refused = run("add", "x", *scope, "--expires-at", "soon")
    assert (refused.exit_code, "expires_at" in refused.stderr) == (1, True)


def test_blocks(tmp_path: Path) -> None:
    scope = ("--user-id", "ana", "--data-dir", str(tmp_path))
    [made] = lines(run("block", "set", "persona", "Be brief.", *scope, "--json"))
    assert run("block", "set", "persona", "-", *scope, stdin="Be kind.").stdout.strip() == made["id"]
    assert run("block", "list", *scope).stdout == "persona: Be kind.\n"
    assert lines(run("block", "list", *scope, "--json"))[0]["name"] == "persona"
    assert run("block", "delete", "persona", *scope).exit_code == 0
    assert run("block", "list", *scope).stdout == ""
    assert run("block", "delete", "persona", *scope).exit_code == 1
