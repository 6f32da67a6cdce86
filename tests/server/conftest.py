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
    made: list[FakeServer] = []

    def make(**options: Any) -> FakeServer:
        made.append(FakeServer(tmp_path / f"server{len(made)}", monkeypatch, **options))
        return made[-1]

    yield make
    for server in made:
        server.service.memory.close()
