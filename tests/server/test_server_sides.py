"""Which model's KV a chat gets: that of the adapter it names, encoded behind the same gate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import FRONT, Connector

from fakes import open_memory
from inferscale.config import ConnectorConfig
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.plan import OTHER_MODEL, WIRE_KEY, from_wire
from inferscale.prompt import PromptBuilder
from inferscale.server import chat
from inferscale.server.ask import MemoryAsk
from inferscale.server.engine import EngineSide
from inferscale.server.keys import OPERATOR
from inferscale.server.service import MemoryService
from inferscale.server_config import ServerConfig
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

ANA = Scope("ana")
SECRET = b"s" * 32
QUESTION = [{"role": "user", "content": "Where does my sister live?"}]


class Client:
    """vLLM's engine client: notes each request's plan and adapter, and captures all."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any = None) -> Any:
        plan = from_wire(params.extra_args["kv_transfer_params"], SECRET, prompt["prompt_token_ids"])
        assert plan is not None
        self.seen.append((plan, lora_request))
        told: dict[str, Any] = {"captured": len(plan.captures)}
        if plan.order is not None:
            told["answer"] = {}
        yield SimpleNamespace(finished=True, kv_transfer_params={WIRE_KEY: told})


class Asked(Connector):
    """model: what the connector calls its model. told: its account of any plan."""

    model_now = "m"
    told: dict[str, Any] | None = None

    def model(self) -> str:
        return self.model_now

    def outcome(self, plan_id: str) -> dict[str, Any] | None:
        return self.told

    def close(self) -> None: ...


class Parts(SimpleNamespace):
    service: MemoryService
    client: Client
    connector: Asked
    adapters: dict[str, Any]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path / "memory") as memory:
        memory.add(["My sister Ines lives in Oslo.", "My dog is called Rex."], user_id="ana")
        yield memory


@pytest.fixture
def with_service(memory: Memory, tmp_path: Path) -> Callable[[Callable[[Parts], Awaitable[None]]], None]:
    def run(test: Callable[[Parts], Awaitable[None]]) -> None:
        asyncio.run(served(test))

    async def served(test: Callable[[Parts], Awaitable[None]]) -> None:
        adapters = {name: adapter(tmp_path, name, number) for number, name in enumerate(("one", "two"), 1)}
        settings = {
            **vars(FRONT),
            "adapter": adapters.get,
            "server": ServerConfig(tail=0),
            "connector": ConnectorConfig(),
            "max_model_len": 4096,
            "is_on_gpu": False,
            "accepts_ids": True,
        }
        client, connector = Client(), Asked()
        prompts = PromptBuilder(tokenizer_with(CHATML))
        encoder = Encoder(memory.catalog, prompts, "m", WindowPolicy(2, 9, 0), 4000)
        engine = EngineSide(client, "m", SECRET)
        front: Any = SimpleNamespace(**settings)
        service = MemoryService(front, memory, encoder, connector, engine)  # type: ignore[arg-type]
        try:
            await test(Parts(service=service, client=client, connector=connector, adapters=adapters))
        finally:
            await service.gate.close()
            await service._threads.close()

    return run


def adapter(folder: Path, name: str, number: int) -> Any:
    path = folder / name
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(name.encode())
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


async def ask(parts: Parts, model: str, **fields: Any) -> tuple[chat.Turn, dict[str, Any]]:
    """A chat on its way to vLLM, once all that it asked for is encoded."""
    body: dict[str, Any] = {"model": model, "messages": QUESTION, **fields}
    turn = await chat.begin(parts.service, OPERATOR, body, MemoryAsk(ANA, 5, "inject", None, False))
    await parts.service.gate.drained()
    return turn, body


def in_the_pool(parts: Parts) -> None:
    """Everything that was captured is resident from now on."""
    parts.connector.there = {span.key for plan, _ in parts.client.seen for span in plan.captures}


def plan_of(body: dict[str, Any]) -> Any:
    return from_wire(body["kv_transfer_params"], SECRET)


