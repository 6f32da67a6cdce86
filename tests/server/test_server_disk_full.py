"""A disk that is full refuses what is to be stored, and nothing else. A chat that remembers is answered."""

from __future__ import annotations

from collections.abc import Callable

from asgi_server import FakeServer

NO_LIMIT = 2**30


def limit_pages(server: FakeServer, num_pages: int) -> None:
    """SQLite's own limit of a file's size: at it, it answers as for a full disk."""
    handle = server.service.memory.catalog._database._open_handle()
    handle.connection.execute(f"PRAGMA max_page_count = {num_pages}")


def fill(server: FakeServer) -> None:
    limit_pages(server, 1)  # SQLite makes of it what the file has now
    added = [server.ask("POST", "/v1/memories", {"user_id": "filler", "text": "x" * 5000}) for _ in range(20)]
    assert added[-1].status == 503


def test_a_full_disk_refuses_to_store_and_answers_all_else(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    kept = server.add("My sister lives in Oslo.")
    gone = server.add("My brother lives in Rome.")
    fill(server)
    body = {"user_id": "ana", "items": [{"text": "new " * 2000}, {"text": "more " * 2000}]}
    refused = server.ask("POST", "/v1/memories", body)
    assert refused.status == 503
    assert "The disk is full; nothing of this call was stored. Free some space" in refused.error["message"]
    found = server.ask("POST", "/v1/memories/search", {"user_id": "ana", "query": "sister"})
    assert (found.status, found.json["data"][0]["text"]) == (200, kept["text"])
    assert server.ask("GET", "/v1/memories?user_id=ana").json["data"][0]["id"] == kept["id"]
    assert server.ask("DELETE", f"/v1/memories/{gone['id']}").status == 200
    assert server.ask("GET", "/v1/memories?user_id=ana").json["data"] == [kept]
    limit_pages(server, NO_LIMIT)
    assert server.ask("POST", "/v1/memories", body).status == 201


def test_over_a_quota_the_answer_is_openais(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    memory = server.service.memory
    memory.catalog._quota = memory.catalog._quota._replace(max_facts=1)
    server.add()
    refused = server.ask("POST", "/v1/memories", {"user_id": "ana", "text": "one more"})
    assert refused.status == 429
    assert (refused.error["type"], refused.error["code"]) == ("insufficient_quota", "insufficient_quota")
    server.add(user="bob")
