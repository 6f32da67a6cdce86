"""The scripts in benchmarks/: what reproduce.py runs for each part, and the two that measure alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fake_engine import fake_engine
from inferscale.bench.arms import new_run
from inferscale.bench.decode import DecodeTask
from inferscale.bench.encode import encode_users
from inferscale.bench.engine import EngineSpec
from inferscale.bench.harness import BenchRun, Row, read_rows
from inferscale.bench.modes import MODES
from inferscale.bench.options import E2eOptions, RandomTokens
from inferscale.bench.source import Need, RandomSource, encoding_for
from inferscale.bench.suite import PARTS, PartDone
from inferscale.cli.app import main
from inferscale.windows import sliding

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reproduce() -> ModuleType:
    return script("reproduce")


@pytest.fixture
def gpu_command(reproduce: ModuleType, tmp_path: Path) -> list[str]:
    """The command of reproduce.py's docstring that makes the rows of docs/performance.md."""
    doc = str(reproduce.__doc__).replace("\\\n", " ")
    (line,) = [line for line in doc.splitlines() if "--embedder FOLDER" in line]
    words = line.replace("FOLDER", str(tmp_path)).split()
    return words[words.index("benchmarks/reproduce.py") + 1 :]


def test_the_command_of_the_docstring_runs_every_part(
    reproduce: ModuleType, gpu_command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    arguments = reproduce.parse(gpu_command)
    assert set(arguments.parts) == set(reproduce.PARTS) >= {"host_time", "timeline", "kernels", "recall"}
    assert arguments.out == Path("benchmarks/results")
    parts = (*reproduce.SHAPE_PARTS, *reproduce.MACHINE_PARTS)
    commands = {part: reproduce.command_of(part, "llama-3.1-8b", arguments) for part in parts}
    for part, command in commands.items():
        assert isinstance(command, list), command
        assert command[command.index("--out") + 1] == f"benchmarks/results/{part}.jsonl"
    for part in ("e2e", "recall"):
        command = commands[part]
        assert command[command.index("--embedder") + 1] == str(tmp_path)
    assert commands["e2e"][-2:] == ["--embedder-device", "cpu,cuda"]
    for part in ("decode", "e2e", "timeline"):
        assert "--injection-path fused" in " ".join(commands[part])
    assert Path(commands["timeline"][1]) == FOLDER / "timeline.py"
    assert Path(commands["host_time"][1]) == FOLDER / "host_time.py"
    assert script("timeline").parse(commands["timeline"][2:]).k == (50, 200)


def test_an_unknown_part_is_refused(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.parse(["--parts", "ttft,timelines"])
    assert "--parts has timelines; allowed are ttft" in capsys.readouterr().err


def test_help_names_the_commit_variable(reproduce: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproduce.parse(["--help"])
    assert "INFERSCALE_COMMIT" in capsys.readouterr().out


def test_engine_arguments_reach_the_engine_of_every_part(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--shapes", "llama-3.1-8b", "--tokenizer", str(tmp_path), "--engine-arg", "block_size=64"]
    words += ["--out", str(tmp_path / "out"), "--embedder", str(tmp_path)]
    arguments = reproduce.parse(words)
    specs: dict[str, EngineSpec] = {}
    embedders: list[str | None] = []

    def suite(spec: EngineSpec, parts: Any, *rest: Any) -> list[PartDone]:
        specs.update(dict.fromkeys(parts, spec))
        return []

    def decode(task: DecodeTask, run: BenchRun, say: Any) -> list[Row]:
        specs["decode"] = DecodeTask.from_json(task.to_json()).spec  # as it comes to the child process
        return [run.add("tpot", "ms", [1.0])]

    def e2e(spec: EngineSpec, data: Any, options: E2eOptions, out: Any, say: Any, embedder: Any) -> list[Row]:
        specs["e2e"] = spec
        embedders.append(embedder)
        return [BenchRun("e2e", "m", None).add("e2e_ttft", "ms", [1.0])]

    monkeypatch.setattr("inferscale.bench.suite.measure_suite", suite)
    monkeypatch.setattr("inferscale.bench.decode.measure_decode", decode)
    monkeypatch.setattr("inferscale.bench.e2e.measure_e2e", e2e)
    for module in ("bench_options", "engine"):
        monkeypatch.setattr(f"inferscale.cli.{module}.prepare_engine", lambda *, verbose: None)
    assert reproduce.run_suite(arguments) == 0
    for part in ("decode", "e2e"):
        command = reproduce.command_of(part, "llama-3.1-8b", arguments)
        assert command[:3] == [sys.executable, "-m", "inferscale.cli"]
        main(command[3:], standalone_mode=False)
    timeline = script("timeline")
    command = reproduce.command_of("timeline", "llama-3.1-8b", arguments)
    specs["timeline"] = timeline.spec_of(timeline.parse(command[2:]))
    assert set(specs) == {*PARTS, "decode", "e2e", "timeline"}
    assert {spec.arguments()["block_size"] for spec in specs.values()} == {64}
    assert embedders == [str(tmp_path)]


def test_host_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/host_time.py", "--k", "3"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "rows.jsonl"
    script("host_time").main(["--k", "3", "--requests", "4", "--repeats", "2", "--out", str(out)])
    rows = read_rows(out)
    told = [(row["metric"], row["config"]["requests"]) for row in rows]
    assert told == [
        ("scheduler_per_request", 1), ("scheduler_per_request", 4),
        ("step_without_memory", 1), ("step_without_memory", 1),
    ]  # fmt: skip
    for row in rows:
        assert row["config"]["command"] == "python benchmarks/host_time.py --k 3"
        assert "no connector" in row["config"]["baseline"]


def test_timeline_rows() -> None:
    timeline = script("timeline")
    engine = fake_engine()
    encoding = encoding_for(engine, RandomSource(RandomTokens()), Need(6), sliding(4, 4))
    encode_users(engine, encoding, [0])
    run = new_run("timeline", engine, encoding, None)
    clock = timeline.Clock()
    clock.watch(engine.offline, "reset_prefix_cache", "report")
    for mode in MODES:
        timeline.measure_host(engine, encoding, mode, 6, 3, clock, run)
    assert [(row["mode"], row["config"]["stage"], row["n"]) for row in run.rows] == [
        (mode, stage, 3) for mode in MODES for stage in ("total", "report")
    ]
    assert all({"command", "baseline"} <= row["config"].keys() for row in run.rows)
    assert {"finish", "report"} <= set(timeline.STAGES)
    assert json.dumps(run.rows)


def test_a_clock_runs_on_behind_an_error_in_a_pause() -> None:
    clock = script("timeline").Clock()
    owner = SimpleNamespace(work=lambda value: value)
    clock.watch(owner, "work", "stage")
    with pytest.raises(ZeroDivisionError), clock.paused():
        owner.work(1 / 0)
    assert not clock.stages["stage"]
    assert owner.work(2) == 2
    assert len(clock.stages["stage"]) == 1


def test_serve_refuses_unknown_parts() -> None:
    serve = script("serve")
    assert serve.parse(["--parts", "chat, encoding"]).parts == ["chat", "encoding"]
    with pytest.raises(SystemExit):
        serve.parse(["--parts", "chat,chats"])


def test_scale_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = script("scale")
    monkeypatch.setattr(scale, "NUM_TIMED", 5)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(scale, "NUM_RESET", 80)
    sizes = ["--facts", "1000", "--users", "13", "--big", "200"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *sizes, "--folder", str(tmp_path), "--out", str(out)])
    scale.main()
    rows = read_rows(out)
    metrics = {row["metric"] for row in rows}
    assert metrics >= {"add_batch_time", "start_time", "search_time", "page_time", "delete_time", "memory"}
    deleted = [row["config"]["num_facts"] for row in rows if row["metric"] == "delete_all_time"]
    assert deleted == [80, 200]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(SystemExit):
        scale.parse(["--facts", "100"])


def test_encryption_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encryption = script("encryption")
    out = tmp_path / "rows.jsonl"
    sizes = ["--facts", "600", "--users", "3", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["encryption.py", *sizes, "--folder", str(tmp_path), "--out", str(out)])
    encryption.main()
    rows = read_rows(out)
    assert {row["metric"] for row in rows if row["mode"] == "encrypted"} == {
        "add_batch_time", "catalog_size", "open_time", "search_time", "add_time", "delete_time",
        "kv_save_time", "kv_load_time",
    }  # fmt: skip
    assert all(row["config"]["baseline"].startswith("mode plain") for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
