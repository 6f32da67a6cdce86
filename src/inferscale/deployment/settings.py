"""What can be set of a deployment, and what is refused by name before anything is started. Knows no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferscale.catalog_url import VARIABLE as CATALOG_VARIABLE
from inferscale.config import KV_FOLDER, ConnectorConfig, default_data_dir
from inferscale.config_checks import from_mapping
from inferscale.encryption import KEY_VARIABLE
from inferscale.errors import InvalidConfig
from inferscale.serve_command import Flags, ServeCommand, check_command, serve_command
from inferscale.server_config import ServerConfig

REPLICA, FRONT = "Replica", "Front"
"""Names of the deployments."""
NEEDED = ("VLLM_API_KEY", KEY_VARIABLE, CATALOG_VARIABLE)
"""Variables that decide who is answered and where facts are stored; Ray shows settings to all who see it."""
APP = "inferscale.deployment.ray_serve:app"
_LISTENS = "Serve's proxy listens, not the replicas (http_options in Serve's file says where)"
_TLS = (
    "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers",
    "--enable-ssl-refresh",
)  # fmt: skip
_REFUSED = {
    "--host": _LISTENS,
    "--port": _LISTENS,
    "--uds": _LISTENS,
    "--root-path": "Serve's route_prefix takes its place",
    "--api-server-count": "each replica has one API server; more replicas take its place",
    **dict.fromkeys(_TLS, "Serve's proxy speaks TLS (http_options in Serve's file)"),
    "--api-key": "Ray shows it to all who see the cluster. Set VLLM_API_KEY in Ray's environment",
    "--hf-token": "Ray shows it to all who see the cluster. Set HF_TOKEN in Ray's environment",
}


@dataclass(frozen=True)
class ReplicaSettings:
    """What every replica serves; plain JSON, since Serve keeps it. The arguments of Serve's `app`."""

    model: str
    vllm_flags: Sequence[str] = ()
    """As behind `inferscale serve MODEL`."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """As `kv_connector_extra_config`: settings of `ConnectorConfig`, and of `ServerConfig` below `server`."""
    needs: Sequence[str] = ()
    """Environment variables without which a replica does not start (`needed_of`): one that runs in another
    environment than the command that asked for it must not answer everybody, or store elsewhere."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfig(f"model is {self.model!r}; give a folder or a hub name.")
        flags = self.vllm_flags
        if not _is_list(flags) or not all(isinstance(flag, str) for flag in flags):
            raise InvalidConfig(
                f"vllm_flags is {flags!r}; allowed is a list of texts, such as [--dtype, float16]."
            )
        if not _is_list(self.needs) or not all(name in NEEDED for name in self.needs):
            raise InvalidConfig(f"needs is {self.needs!r}; allowed is a list of {', '.join(NEEDED)}.")
        if not isinstance(self.memory, Mapping):
            raise InvalidConfig(f"memory is {self.memory!r}; allowed is an object.")
        if not isinstance(self.memory.get("server", {}), Mapping):
            raise InvalidConfig(f"memory.server is {self.memory['server']!r}; allowed is an object.")
        if "runtime_dir" in self.memory:
            raise InvalidConfig(
                "memory.runtime_dir is given, but each replica has a folder of its own. Leave it out."
            )
        _ = self.connector, self.server
        read = Flags(flags)
        for name, reason in _REFUSED.items():
            if read.has(name):
                raise InvalidConfig(f"{name} was given, but {reason}. Leave it out.")

    @property
    def connector(self) -> ConnectorConfig:
        settings = {name: value for name, value in self.memory.items() if name != "server"}
        return from_mapping(ConnectorConfig, settings, "memory")

    @property
    def server(self) -> ServerConfig:
        return from_mapping(ServerConfig, self.memory.get("server", {}), "memory.server")

    @property
    def num_workers(self) -> int:
        """GPUs of one replica, where there are any."""
        return Flags(self.vllm_flags).read("--tensor-parallel-size", int) or 1

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise what `serve_command` raises for flags. Starts nothing and asks no GPU."""
        check_command(self.model, self.vllm_flags, environment)

    def to_json(self) -> dict[str, Any]:
        """Without what is as by default."""
        found = {"vllm_flags": list(self.vllm_flags), "memory": dict(self.memory), "needs": list(self.needs)}
        return {"model": self.model, **{name: value for name, value in found.items() if value}}


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def needed_of(environment: Mapping[str, str]) -> list[str]:
    """What is set here must be set for the replicas."""
    return [name for name in NEEDED if environment.get(name)]


def memory_settings(connector: ConnectorConfig, server: ServerConfig) -> dict[str, Any]:
    """As `ReplicaSettings.memory`. The data folder is named: all replicas share it, wherever they run."""
    folder = server.data_dir or str(default_data_dir().absolute())
    return {**_changed(connector), "server": _changed(dataclasses.replace(server, data_dir=folder))}


def replica_command(
    settings: ReplicaSettings, rank: int, environment: Mapping[str, str], *, engine_id: str
) -> ServeCommand:
    """What `inferscale serve` would start, with a folder of its own for copies on disk.

    rank: of the replica; one that is started again gets a free one. Raises what `serve_command` raises, and
    InvalidConfig where a variable is needed that is not there.
    """
    server = settings.server
    missing = [name for name in settings.needs if not environment.get(name)]
    if missing:
        raise InvalidConfig(
            f"{missing[0]} is not set in the environment of this replica, but was where it was deployed. "
            "Set it for Ray on every machine (before `ray start`), and deploy again."
        )
    connector, tokens = settings.connector, list(settings.vllm_flags)
    if connector.disk_bytes:
        folder = Path(connector.disk_dir or default_data_dir() / KV_FOLDER) / f"replica-{rank}"
        connector = dataclasses.replace(connector, disk_dir=str(folder))
    if settings.num_workers > 1 and not Flags(tokens).has("--distributed-executor-backend"):
        tokens += [
            "--distributed-executor-backend",
            "mp",
        ]  # inside of Ray, vLLM would ask Ray for its workers
    return serve_command(settings.model, tokens, connector, server, environment, engine_id=engine_id)


@dataclass(frozen=True)
class Scaling:
    """How many replicas and with what; Serve's own settings under the names that Serve has for them."""

    replicas: int = 2
    max_replicas: int | None = None
    """More than `replicas`: Serve starts and stops replicas between the two, by their requests."""
    target_ongoing_requests: float = 16.0
    max_ongoing_requests: int = 256
    """Of one replica; more go to the next one of the ring, and then wait."""
    gpus: float = 0
    cpus: float = 1
    fronts: int = 1
    stop_timeout_s: float = 120.0
    """For the answers that a replica is giving when it is to stop."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidConfig(f"--replicas is {self.replicas}; allowed are 1 or more.")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidConfig(
                f"--max-replicas is {self.max_replicas} and --replicas is {self.replicas}; as many are "
                "needed, or more."
            )

    def deployments(self) -> dict[str, dict[str, Any]]:
        """Options of each deployment, as in Serve's file."""
        replica: dict[str, Any] = {
            "max_ongoing_requests": self.max_ongoing_requests,
            "graceful_shutdown_timeout_s": self.stop_timeout_s,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
        }
        if self.max_replicas is None or self.max_replicas == self.replicas:
            replica["num_replicas"] = self.replicas
        else:
            replica["autoscaling_config"] = {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
            }
        front = {"num_replicas": self.fronts, "graceful_shutdown_timeout_s": self.stop_timeout_s}
        return {REPLICA: replica, FRONT: front}


def serve_config(
    settings: ReplicaSettings, scaling: Scaling, *, name: str, host: str, port: int
) -> dict[str, Any]:
    """Serve's own file, for `serve deploy`."""
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": APP,
        "args": settings.to_json(),
        "deployments": [{"name": part, **options} for part, options in scaling.deployments().items()],
    }
    return {"http_options": {"host": host, "port": port}, "applications": [application]}


def _changed(config: ConnectorConfig | ServerConfig) -> dict[str, Any]:
    default = type(config)()
    values = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
