"""The deployments of Ray Serve, and the application that Serve's file names (`settings.APP`).

`Replica` is one engine with the whole application of `inferscale serve`. `Front` reads whose memory a request
names and hands it to Serve's consistent-hash router as the session. Starting, stopping, restarting, scaling,
routing and health are Serve's. The only module that imports Ray.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from inferscale.config import default_runtime_dir
from inferscale.config_checks import from_mapping
from inferscale.deployment.asgi import answer_of
from inferscale.deployment.engine import engine_app
from inferscale.deployment.front import Front as FrontApp
from inferscale.deployment.front import NoReplica, ReplicaLost
from inferscale.deployment.settings import FRONT, REPLICA, ReplicaSettings, Scaling, replica_command
from inferscale.runtime.folder_lock import remove_stale_runtime_dirs
from inferscale.server.http import App, Message
from inferscale.server.keys import Keys
from inferscale.server_config import read_tenants

logger = logging.getLogger(__name__)

_HEADER = b"x-inferscale-replica"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_HEALTH: dict[str, Any] = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
    "path": "/health", "raw_path": b"/health", "query_string": b"", "root_path": "", "headers": [],
    "client": None, "server": None,
}  # fmt: skip


class ReplicaServer:
    """One engine, one runtime folder, one copy of the application."""

    async def __init__(self, settings: Mapping[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        context = serve.get_replica_context()
        self._name = context.replica_tag.encode()
        read = from_mapping(ReplicaSettings, settings, "args")
        command = replica_command(read, context.rank.rank, os.environ, engine_id=str(uuid.uuid4()))
        for note in command.notes:
            logger.info(note)
        os.environ.update(command.environment)
        remove_stale_runtime_dirs(Path(default_runtime_dir("")).parent)
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        assert list(command.arguments[:3]) == start
        self._stack = AsyncExitStack()
        self._app: App = await self._stack.enter_async_context(engine_app(command.arguments[3:]))

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """The answer's ASGI messages as they come. A header says which replica this is."""
        async for messages in answer_of(self._app, scope, body):
            for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (_HEADER, self._name)]
            yield messages

    async def whole_answer(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        return [message async for messages in answer_of(self._app, scope, body) for message in messages]

    async def check_health(self) -> None:
        """Serve starts another replica where this fails."""
        status = (await self.whole_answer(_HEALTH, b""))[0]["status"]
        if status != 200:
            raise RuntimeError(f"the server's own health check answers {status}")

    async def __del__(self) -> None:
        stack = getattr(self, "_stack", None)  # none where the start failed
        if stack is not None:
            await stack.aclose()


class _Handle:
    """`front.Replicas` by Serve's handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def answer(
        self, key: str | None, scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[list[Message]]:
        handle = self._handle.options(stream=True, method_name="answer", session_id=key or "")
        with _errors():
            answer = handle.remote(scope, body)
            try:
                async for messages in answer:
                    yield messages
            finally:
                answer.cancel()  # of no effect once it is whole

    async def answers_of_all(self, scope: dict[str, Any], body: bytes) -> Sequence[list[Message]]:
        with _errors():
            return list(await self._handle.broadcast("whole_answer", scope, body).results_async())


@contextmanager
def _errors() -> Any:
    try:
        yield
    except (RayActorError, WorkerCrashedError) as error:
        raise ReplicaLost from error
    except BackPressureError as error:
        raise NoReplica(is_full=True) from error
    except (DeploymentUnavailableError, ReplicaUnavailableError) as error:
        raise NoReplica(is_full=False) from error
    except RayTaskError as error:
        if isinstance(error.cause, RayActorError):
            raise ReplicaLost from error
        raise


class FrontServer:
    """The application that Serve's proxies hand requests to."""

    def __init__(self, replicas: DeploymentHandle[Any], settings: Mapping[str, Any]) -> None:
        server = from_mapping(ReplicaSettings, settings, "args").server
        keys = Keys((), read_tenants(server.keys_file))
        self._front = FrontApp(_Handle(replicas), keys, use_user_field=server.use_user_field)

    def __serve_build_asgi_app__(self) -> App:
        return self._front


Replica: Any = serve.deployment(
    name=REPLICA,
    num_replicas=Scaling.replicas,
    max_ongoing_requests=Scaling.max_ongoing_requests,
    health_check_period_s=5,
    health_check_timeout_s=30,
    max_constructor_retry_count=3,  # what a setting keeps from starting is said soon
    graceful_shutdown_timeout_s=Scaling.stop_timeout_s,
    request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    ray_actor_options={"num_cpus": Scaling.cpus},
)(ReplicaServer)
Front: Any = serve.deployment(
    name=FRONT,
    max_ongoing_requests=10_000,
    graceful_shutdown_timeout_s=Scaling.stop_timeout_s,
    ray_actor_options={"num_cpus": 0},
)(serve.ingress()(FrontServer))


def app(args: dict[str, Any]) -> Any:
    """The application of Serve's file; args: `ReplicaSettings`. Raises InvalidConfig."""
    settings = from_mapping(ReplicaSettings, args, "args")
    return _bind(settings, {})


def scaled_app(settings: ReplicaSettings, scaling: Scaling) -> Any:
    return _bind(settings, scaling.deployments())


def _bind(settings: ReplicaSettings, options: Mapping[str, dict[str, Any]]) -> Any:
    settings.check(os.environ)
    given = settings.to_json()
    replica = Replica.options(**options.get(REPLICA, {}))
    front = Front.options(**options.get(FRONT, {}))
    return front.bind(replica.bind(given), given)
