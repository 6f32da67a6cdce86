"""The offline engine on a stand-in for vLLM: times, streams, closed loops, and the memory's division."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale import engine_budget, offline
from inferscale.budget import DeviceMemory, ModelSize
from inferscale.config import ConnectorConfig
from inferscale.engine_budget import find_gpus, within_budget
from inferscale.errors import EngineError, InvalidConfig, InvalidInput, PoolTooLarge, UnsupportedLayout
from inferscale.offline import GenerationRequest, OfflineEngine

GIB = 2**30


class FakeEngine:
    """Takes as many steps for a request as its first token id says, one for all requests at a time."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.aborted: list[str] = []
        self.most_running = 0
        self.num_steps = 0

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        self.left[name] = prompt["prompt_token_ids"][0]
        self.most_running = max(self.most_running, len(self.left))

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.num_steps += 1
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            finished = self.left[name] <= 0
            if finished:
                del self.left[name]
            outputs.append(output(name, finished))
        return outputs


def output(name: str, finished: bool) -> Any:
    return SimpleNamespace(
        request_id=name,
        finished=finished,
        outputs=[SimpleNamespace(text=name, token_ids=[1], finish_reason="stop", logprobs=None)],
        kv_transfer_params=None,
        num_cached_tokens=0,
    )


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> OfflineEngine:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **settings: settings))
    engine = OfflineEngine.__new__(OfflineEngine)
    engine.llm = SimpleNamespace(llm_engine=fake)
    engine._num_requests = 0
    engine._running = {}
    engine._answers = []
    return engine


def steps(*numbers: int) -> list[GenerationRequest]:
    return [GenerationRequest([number]) for number in numbers]


# --- the prefix cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_process", [True, False])
def test_emptying_the_prefix_cache_waits_for_what_was_given_up(
    engine: OfflineEngine, fake: FakeEngine, is_in_process: bool
) -> None:
    """vLLM answers False, and keeps the cache, while blocks of requests are held."""
    answers = [False, False, True]
    engine.llm.reset_prefix_cache = lambda: answers.pop(0)
    fake.engine_core = SimpleNamespace(engine_core=1) if is_in_process else SimpleNamespace()  # type: ignore[attr-defined]
    engine.reset_prefix_cache()
    assert (answers, fake.num_steps) == ([], 2 if is_in_process else 0)


