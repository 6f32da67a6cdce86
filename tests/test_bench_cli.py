"""`inferscale bench …`: options reach the engine and the workload, and bad ones are one clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fake_engine import FakeOffline
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.harness import BenchRun, read_rows
from inferscale.cli.app import main
from inferscale.errors import InvalidInput

ROOT = Path(__file__).parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """Folder with nothing but a config."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineSpec]:
    """The engines that a command starts; they keep account only."""
    specs: list[EngineSpec] = []

    def start(spec: EngineSpec) -> BenchEngine:
        specs.append(spec)
        return BenchEngine(FakeOffline(), spec)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineSpec, "open", start)
    monkeypatch.setattr("inferscale.cli.bench_options.prepare_engine", lambda *, verbose: None)
    return specs


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_ttft(opened: list[EngineSpec], shape: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.jsonl", tmp_path / "ttft.png"
    result = bench(
        "ttft", "--random-weights", shape, "--k", "0,6", "--questions", 2, "--out", out, "--plot", plot,
        "--engine-arg", "max_num_seqs=9", "--max-num-batched-tokens", 512, "--dtype", "float32",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    modes, ratios = (
        "text | hit | inject | none",
        "text/inject | text/hit | inject/hit | inject/none | hit/none",
    )
    assert f"| k | prompt tokens | {modes} | {ratios} |" in result.stdout
    assert "Starting the engine with tiny (random weights)" in result.stderr
    (spec,) = opened
    arguments = spec.arguments()
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (9, 512)
    assert (arguments["dtype"], arguments["load_format"]) == ("float32", "dummy")
    assert spec.max_model_len == 4096  # the model's own, below what benchmarks like to have
    assert spec.pool_size_bytes
    rows = read_rows(out)
    assert {row["bench"] for row in rows} == {"ttft", "encode"}
    assert {row["k"] for row in rows if row["bench"] == "ttft"} == {0, 6}
    assert plot.is_file()


def test_throughput_and_encode_and_report(opened: list[EngineSpec], shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    load = ("--users", 2, "--k", 5, "--rounds", 1, "--repeats", 1, "--output-tokens", 3)
    policy = ("--window", 2, "--stride", 3)
    first = bench("throughput", "--random-weights", shape, *load, *policy, "--out", out / "throughput.jsonl")
    assert first.exit_code == 0, first.stderr
    assert "2 users at once" in first.stdout
    second = bench(
        "encode",
        "--random-weights",
        shape / "config.json",
        "--facts",
        9,
        *policy,
        "--out",
        out / "encode.jsonl",
        "--json",
    )
    assert second.exit_code == 0, second.stderr
    rows = [json.loads(line) for line in second.stdout.splitlines()]
    assert rows == read_rows(out / "encode.jsonl")
    assert rows[0]["config"]["policy"] == "sliding(2,3)"
    result = bench("report", out, "--plots", out / "plots")
    assert result.exit_code == 0
    assert "## throughput: tiny (random weights) on" in result.stdout
    assert "9 facts, sliding(2,3)" in result.stdout
    assert len(list((out / "plots").iterdir())) == 1


def test_a_conversation_with_a_real_model_is_the_default(
    opened: list[EngineSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: str) -> Any:
        raise InvalidInput(f"tokenizer of {path}")

    monkeypatch.setattr("inferscale.bench.source.prompt_builder", refuse)
    result = bench("ttft", "--model", "some/model", "--k", "5")
    assert result.stderr.splitlines()[-1] == "Error: tokenizer of some/model"
    random = bench("ttft", "--model", "some/model", "--random-tokens", "--k", "5", "--questions", 1, "--out",
                   tmp_path / "rows.jsonl", "--plot", tmp_path / "x.png")  # fmt: skip
    assert random.exit_code == 0, random.stderr
    assert not opened[0].random_weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ttft", "--k", "a,b"], "--k is 'a,b'"),
        (["ttft", "--k", "0,999"], "k=999 was asked for; demo has"),
        (["ttft", "--model", "m", "--random-weights", "llama-3.1-8b"], "give one of them"),
        (["ttft", "--random-weights", "llama-9"], "the shape is 'llama-9'; give llama-3.1-8b"),
        (["encode", "--random-weights", "llama-3.1-8b", "--engine-arg", "x"], "give NAME=JSON"),
        (["encode", "--random-weights", "llama-3.1-8b", "--engine-arg", "x=y"], "give NAME=JSON"),
        (["ttft", "--random-weights", "llama-3.1-8b", "--conversation", __file__], "needs a tokenizer"),
        (["ttft", "--random-tokens", "--conversation", __file__], "give one of them"),
        (["decode", "--batches", "0"], "--batches is '0'; give whole numbers from 1"),
        (["e2e", "--random-weights", "llama-3.1-8b"], "has no tokenizer"),
        (["e2e", "--embedder-device", ","], "give a device"),
        (["kernels", "--tokens", "x"], "--tokens is 'x'"),
        (["recall", "--conversation", __file__, "--k", "0"], "--k is '0'"),
        (["report", __file__], "is damaged"),
    ],
)
def test_bad_input_is_one_clear_error(opened: list[EngineSpec], arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr.splitlines()[-1]
    assert not opened
    assert result.stdout == ""


def test_an_empty_folder_has_no_report(tmp_path: Path) -> None:
    assert "there are no rows; run a benchmark first" in bench("report", tmp_path).stderr


@pytest.mark.parametrize("raised", [OSError("no such repository"), ValueError("bad setting")])
def test_what_a_start_raises_is_one_line(
    opened: list[EngineSpec], monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def refuse(spec: EngineSpec) -> None:
        raise raised

    monkeypatch.setattr(EngineSpec, "open", refuse)
    result = bench("encode", "--model", "some/model", "--random-tokens", "--facts", 5)
    assert result.exit_code == 1
    assert str(raised) in result.stderr.splitlines()[-1]


def test_decode_and_recall_are_wired(
    opened: list[EngineSpec], monkeypatch: pytest.MonkeyPatch, shape: Path, tmp_path: Path
) -> None:
    def measure(task: Any, run: BenchRun, say: Any) -> list[Any]:
        assert (task.options.batches, task.options.k, task.spec.enforce_eager) == ((2, 3), 7, True)
        assert task.spec.pool_size_bytes
        run.add("tpot", "ms", [1.0], mode="stock")
        return run.rows

    monkeypatch.setattr("inferscale.bench.decode.measure_decode", measure)
    out = tmp_path / "rows.jsonl"
    result = bench(
        "decode", "--random-weights", shape, "--batches", "2,3", "--k", 7, "--enforce-eager", "--out", out
    )
    assert "| tpot | stock |" in result.stdout, result.stderr
    assert read_rows(out)[0]["model"] == "tiny (random weights)"

    def recall(path: Path, embedders: Any, ks: Any, out: Any, say: Any) -> list[Any]:
        run = BenchRun("recall", "default", None)
        run.add("recall", "share", [float(len(ks))], config={"given": list(embedders)})
        return run.rows

    monkeypatch.setattr("inferscale.bench.recall.run_recall", recall)
    result = bench("recall", "--conversation", __file__, "--k", "10,50", "--out", out)
    assert "| recall |" in result.stdout, result.stderr


@pytest.mark.engine
def test_all_that_shares_an_engine_on_the_real_engine(shape: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs it")
    out = tmp_path / "results"
    small = "--ks 4 --k 4 --users 3 --rounds 2 --repeats 1 --output-tokens 3 --facts 40 --questions 1"
    parts = "ttft,throughput,encode,e2e,report"
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), "--shapes", str(shape)]
    command += [*small.split(), "--parts", parts, "--enforce-eager", "--out", str(out)]
    command += ["--engine-arg", "block_size=64", "--tail", "1"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Left out: it needs --tokenizer." in done.stdout
    rows = {name: read_rows(out / f"{name}.jsonl") for name in ("ttft", "throughput", "encode")}
    for row in rows["ttft"] + rows["throughput"]:
        config = row["config"]
        assert config["block_size"] == 64
        if row["mode"] == "inject" and "injected_tokens" in config:
            # Blocks of the head that a user's earlier request left in the prefix cache count as cached.
            assert config["injected_tokens"] + config["cached_tokens"] >= 32 + 3 * 20
            assert config["max_prefilled_tokens"] >= 32 + 20
            assert config["tail"] == "1"
        if row["mode"] == "text" and "prefilled_tokens" in config:
            assert config["prefilled_tokens"] >= 32 + 4 * 20 + 32
    assert {row["metric"] for row in rows["encode"]} >= {"encode_rate", "tokens_per_stored_token"}
    assert "## throughput: tiny (random weights)" in (out / "report.md").read_text()
    assert len(list((out / "plots").iterdir())) == 2
