"""vLLM and the compiler's modules warn about themselves when they are imported: import them once, quietly."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from symbolic_engine import SymbolicEngine


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    """The model runner whose shape of scheduler output is used."""
    return str(request.param)


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps scheduled before the first is reported."""
    return int(request.param)


class NoServer:
    """In place of the residency server, which takes half a second to close and has tests of its own."""

    def __init__(self, folder: Any, answer: Any) -> None:
        self.answer = answer

    def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SymbolicEngine]]:
    monkeypatch.setattr("inferscale.connector.connector.ResidencyServer", NoServer)
    # In this process pytest reads our log; some releases of vLLM have set up theirs by now.
    monkeypatch.setattr("inferscale.connector.connector.share_engine_log", lambda: None)
    engines: list[SymbolicEngine] = []

    def make(**settings: Any) -> SymbolicEngine:
        engines.append(SymbolicEngine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
