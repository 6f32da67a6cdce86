"""`inferscale deploy ray`: replicas of what `inferscale serve` serves, by Ray Serve."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from inferscale.catalog_url import VARIABLE as CATALOG_VARIABLE
from inferscale.cli.engine import prepare_engine
from inferscale.cli.options import POSITIVE, catalog_url
from inferscale.cli.output import say
from inferscale.cli.serve import Serve, check_catalog, check_free, serve, settings_of
from inferscale.config import default_data_dir
from inferscale.errors import EngineError, EngineMissing, InvalidConfig
from inferscale.server_config import read_tenants

_APP = "inferscale"
_OWN = ("model", "vllm_flags", "print_command")
_LOCAL_ADDRESS = "local"
_PROXY_S = 30.0


@click.group()
def deploy() -> None:
    """Many replicas of the server, by an engine that runs many."""


@deploy.command(
    "ray", cls=Serve, context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]}
)
@click.argument("model")
@click.argument("vllm_flags", metavar="[VLLM_FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--replicas", type=POSITIVE, default=2, show_default=True, help="Engines, each with its server."
)
@click.option(
    "--max-replicas",
    type=POSITIVE,
    help="Let Serve start up to so many, by the load, and stop them again down to --replicas.",
)
@click.option(
    "--target-ongoing-requests",
    type=click.FloatRange(min=0, min_open=True),
    default=16.0,
    show_default=True,
    help="Requests of one replica at a time that Serve scales for.",
)
@click.option(
    "--max-ongoing-requests",
    type=POSITIVE,
    default=256,
    show_default=True,
    help="Requests of one replica at a time; more go to the next one.",
)
@click.option(
    "--gpus-per-replica",
    type=click.FloatRange(min=0),
    help="GPUs that Ray gives a replica. Default: as many as --tensor-parallel-size where Ray (for "
    "--print-config, this machine) has any, else none.",
)
@click.option("--cpus-per-replica", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option(
    "--fronts",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Processes that read whose memory a request names and hand it on.",
)
@click.option(
    "--stop-timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="For the answers that a replica is giving when it is to stop.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where Serve's proxies listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--name", default=_APP, show_default=True, help="Of the application in Serve.")
@click.option(
    "--address",
    default=None,
    metavar="ADDRESS",
    help="Of a running Ray, 'auto' for the one of this machine, or 'local' to start one that ends with this "
    "command. Default: $RAY_ADDRESS, else local.",
)
@click.option("--print-config", is_flag=True, help="Print the file for `serve deploy` and start nothing.")
def ray(model: str, vllm_flags: tuple[str, ...], **given: Any) -> None:
    """Run replicas of what `inferscale serve MODEL` serves behind Ray Serve.

    All options of `inferscale serve` and all flags of vLLM can follow. A user's requests go to one replica,
    on which the user's facts are hot. The replicas share the data folder. Needs
    `pip install "inferscale[ray]"`.

    With a Ray that runs already, the replicas stay when this command has ended; with one that it starts
    itself, they end with it (Ctrl-C).
    """
    from inferscale.deployment.settings import (
        ReplicaSettings,
        Scaling,
        memory_settings,
        needed_of,
        serve_config,
    )

    if (url := catalog_url()) is not None:
        os.environ[CATALOG_VARIABLE] = url  # for a Ray of this command; not into what Ray shows
    check_catalog(given["data_dir"] or default_data_dir(), url)
    prepare_engine(verbose=False)
    from inferscale.engine_budget import find_gpus

    connector, server = settings_of(given)
    settings = ReplicaSettings(
        model=str(Path(model).absolute()) if Path(model).is_dir() else model,
        vllm_flags=vllm_flags,
        memory=memory_settings(connector, server),
        needs=needed_of(os.environ),
    )
    settings.check(os.environ)
    has_key = bool(os.environ.get("VLLM_API_KEY") or read_tenants(server.keys_file))
    _check_host(given["host"], has_key=has_key, allowed=server.allow_remote_without_key)
    scaling = Scaling(
        replicas=given["replicas"],
        max_replicas=given["max_replicas"],
        target_ongoing_requests=given["target_ongoing_requests"],
        max_ongoing_requests=given["max_ongoing_requests"],
        gpus=given["gpus_per_replica"] or 0,
        cpus=given["cpus_per_replica"],
        fronts=given["fronts"],
        stop_timeout_s=given["stop_timeout"],
    )
    if given["print_config"]:
        if given["gpus_per_replica"] is None and find_gpus(settings.num_workers):
            scaling = replace(scaling, gpus=settings.num_workers)
        config = serve_config(settings, scaling, name=given["name"], host=given["host"], port=given["port"])
        click.echo(_yaml(config), nl=False)
        return
    _start(settings, scaling, given)


ray.params += [option for option in serve.params if option.name not in _OWN]


def _check_host(host: str, *, has_key: bool, allowed: bool) -> None:
    from inferscale.server.keys import is_loopback

    if not (has_key or allowed or is_loopback(host)):
        raise InvalidConfig(
            f"--host is {host!r} and no API key is set: whoever reaches that address could read, change and "
            "delete all memory. Set VLLM_API_KEY, or leave --host out, or, where something in front checks "
            "who asks, give --allow-remote-without-key."
        )


def _yaml(config: Mapping[str, Any]) -> str:
    try:
        import yaml
    except ModuleNotFoundError as error:  # comes with vLLM and with Ray
        raise EngineMissing('Ray Serve is missing. Install it: pip install "inferscale[ray]"') from error
    return cast(str, yaml.safe_dump(config, sort_keys=False, width=100))


def _start(settings: Any, scaling: Any, given: Mapping[str, Any]) -> None:
    """Deploy; returns when the replicas answer, or at Ctrl-C where Ray is this command's own."""
    # Ray would report to its makers; whoever wants that sets the variable.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = given["address"] or os.environ.get("RAY_ADDRESS") or _LOCAL_ADDRESS
    if address == _LOCAL_ADDRESS:
        check_free(given["host"], given["port"])
    try:
        import ray as ray_package
        from ray import serve as ray_serve

        from inferscale.deployment.ray_serve import scaled_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise EngineMissing('Ray Serve is missing. Install it: pip install "inferscale[ray]"') from error
    say(f"Ray: {'a local one is started' if address == _LOCAL_ADDRESS else address}")
    try:
        ray_package.init(address=address, log_to_driver=address == _LOCAL_ADDRESS)
    except ConnectionError as error:
        raise EngineError(
            f"No Ray answers at {address!r}: {error}. Start one (`ray start --head`), or leave --address out."
        ) from error
    if given["gpus_per_replica"] is None and ray_package.cluster_resources().get("GPU", 0):
        scaling = replace(scaling, gpus=settings.num_workers)
    _check_fits(ray_package, settings, scaling)
    ray_serve.start(http_options={"host": given["host"], "port": given["port"]})
    try:
        ray_serve.run(scaled_app(settings, scaling), name=given["name"], route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"Serve could not start the replicas: {_reason(str(error))}") from error
    _check_reached(given["host"], given["port"])
    say(f"Serving {scaling.replicas} replicas on http://{given['host']}:{given['port']}")
    if address != _LOCAL_ADDRESS:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray's own handler ends this without the `finally`
    try:
        while True:
            time.sleep(3600)
    finally:
        ray_serve.shutdown()
        ray_package.shutdown()


