"""The self-check through the server's engine client, and what a refusal means for chats and facts."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asgi_server import FakeServer
from stand_ins import FRONT, Connector, Engine

from fakes import open_memory
from inferscale.config import ConnectorConfig
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.plan import WIRE_KEY, from_wire
from inferscale.prompt import PromptBuilder
from inferscale.self_check import Probe, Seen, Verdict
from inferscale.server import chat
from inferscale.server.ask import MemoryAsk
from inferscale.server.engine import EngineSide
from inferscale.server.keys import OPERATOR
from inferscale.server.self_check import check_engine
from inferscale.server.service import MemoryService
from inferscale.server_config import ServerConfig
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

sys.path.append(str(Path(__file__).parents[1] / "self_check"))
from toy_engine import VOCAB, ToyEngine

ANA = Scope("ana")
REFUSED = Verdict("refused", moved=0.5, wrong=0.6, allowed=0.15)


class Client:
    """vLLM's engine client with the small transformer behind it."""

    def __init__(self, toy: ToyEngine) -> None:
        self.toy = toy
        self.salts: list[str] = []

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        plan = from_wire(params["extra_args"]["kv_transfer_params"], b"secret")
        assert plan is not None
        ids = tuple(token % VOCAB for token in prompt["prompt_token_ids"])
        segments = [(s, tuple(token % VOCAB for token in s.token_ids)) for s in plan.segments]
        shown = SimpleNamespace(
            captures=plan.captures,
            order=plan.order,
            segments=[SimpleNamespace(key=s.key, token_ids=own) for s, own in segments],
        )
        allowed = params.get("allowed_token_ids")
        told = self.toy.answer(
            Probe(
                ids,
                shown,  # type: ignore[arg-type]
                params["max_tokens"],
                params.get("logprobs"),
                None if allowed is None else allowed[0] % VOCAB,
            )
        )
        steps = [{t: SimpleNamespace(logprob=value) for t, value in step.items()} for step in told.steps]
        for is_last in (False, True):
            yield SimpleNamespace(
                finished=is_last,
                kv_transfer_params={WIRE_KEY: told.outcome},
                outputs=[SimpleNamespace(logprobs=steps)],
            )


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory:
        yield memory


@pytest.fixture
def prompts() -> PromptBuilder:
    return PromptBuilder(tokenizer_with(CHATML))


def encoder_of(memory: Memory, prompts: PromptBuilder) -> Encoder:
    return Encoder(memory.catalog, prompts, "m", WindowPolicy(2, 9), 4000)


def front_with(**settings: Any) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=4096, dtype="torch.float32", max_logprobs=20, logprobs_mode="raw_logprobs"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    return SimpleNamespace(connector=ConnectorConfig(**settings), vllm_config=config)


