"""The stand-ins of all tests are this folder's too; a server that a test asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from asgi_server import FakeServer


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeServer]]:
    """Makes a `FakeServer`: api_keys and tenants, and fields of ServerConfig."""
    yield from _making(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def serve_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FakeServer]]:
    """The same for servers that several tests ask, and none changes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from _making(tmp_path_factory.mktemp("servers"), monkeypatch)


def _making(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(**options: Any) -> FakeServer:
        made.append(FakeServer(folder / f"server{len(made)}", monkeypatch, **options))
        made[-1].ask("GET", "/version")  # opens it, with what is patched now
        made[-1].vllm.seen.clear()
        return made[-1]

    yield make
    for server in made:
        server.service.memory.close()
