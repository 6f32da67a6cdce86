"""The command line without an engine: data on stdout, one-line errors, documentation that is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from fakes import WordEmbedder
from inferscale.cli.app import main
from inferscale.cli.options import memory_config
from inferscale.cli.reference import render
from inferscale.config import DEFAULT_TAIL, ConnectorConfig, MemoryConfig
from inferscale.errors import InvalidInput
from inferscale.memory import Memory
from inferscale.models import EMBEDDER, is_present

ROOT = Path(__file__).parent.parent


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


@pytest.fixture(autouse=True)
def _unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("engine", "bench_options"):  # it would change this process
        monkeypatch.setattr(f"inferscale.cli.{place}.prepare_engine", lambda *, verbose: None)


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


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "x", "--user-id", "ana"),
        ("search", "x", "--user-id", "ana"),
        ("list", "--user-id", "ana"),
        ("delete", "some-id"),
        ("ingest", "-", "--user-id", "ana"),
    ],
)
def test_without_an_engine_the_cpu_embeds(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of another process may fill the GPU."""
    opened: list[MemoryConfig] = []

    def open_memory(config: MemoryConfig) -> Memory:
        opened.append(config)
        return Memory(config, embedder=WordEmbedder())

    for place in ("facts", "ingest"):
        monkeypatch.setattr(f"inferscale.cli.{place}.Memory", open_memory)
    run(*arguments, "--data-dir", str(tmp_path), stdin="a fact")
    assert [config.embedder_device for config in opened] == ["cpu"]
    assert memory_config(tmp_path, None, has_engine=True).embedder_device == "auto"


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


def test_add_what_a_model_extracts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP: it needs no engine."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    seen = []

    def answer(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        key = request.headers.get("authorization")
        seen.append((str(request.url), json.loads(request.read())["model"], key))
        fact = '{"facts": [{"line": 1, "text": "Cy moved to Turin on 31 May 2025."}], "nothing": false}'
        return httpx.Response(200, json={"choices": [{"message": {"content": fact}}]})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    where = ("--data-dir", str(folder), "--user-id", "cy", "--said-at", "1 June 2025")
    model = ("--infer", "--infer-url", "http://there/v1", "--model", "tiny")
    result = run("add", "I moved to Turin yesterday.", *where, *model)
    assert result.exit_code == 0, result.output
    event, _, text = result.stdout.strip().split(maxsplit=2)
    assert (event, text) == ("ADD", "Cy moved to Turin on 31 May 2025.")
    assert "Stored 1 fact." in result.stderr
    assert seen == [("http://there/v1/chat/completions", "tiny", "Bearer sk-test")]
    again = run("add", "I moved to Turin yesterday.", *where, *model, "--json")
    assert json.loads(again.stdout)["event"] == "NONE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "x", "--user-id", "ana", "--model", "tiny"], "add --infer"),
        (["add", "x", "--user-id", "ana", "--infer", "--infer-url", "http://a"], "--infer-url needs --model"),
        (["add", "x", "--user-id", "ana", "--infer", "--infer-url", "a", "--model", "b"], "base_url is 'a'"),
        (["add", "  ", "--user-id", "ana"], "blank"),
        (["add", "text"], "no scope was given"),
        (["add", "--user-id", "ana"], "either TEXT or --messages"),
        (["search", "x", "--user-id", "nobody"], "no fact is stored under user_id='nobody'"),
        (["delete", "no-such-id"], "no-such-id"),
        (["bench", "ttft", "--k", "a,b"], "--k is 'a,b'"),
        (["bench", "ttft", "--k", "-5"], "--k is '-5'"),
        (["bench", "ttft", "--k", "0,999"], "k=999 was asked for; demo has"),
        (["warm", "--user-id", " "], "user_id has 1 characters"),
        (["warm", "--model", "no/such/folder"], "--model is 'no/such/folder', which is not a folder. Give a"),
        (
            ["chat", "hi", "--user-id", "a", "--model", "."],
            "--model is '.', which holds no config.json.",
        ),
    ],
)
def test_bad_input_is_one_clear_error(folder: Path, arguments: list[str], message: str) -> None:
    where = [] if arguments[0] == "bench" else ["--data-dir", str(folder)]
    result = run(*arguments, *where)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("Error: ")
    assert message in lines[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", {"--questions": 0, "--top-k": -1, "--tail": "x", "--max-model-len": 0, "--pool-size": "x"}),
        ("chat", {"--max-tokens": 0, "--top-k": -1, "--tail": -1, "--order": "x", "--pool-size": "0"}),
        ("bench ttft", {"--questions": 0, "--number": 0, "--tail": -1}),
        ("search x", {"--top-k": -1}),
        ("list", {"--limit": -1}),
    ],
)
def test_values_out_of_range_are_refused_before_anything_starts(
    command: str, options: dict[str, object]
) -> None:
    for option, value in options.items():
        result = run(*command.split(), option, str(value))
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.stderr


def test_defaults_are_those_of_the_settings() -> None:
    help_text = " ".join(run("chat", "--help").stdout.split())
    assert "a GPU, 1GiB elsewhere. [default: auto]" in help_text
    assert f"Default: {DEFAULT_TAIL}, and 0 behind earlier turns." in help_text
    for command in (("serve",), ("bench", "ttft"), ("bench", "throughput"), ("bench", "e2e")):
        help_text = " ".join(run(*command, "--help").stdout.split())
        assert re.search(rf"--tail TAIL .* or 0\. \[default: {DEFAULT_TAIL}\]", help_text), command
    assert ConnectorConfig().is_auto_size
    assert ConnectorConfig().size_bytes == 2**30


def test_the_program_prints_errors_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["inferscale", "add", "x"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("Error: ")
    assert streams.err.count("\n") == 1


def test_an_error_of_several_lines_is_printed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise InvalidInput("first\n  second")

    monkeypatch.setattr("inferscale.cli.facts.memory_config", refuse)
    assert run("list", "--user-id", "a").stderr == "Error: first second\n"


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("inferscale.cli.facts.memory_config", interrupt)
    result = run("list", "--user-id", "a")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


def test_report_of_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}x", encoding="utf-8")
    result = run("bench", "report", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: Line 1 of {path} is damaged")
    path.write_text("", encoding="utf-8")
    assert "there are no rows" in run("bench", "report", str(path)).stderr


def test_ttft_without_matplotlib_is_refused_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.bench.plots.find_spec", lambda name: None)
    result = run("bench", "ttft")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Plots need matplotlib")
    assert "Starting" not in result.stderr


def test_damaged_messages_file_names_the_line(folder: Path) -> None:
    result = run("add", "--messages", "-", "--data-dir", str(folder), "--user-id", "a", stdin='{"role"\n')
    assert "Line 1 of standard input is not JSON" in result.stderr


def test_help_imports_no_engine() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from inferscale.cli.app import main; "
        "CliRunner().invoke(main, ['chat', '--help']); "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_doctor_json_and_exit_status() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["ready"] else 1)
    assert {"name", "ok", "detail", "fix", "required"} <= set(report["findings"][0])


def test_half_a_surrogate_pair_in_metadata_does_not_end_the_listing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from inferscale.cli.output import emit

    emit({"metadata": {"k\ud800": "\udc00"}})
    assert json.loads(capsys.readouterr().out) == {"metadata": {"k?": "?"}}