def check(toy: ToyEngine, memory: Memory, prompts: PromptBuilder, **settings: Any) -> tuple[Verdict, Client]:
    client = Client(toy)

    async def run() -> Verdict:
        engine = EngineSide(client, "m", b"secret")
        return await check_engine(front_with(**settings), engine, encoder_of(memory, prompts), memory)

    return asyncio.run(run()), client


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(SamplingParams=lambda **settings: settings, __version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", stand_in)  # type: ignore[arg-type]


@pytest.mark.usefixtures("vllm")
def test_the_first_start_asks_the_engine_and_the_next_does_not(
    memory: Memory, prompts: PromptBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inferscale")
    first, client = check(ToyEngine(), memory, prompts)
    assert (first.state, first.is_new) == ("exact", True)
    assert len(set(client.salts)) == len(client.salts)
    assert "KV can be moved in this model" in caplog.text
    second, client = check(ToyEngine(), memory, prompts)
    assert (second.state, second.is_new, client.salts) == ("exact", False, [])
    assert check(ToyEngine(), memory, prompts, pool_dtype="int8")[0].is_new


@pytest.mark.usefixtures("vllm")
def test_a_refusal_is_a_warning(
    memory: Memory, prompts: PromptBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    verdict, _ = check(ToyEngine(turn=lambda delta: 0.0), memory, prompts)
    assert verdict.is_refusal
    [record] = [record for record in caplog.records if record.name.endswith("self_check")]
    assert (record.levelname, record.getMessage()) == ("WARNING", str(verdict))


@pytest.mark.usefixtures("vllm")
def test_an_engine_that_breaks_in_the_second_round_leaves_the_refusal(
    memory: Memory, prompts: PromptBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(ToyEngine):
        def answer(self, probe: Probe) -> Seen:
            if sum(bool(earlier.plan.captures) for earlier in self.log) >= 3 and probe.plan.captures:
                raise RuntimeError("the engine is gone")
            self.log.append(probe)
            return super().answer(probe)

    verdict, _ = check(Breaking(turn=lambda delta: 0.0), memory, prompts)
    assert (verdict.state, verdict.why) == ("refused", "it failed (RuntimeError)")
    assert "the engine is gone" in caplog.text


@pytest.mark.usefixtures("vllm")
def test_a_check_that_fails_keeps_nobody_from_serving(
    memory: Memory, prompts: PromptBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(ToyEngine):
        def answer(self, probe: Probe) -> Seen:
            raise RuntimeError("the engine is gone")

    verdict, _ = check(Gone(), memory, prompts)
    assert (verdict.state, verdict.is_refusal) == ("unknown", False)
    assert "it failed (RuntimeError)" in str(verdict)
    assert "the engine is gone" in caplog.text


def with_service(
    memory: Memory, prompts: PromptBuilder, test: Callable[[MemoryService, Engine], Any]
) -> None:
    """A service whose model was refused."""

    async def run() -> None:
        front = SimpleNamespace(
            **vars(FRONT),
            server=ServerConfig(),
            connector=ConnectorConfig(),
            max_model_len=4096,
            is_on_gpu=False,
            accepts_ids=True,
        )
        engine = Engine()
        service = MemoryService(front, memory, encoder_of(memory, prompts), Connector(), engine)  # type: ignore[arg-type]
        service.residency.stats = dict  # type: ignore[method-assign]
        try:
            service.verdict = REFUSED
            service._encoding.is_off = True
            await test(service, engine)
        finally:
            await service.gate.close()
            await service._threads.close()

    asyncio.run(run())


def test_where_it_is_refused_chats_have_their_facts_as_text_and_say_why(
    memory: Memory, prompts: PromptBuilder
) -> None:
    async def talk(service: MemoryService, engine: Engine) -> None:
        await service.add(OPERATOR, ANA, "My sister Ines lives in Oslo.")
        count = service.metrics.refused_chats._value.get()
        bodies = [{"messages": [{"role": "user", "content": "Where does my sister live?"}]} for _ in range(2)]
        refused = await chat.begin(service, OPERATOR, bodies[0], MemoryAsk(ANA, 5, "inject", None, False))
        asked = await chat.begin(service, OPERATOR, bodies[1], MemoryAsk(ANA, 5, "text", None, False))
        assert bodies[0] == bodies[1], "the prompt is that of text"
        assert "Ines lives in Oslo" in str(bodies[0]["messages"])
        assert refused.plan_id is None
        use = await chat.use_of(service, refused, {"prompt_tokens": 40})
        assert (use["mode"], use["reason"], use["injected_tokens"]) == ("text", REFUSED.refusal, 0)
        assert (await chat.use_of(service, asked, {"prompt_tokens": 40}))["reason"] is None
        assert service.metrics.refused_chats._value.get() == count + 1
        await service.warm(OPERATOR, ANA)
        await service.gate.drained()
        assert engine.ran == []
        assert (await service.stats(OPERATOR, ANA)).num_pending == 0

    with_service(memory, prompts, talk)


def test_an_operator_cannot_switch_on_what_is_refused(memory: Memory, prompts: PromptBuilder) -> None:
    async def switch(service: MemoryService, engine: Engine) -> None:
        service.injects = True
        assert not service.injects
        assert (await service.stats(OPERATOR, Scope())).verdict is REFUSED
        service.verdict = Verdict("exact")
        assert service.injects

    with_service(memory, prompts, switch)


def test_the_api_says_why_injection_stays_off(serve: Callable[[], FakeServer]) -> None:
    server = serve()
    server.service.verdict = REFUSED
    answer = server.ask("PUT", "/v1/memories/injection", {"enabled": True}).json
    assert answer["reason"] == REFUSED.refusal
    assert server.ask("PUT", "/v1/memories/injection", {"enabled": False}).json["reason"] is None
    stats = server.ask("GET", "/v1/memories/stats").json
    assert stats["self_check"] == {"state": "refused", "detail": str(REFUSED)}
