"""`inferscale deploy ray`: options, refusals and the file it prints. Ray is not needed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inferscale.cli import deploy as deploy_module
from inferscale.cli.app import main
from inferscale.cli.deploy import _check_fits, _check_reached, _reason
from inferscale.deployment.settings import APP, ReplicaSettings, Scaling
from inferscale.errors import EngineError

yaml: Any = pytest.importorskip("yaml")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("inferscale.serve_command.find_spec", lambda name: object())
    monkeypatch.setattr("inferscale.cli.deploy.prepare_engine", lambda *, verbose: None)
    monkeypatch.setattr("inferscale.engine_budget.find_gpus", lambda workers: [])
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path))
    for name in (
        "VLLM_API_KEY",
        "VLLM_USE_RUST_FRONTEND",
        "RAY_ADDRESS",
        "INFERSCALE_CATALOG",
        "INFERSCALE_ENCRYPTION_KEY",
    ):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["deploy", "ray", *arguments])


def printed(*arguments: str) -> dict[str, Any]:
    result = run("org/model", "--print-config", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    return found


def test_options_of_serve_and_flags_of_vllm(tmp_path: Path) -> None:
    config = printed(
        "--replicas", "3", "--top-k", "7", "--pool-size", "1GiB", "--dtype", "float16", "--port", "81"
    )
    assert config["http_options"] == {"host": "127.0.0.1", "port": 81}
    (application,) = config["applications"]
    assert application["import_path"] == APP
    assert application["args"] == {
        "model": "org/model",
        "vllm_flags": ["--dtype", "float16"],
        "memory": {"pool_size_bytes": 2**30, "server": {"data_dir": str(tmp_path), "top_k": 7}},
    }
    assert application["deployments"][0]["num_replicas"] == 3


def test_gpus_of_this_machine_are_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.engine_budget.find_gpus", lambda workers: ["a GPU"] * workers)

    def of_replica(*arguments: str) -> float:
        (application,) = printed(*arguments)["applications"]
        found: float = application["deployments"][0]["ray_actor_options"]["num_gpus"]
        return found

    assert of_replica("--tensor-parallel-size", "2") == 2
    assert of_replica("--gpus-per-replica", "0.5") == 0.5


def test_a_key_is_not_in_the_file_but_that_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    result = run("org/model", "--print-config", "--host", "0.0.0.0")
    assert result.exit_code == 0, result.output
    assert "sk-secret" not in result.output
    assert yaml.safe_load(result.stdout)["applications"][0]["args"]["needs"] == ["VLLM_API_KEY"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("m", "--host", "0.0.0.0"), "no API key is set"),
        (("m", "--max-replicas", "1"), "--max-replicas is 1 and --replicas is 2"),
        (("m", "--uds", "/tmp/x"), "--uds was given"),
        (("m", "--api-key", "sk-secret"), "Set VLLM_API_KEY in Ray's environment"),
        (("m", "--data-parallel-size", "2"), "does not support data parallelism"),
        (("/nowhere/model",), "no such file or folder"),
    ],
)
def test_refused_before_anything_is_started(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "sk-secret" not in result.output


def test_every_option_of_serve_is_one_of_deploy() -> None:
    commands: Any = main.commands
    names = {option.name for option in commands["serve"].params} - {"print_command"}
    assert names <= {option.name for option in commands["deploy"].commands["ray"].params}


class _Ray:
    def __init__(self, nodes: int, **resources: float) -> None:
        self._nodes, self._resources = nodes, resources

    def cluster_resources(self) -> dict[str, float]:
        return self._resources

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}] * self._nodes + [{"Alive": False}]


def test_what_the_cluster_does_not_have() -> None:
    settings = ReplicaSettings("m")
    with pytest.raises(EngineError, match="2 replicas with 2 GPUs each need 4, and Ray has 3"):
        _check_fits(_Ray(1, GPU=3, CPU=8), settings, Scaling(gpus=2))
    with pytest.raises(EngineError, match="fewer --replicas"):
        _check_fits(_Ray(1, CPU=1), settings, Scaling())
    _check_fits(_Ray(1, CPU=2), settings, Scaling())


def test_one_file_for_several_machines_is_refused() -> None:
    with pytest.raises(EngineError, match="only one can use"):
        _check_fits(_Ray(2, CPU=8), ReplicaSettings("m"), Scaling())
    _check_fits(_Ray(2, CPU=8), ReplicaSettings("m", needs=["INFERSCALE_CATALOG"]), Scaling())


def test_a_serve_that_listens_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_module, "_PROXY_S", 0.1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(EngineError, match="end it \\(`serve shutdown`\\) and deploy again"):
            _check_reached("0.0.0.0", nobody.getsockname()[1])


def test_what_serve_tells_is_one_line() -> None:
    assert "pool does not fit" in _reason(
        "Traceback\n  File x\ninferscale.errors.InvalidConfig: the pool does not fit.\n\n"
    )
    assert _reason("odd") == "odd"
