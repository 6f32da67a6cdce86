"""`inferscale mcp`: the memory API of a server as tools for MCP hosts."""

from __future__ import annotations

import click

from inferscale.cli.options import read_api_key, scope_options
from inferscale.errors import InferScaleError
from inferscale.facts import ScopeIds
from inferscale.turns import read_scope

_KEY_VARIABLE = "INFERSCALE_API_KEY"


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="The server with the memory API."
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    help=f"Environment variable that holds the API key. Default: {_KEY_VARIABLE}, if it is set.",
)
@scope_options
def mcp(url: str, api_key_env: str | None, ids: ScopeIds) -> None:
    """Give an MCP host the memory of a user, agent or run, over standard input and output.

    The tools are add_memory, search_memory, list_memories and delete_memory. Whose memory it is, is
    given here and cannot be chosen by the model.
    """
    scope = read_scope(**ids)
    try:
        from inferscale.mcp_server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "mcp":
            raise
        raise InferScaleError('The MCP SDK is missing. Install it: pip install "inferscale[mcp]"') from error
    from inferscale.client import AsyncClient

    serve(AsyncClient(url, read_api_key(api_key_env, _KEY_VARIABLE)), scope)