def test_facts_are_encoded_under_the_adapter_that_a_chat_names(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        models = {}
        for name in ("base", "one", "two"):
            parts.client.seen.clear()
            await ask(parts, name)
            assert all(lora is parts.adapters.get(name) for _, lora in parts.client.seen)
            assert parts.client.seen
            in_the_pool(parts)
            turn, body = await ask(parts, name)
            plan = plan_of(body)
            models[name] = plan.model
            assert turn.plan_id == plan.id
            facts = {segment.key for segment in plan.segments if segment.kind == "fact"}
            assert len(facts) == 2
            assert facts <= parts.connector.there
        assert models["base"] == "m"
        assert len(set(models.values())) == 3
        again = await parts.service.sides.of("one")
        assert again is await parts.service.sides.of("one")

    with_service(test)


def test_a_deletion_takes_the_kv_of_all_adapters(with_service: Any, memory: Memory) -> None:
    async def test(parts: Parts) -> None:
        for name in ("base", "one", "two"):
            await ask(parts, name)
        keys = {span.key for plan, _ in parts.client.seen for span in plan.captures if span.start}
        assert len(keys) == 6
        await parts.service.delete_all(OPERATOR, ANA)
        orders = [(plan, lora) for plan, lora in parts.client.seen if plan.order is not None]
        assert {key for plan, _ in orders for key in plan.order.keys} >= keys
        assert all(lora is None for _, lora in orders), "orders need no adapter"

    with_service(test)


def test_turns_of_an_adapter_are_forgotten_too_and_its_anchor_is_no_stray(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        side = await parts.service.sides.of("one")
        side.encoding._turns.forget = lambda scopes: ["a turn"] if ANA in list(scopes) else []  # type: ignore[method-assign]
        assert "a turn" in parts.service._encoding.forget_turns(scope for scope in [ANA])
        parts.connector.on_disk = [side.encoder.anchor_key, "stray"]
        assert parts.service._encoding.strays() == ["stray"]

    with_service(test)


def test_what_cannot_be_told_apart_gets_the_plan_of_the_model_below(with_service: Any) -> None:
    """The connector refuses it there, and says why."""

    async def test(parts: Parts) -> None:
        parts.adapters["one"].load_inplace = True
        parts.adapters["two"].lora_path = "/nowhere"
        for name in ("one", "two", "unknown", None, 7):
            assert await parts.service.sides.of(name) is parts.service.sides.base

    with_service(test)


def test_after_a_reload_of_weights_everything_is_encoded_anew(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        await ask(parts, "base")
        await ask(parts, "one")
        in_the_pool(parts)
        old = await parts.service.sides.of("one")
        turn, _ = await ask(parts, "base")
        parts.connector.model_now = "renewed"
        parts.connector.told = {"reason": OTHER_MODEL, "prompt_tokens": 9, "injected_tokens": 0}
        use = await chat.use_of(parts.service, turn, None)
        assert use["reason"] == OTHER_MODEL
        parts.connector.told = None
        parts.client.seen.clear()
        await ask(parts, "base")
        assert {plan.model for plan, _ in parts.client.seen} == {"renewed"}
        in_the_pool(parts)
        _, body = await ask(parts, "base")
        assert plan_of(body).model == "renewed"
        assert (await parts.service.sides.of("one")).engine.model.startswith("renewed+lora ")
        assert await parts.service.sides.of("one") is not old
        assert await parts.service.is_healthy()
        assert parts.service._prefetch.encoder.model == "renewed"
        assert parts.service._forgetting.encoding is parts.service.sides.base.encoding

    with_service(test)


def test_health_notices_a_reload_of_weights(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        parts.connector.model_now = "renewed"
        assert await parts.service.is_healthy()
        assert parts.service.sides.base.encoder.model == "renewed"

    with_service(test)


def test_beam_search_has_its_facts_as_text_and_says_why(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        await ask(parts, "base")
        in_the_pool(parts)
        turn, body = await ask(parts, "base", use_beam_search=True)
        assert turn.plan_id is None
        assert "Ines lives in Oslo" in str(body["messages"])
        assert "beam search" in (await chat.use_of(parts.service, turn, None))["reason"]

    with_service(test)


def test_a_plan_without_an_account_says_so(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        await ask(parts, "base")
        in_the_pool(parts)
        turn, _ = await ask(parts, "base")
        use = await chat.use_of(parts.service, turn, {"prompt_tokens": 50})
        assert (use["injected_tokens"], use["reason"]) == (0, chat._NO_ACCOUNT)

    with_service(test)


def test_messages_with_an_image_have_their_facts_as_text_beside_it(with_service: Any) -> None:
    async def test(parts: Parts) -> None:
        await ask(parts, "base")
        in_the_pool(parts)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        messages = [
            {"role": "user", "content": [image, {"type": "text", "text": "Does my sister live here?"}]}
        ]
        turn, body = await ask(parts, "base", messages=messages)
        assert turn.plan_id is None
        assert "Ines lives in Oslo" in str(body["messages"])
        assert body["messages"][-1]["content"] == messages[0]["content"], "nothing of the message is lost"
        assert "kv_transfer_params" not in body, "vLLM renders what it alone can"
        assert "images" in (await chat.use_of(parts.service, turn, None))["reason"]

    with_service(test)
