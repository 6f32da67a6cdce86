"""The service deletes what has expired before a chat or search, and the engine forgets its KV."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import Engine

from fakes import open_memory
from inferscale.config import ConnectorConfig
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.prompt import PromptBuilder
from inferscale.server.keys import OPERATOR
from inferscale.server.service import MemoryService
from inferscale.server_config import ServerConfig
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with


def test_what_expired_is_deleted_and_forgotten_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    prompts = PromptBuilder(tokenizer_with(CHATML))
    engine = Engine()
    nothing = SimpleNamespace(resident=lambda keys: [False] * len(keys), close=lambda: None)
    front = SimpleNamespace(
        server=ServerConfig(),
        connector=ConnectorConfig(),
        max_model_len=4096,
        block_size=16,
        is_on_gpu=False,
        caches_prefixes=False,
        adapter=lambda name: None,
    )

    async def talk() -> None:
        service = MemoryService(front, memory, encoder, nothing, engine)  # type: ignore[arg-type]
        draft = prompts.draft([{"role": "user", "content": "Where is Ana?"}])
        for find in (
            lambda: service.search(OPERATOR, Scope("ana"), "rome", 5),
            lambda: service.prepare(draft, OPERATOR, Scope("ana"), 5, "inject", None, 16),
        ):
            memory.add("Ana is in Rome.", user_id="ana", expires_at=time.time() + 9)
            [goes] = memory.catalog.unencoded(encoder.encodings_of, Scope("ana"))[-1:]
            key = encoder.new_jobs(Scope("ana"))[-1].captures[-1].key
            await find()
            assert engine.orders == []
            monkeypatch.setattr(time, "time", lambda: now + 100)
            await find()
            [order] = engine.orders
            assert key in order.keys
            assert order.epochs
            await find()
            assert len(engine.orders) == 1
            engine.orders.clear()
            assert memory.catalog.facts_by_ids([goes.id]) == []
            monkeypatch.setattr(time, "time", lambda: now)
        await service.gate.close()
        await service._threads.close()

    with open_memory(tmp_path) as memory:
        memory.add("Ana likes tea.", user_id="ana")
        encoder = Encoder(memory.catalog, prompts, "m", WindowPolicy(2, 3), 4000)
        asyncio.run(talk())
