"""Commands that start the engine: with a stand-in, and the demo once on the real one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import inferscale.memory_llm
from inferscale.cli.app import main
from inferscale.errors import EngineMissing, InvalidInput, TextTooLong
from inferscale.facts import Fact, Scope, SearchHit, Turn
from inferscale.memory_llm import ChatResult, EncodeProgress
from inferscale.models import ensure_demo_model, ensure_embedder
from inferscale.self_check import Verdict
from inferscale.tail import Tail

HIT = SearchHit(Fact("fact-1", 1, Scope("ana"), "My sister lives in Oslo."), 0.5)
ANA = ("--user-id", "ana")


class FakeMemory:
    """Counts what is added, and refuses texts of more than 20 characters."""

    def __init__(self) -> None:
        self.catalog = SimpleNamespace(count=lambda scope: 7)
        self.batches: list[list[Turn]] = []

    def add(self, turns: list[Turn], **scope: Any) -> None:
        self.batches.append(turns)

    def count(self, **scope: Any) -> int:
        return sum(map(len, self.batches))

    def check_text(self, turn: Turn) -> None:
        if len(turn.text) > 20:
            raise TextTooLong("A text has too many tokens. Nothing was stored.")


class FakeLLM:
    """Answers with the number of messages; refuses `bad`, and more than `max_messages` of them."""

    max_messages = 99

    def __init__(self, model: str, memory: Any, **settings: Any) -> None:
        self.settings = {"model": model, "memory": memory, **settings}
        self.chats: list[dict[str, Any]] = []
        self.warmed: list[Scope] = []
        self.added = 0
        self.engine = SimpleNamespace(reset_prefix_cache=lambda: None, budget=lambda: "Memory of the CPU: …")
        self.memory = FakeMemory()
        self.verdict = Verdict("exact", is_new=False)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, turns: list[Any], *, user_id: str, progress: Any) -> None:
        self.added = len(turns)

    def warm(self, *, user_id: Any, agent_id: Any, run_id: Any, progress: Any) -> EncodeProgress:
        self.warmed.append(Scope(user_id, agent_id, run_id))
        state = EncodeProgress(
            done_jobs=2, jobs=2, stored_tokens=100, computed_tokens=230, seconds=0.5, stored_facts=4
        )
        progress(state)
        return state

    def stats(self) -> dict[str, int]:
        return {"resident_segments": 8, "free_pages": 40}

    def chat(self, messages: Any, *, mode: str = "inject", **settings: Any) -> ChatResult:
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        self.chats.append({"messages": listed, "mode": mode, **settings})
        if listed[-1]["content"] == "bad":
            raise InvalidInput("that cannot\nbe asked.")
        if len(listed) > self.max_messages:
            raise TextTooLong("too many tokens.")
        injected = 30 if mode == "inject" else 0
        prompt = 10 if mode == "none" else 40
        return ChatResult(
            text=f" answer to {len(listed)} ",
            mode=mode,  # type: ignore[arg-type]
            ttft_ms=100.0 if mode == "text" else 10.0,
            e2e_ttft_ms=110.0,
            num_prompt_tokens=prompt,
            num_injected_tokens=injected,
            num_cached_tokens=0,
            num_prefilled_tokens=prompt - injected,
            num_missing_tokens=0,
            num_output_tokens=3,
            num_left_out=0,
            hits=(HIT,),
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The engines that a command starts."""
    started: list[FakeLLM] = []

    def start(*arguments: Any, **settings: Any) -> FakeLLM:
        started.append(FakeLLM(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(inferscale.memory_llm, "MemoryLLM", start)
    for place in ("engine", "bench_options"):  # it would change this process
        monkeypatch.setattr(f"inferscale.cli.{place}.prepare_engine", lambda *, verbose: None)
    return started


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*arguments, "--model", "some/model"], input=stdin)


def asked(llm: FakeLLM) -> list[list[str]]:
    return [[message["content"] for message in chat["messages"]] for chat in llm.chats]


def test_one_question(opened: list[FakeLLM]) -> None:
    counts = ["--top-k", "3", "--tail", "1", "--order", "session", "--max-tokens", "9"]
    result = run("chat", "Where does she live?", *ANA, *counts, "--filter", '{"topic": "home"}')
    assert result.stdout == "answer to 1\n"
    assert "[inject: TTFT 10 ms, 30 tokens injected, 10 prefilled, 0 missing]" in result.stderr
    (llm,) = opened
    (chat,) = llm.chats
    wanted = {"user_id": "ana", "top_k": 3, "tail": Tail(1), "max_tokens": 9, "mode": "inject"}
    wanted |= {"filters": {"topic": "home"}, "order": "session"}
    assert {name: chat[name] for name in wanted} == wanted
    assert llm.warmed == []
    assert llm.settings["repair_after_chat"] is False
    assert llm.settings["engine_args"]["use_tqdm_on_load"] is False
    assert llm.settings["pool_size_bytes"] is None
    assert "Memory of the CPU: …\n" in result.stderr


