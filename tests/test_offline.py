"""Times of the offline engine: a request's time includes its own submission."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale import offline
from inferscale.offline import GenerationRequest, OfflineEngine


class FakeEngine:
    """Finishes every submitted request in one step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.names)

    def step(self) -> list[Any]:
        outputs = [
            SimpleNamespace(
                request_id=name,
                finished=True,
                outputs=[SimpleNamespace(text=name, token_ids=[1], finish_reason="stop")],
                kv_transfer_params=None,
                num_cached_tokens=0,
            )
            for name in self.names
        ]
        self.names = []
        return outputs


def test_ttft_begins_with_a_requests_own_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OfflineEngine.__new__(OfflineEngine)
    fake = FakeEngine()
    engine.llm = SimpleNamespace(llm_engine=fake)

    def submit(request: GenerationRequest) -> str:
        name = f"r{len(fake.names)}"
        time.sleep(0.02)
        fake.names.append(name)
        return name

    monkeypatch.setattr(engine, "_submit", submit)
    first, second = engine.generate([GenerationRequest([1]), GenerationRequest([2])])
    assert (first.text, second.text) == ("r0", "r1")
    assert first.ttft_s >= second.ttft_s + 0.02, "the first one waited for the second one's submission"
    assert second.ttft_s >= 0.02, "signing and input processing are part of a request's time"


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
