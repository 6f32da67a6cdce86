"""decode and e2e without an engine: tasks for child processes, pairs, and facts that were not injected."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_engine import fake_engine
from inferscale.bench import decode, e2e
from inferscale.bench.conversation import BenchConversation
from inferscale.bench.decode import DecodeTask, measure_decode, run_task
from inferscale.bench.engine import EngineSpec
from inferscale.bench.harness import BenchRun, read_rows
from inferscale.bench.load import StockEngine, drive, drive_steadily
from inferscale.bench.options import DecodeOptions, E2eOptions, RandomTokens
from inferscale.chat_plan import ChatTimings
from inferscale.errors import EngineError, InvalidInput
from inferscale.facts import Fact, Scope, SearchHit, Turn
from inferscale.memory_llm import ChatResult
from inferscale.offline import Answer, Generation, GenerationRequest
from inferscale.windows import sliding

SPEC = EngineSpec("some/tiny", random_weights=True, extra={"max_num_seqs": 7})
OPTIONS = DecodeOptions(batches=(1, 3), output_tokens=4, k=5, repeats=2)
TASK = DecodeTask("connector", SPEC, OPTIONS, RandomTokens(), sliding(4, 4))
SETTINGS = {"gpu_memory_utilization": 0.4, "dtype": "bfloat16"}


# decode -------------------------------------------------------------------------------------------


def test_a_task_travels_to_its_process() -> None:
    assert DecodeTask.from_json(TASK.to_json()) == TASK


def test_both_engines_in_turn_and_their_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks: list[DecodeTask] = []

    def child(task: DecodeTask) -> dict[str, Any]:
        tasks.append(task)
        modes = {"stock": 2.0} if task.engine == "stock" else {"connector": 3.0, "hit": 4.0, "inject": 6.0}
        series = [[mode, batch, [ms, ms]] for mode, ms in modes.items() for batch in OPTIONS.batches]
        return {"settings": SETTINGS, "series": series}

    monkeypatch.setattr(decode, "_in_child", child)
    task = TASK._replace(options=replace(OPTIONS, alternations=2))
    rows = measure_decode(task, BenchRun("decode", "m", tmp_path / "rows.jsonl"), lambda _: None)
    assert [task.engine for task in tasks] == ["connector", "stock"] * 2
    assert tasks[1].spec.gpu_memory_utilization == 0.4  # the stock engine has as much memory
    assert read_rows(tmp_path / "rows.jsonl") == rows
    tpot = {(row["mode"], row["config"]["batch"]): row for row in rows if row["metric"] == "tpot"}
    assert set(tpot) == {(m, b) for m in ("connector", "stock", "hit", "inject") for b in (1, 3)}
    assert tpot["stock", 3]["n"] == 4
    assert (tpot["stock", 1]["k"], tpot["inject", 1]["k"]) == (None, 5)
    ratios = {(row["mode"], row["config"]["batch"]): row["p50"] for row in rows if row["unit"] == "x"}
    assert ratios["connector/stock", 1] == ratios["inject/hit", 3] == 1.5


def test_the_connector_engine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSpec, "open", lambda spec: fake_engine())
    measured = run_task(TASK)
    assert [entry[:2] for entry in measured["series"]] == [
        ["connector", 1], ["connector", 3], ["hit", 1], ["inject", 1], ["hit", 3], ["inject", 3],
    ]  # fmt: skip
    assert all(entry[2] == pytest.approx([2.0, 2.0]) for entry in measured["series"])
    assert measured["settings"]["block_size"] == 16


def test_decoding_behind_memory_that_was_not_injected_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSpec, "open", lambda spec: fake_engine(loses=True))
    with pytest.raises(EngineError, match="fell back to text"):
        run_task(TASK)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that measures instead of Python."""
    path = tmp_path / "child.sh"
    path.touch(mode=0o755)
    monkeypatch.setattr(decode.sys, "executable", str(path))
    return path


def test_what_a_child_says_when_it_fails_comes_out(child: Path) -> None:
    child.write_text("#!/bin/sh\necho first; echo Out of memory >&2; exit 3\n")
    with pytest.raises(EngineError, match=r"(?s)connector engine ended with 3.*Out of memory"):
        measure_decode(TASK, BenchRun("decode", "m", None), lambda _: None)


