"""What stands for the engine and its connector where parts of the service are tested by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from inferscale.errors import EngineError
from inferscale.plan import Order, Span

FRONT: Any = SimpleNamespace(block_size=16, caches_prefixes=True, adapter=lambda name: None)


class Engine:
    """Notes orders and passes, by their number of tokens. is_gone: it answers nothing any more."""

    model = "m"
    secret = b"secret"

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.ran: list[int] = []
        self.captured: list[tuple[Span, ...]] = []
        self.is_gone = False
        self.loses = 0

    async def order(self, order: Order) -> dict[str, Any]:
        if self.is_gone:
            raise EngineError("gone")
        self.orders.append(order)
        return {}

    async def run(self, token_ids: Sequence[int], plan: Any) -> dict[str, Any]:
        self.ran.append(len(token_ids))
        self.captured.append(plan.captures)
        return {"captured": len(plan.captures) - self.loses}


class Connector:
    """`ResidencyClient` with a pool that holds `there`, `loadable` below it, and files of `on_disk`.

    free_pages: of 16 tokens each.
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.loadable: set[str] = set()
        self.on_disk: list[str] = []
        self.free_pages = 10_000
        self.is_gone = False

    def stats(self) -> dict[str, int]:
        if self.is_gone:
            raise EngineError("gone")
        return {"free_pages": self.free_pages, "page_size_tokens": 16}

    def resident(self, keys: Sequence[str]) -> list[bool]:
        if self.is_gone:
            raise EngineError("gone")
        return [key in self.there for key in keys]

    def below(self, keys: Sequence[str]) -> list[bool]:
        if self.is_gone:
            raise EngineError("gone")
        return [key in self.loadable for key in keys]

    def keys(self, tier: str) -> list[str]:
        if self.is_gone:
            raise EngineError("gone")
        return self.on_disk