def test_a_prefix_cache_that_cannot_be_emptied_is_an_error(
    engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.llm.reset_prefix_cache = lambda: False
    engine.llm.llm_engine.engine_core = SimpleNamespace()
    name = engine.submit(steps(3)[0])
    with pytest.raises(EngineError, match=r"not emptied.*\(1 are running\).*abort them"):
        engine.reset_prefix_cache()
    engine.abort([name])
    monkeypatch.setattr("inferscale.offline._DRAIN_S", 0.02)
    with pytest.raises(EngineError, match=r"\(0 are running\)"):
        engine.reset_prefix_cache()


# --- generate -------------------------------------------------------------------------------------


def test_results_come_in_the_order_given(engine: OfflineEngine, fake: FakeEngine) -> None:
    results = engine.generate(steps(3, 1, 2))
    assert [result.text for result in results] == ["inferscale-1", "inferscale-2", "inferscale-3"]
    assert (fake.most_running, fake.num_steps) == (3, 3)
    assert engine.generate([]) == []
    assert fake.aborted == []


def test_ttft_begins_with_a_requests_own_submission(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = fake.add_request

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        add(*arguments)

    monkeypatch.setattr(fake, "add_request", slowly)
    first, second = engine.generate(steps(1, 1))
    assert first.ttft_s >= second.ttft_s + 0.02, "the first one waited for the second one's submission"
    assert second.ttft_s >= 0.02, "signing and input processing are part of a request's time"


def test_ttft_ends_with_the_first_token(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fake.step

    def slowly() -> list[Any]:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(fake, "step", slowly)
    [result] = engine.generate(steps(4))
    assert result.total_s >= result.ttft_s + 0.03


def test_an_error_aborts_what_runs(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(fake, "step", fail)
    with pytest.raises(RuntimeError, match="gone"):
        engine.generate(steps(1, 1))
    assert fake.aborted == ["inferscale-1", "inferscale-2"]
    assert engine._running == {}


def test_requests_that_the_engine_lost_are_an_error(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "has_unfinished_requests", lambda: False)
    with pytest.raises(EngineError, match="lost 1 requests"):
        engine.generate(steps(1))


def test_a_closed_engine_says_so(engine: OfflineEngine) -> None:
    engine.llm = None
    for use in (lambda: engine.generate(steps(1)), lambda: engine.submit(steps(1)[0]), engine.budget):
        with pytest.raises(EngineError, match="closed"):
            use()
    assert engine.step() == []


# --- stream ---------------------------------------------------------------------------------------


def test_a_stream_yields_as_requests_finish(engine: OfflineEngine) -> None:
    assert [place for place, _ in engine.stream(steps(3, 1, 2))] == [1, 2, 0]


def test_a_stream_refills_as_requests_finish(engine: OfflineEngine, fake: FakeEngine) -> None:
    drawn: list[int] = []

    def requests() -> Iterator[GenerationRequest]:
        for number, request in enumerate(steps(3, 1, 1, 1)):
            drawn.append(number)
            yield request

    stream = engine.stream(requests(), max_in_flight=2)
    assert next(stream).place == 1
    assert drawn == [0, 1, 2], "one ahead, to see whether it fits"
    assert [finished.place for finished in stream] == [2, 0, 3]
    assert (fake.most_running, fake.num_steps) == (2, 3)


def test_tokens_in_flight_are_bounded_but_one_request_always_runs(
    engine: OfflineEngine, fake: FakeEngine
) -> None:
    requests = [GenerationRequest([1] * length, max_tokens=2) for length in (8, 8, 50, 8)]
    places = [place for place, _ in engine.stream(requests, max_tokens_in_flight=20)]
    assert places == [0, 1, 2, 3]
    assert (fake.most_running, fake.num_steps) == (2, 3)


def test_closing_a_stream_aborts_what_it_runs_and_nothing_else(
    engine: OfflineEngine, fake: FakeEngine
) -> None:
    other = engine.submit(GenerationRequest([9]))
    stream = engine.stream(steps(1, 5, 5))
    next(stream)
    stream.close()
    assert fake.aborted == ["inferscale-3", "inferscale-4"]
    assert list(engine._running) == [other]


def test_an_error_of_the_iterable_aborts_what_runs(engine: OfflineEngine, fake: FakeEngine) -> None:
    def requests() -> Iterator[GenerationRequest]:
        yield from steps(5, 1)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(engine.stream(requests(), max_in_flight=2))
    assert fake.aborted == ["inferscale-1", "inferscale-2"]
    assert engine._running == {}


def test_other_calls_may_run_inside_a_stream(engine: OfflineEngine) -> None:
    """What finishes in their steps is not lost, also when nothing is left to be stepped for."""
    places = []
    for place, _ in engine.stream(steps(1, 2, 3)):
        places.append(place)
        if place == 0:
            assert [result.text for result in engine.generate(steps(9))] == ["inferscale-4"]
    assert places == [0, 1, 2]


# --- submit and step ------------------------------------------------------------------------------


def test_a_closed_loop(engine: OfflineEngine, fake: FakeEngine) -> None:
    waiting = steps(1, 1, 1)
    running = {engine.submit(request) for request in steps(2, 3)}
    num_answers = 0
    while running:
        for name, result in engine.step():
            running.remove(name)
            assert result.text == name
            num_answers += 1
            if waiting:
                running.add(engine.submit(waiting.pop()))
    assert num_answers == 5
    assert fake.most_running == 2
    assert engine.step() == []
    assert fake.num_steps == 4


def test_answers_that_came_in_anothers_steps_come_first(engine: OfflineEngine, fake: FakeEngine) -> None:
    name = engine.submit(GenerationRequest([1]))
    engine.generate(steps(2))
    before = fake.num_steps
    assert [answer.name for answer in engine.step()] == [name]
    assert fake.num_steps == before


def test_abort(engine: OfflineEngine, fake: FakeEngine) -> None:
    names = [engine.submit(request) for request in steps(1, 5)]
    engine.step()
    engine.abort(names)
    assert fake.aborted == names[1:]
    assert engine.step() == []


# --- starting -------------------------------------------------------------------------------------


def test_engines_are_spawned_and_get_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked engine can hang: torch's threads of this process do not exist in it."""
    started: dict[str, Any] = {}
    vllm = SimpleNamespace(LLM=lambda **settings: started.update(settings))
    config = SimpleNamespace(KVTransferConfig=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    offline._start("model", "id", {"pool_size_bytes": 1}, {"seed": 3})
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert started["seed"] == 3
    assert started["kv_transfer_config"]["kv_connector_module_path"] == "inferscale.connector"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    offline._start("model", "id", {}, {})
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork", "an explicit setting wins"


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(*free_gib)` gives this machine GPUs of 140 GiB and a model of 15 GiB."""

    def have(*free_gib: float) -> None:
        found = [
            DeviceMemory(f"cuda:{number}", 140 * GIB, int(free * GIB)) for number, free in enumerate(free_gib)
        ]
        size = ModelSize(15 * GIB, 2**17, 131072)
        for module in (offline, engine_budget):
            monkeypatch.setattr(module, "find_gpus", lambda num_workers: found[:num_workers])
            monkeypatch.setattr(module, "model_size", lambda model, arguments: size)

    return have


def test_on_a_cpu_only_the_pools_size_becomes_a_number(gpus: Callable[..., None]) -> None:
    gpus()
    config, arguments = within_budget("m", ConnectorConfig(), {"seed": 1}, None)
    assert (config.pool_size_bytes, arguments) == (GIB, {"seed": 1})


def test_on_a_gpu_vllm_gets_what_the_pool_leaves(gpus: Callable[..., None]) -> None:
    gpus(139.5)
    config, arguments = within_budget(
        "m", ConnectorConfig(pool_size_bytes="60GiB", page_size_tokens=8), {"seed": 1}, None
    )
    assert (config.size_bytes, config.page_size_tokens) == (60 * GIB, 8)
    assert arguments == {
        "seed": 1,
        "gpu_memory_utilization": pytest.approx((139.5 - 60 - 3.1) / 140, abs=1e-4),
        "block_size": 64,
    }
    config, arguments = within_budget("m", ConnectorConfig(), {}, 2 * GIB)
    assert 30 * GIB < config.size_bytes <= (139.5 - 2 - 15) / 4 * GIB
    assert isinstance(config.pool_size_bytes, int)


def test_given_settings_are_respected(gpus: Callable[..., None]) -> None:
    gpus(139.5)
    config, arguments = within_budget(
        "m",
        ConnectorConfig(pool_size_bytes="10GiB"),
        {"gpu_memory_utilization": 0.5, "block_size": 32},
        None,
    )
    assert (config.size_bytes, arguments) == (10 * GIB, {"gpu_memory_utilization": 0.5, "block_size": 32})
    with pytest.raises(PoolTooLarge, match=r"gpu_memory_utilization=0.95 gives vLLM 133.0 GiB"):
        within_budget("m", ConnectorConfig(pool_size_bytes="10GiB"), {"gpu_memory_utilization": 0.95}, None)


def test_the_fullest_of_the_workers_gpus_decides(gpus: Callable[..., None]) -> None:
    gpus(139.5, 100, 10)
    pool = ConnectorConfig(pool_size_bytes="20GiB")
    _, one = within_budget("m", pool, {}, None)
    _, two = within_budget("m", pool, {"tensor_parallel_size": 2}, None)
    assert one["gpu_memory_utilization"] == pytest.approx((139.5 - 20 - 3.1) / 140, abs=1e-4)
    assert two["gpu_memory_utilization"] == pytest.approx((100 - 20 - 3.1 - 0.75) / 140, abs=1e-4)
    with pytest.raises(PoolTooLarge, match="cuda:2"):
        within_budget("m", pool, {"tensor_parallel_size": 3}, None)


class FakeNvml:
    """NVML of a machine with GPUs of 10, 20, … GiB, of which 1, 2, … GiB are free."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index + 1

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=10 * handle * GIB, free=handle * GIB)


def install_platform(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, *, is_gpu: bool = True) -> None:
    platform = SimpleNamespace(
        is_cuda_alike=lambda: is_gpu,
        device_id_to_physical_device_id=lambda worker: worker + 2,  # CUDA_VISIBLE_DEVICES=2,3
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm.utils.import_utils", SimpleNamespace(import_pynvml=lambda: nvml))


def test_gpus_are_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    install_platform(monkeypatch, nvml)
    assert find_gpus(2) == [
        DeviceMemory("cuda:0", 30 * GIB, 3 * GIB),
        DeviceMemory("cuda:1", 40 * GIB, 4 * GIB),
    ]
    assert not nvml.is_open


def test_torch_is_asked_where_the_driver_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    install_platform(monkeypatch, FakeNvml(RuntimeError("MIG")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda worker: (5 * GIB, 7 * GIB))
    assert find_gpus(2) == [DeviceMemory("cuda:0", 7 * GIB, 5 * GIB)]


def test_a_cpu_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_platform(monkeypatch, FakeNvml(), is_gpu=False)
    assert find_gpus(1) == []


def test_budget_of_a_running_engine(engine: OfflineEngine, gpus: Callable[..., None]) -> None:
    import torch

    gpus(4)
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_num_kv_heads=lambda parallel: 8,
        get_num_layers=lambda parallel: 32,
        get_head_size=lambda: 128,
    )
    engine.llm.llm_engine.vllm_config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(num_gpu_blocks=1000, block_size=16, gpu_memory_utilization=0.75),
    )
    engine.connector = ConnectorConfig(pool_size_bytes=2**30 + 1)
    engine._model, engine._engine_args = "m", {}
    budget = engine.budget()
    assert (budget.cache_tokens, budget.cache_bytes) == (16_000, 16_000 * 2**17)
    assert (budget.pool_tokens, budget.pool_bytes, budget.pool_facts) == (8192, GIB, 256)
    assert (budget.model_bytes, budget.free_bytes) == (15 * GIB, 4 * GIB)
    assert (budget.device, budget.gpu_memory_utilization) == ("cuda:0", 0.75)
    assert "pool 1.0 GiB (8,192 tokens, about 256 facts of 30 tokens" in str(budget)


# --- what vLLM refuses ------------------------------------------------------------------------------


class VLLMValidationError(Exception):
    """As in vLLM 0.32, where it is no ValueError."""


@pytest.mark.parametrize("error", [VLLMValidationError("n must be 1"), ValueError("n must be 1")])
def test_what_vllm_refuses_is_an_invalid_input(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fake, "add_request", refuses)
        with pytest.raises(InvalidInput, match="does not take this request: n must be 1"):
            engine.generate(steps(1))
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", refuses)
    with pytest.raises(InvalidInput, match="does not take these sampling settings: n must be 1"):
        engine.generate(steps(1))
    assert not engine._running


def test_what_breaks_in_vllm_comes_out_as_it_is(
    engine: OfflineEngine, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError("the engine died")

    monkeypatch.setattr(fake, "add_request", breaks)
    with pytest.raises(RuntimeError, match="the engine died"):
        engine.generate(steps(1))


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan"), float("inf"), True, "0.5"])
def test_a_share_of_memory_that_cannot_be_is_refused(share: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"gpu_memory_utilization is .* above 0, up to 1"):
        within_budget("m", ConnectorConfig(), {"gpu_memory_utilization": share}, None)


@pytest.mark.parametrize("name", ["data_parallel_size", "pipeline_parallel_size"])
def test_parallelism_that_is_not_supported_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"engine_args has {name}=2; .*parallelism.* Leave it out"):
        OfflineEngine("m", ConnectorConfig(), {name: 2})
