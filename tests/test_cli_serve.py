"""`inferscale serve`: the command it makes, what it refuses, what it shows and what it starts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inferscale.budget import DeviceMemory, ModelSize
from inferscale.cli.app import main
from inferscale.config import ConnectorConfig, connector_config
from inferscale.config_checks import from_mapping
from inferscale.errors import EngineMissing, InvalidConfig, PoolTooLarge, UnsupportedLayout
from inferscale.serve_command import MIDDLEWARE, Flags, ServeCommand, serve_command
from inferscale.server_config import ServerConfig

GIB = 2**30
MODULE = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"]
OURS = ["--middleware", MIDDLEWARE]
LOCAL = ["--host", "127.0.0.1"]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU with vLLM and no catalog; the environment of this process stays as it is."""
    gpus(monkeypatch)
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("INFERSCALE_CATALOG", raising=False)
    monkeypatch.setattr("inferscale.serve_command.find_spec", lambda name: object())
    monkeypatch.setattr("inferscale.cli.serve.prepare_engine", lambda *, verbose: None)
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)


def gpus(monkeypatch: pytest.MonkeyPatch, *free_gib: int) -> None:
    """GPUs of 80 GiB, and a model with 16 GiB of weights."""
    found = [DeviceMemory(f"cuda:{i}", 80 * GIB, free * GIB) for i, free in enumerate(free_gib)]
    monkeypatch.setattr("inferscale.engine_budget.find_gpus", lambda workers: found[:workers])
    size = ModelSize(16 * GIB, 131072, 32768)
    monkeypatch.setattr("inferscale.engine_budget.model_size", lambda model, arguments: size)


