"""What of a server's memory belongs to one model: the one that is served, and each LoRA adapter on it.

Facts are the same for all of them, KV is not: it is encoded under the adapter that a chat names as its model,
when the first such chat misses it. Passes of all sides run behind one gate.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from inferscale.adapters import model_with_adapter
from inferscale.chat_plan import ChatPlanner
from inferscale.encoder import Encoder
from inferscale.memory import Memory
from inferscale.runtime.residency import ResidencyClient
from inferscale.server.encoding import Encoding
from inferscale.server.engine import EngineSide, Front
from inferscale.server.metrics import Metrics
from inferscale.server.threads import Threads
from inferscale.tail import Tail

logger = logging.getLogger(__name__)


class Side(NamedTuple):
    """engine: sends requests under the side's model. planner: of its chats. encoding: of its KV."""

    engine: EngineSide
    encoder: Encoder
    encoding: Encoding
    planner: ChatPlanner


class Sides:
    """Methods are to be called in one event loop.

    base: of the model that is served, as it is without an adapter.
    """

    def __init__(
        self,
        front: Front,
        memory: Memory,
        encoder: Encoder,
        residency: ResidencyClient,
        engine: EngineSide,
        threads: Threads,
        metrics: Metrics,
    ) -> None:
        self._front = front
        self._memory = memory
        self._residency = residency
        self._threads = threads
        self._metrics = metrics
        self._of_adapters: dict[str, Side] = {}
        encoding = Encoding(front, encoder, residency, engine, threads, metrics)
        self.base = self._side(engine, encoder, encoding)

    def _side(self, engine: EngineSide, encoder: Encoder, encoding: Encoding) -> Side:
        server = self._front.server
        planner = ChatPlanner(
            self._memory,
            encoder,
            self._front.max_model_len,
            encoding.ask_resident,
            keeps_turns=True,
            tail=Tail.parse(server.tail, "server.tail"),
            order=server.order,
        )
        return Side(engine, encoder, encoding, planner)

    async def of(self, name: object) -> Side:
        """Of chats that name this model. Where an adapter cannot be told from others, that of the model
        below: the connector says so, and prefills the facts."""
        adapter = self._front.adapter(name)
        if adapter is None:
            return self.base
        base = self.base
        known = (base.engine.model, adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        model = None
        if not getattr(adapter, "load_inplace", False):
            model = await self._threads.run(model_with_adapter, *known)
        if model is None or base is not self.base:
            return self.base
        side = self._of_adapters.get(model)
        if side is None:
            logger.info("Facts are encoded under the LoRA adapter %s, as its chats need them", name)
            engine = base.engine.under(adapter, model)
            encoder = base.encoder.for_model(model)
            side = self._side(engine, encoder, base.encoding.for_adapter(encoder, engine))
            self._of_adapters[model] = side
        return side

    def renew(self, model: str) -> None:
        """The engine has other weights, under this fingerprint: no KV from before counts any more. Passes
        that wait are of the model before, and the connector refuses them."""
        base = self.base
        encoder, engine = base.encoder.for_model(model), base.engine.under(None, model)
        self._of_adapters.clear()
        self.base = self._side(engine, encoder, base.encoding.renewed(encoder, engine))
