"""Two servers on one database, and one whose database goes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asgi_server import FakeServer

from fakes import WordEmbedder
from inferscale.config import MemoryConfig
from inferscale.memory import Memory
from postgres_server import MISSING, find_binaries, running

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "where does my sister live?"}],
    "memory": {"user_id": "ana"},
}


@pytest.fixture
def share(serve: Callable[..., FakeServer], tmp_path: Path) -> Iterator[Callable[[str], FakeServer]]:
    """Makes a server whose catalog is under this URL."""

    def make(url: str) -> FakeServer:
        server = serve()
        server.service.memory.close()
        folder = tmp_path / f"data{id(server)}"
        server.service.memory = Memory(MemoryConfig(folder, catalog=url), embedder=WordEmbedder())
        return server

    return make


def found(server: FakeServer, query: str) -> list[str]:
    answer = server.ask("POST", "/v1/memories/search", {"user_id": "ana", "query": query})
    assert answer.status == 200, answer.body
    return [item["text"] for item in answer.json["data"]]


def test_what_one_server_deletes_no_other_finds(share: Callable[[str], FakeServer], url: str) -> None:
    one, other = share(url), share(url)
    kept = one.add("my sister lives in oslo")
    gone = other.add("my sister lives in rome")
    assert set(found(one, "sister")) == set(found(other, "sister")) == {kept["text"], gone["text"]}
    assert one.ask("DELETE", f"/v1/memories/{gone['id']}").status == 200
    assert found(other, "sister") == [kept["text"]]
    assert other.ask("GET", f"/v1/memories/{gone['id']}").status == 404
    assert one.ask("DELETE", "/v1/memories?user_id=ana").json["deleted"] == 1
    assert found(other, "sister") == []


def test_without_its_database_memory_is_refused_and_comes_back(share: Callable[[str], FakeServer]) -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(MISSING)
    with running(binaries) as database:
        server = share(database.url)
        kept = server.add("my sister lives in oslo")
        database.stop()
        for method, path, body in (
            ("POST", "/v1/memories", {"user_id": "ana", "text": "one more"}),
            ("POST", "/v1/memories/search", {"user_id": "ana", "query": "sister"}),
            ("DELETE", f"/v1/memories/{kept['id']}", None),
            ("GET", "/v1/memories?user_id=ana", None),
        ):
            answer = server.ask(method, path, body)
            assert (answer.status, answer.header("retry-after")) == (503, "5")
            assert "cannot be reached" in answer.error["message"]
            assert database.password not in answer.error["message"]
        plain = {name: value for name, value in CHAT.items() if name != "memory"}
        assert server.ask("POST", "/v1/chat/completions", plain).status == 200
        database.start()
        assert found(server, "sister") == [kept["text"]]
        server.service.memory.close()