def _check_reached(host: str, port: int) -> None:
    """A Serve that ran already keeps the address that it has."""
    import httpx

    near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    end = time.monotonic() + _PROXY_S
    while time.monotonic() < end:
        try:
            httpx.get(f"http://{near}:{port}/-/healthz", timeout=5, trust_env=False)
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return
    raise EngineError(
        f"The replicas run, but nobody answers at {host}:{port}. Serve was running on this Ray, perhaps with "
        "another address, which it keeps: use that, or end it (`serve shutdown`) and deploy again."
    )


def _reason(text: str) -> str:
    """The last line of a traceback that Serve tells; all of it is in the replica's log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Config|Key|Layout)\b", line)), text
    )


def _check_fits(ray_package: Any, settings: Any, scaling: Any) -> None:
    """Serve would wait for what the cluster does not have."""
    has = ray_package.cluster_resources()
    for name, each in (("GPU", scaling.gpus), ("CPU", scaling.cpus)):
        if each * scaling.replicas > has.get(name, 0):
            raise EngineError(
                f"{scaling.replicas} replicas with {each:g} {name}s each need {each * scaling.replicas:g}, "
                f"and Ray has {has.get(name, 0):g}. Give fewer --replicas, or --{name.lower()}s-per-replica."
            )
    nodes = sum(bool(node["Alive"]) for node in ray_package.nodes())
    is_shared = settings.server.catalog is not None or CATALOG_VARIABLE in settings.needs
    if nodes > 1 and not is_shared:
        raise EngineError(
            f"Ray has {nodes} machines, and the memory's catalog is a file (SQLite), which only one can use. "
            "Run Ray on one machine, or give the replicas a catalog that they share."
        )