@pytest.mark.parametrize("ending", ["wait", "exit 1"])
def test_no_process_of_a_child_outlives_it(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """An engine's own process would keep the GPU; here it ignores most signals and keeps the log open."""
    monkeypatch.setattr(decode, "_TIMEOUT_S", 1)
    pid_file = tmp_path / "pid"
    child.write_text(
        "#!/bin/sh\n"
        f'sh -c \'trap "" TERM INT HUP; echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; '
        "while :; do sleep 0.1; done' &\n"
        f"while [ ! -e {pid_file} ]; do sleep 0.05; done\n"
        f"echo Loading; {ending}\n"
    )
    what = r"not done after 1 s and was ended; lower" if ending == "wait" else "ended with 1"
    with pytest.raises(EngineError, match=rf"(?s)connector engine (was )?{what}.*Loading"):
        measure_decode(TASK, BenchRun("decode", "m", None), lambda _: None)
    stat = Path(f"/proc/{int(pid_file.read_text())}/stat")
    deadline_s = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline_s, "the grandchild still runs"
        time.sleep(0.02)


def test_stock_vllm_is_driven_like_ours() -> None:
    pytest.importorskip("vllm")

    class LLMEngine:
        """Two steps a request."""

        def __init__(self) -> None:
            self.open: dict[str, int] = {}

        def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
            assert (params.ignore_eos, params.detokenize) == (True, False)
            assert set(prompt) == {"prompt_token_ids"}
            self.open[name] = 0

        def step(self) -> list[Any]:
            outputs = []
            for name in list(self.open):
                self.open[name] += 1
                num = self.open[name]
                completion = SimpleNamespace(text="", token_ids=[0] * num, finish_reason="length")
                is_done = num == 2
                outputs.append(
                    SimpleNamespace(
                        request_id=name, outputs=[completion], finished=is_done, num_cached_tokens=None
                    )
                )
                if is_done:
                    del self.open[name]
            return outputs

    request = GenerationRequest([1, 2], 2, sampling={"ignore_eos": True, "detokenize": False})
    lanes = drive(
        StockEngine(SimpleNamespace(llm_engine=LLMEngine())), [iter([request] * 2), iter([request])]
    )
    assert [len(lane) for lane in lanes] == [2, 1]
    for one in lanes[0]:
        assert len(one.generation.token_ids) == 2
        assert 0 <= one.generation.ttft_s <= one.generation.total_s


# e2e ----------------------------------------------------------------------------------------------

CONVERSATION = BenchConversation("demo", (Turn("a"),) * 8, ("q1?", "q2?"))
HIT = SearchHit(Fact("1", 1, Scope("ana"), "a"), 0.5)


class FakeLLM:
    """Memory adds 7 ms, on a GPU 3; it asks whichever memory it has."""

    missing = 0

    def __init__(self, model: str, memory: Any, **options: Any) -> None:
        self.memory = memory
        self.options = options
        self.asked: list[str] = []
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16, gpu_memory_utilization=0.9),
            model_config=SimpleNamespace(dtype="torch.bfloat16", enforce_eager=True, max_model_len=4096),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        )
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=vllm_config))
        self.engine = SimpleNamespace(llm=llm, reset_prefix_cache=lambda: self.asked.append("reset"))
        self.encoder = SimpleNamespace(policy=sliding(20, 20))

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, turns: Sequence[Turn], *, user_id: str) -> None:
        assert len(turns) == 8

    def chat(self, question: str, *, mode: str, **settings: Any) -> ChatResult:
        self.asked.append(mode)
        added = 3.0 if self.memory.config.embedder_device == "cuda" else 7.0
        ms = 10.0 + (added if mode == "inject" else 0.0)
        timings = ChatTimings(embed_ms=added, engine_ms=10.0)
        return ChatResult("", mode, 10.0, ms, 90, 80, 0, 10, self.missing, 1, 0, (HIT,), None, timings)  # type: ignore[arg-type]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    started: list[FakeLLM] = []

    def start(*arguments: Any, **options: Any) -> FakeLLM:
        started.append(FakeLLM(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(e2e, "MemoryLLM", start)
    monkeypatch.setattr(e2e, "_sized", lambda spec, conversation, k: spec)
    return started


def test_what_memory_adds_on_each_device(opened: list[FakeLLM]) -> None:
    options = E2eOptions(k=3, num_questions=4, devices=("cpu", "cuda"))
    rows = e2e.measure_e2e(SPEC, CONVERSATION, options, None, lambda _: None)
    (llm,) = opened
    assert llm.options["engine_args"]["max_num_seqs"] == 7
    assert llm.options["repair_after_chat"] is False
    added = {row["config"]["embedder_device"]: row for row in rows if row["metric"] == "e2e_minus_none"}
    assert (added["cpu"]["p50"], added["cuda"]["p50"]) == (7.0, 3.0)
    assert added["cpu"]["ci95"] == [7.0, 7.0]
    assert {row["metric"] for row in rows} >= {"e2e_ttft", "e2e_embed_ms", "e2e_engine_ms"}
    assert all(row["n"] == 4 for row in rows)
    assert llm.asked[:8] == ["reset", "none", "reset", "inject", "reset", "inject", "reset", "none"]
    assert rows[0]["config"]["injected_tokens"] == 80


def test_facts_that_were_not_injected_write_no_row(
    opened: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeLLM, "missing", 5)
    with pytest.raises(EngineError, match="5 tokens were not injected"):
        e2e.measure_e2e(SPEC, CONVERSATION, E2eOptions(k=3), tmp_path / "rows.jsonl", lambda _: None)
    assert not (tmp_path / "rows.jsonl").exists()


def test_more_facts_than_turns_are_refused(opened: list[FakeLLM]) -> None:
    with pytest.raises(InvalidInput, match=r"k=9 was asked for; demo has 8 turns"):
        e2e.measure_e2e(SPEC, CONVERSATION, E2eOptions(k=9), None, lambda _: None)
    assert not opened


class _Steps:
    """Answers a request after as many steps as it has tokens to make."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.aborted: list[str] = []
        self.most = 0

    def submit(self, request: GenerationRequest) -> str:
        name = f"r{len(self.left)}-{id(request)}"
        self.left[name] = request.max_tokens
        self.most = max(self.most, sum(left > 0 for left in self.left.values()))
        return name

    def step(self) -> list[Answer]:
        done = []
        for name, left in self.left.items():
            self.left[name] = left - 1
            if left == 1:
                done.append(Answer(name, Generation("", (0,), 0.1, 0.2, 0, None, "length")))
        return done

    def abort(self, names: Iterable[str]) -> None:
        self.aborted += names


def test_steady_load_counts_from_when_all_lanes_are_under_way() -> None:
    server = _Steps()
    lanes = [[GenerationRequest([lane], 1 + lane), *[GenerationRequest([lane], 5)] * 9] for lane in range(4)]
    window = drive_steadily(server, [iter(lane) for lane in lanes], 10)
    assert len(window.served) == 10
    assert all(number >= 1 for _, number, _ in window.served)
    assert {lane for lane, _, _ in window.served} == {0, 1, 2, 3}
    assert all(one.request.max_tokens == 5 for _, _, one in window.served)
    assert server.most == 4, "each lane has one request at a time"
    assert len(server.aborted) == 4, "what still runs is ended"
    assert window.seconds > 0


def test_steady_load_needs_lanes_that_do_not_end() -> None:
    server = _Steps()
    with pytest.raises(
        EngineError, match=r"(?s)Lane 0 of 1 has no request left behind its 3 .*max_num_seqs=1"
    ):
        drive_steadily(server, [iter([GenerationRequest([1], 1)] * 3)], 10)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_steady_load_counts_nothing_of_the_step_it_starts_behind(
    monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    """That step's time is not counted, so neither is what was done in it, whatever the order of answers."""
    clock = iter(range(100))
    monkeypatch.setattr("inferscale.bench.load.time.perf_counter", lambda: float(next(clock)))
    server = _Steps()
    step = server.step
    num_answers: list[int] = []

    def noted() -> list[Answer]:
        answers = step()
        num_answers.append(len(answers))
        return answers[::-1] if is_reversed else answers

    monkeypatch.setattr(server, "step", noted)
    # Lane 0's second request is done in the same step as the first one of lane 1.
    lanes = [[GenerationRequest([lane], 1 + lane), *[GenerationRequest([lane], 1)] * 9] for lane in (0, 1)]
    window = drive_steadily(server, [iter(lane) for lane in lanes], 4)
    assert num_answers == [1, 2, 2, 2]
    assert sorted((lane, number) for lane, number, _ in window.served) == [(0, 2), (0, 3), (1, 1), (1, 2)]
    assert window.seconds == 1.0, "the clock is read twice"