def test_one_question_as_json(opened: list[FakeLLM]) -> None:
    row = json.loads(run("chat", "-", *ANA, "--json", stdin="Where?").stdout)
    assert (row["text"], row["mode"], row["facts"]) == (" answer to 1 ", "inject", ["fact-1"])
    assert opened[0].chats[0]["tail"] is None, "MemoryLLM knows the default"
    assert opened[0].chats[0]["order"] == "best-last"
    assert "hits" not in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "hi"], "no scope was given"),
        (["chat"], "no scope was given"),
        (["chat", " ", *ANA], "blank"),
        (["chat", "hi", *ANA, "--mode", "text", "--warm"], "--warm was given with --mode text"),
    ],
)
def test_chat_refuses_before_the_engine_starts(
    opened: list[FakeLLM], arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert opened == []


def test_mode_none_needs_no_scope_and_warms_nothing(opened: list[FakeLLM]) -> None:
    assert run("chat", "--mode", "none", stdin="hi\n").stdout == "answer to 1\n"
    assert opened[0].warmed == []


@pytest.mark.parametrize(("options", "times"), [((), 1), (("--no-warm",), 0), (("--mode", "text"), 0)])
def test_a_talk_warms_its_scope_for_injection_only(
    opened: list[FakeLLM], options: tuple[str, ...], times: int
) -> None:
    assert run("chat", *ANA, *options, stdin="hi\n").exit_code == 0
    assert opened[0].warmed == [Scope("ana")] * times


def test_a_talk_keeps_its_history_and_skips_blank_lines_of_a_pipe(opened: list[FakeLLM]) -> None:
    result = run("chat", *ANA, stdin="one\n\n  \ntwo")
    assert result.stdout == "answer to 1\nanswer to 3\n"
    assert asked(opened[0]) == [["one"], ["one", " answer to 1 ", "two"]]
    assert [message["role"] for message in opened[0].chats[1]["messages"]] == ["user", "assistant", "user"]


def test_a_blank_line_ends_a_talk_on_a_terminal(
    opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("one\n\ntwo\n"))
    main(["chat", *ANA, "--model", "some/model"], standalone_mode=False)
    streams = capsys.readouterr()
    assert streams.out == "answer to 1\n"
    assert streams.err.count("> ") == 2


def test_a_refused_message_leaves_the_talk_as_it_was(opened: list[FakeLLM]) -> None:
    result = run("chat", *ANA, "--json", stdin="one\nbad\ntwo\n")
    assert result.exit_code == 0
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == [
        " answer to 1 ",
        " answer to 3 ",
    ]
    assert "Error: that cannot be asked. The message was left out.\n" in result.stderr
    assert asked(opened[0])[-1] == ["one", " answer to 1 ", "two"]


def test_a_talk_that_grows_too_long_drops_its_oldest_turns(
    opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "max_messages", 3)
    result = run("chat", *ANA, stdin="one\ntwo\nthree\n")
    assert result.stdout == "answer to 1\nanswer to 3\nanswer to 3\n"
    assert "its oldest 2 messages were dropped" in result.stderr
    assert asked(opened[0])[-1] == ["two", " answer to 3 ", "three"]


def test_a_message_that_is_too_long_by_itself_costs_no_history(
    opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = FakeLLM.chat

    def refuse_long(self: FakeLLM, messages: Any, **settings: Any) -> ChatResult:
        if messages[-1]["content"] == "long":
            raise TextTooLong("too many tokens.")
        return chat(self, messages, **settings)

    monkeypatch.setattr(FakeLLM, "chat", refuse_long)
    result = run("chat", *ANA, stdin="one\nlong\ntwo\n")
    assert "Error: too many tokens." in result.stderr
    assert "dropped" not in result.stderr
    assert asked(opened[0])[-1] == ["one", " answer to 1 ", "two"]


def test_warm(opened: list[FakeLLM]) -> None:
    result = run("warm", *ANA, "--json")
    assert json.loads(result.stdout) == {
        "facts": 7,
        "passes": 2,
        "stored_tokens": 100,
        "computed_tokens": 230,
        "seconds": 0.5,
        "resident_segments": 8,
        "free_pages": 40,
    }
    assert "encoded 2/2 passes, 460 tokens/s, 8.0 facts/s" in result.stderr
    assert "Memory of the CPU: …\n" in result.stderr
    assert opened[0].warmed == [Scope("ana")]
    assert run("warm").stdout.startswith("7 facts, 8 segments resident, 2 passes, 230 tokens computed")
    assert opened[1].warmed == [Scope()]


def test_pool_sizes(opened: list[FakeLLM]) -> None:
    for given in ("512MiB", "auto"):
        assert run("warm", "--pool-size", given).exit_code == 0
    assert [llm.settings["pool_size_bytes"] for llm in opened] == [2**29, None]


def test_ingest_and_encode(opened: list[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "facts.txt"
    path.write_text("one\ntwo\n\nthree\n")
    result = run("ingest", str(path), *ANA, "--encode", "--batch", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["facts"], report["files"], report["skipped"]) == (3, 1, 0)
    assert report["encoding"] == {
        "facts": 4, "passes": 2, "failed": 0, "stored_tokens": 100, "computed_tokens": 230, "seconds": 0.5,
        "facts_per_s": 8.0, "stored_tokens_per_s": 200.0,
    }  # fmt: skip
    (llm,) = opened
    assert [[turn.text for turn in batch] for batch in llm.memory.batches] == [["one", "two"], ["three"]]
    assert llm.warmed == [Scope("ana")]
    shown = run("ingest", str(path), *ANA, "--encode")
    assert "Memory of the CPU: …\n" in shown.stderr
    assert "stored 3/3 facts" in shown.stderr
    assert "encoded 2/2 passes" in shown.stderr
    assert shown.stdout.splitlines()[1].startswith(
        "4 facts encoded in 0.5 s (8.0 facts/s, 200 tokens/s, 230 tok"
    )


def test_a_text_too_long_for_the_model_is_found_before_anything_is_stored(
    opened: list[FakeLLM], tmp_path: Path
) -> None:
    path = tmp_path / "facts.txt"
    path.write_text("one\n" + "long " * 9 + "\n")
    result = run("ingest", str(path), *ANA, "--encode", "--batch", "1")
    assert result.exit_code == 1
    assert f"Error: Line 2 of {path}: A text has too many tokens. Nothing was stored." in result.stderr
    assert opened[0].memory.batches == []


def test_options_of_the_engine_need_encode(opened: list[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "facts.txt"
    path.write_text("one\n")
    assert "are for the engine; add --encode" in run("ingest", str(path), *ANA).stderr
    assert opened == []


def test_demo(opened: list[FakeLLM]) -> None:
    result = run("demo", "--questions", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\nQ: ") == 2
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines.count("injected wrong TTFT 10 ms injected 30 prefilled 10 answer to 1") == 2
    assert "text memory 0/2 100 ms 0 / 40" in lines
    assert "Injected memory reached its first token 10.0 times sooner than text memory." in lines
    (llm,) = opened
    assert llm.added >= 100
    assert llm.settings["engine_args"]["max_model_len"] == 8192


def test_demo_as_json(opened: list[FakeLLM]) -> None:
    rows = [json.loads(line) for line in run("demo", "--questions", "1", "--json").stdout.splitlines()]
    assert [(row["mode"], row["injected_tokens"]) for row in rows] == [
        ("none", 0),
        ("text", 0),
        ("inject", 30),
    ]
    assert set(rows[0]) == {
        "question", "expected", "mode", "answer", "right", "ttft_ms", "e2e_ttft_ms", "prompt_tokens",
        "injected_tokens", "prefilled_tokens", "missing_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (OSError("no\n such repository"), "The model 'some/model' cannot be loaded: no such repository."),
        (ValueError("1 error\nof it." + " x" * 999), "the model 'some/model' or a setting: 1 error of it. x"),
        (InvalidInput("what it says"), "Error: what it says"),
    ],
)
def test_what_a_start_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, opened: list[FakeLLM], raised: Exception, message: str
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise raised

    monkeypatch.setattr(inferscale.memory_llm, "MemoryLLM", refuse)
    for command in (["demo"], ["warm"], ["chat", "hi", *ANA], ["ingest", "-", *ANA, "--encode"]):
        result = run(*command)
        assert result.exit_code == 1
        last = result.stderr.splitlines()[-1]
        assert message in last
        assert last.startswith("Error: ")
        assert len(last) < 600


def test_the_engine_is_quiet_unless_asked_and_settings_stay() -> None:
    code = (
        "import logging, os, sys; from inferscale.cli.engine import prepare_engine; "
        "prepare_engine(verbose=sys.argv[1] == 'verbose'); "
        "print(os.environ.get('VLLM_LOGGING_LEVEL'), os.environ.get('TORCH_CPP_LOG_LEVEL'), "
        "os.environ['VLLM_CPU_KVCACHE_SPACE'], logging.getLogger('vllm.x').isEnabledFor(logging.WARNING))"
    )
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "3"

    def printed(how: str) -> str:
        command = [sys.executable, "-c", code, how]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.strip()

    assert printed("quiet") == "ERROR ERROR 3 False"
    assert printed("verbose") == "None None 3 True"


@pytest.fixture(scope="module")
def demo_models() -> None:
    try:
        ensure_demo_model()
        ensure_embedder()
    except EngineMissing as error:
        pytest.skip(f"the demo's models cannot be had: {error}")
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs it")


@pytest.mark.engine
@pytest.mark.usefixtures("demo_models")
def test_demo_on_the_real_engine() -> None:
    command = [str(Path(sys.executable).with_name("inferscale")), "demo", "--questions", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {row["mode"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(done.stdout.splitlines()) == 3
    assert set(rows) == {"none", "text", "inject"}
    assert rows["inject"]["injected_tokens"] > 1000
    assert rows["inject"]["missing_tokens"] == 0
    assert rows["inject"]["prompt_tokens"] == rows["text"]["prompt_tokens"]
    assert rows["text"]["injected_tokens"] == 0
