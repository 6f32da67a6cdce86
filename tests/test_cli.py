"""The command line: data on stdout, one-line errors, documentation that is true."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inferscale.cli.app import cli, main
from inferscale.cli.reference import render
from inferscale.errors import InferScaleError
from inferscale.models import EMBEDDER, is_present

ROOT = Path(__file__).parent.parent


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, list(arguments), input=stdin, catch_exceptions=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not is_present(EMBEDDER):
        pytest.skip("the embedder is not there; `make setup` fetches it")
    return tmp_path_factory.mktemp("data")


def test_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == render(), "run `python -m inferscale.cli.reference > docs/cli.md`"


def test_add_search_list_delete(folder: Path) -> None:
    where = ("--data-dir", str(folder), "--user-id", "ana")
    added = run(
        "add", "My sister lives in Oslo.", "--speaker", "Ana", "--said-at", "3 May 2025", *where, "--json"
    )
    assert added.exit_code == 0, added.output
    fact = json.loads(added.stdout)
    assert fact["text"] == "My sister lives in Oslo."
    assert (fact["speaker"], fact["said_at"], fact["user_id"]) == ("Ana", "3 May 2025", "ana")
    assert run("add", "-", *where, stdin="I am allergic to walnuts.").exit_code == 0

    found = run("search", "food allergies", *where, "--top-k", "1", "--json")
    assert json.loads(found.stdout)["text"] == "I am allergic to walnuts."
    listed = run("list", *where)
    assert [line.split("  ", 1)[1] for line in listed.stdout.splitlines()] == [
        "Ana (3 May 2025): My sister lives in Oslo.",
        "I am allergic to walnuts.",
    ]
    deleted = run("delete", fact["id"], "--data-dir", str(folder))
    assert deleted.stdout == fact["id"] + "\n"
    assert len(run("list", *where).stdout.splitlines()) == 1


def test_add_messages(folder: Path) -> None:
    lines = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "name": "Bo", "time": "1 June 2025", "content": "I moved to Turin."},
        {"role": "assistant", "content": "Congratulations!"},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    result = run("add", "--messages", "-", "--data-dir", str(folder), "--user-id", "bo", "--json", stdin=text)
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(fact["speaker"], fact["text"]) for fact in facts] == [
        ("Bo", "I moved to Turin."),
        ("assistant", "Congratulations!"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "  ", "--user-id", "ana"], "blank"),
        (["add", "text"], "no scope was given"),
        (["add", "--user-id", "ana"], "either TEXT or --messages"),
        (["search", "x", "--user-id", "nobody"], "no fact is stored under user_id='nobody'"),
        (["search", "x", "--user-id", "ana", "--top-k", "-1"], "top_k is -1"),
        (["delete", "no-such-id"], "no-such-id"),
        (["bench", "ttft", "--k", "a,b"], "--k is 'a,b'"),
        (["bench", "ttft", "--k", "-5"], "--k is '-5'"),
        (["bench", "ttft", "--questions", "0"], "--questions is 0"),
    ],
)
def test_bad_input_is_one_clear_error(folder: Path, arguments: list[str], message: str) -> None:
    where = [] if arguments[0] == "bench" else ["--data-dir", str(folder)]
    result = run(*arguments, *where)
    assert isinstance(result.exception, InferScaleError)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_main_prints_errors_on_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferscale", "add", " ", "--user-id", "a", "--data-dir", str(folder)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("Error: ")
    assert streams.err.count("\n") == 1


def test_damaged_messages_file_names_the_line(folder: Path) -> None:
    result = run("add", "--messages", "-", "--data-dir", str(folder), "--user-id", "a", stdin='{"role"\n')
    assert "Line 1 of standard input is not JSON" in str(result.exception)


def test_help_imports_no_engine() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from inferscale.cli.app import cli; "
        "CliRunner().invoke(cli, ['chat', '--help']); "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_json_and_exit_status() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["ready"] else 1)
    assert {"name", "ok", "detail", "fix", "required"} <= set(report["findings"][0])
