"""Settings of a deployment: what a replica starts, what is refused, and Serve's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from inferscale.config import ConnectorConfig
from inferscale.config_checks import from_mapping
from inferscale.deployment.settings import (
    FRONT,
    REPLICA,
    ReplicaSettings,
    Scaling,
    memory_settings,
    needed_of,
    replica_command,
    serve_config,
)
from inferscale.errors import InvalidConfig
from inferscale.server_config import ServerConfig


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.serve_command.find_spec", lambda name: object())
    monkeypatch.setattr("inferscale.engine_budget.find_gpus", lambda workers: [])
    monkeypatch.setattr(
        "inferscale.engine_budget.within_budget", lambda model, connector, given, reserve: (connector, {})
    )


def transfer(
    settings: ReplicaSettings, rank: int = 0, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    command = replica_command(settings, rank, environment or {}, engine_id=f"engine-{rank}")
    found: dict[str, Any] = json.loads(command.arguments[-1])
    return found


def test_a_replica_starts_what_inferscale_serve_starts() -> None:
    settings = ReplicaSettings("org/model", ("--dtype", "float16"), {"server": {"top_k": 7}})
    command = replica_command(settings, 0, {}, engine_id="one")
    assert command.arguments[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert "--dtype" in command.arguments
    assert "inferscale.server.MemoryMiddleware" in command.arguments
    found = transfer(settings, 3)
    assert found["engine_id"] == "engine-3"
    assert found["kv_connector_extra_config"]["server"] == {"top_k": 7}


def test_each_replica_has_a_folder_of_its_own_on_disk() -> None:
    settings = ReplicaSettings("m", (), {"disk_size_bytes": "1GiB", "disk_dir": "/kv"})
    assert [transfer(settings, rank)["kv_connector_extra_config"]["disk_dir"] for rank in (0, 1)] == [
        "/kv/replica-0",
        "/kv/replica-1",
    ]


def test_workers_of_a_replica_are_processes_of_it() -> None:
    command = replica_command(ReplicaSettings("m", ("-tp", "2")), 0, {}, engine_id="x")
    assert " --distributed-executor-backend mp " in str(command)
    given = ReplicaSettings("m", ("-tp", "2", "--distributed-executor-backend", "ray"))
    assert str(replica_command(given, 0, {}, engine_id="x")).count("--distributed-executor-backend") == 1


def test_a_replica_without_the_key_that_is_expected_does_not_start() -> None:
    needed = needed_of({"VLLM_API_KEY": "sk", "INFERSCALE_ENCRYPTION_KEY": "", "HOME": "/"})
    settings = ReplicaSettings("m", needs=needed)
    with pytest.raises(InvalidConfig, match="VLLM_API_KEY is not set in the environment of this replica"):
        transfer(settings)
    assert transfer(settings, 0, {"VLLM_API_KEY": "sk"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vllm_flags": ["--port", "1"]}, "--port was given"),
        ({"vllm_flags": ["--api-key=sk-secret"]}, "VLLM_API_KEY"),
        ({"vllm_flags": ["--api-server-count", "2"]}, "more replicas"),
        ({"vllm_flags": ["--ssl-ca-certs", "/ca"]}, "--ssl-ca-certs was given, but Serve's proxy speaks TLS"),
        ({"vllm_flags": "--dtype float16"}, "a list of texts"),
        ({"vllm_flags": None}, "a list of texts"),
        ({"memory": {"server": None}}, "memory.server is None; allowed is an object"),
        ({"needs": None}, "allowed is a list of VLLM_API_KEY"),
        ({"memory": {"runtime_dir": "/tmp/x"}}, "folder of its own"),
        ({"memory": {"pool": 3}}, "unknown settings pool"),
        ({"memory": {"server": {"topk": 3}}}, "unknown settings topk"),
        ({"memory": []}, "allowed is an object"),
        ({"needs": ["PATH"]}, "allowed is a list of VLLM_API_KEY"),
        ({"model": ""}, "a folder or a hub name"),
        ({"replicas": 2}, "unknown settings replicas"),
    ],
)
def test_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as caught:
        from_mapping(ReplicaSettings, {"model": "m", **settings}, "args")
    assert "sk-secret" not in str(caught.value)


def test_settings_survive_the_way_through_serve() -> None:
    memory = memory_settings(ConnectorConfig(pool_size_bytes="1GiB"), ServerConfig(data_dir="/srv", top_k=9))
    assert memory == {"pool_size_bytes": 2**30, "server": {"data_dir": "/srv", "top_k": 9}}
    settings = ReplicaSettings("m", ("--dtype", "float16"), memory, needs=["INFERSCALE_CATALOG"])
    again = from_mapping(ReplicaSettings, json.loads(json.dumps(settings.to_json())), "args")
    assert again.to_json() == settings.to_json()
    assert again.server.top_k == 9


def test_the_data_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCALE_HOME", "/home/memory")
    assert memory_settings(ConnectorConfig(), ServerConfig())["server"] == {"data_dir": "/home/memory"}


def test_serves_own_file() -> None:
    scaling = Scaling(replicas=2, max_replicas=5, target_ongoing_requests=8, gpus=1)
    config = serve_config(ReplicaSettings("m"), scaling, name="memory", host="127.0.0.1", port=8000)
    (application,) = config["applications"]
    assert application["args"] == {"model": "m"}
    replica, front = application["deployments"]
    assert (replica["name"], front["name"]) == (REPLICA, FRONT)
    assert replica["autoscaling_config"]["min_replicas"], replica["autoscaling_config"]["max_replicas"] == (
        2,
        5,
    )
    assert "num_replicas" not in replica
    assert Scaling(replicas=3).deployments()[REPLICA]["num_replicas"] == 3


def test_fewer_at_most_than_at_least() -> None:
    with pytest.raises(InvalidConfig, match="--max-replicas is 1 and --replicas is 2"):
        Scaling(replicas=2, max_replicas=1)
