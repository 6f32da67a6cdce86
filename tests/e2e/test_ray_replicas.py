"""`inferscale deploy ray` as its users see it: two replicas, affinity, keys, streams, a killed replica.

Needs `pip install "inferscale[ray]"` and some minutes, so it is not part of the default run:

    INFERSCALE_RAY=1 python -m pytest tests/e2e/test_ray_replicas.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

if os.environ.get("INFERSCALE_RAY") != "1":
    pytest.skip("starts Ray and two engines; set INFERSCALE_RAY=1", allow_module_level=True)
pytest.importorskip("ray.serve")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from drill import Deployment, deployed
from drill_users import MODEL, REPLICA

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

OPERATOR, ACME = "sk-operator", "sk-acme"
USERS = [f"user-{number}" for number in range(20)]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("replicas")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({ACME: "acme"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", OPERATOR)
        with deployed(folder, None, "--keys-file", str(keys)) as running:
            running.wait_ready(2)
            yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with httpx.Client(base_url=deployment.url, headers=headers, timeout=120, trust_env=False) as found:
        yield found


def chat(user: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Where do I live?"}]
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "memory": {"user_id": user},
    }
    return {**body, **fields}


def test_a_users_requests_go_to_one_replica(client: httpx.Client) -> None:
    of_user: dict[str, set[str]] = {user: set() for user in USERS}
    for user in USERS:
        text = f"My name is {user}."
        answers = [client.post("/v1/memories", json={"user_id": user, "text": text})]
        answers += [client.post("/v1/chat/completions", json=chat(user)) for _ in range(2)]
        answers += [client.get("/v1/memories", params={"user_id": user})]
        assert [answer.status_code for answer in answers] == [201, 200, 200, 200]
        assert [fact["text"] for fact in answers[1].json()["memory"]["facts"]] == [text]
        of_user[user] |= {answer.headers[REPLICA] for answer in answers}
    assert all(len(replicas) == 1 for replicas in of_user.values())
    assert len(set.union(*of_user.values())) == 2


def test_keys_and_tenants_are_those_of_the_server(deployment: Deployment, client: httpx.Client) -> None:
    url = f"{deployment.url}/v1/memories"
    body = {"user_id": "ana", "text": "My dog is called Rex."}
    assert httpx.post(url, json=body).status_code == 401
    acme = {"Authorization": f"Bearer {ACME}"}
    assert httpx.post(url, json=body, headers=acme).status_code == 201
    assert len(httpx.get(url, params={"user_id": "ana"}, headers=acme).json()["data"]) == 1
    assert client.get(url, params={"user_id": "ana"}).json()["data"] == []
    assert len(client.get(url, params={"user_id": "acme/ana"}).json()["data"]) == 1
    assert client.post(url, json={"unknown": 1}).status_code == 400
    assert client.get(f"{url}/unknown").json()["error"]["type"] == "not_found_error"


def test_a_stream(client: httpx.Client) -> None:
    body = chat("user-1", stream=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert len(lines) > 5
    assert any("memory" in json.loads(line) for line in lines[:-1])


def test_the_switch_of_injection_is_thrown_in_both(client: httpx.Client) -> None:
    for enabled in (False, True):
        assert client.put("/v1/memories/injection", json={"enabled": enabled}).status_code == 200
        seen: dict[str, bool] = {}
        while len(seen) < 2:
            answer = client.get("/v1/memories/stats")
            seen[answer.headers[REPLICA]] = answer.json()["injection"]
        assert set(seen.values()) == {enabled}


def test_a_killed_replica_is_replaced_and_nothing_is_missing(
    deployment: Deployment, client: httpx.Client
) -> None:
    before = deployment.wait_ready(2)
    deployment.kill_one()
    for user in USERS:  # at once, by the other one
        answer = client.post("/v1/chat/completions", json=chat(user))
        assert answer.status_code == 200
        assert [fact["text"] for fact in answer.json()["memory"]["facts"]] == [f"My name is {user}."]
    while not deployment.wait_ready(2) - before:
        pass
    for user in USERS:
        replicas = {client.post("/v1/chat/completions", json=chat(user)).headers[REPLICA] for _ in range(3)}
        assert len(replicas) == 1
