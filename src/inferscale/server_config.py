"""Settings of the server's memory, in `kv_connector_extra_config["server"]`; whose keys belong to whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferscale.catalog_url import check_public_url
from inferscale.config import (
    AUTO,
    DEFAULT_ORDER,
    DEFAULT_TAIL,
    MAX_NEIGHBOURS,
    EncodingConfig,
    MemoryConfig,
    RetrievalConfig,
    check_mixed,
)
from inferscale.config_checks import check_int, from_mapping
from inferscale.errors import InvalidConfig, InvalidInput
from inferscale.fact_order import FactOrder, parse_order
from inferscale.tail import Tail


@dataclass(frozen=True)
class ServerConfig:
    """`kv_connector_extra_config["server"]`: the memory of `MemoryMiddleware`. All values are plain JSON."""

    data_dir: str | None = None
    """Folder of the memory; default as in `MemoryConfig`."""
    embedder: str | None = None
    embedder_device: str = AUTO
    window: int = 20
    stride: int = 20
    mixed: int = 60
    neighbours: int = 1
    """As in `EncodingConfig`."""
    top_k: int = 50
    """Facts of a chat that does not say how many."""
    tail: int | str = DEFAULT_TAIL
    """Best facts that are recomputed instead of injected (`tail`), of a chat that does not say how many, and
    in which nothing was said before the question."""
    order: FactOrder = DEFAULT_ORDER
    """Of the facts in the prompt (`fact_order`), of a chat that does not name one."""
    use_user_field: bool = False
    """Chats without a `memory` object use the memory of their `user` field."""
    keys_file: str | None = None
    """JSON file that binds API keys to tenants (`server.keys`)."""
    allow_remote_without_key: bool = False
    """Answer memory routes on other addresses than this machine's own although no API key is set."""
    share_agents: bool = False
    """Read without a user: an agent or run that is named alone shows what any user told it. Without this, a
    chat, a search or a list names its user."""
    min_injected_tokens: int | None = None
    """Memory of fewer tokens is prefilled: that is as fast. None: 128 on a GPU, whose prefill of few tokens
    takes as long as that of one, and 0 elsewhere."""
    max_facts_per_user: int | None = None
    max_bytes_per_user: int | None = None
    """As in `MemoryConfig`, of each user of each tenant."""
    encryption_key_file: str | None = None
    """As in `MemoryConfig`."""
    retrieval: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `RetrievalConfig`."""
    reranker: str | None = None
    """As in `MemoryConfig`."""
    catalog: str | None = None
    """As in `MemoryConfig`, without a password: vLLM logs this setting."""

    def __post_init__(self) -> None:
        if self.catalog is not None:
            check_public_url(self.catalog, "server.catalog")
        if not isinstance(self.retrieval, Mapping):
            raise InvalidConfig(f"server.retrieval is {self.retrieval!r}; allowed is an object.")
        from_mapping(RetrievalConfig, self.retrieval, "server.retrieval")
        check_int(self.window, "server.window", 0)
        check_int(self.stride, "server.stride", 1)
        check_mixed(self.mixed, "server.mixed")
        check_int(self.neighbours, "server.neighbours", 1, MAX_NEIGHBOURS)
        check_int(self.top_k, "server.top_k", 0)
        try:
            Tail.parse(self.tail, "server.tail")
            parse_order(self.order, "server.order")
        except InvalidInput as error:
            raise InvalidConfig(str(error)) from error
        for name in ("data_dir", "embedder", "keys_file", "reranker", "encryption_key_file"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidConfig(f"server.{name} is {value!r}; allowed are texts. Leave it out for none.")
        if self.min_injected_tokens is not None:
            check_int(self.min_injected_tokens, "server.min_injected_tokens", 0)
        for name in ("max_facts_per_user", "max_bytes_per_user"):
            if getattr(self, name) is not None:
                check_int(getattr(self, name), f"server.{name}", 1)
        for name in ("use_user_field", "allow_remote_without_key", "share_agents"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"server.{name} is {getattr(self, name)!r}; allowed are true and false.")

    @property
    def memory(self) -> MemoryConfig:
        folder = {} if self.data_dir is None else {"data_dir": self.data_dir}
        return MemoryConfig(
            embedder=self.embedder,
            embedder_device=self.embedder_device,
            max_facts_per_user=self.max_facts_per_user,
            max_bytes_per_user=self.max_bytes_per_user,
            retrieval=from_mapping(RetrievalConfig, self.retrieval, "server.retrieval"),
            reranker=self.reranker,
            encryption_key_file=self.encryption_key_file,
            catalog=self.catalog,
            **folder,
        )

    @property
    def encoding(self) -> EncodingConfig:
        return EncodingConfig(self.window, self.stride, self.mixed, self.neighbours)


def read_tenants(path: str | None) -> dict[str, str]:
    """A JSON object, API key → tenant. Raises InvalidConfig."""
    if path is None:
        return {}
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"keys_file {path} cannot be read: {error}") from error
    if not isinstance(read, dict) or not all(isinstance(value, str) and key for key, value in read.items()):
        raise InvalidConfig(f'keys_file {path} must hold one JSON object: {{"API key": "tenant", …}}.')
    return read