def make(
    *tokens: str,
    model: str = "org/model",
    connector: ConnectorConfig | None = None,
    server: ServerConfig | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServeCommand:
    return serve_command(
        model,
        tokens,
        connector or ConnectorConfig(),
        server or ServerConfig(),
        environment or {},
        engine_id="id",
    )


def transfer(arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON behind --kv-transfer-config, the last flag."""
    assert arguments[-2] == "--kv-transfer-config"
    found: dict[str, Any] = json.loads(arguments[-1])
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments])


# the command ------------------------------------------------------------------------------------


def test_on_a_cpu() -> None:
    command = make()
    assert list(command.arguments[:-2]) == [*MODULE, *OURS, *LOCAL, "--enforce-eager"]
    assert transfer(command.arguments) == {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale.connector",
        "kv_role": "kv_both",
        "engine_id": "id",
        "kv_connector_extra_config": {"pool_size_bytes": GIB},
    }
    assert command.environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert command.notes == (
        "No API key is set, so only this machine is answered (127.0.0.1). Others: set VLLM_API_KEY.",
        "No GPU: pool of 1.00 GiB; vLLM's cache 2 GiB (VLLM_CPU_KVCACHE_SPACE).",
    )


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 79)
    command = make(environment={"VLLM_API_KEY": "k"})
    flags = ["--gpu-memory-utilization", "0.7514", "--block-size", "64"]
    assert list(command.arguments[:-2]) == [*MODULE, *OURS, *flags]
    settings = transfer(command.arguments)["kv_connector_extra_config"]
    assert settings == {"pool_size_bytes": 235 * 2**26}
    assert command.environment == {}
    assert command.notes == (
        "Memory of each GPU: pool of 14.69 GiB; gpu_memory_utilization is 0.7514, blocks have 64 tokens.",
    )


def test_an_embedder_on_the_gpu_has_room_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 79)
    pool = ConnectorConfig(pool_size_bytes=8 * GIB)
    shares = []
    for device in ("cpu", "auto"):
        arguments = make(connector=pool, server=ServerConfig(embedder_device=device)).arguments
        shares.append(float(arguments[arguments.index("--gpu-memory-utilization") + 1]))
    assert shares[0] - shares[1] == pytest.approx(2 / 80, abs=1e-4)


def test_flags_of_the_budget_that_the_user_gave_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 79)
    command = make("--gpu-memory-utilization=0.5", "--block_size", "128")
    given = ["--gpu-memory-utilization=0.5", "--block_size", "128"]
    assert list(command.arguments[:-2]) == [*MODULE, *OURS, *given, *LOCAL]
    assert "gpu_memory_utilization is 0.5, blocks have 128 tokens" in command.notes[-1]
    with pytest.raises(PoolTooLarge, match="leaves nothing for the pool"):
        make("--gpu-memory-utilization", "0.99")


@pytest.mark.parametrize("tokens", [("-tp", "2"), ("-tp=2",), ("--tensor-parallel-size=2",)])
def test_every_gpu_of_tensor_parallelism_counts(
    monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, ...]
) -> None:
    gpus(monkeypatch, 79, 40)
    shares = [make(*flags).arguments for flags in ((), tokens)]
    one, two = [float(found[found.index("--gpu-memory-utilization") + 1]) for found in shares]
    assert two < 0.5 < one


def test_the_model_size_is_asked_with_the_users_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 79)
    asked: dict[str, Any] = {}

    def size(model: str, arguments: Mapping[str, Any]) -> ModelSize:
        asked.update(arguments)
        return ModelSize(16 * GIB, 131072, 32768)

    monkeypatch.setattr("inferscale.engine_budget.model_size", size)
    make(
        *("--max_model_len", "32k", "--kv-cache-memory-bytes", "1.5g", "-q", "awq", "--dtype=float16"),
        *("--hf-overrides", '{"rope_theta": 1}', "--revision", "None", "--kv-cache-dtype", "auto"),
    )
    assert asked == {
        "max_model_len": 32_000,
        "kv_cache_memory_bytes": 1_500_000_000,
        "quantization": "awq",
        "dtype": "float16",
        "hf_overrides": {"rope_theta": 1},
        "kv_cache_dtype": "auto",
    }
    asked.clear()
    make("--max-model-len", "16K")
    assert asked == {"max_model_len": 16_384}
    asked.clear()
    make("--max-model-len", "-1")
    assert asked == {}


def test_the_users_flags_go_through_in_order() -> None:
    tokens = ["--port", "8001", "-dph", "--middleware", "mine.Auth", "-cc.mode=0", "--seed", "-1", "-O", "0"]
    assert list(make(*tokens).arguments[:-2]) == [*MODULE, *OURS, *tokens, *LOCAL]


def test_settings_that_are_not_the_default_travel_and_are_read_as_the_connector_reads_them(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "k.json"
    keys.write_text('{"sk-a": "a"}')
    server = ServerConfig(data_dir="/d", window=10, use_user_field=True, keys_file=str(keys))
    settings = transfer(
        make(
            connector=ConnectorConfig(pool_size_bytes="2GiB", injection_path="portable"), server=server
        ).arguments
    )["kv_connector_extra_config"]
    assert settings == {
        "pool_size_bytes": 2 * GIB,
        "injection_path": "portable",
        "server": {"data_dir": "/d", "window": 10, "use_user_field": True, "keys_file": str(keys)},
    }
    assert from_mapping(ServerConfig, connector_config(settings, "id").server, "server") == server


def test_what_the_user_says_on_a_cpu_wins() -> None:
    kept = make(environment={"VLLM_CPU_KVCACHE_SPACE": "7"})
    assert kept.environment == {} and "cache 7 GiB" in kept.notes[-1]
    sized = make("--kv-cache-memory-bytes", "1G")
    assert sized.environment == {} and "--kv-cache-memory-bytes" in sized.notes[-1]
    for flag in ("--no-enforce-eager", "-O2", "--compilation-config.mode=3", "-cc={}"):
        assert "--enforce-eager" not in make(flag).arguments


def test_several_api_servers_need_the_vllm_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make("--api-server-count", "1").arguments[2] == "vllm.entrypoints.openai.api_server"
    monkeypatch.setattr("inferscale.serve_command.version", lambda name: "0.25.1")
    command = make("-asc", "2")
    assert list(command.arguments[1:7]) == ["-m", "vllm.entrypoints.cli.main", "serve", "org/model", *OURS]

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("inferscale.serve_command.version", missing)
    with pytest.raises(InvalidConfig, match=r"only 1 can be started.*Leave it out"):
        make("-asc", "2")
    with pytest.raises(InvalidConfig, match="lives in an API server"):
        make("--api-server-count", "0")


# the network ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_a_host_of_this_machine_needs_no_key(host: str) -> None:
    assert make("--host", host).arguments.count("--host") == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "example.org"])
def test_another_host_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"no API key is set.*VLLM_API_KEY"):
        make(f"--host={host}")
    with pytest.raises(InvalidConfig, match="no API key is set"):
        make("--host", "127.0.0.1", "--host", host)  # the last one counts
    with pytest.raises(InvalidConfig, match="no API key is set"):
        make("--host", host, "--api-key", "", environment={"VLLM_API_KEY": "hidden by the flag"})
    with pytest.raises(InvalidConfig, match="no API key is set"):
        make("--host", host, environment={"VLLM_API_KEY": ""})
    make("--host", host, server=ServerConfig(allow_remote_without_key=True))
    assert make("--host", host, environment={"VLLM_API_KEY": "k"}).arguments.count("--host") == 1
    assert make("--host", host, "--api-key", "k").arguments.count("--host") == 1


def test_where_nothing_is_bound_no_host_is_set() -> None:
    assert "--host" not in make("--uds", "/tmp/s").arguments
    assert "--host" not in make(environment={"VLLM_API_KEY": "k"}).arguments
    assert "--host" in make(server=ServerConfig(allow_remote_without_key=True)).arguments


def test_secrets_are_masked() -> None:
    command = make("--api-key", "one", "two", "--port", "1", "--api_key=three", "--hf-token", "four")
    shown = str(command)
    assert "--api-key '***' '***' --port 1 '--api_key=***' --hf-token '***'" in shown
    assert not [secret for secret in ("one", "two", "three", "four") if secret in shown.split()]
    assert "process list" in command.notes[0]
    assert [secret in command.arguments for secret in ("one", "two", "four")] == [True] * 3


# what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--kv-transfer-config", "{}"], "writes it from its own options"),
        (["--kv_transfer_config={}"], "writes it from its own options"),
        (["--kv-transfer-config.kv_role", "kv_both"], "writes it from its own options"),
        (["--kv-transf", "{}"], "could stand for --kv-transfer-config"),
        (["--hos", "0.0.0.0"], "could stand for --host"),
        (["-t", "2"], "could stand for -tp"),
        (["--model", "other"], "first argument"),
        (["--middleware", MIDDLEWARE], "this command sets it"),
        (["--headless"], "no API server"),
        (["--grpc"], "no middleware"),
        (["--grpc-port", "1"], "no Python middleware"),
        (["--kv-offloading-size", "4"], "in the place of InferScale's"),
        (["-tp", "two"], "--tensor-parallel-size is 'two'"),
        (["--max-model-len", "1.5K5"], "--max-model-len is '1.5K5'"),
        (["--hf-overrides", "{"], "--hf-overrides is '{'"),
        (["other"], "stands behind MODEL"),
    ],
)
def test_flags_that_do_not_go_with_the_memory(tokens: list[str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make(*tokens)


@pytest.mark.parametrize("flag", ["-dp", "-pp", "-pcp", "--decode-context-parallel-size"])
def test_parallelism_that_the_connector_refuses(flag: str) -> None:
    make(flag, "1")
    with pytest.raises(UnsupportedLayout, match="parallelism"):
        make(flag, "2")


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="MODEL is '--port'"):
        make("8001", model="--port")
    with pytest.raises(EngineMissing, match="no such file or folder"):
        make(model=str(tmp_path / "nothing"))
    make(environment={"VLLM_USE_RUST_FRONTEND": "0"})
    with pytest.raises(InvalidConfig, match="Rust front end loads no Python middleware"):
        make(environment={"VLLM_USE_RUST_FRONTEND": "1"})
    monkeypatch.setattr("inferscale.serve_command.find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="vLLM is not installed"):
        make()


def test_the_flags_of_a_config_file_count(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "host: 0.0.0.0\nheadless: false\nenforce-eager: true\ncompilation-config: {mode: 0}\nport: 1\n"
    )
    flags = ("--config", str(file))
    with pytest.raises(InvalidConfig, match=r"--host is '0\.0\.0\.0'"):
        make(*flags)
    keyed = make(*flags, "--api-key", "k")
    assert list(keyed.arguments[:-2]) == [*MODULE, *OURS, *flags, "--api-key", "k"]
    make(*flags, "--host", "localhost")  # the command line comes later
    found = Flags(flags)
    assert (found.value("--port"), found.value("--compilation-config")) == ("1", '{"mode": 0}')
    assert found.has("--enforce-eager") and not found.has("--headless")
    for content, message in (
        ("kv-transfer-config: {}", "writes it"),
        ("middleware: [mine.Auth]", "not guard it"),
        ("{", "cannot be read"),
        ("1", "YAML"),
    ):
        file.write_text(content)
        with pytest.raises(InvalidConfig, match=message):
            make(*flags)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        make("--config", str(tmp_path / "none.yaml"))


# the command line -------------------------------------------------------------------------------


def test_a_dry_run_prints_the_command_for_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *arguments: pytest.fail("started"))
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    monkeypatch.chdir(tmp_path)
    result = run(
        *("org/model", "--port", "1", "--window=5", "-tp", "1", "--keys-file", "keys.json", "--user-field"),
        *("--data-dir", "data", "--pool-size", "64MiB", "--top-k", "7", "--stride", "3", "--print-command"),
        *("--mixed", "0", "--neighbours", "3"),
        *("--tail", "300 tokens,5", "--self-check", "always", "--order", "session"),
        *("--injection-path", "portable", "--embedder", "static", "--embedder-device", "cpu"),
        *("--chat-template", "a b", "--", "--seed", "0"),
    )
    assert result.exit_code == 0, result.output
    variable, *arguments = shlex.split(result.stdout)
    assert variable == "VLLM_CPU_KVCACHE_SPACE=2"
    flags = ["--port", "1", "-tp", "1", "--chat-template", "a b", "--seed", "0"]
    assert arguments[:-2] == [*MODULE, *OURS, *flags, *LOCAL, "--enforce-eager"]
    assert transfer(arguments)["kv_connector_extra_config"] == {
        "pool_size_bytes": 2**26,
        "injection_path": "portable",
        "self_check": "always",
        "server": {
            "data_dir": str(tmp_path / "data"),
            "embedder": "static",
            "embedder_device": "cpu",
            "window": 5,
            "stride": 3,
            "mixed": 0,
            "neighbours": 3,
            "top_k": 7,
            "tail": "5,300t",
            "order": "session",
            "use_user_field": True,
            "keys_file": str(keys),
        },
    }
    assert result.stderr.splitlines()[-1].startswith("No GPU: pool of 0.06 GiB")


def test_vllm_takes_the_place_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, Sequence[str], Mapping[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("inferscale.cli.serve.check_free", lambda host, port: None)
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    result = run("org/model", "--hf-token", "secret", "--seed", "0")
    assert result.exit_code == 0, result.output
    ((file, arguments, environment),) = started
    assert file == sys.executable == arguments[0]
    assert list(arguments[:-2]) == [
        *MODULE,
        *OURS,
        *("--hf-token", "secret", "--seed", "0", "--enforce-eager"),
    ]
    assert environment == {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2"}
    assert result.stdout == ""
    assert "Starting: VLLM_CPU_KVCACHE_SPACE=2" in result.stderr
    assert "secret" not in result.output and "hidden" not in result.output
    run("org/model")
    ids = [transfer(found)["engine_id"] for _, found, _ in started]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("flags", [("--port", "{}"), ("--port={}", "--host", "127.0.0.1")])
def test_a_port_that_is_taken_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("org/model", *(flag.format(port) for flag in flags))
        assert result.exit_code == 1
        assert f"Port {port} is in use" in result.output
        assert started == []
    assert run("org/model", *(flag.format(port) for flag in flags)).exit_code == 0
    assert len(started) == 1


def test_where_it_will_listen() -> None:
    assert make().address == ("127.0.0.1", 8000)
    assert make("--port=9", "--host", "::1").address == ("::1", 9)
    assert make("--host", "0.0.0.0", environment={"VLLM_API_KEY": "k"}).address == ("0.0.0.0", 8000)
    assert make(environment={"VLLM_API_KEY": "k"}).address == ("", 8000)
    assert make("--uds", "/tmp/socket").address is None


def test_room_below_the_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *arguments: pytest.fail("started"))
    sizes = ("--host-size", "2GiB", "--disk-size", "10GB", "--pool-dtype", "int8")
    result = run("org/model", *sizes, "--data-dir", str(tmp_path), "--print-command")
    assert result.exit_code == 0, result.output
    settings = transfer(shlex.split(result.stdout))["kv_connector_extra_config"]
    assert settings["host_size_bytes"] == 2 * GIB
    assert settings["pool_dtype"] == "int8"
    assert (settings["disk_size_bytes"], settings["disk_dir"]) == (10**10, str(tmp_path / "kv"))
    assert "encryption_key_file" not in settings
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    with_key = ("--data-dir", str(tmp_path), "--encryption-key-file", str(key))
    result = run("org/model", *with_key, "--print-command")
    settings = transfer(shlex.split(result.stdout))["kv_connector_extra_config"]
    assert settings["encryption_key_file"] == str(key)
    assert "abab" not in result.output
    (tmp_path / "catalog.sqlite3").write_bytes(b"no database " * 400)
    for arguments in (with_key, with_key[:2]):
        refused = run("org/model", *arguments)
        assert refused.exit_code == 1
        assert "encryption key" in refused.output
    key.write_text("ab")
    refused = run("org/model", *with_key)
    assert (refused.exit_code, "holds no encryption key" in refused.output) == (1, True)
    wrong = run("org/model", "--host-size", "much")
    assert wrong.exit_code == 2
    assert "--host-size is 'much'" in wrong.output


def test_what_is_refused_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *arguments: pytest.fail("started"))
    result = run("org/model", "--host", "0.0.0.0")
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert run("org/model", "--keys-file", "/nothing.json").exit_code == 2
    assert run("-h").stdout == run("--help").stdout
    assert "VLLM_API_KEY" in run("--help").stdout


# vLLM itself ------------------------------------------------------------------------------------

_PARSE = """
import json, pickle, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
args = parser.parse_args(json.loads(sys.argv[1]))
json.dump({"flags": list(parser._option_string_actions), "host": args.host, "middleware": args.middleware,
           "model": args.model, "extra": args.kv_transfer_config.kv_connector_extra_config}, sys.stderr)
by_hand = json.dumps({"kv_connector": "InferScaleConnector", "kv_role": "kv_both"})
sent = pickle.dumps(parser.parse_args(["--kv-transfer-config", by_hand]))  # to each API process
print(*(pickle.loads(sent).kv_transfer_config.engine_id for _ in range(2)))
"""


@pytest.mark.engine
def test_vllm_reads_what_is_written_and_none_of_its_flags_is_taken_for_an_abbreviation() -> None:
    command = make("--middleware", "mine.Auth", "--seed", "0", server=ServerConfig(top_k=3))
    result = subprocess.run(
        [sys.executable, "-c", _PARSE, json.dumps(command.arguments[3:])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stderr.splitlines()[-1])
    assert found["model"] == "org/model" and found["host"] == "127.0.0.1"
    assert found["middleware"] == [MIDDLEWARE, "mine.Auth"]
    assert found["extra"] == {"pool_size_bytes": GIB, "server": {"top_k": 3}}
    for flag in found["flags"]:
        Flags([flag])
    one, other = result.stdout.split()[-2:]
    assert one == other, "API processes of flags given by hand would look for two engines"
