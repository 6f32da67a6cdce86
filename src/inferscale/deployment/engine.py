"""vLLM's API application in this process, without a socket: what its own server builds, in the same steps.

Followed in vLLM 0.32: `entrypoints/launchers/api_server/entry.py`. 0.25 has the same functions elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from inferscale.deployment.asgi import running
from inferscale.errors import EngineError
from inferscale.server.http import App

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_FAILED = 1


@asynccontextmanager
async def engine_app(flags: Sequence[str]) -> AsyncIterator[App]:
    """The application with its engine, started. flags: of vLLM's API server.

    Raises EngineError where the application does not start, and what vLLM raises.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own start does
    entry, args = _entry(), _read(flags)
    _load_plugins(args)
    async with entry.build_async_engine_client(args) as client:
        tasks = await client.get_supported_tasks()
        app = entry.build_app(args, tasks, client.model_config)
        await entry.init_app_state(client, app.state, args, tasks)
        async with running(app):
            watch = asyncio.create_task(_end_with_engine(client))
            try:
                yield app
            finally:
                watch.cancel()


def _read(flags: Sequence[str]) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:
        from vllm.entrypoints.openai import cli_args
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    try:
        args = parser.parse_args(list(flags))
    except SystemExit as error:  # it has said why
        raise EngineError("vLLM does not take its flags; the replica's log says which.") from error
    cli_args.validate_parsed_serve_args(args)
    return args


def _load_plugins(args: Any) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if getattr(args, "tool_parser_plugin", None):
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if getattr(args, "reasoning_parser_plugin", None):
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)


def _entry() -> Any:
    """The module that has `build_app`, `build_async_engine_client` and `init_app_state`."""
    try:
        from vllm.entrypoints.launchers import api_server
        from vllm.entrypoints.launchers.api_server import entry
    except ImportError:
        from vllm.entrypoints.openai import api_server as entry
    else:
        assert api_server is not None
    return entry


async def _end_with_engine(client: Any) -> None:
    """As vLLM's server does, end this process when its engine has: Serve then starts another at once."""
    while True:
        await asyncio.sleep(_WATCH_S)
        if getattr(client, "errored", False):
            logger.error("The engine has ended, and this replica ends with it")
            os._exit(_FAILED)
