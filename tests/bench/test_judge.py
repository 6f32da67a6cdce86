"""The judge of answers, with a server that is a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferscale.bench.judge import Judge, Judged, check_styles
from inferscale.bench.options import JudgeOptions
from inferscale.bench.record_cache import RecordCache
from inferscale.errors import ExtractionError, InvalidInput

RIGHT = Judged("Where does Ana live?", "Oslo", "in Oslo")
WRONG = Judged("Where does Ana live?", "Oslo", "in Rome")
BLANK = Judged("Where does Ana live?", "Oslo", " ")


class Server:
    """Says that answers with Oslo are right. refused: requests that it answers with 503 first."""

    def __init__(self, refused: int = 0, mark: Callable[[str], Any] = lambda said: "in Oslo" in said) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._refused = refused
        self._mark = mark
        self._lock = threading.Lock()

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        with self._lock:
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            if len(self.bodies) <= self._refused:
                return httpx.Response(503)
        said = body["messages"][1]["content"]
        text = json.dumps({"reason": "It is so.", "correct": self._mark(said)})
        return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def judge(server: Server, path: Path | None = None, **options: Any) -> Judge:
    chosen = JudgeOptions("http://there/v1", "big", **options)
    cache = RecordCache(path, "answer")
    return Judge(chosen, cache, http_client=server.client(), wait=lambda seconds: None)


def test_each_answer_is_judged_once_for_each_style(tmp_path: Path) -> None:
    server = Server()
    seen: list[tuple[int, int]] = []
    one = judge(server, tmp_path / "cache", api_key="secret")
    asked = [RIGHT, WRONG, BLANK, RIGHT]
    strict = one.verdicts("strict", asked, lambda *numbers: seen.append(numbers))
    assert strict == {RIGHT: True, WRONG: False, BLANK: False}
    assert len(server.bodies) == 2  # a blank answer is not asked about
    assert seen[-1] == (3, 3)
    assert set(server.keys) == {"Bearer secret"}
    one.verdicts("generous", asked)
    assert len(server.bodies) == 4
    tasks = {body["messages"][0]["content"] for body in server.bodies}
    assert len(tasks) == 2
    for part in RIGHT:
        assert any(part in body["messages"][1]["content"] for body in server.bodies)

    again = Server()
    assert judge(again, tmp_path / "cache").verdicts("strict", asked) == strict
    assert not again.bodies
    assert "secret" not in (tmp_path / "cache").read_text()


def test_a_busy_server_is_asked_again() -> None:
    server = Server(refused=2)
    assert judge(server, in_flight=1).verdicts("strict", [RIGHT]) == {RIGHT: True}
    assert len(server.bodies) == 3


def test_a_judge_that_fails_says_so_and_keeps_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match="the judge answered with HTTP 503"):
        judge(Server(refused=99)).verdicts("strict", [RIGHT])
    with pytest.raises(ExtractionError, match="no mark"):
        judge(Server(mark=lambda said: "maybe")).verdicts("strict", [RIGHT])
    path = tmp_path / "cache"
    odd = Server(mark=lambda said: "maybe" if "in Rome" in said else True)
    with pytest.raises(ExtractionError, match="no mark"):
        judge(odd, path, in_flight=1).verdicts("strict", [RIGHT, WRONG])
    assert len(RecordCache(path, "answer")) == 1


def test_styles() -> None:
    with pytest.raises(InvalidInput, match="'fair'; allowed are strict and generous"):
        check_styles(["fair"])
    with pytest.raises(InvalidInput, match="are none; allowed"):
        check_styles([])
