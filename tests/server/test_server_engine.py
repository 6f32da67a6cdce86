"""What is read from vLLM's API process, and what is asked of its engine; a stand-in for both."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.errors import EngineError, InvalidConfig
from inferscale.plan import WIRE_KEY, Order, Plan, Segment, from_wire, salt_of
from inferscale.server import engine
from inferscale.server.engine import EngineSide, front_of, tool_dicts

SECRET = b"s" * 32


def state(
    server: Any = None, connector: str = "InferScaleConnector", device: str = "cpu", **args: Any
) -> Any:
    transfer = SimpleNamespace(
        kv_connector=connector, kv_connector_extra_config={"server": server or {}}, engine_id="engine-1"
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(data_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=2048),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(block_size=64, enable_prefix_caching=True),
    )
    return SimpleNamespace(vllm_config=config, engine_client="client", args=SimpleNamespace(**args))


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_accepts_ids", lambda: True)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_what_is_read() -> None:
    front = front_of(state({"top_k": 7, "use_user_field": True}, device="cuda"))
    assert (front.client, front.max_model_len, front.api_keys) == ("client", 2048, ())
    assert (front.server.top_k, front.server.use_user_field, front.is_on_gpu, front.accepts_ids) == (
        7,
        True,
        True,
        True,
    )
    assert front.runtime_dir.name == front_of(state()).runtime_dir.name, "by the engine's id"
    assert not front_of(state()).is_on_gpu


def test_the_key_file_of_the_connector_is_that_of_the_memory() -> None:
    given = state({"data_dir": "/d"})
    given.vllm_config.kv_transfer_config.kv_connector_extra_config["encryption_key_file"] = "/k"
    assert front_of(given).server.memory.encryption_key_file == "/k"
    assert front_of(state({"encryption_key_file": "/other"})).server.encryption_key_file == "/other"
    assert front_of(state()).server.encryption_key_file is None


def test_data_parallel_engines_are_refused() -> None:
    given = state()
    given.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(EngineError, match="one server for each replica"):
        front_of(given)


def test_adapters_are_those_that_vllm_serves_now() -> None:
    given = state()
    assert front_of(given).adapter("x") is None
    given.openai_serving_models = SimpleNamespace(lora_requests={"x": "request"})
    front = front_of(given)
    assert front.adapter("x") == "request"
    given.openai_serving_models.lora_requests["y"] = "later"
    assert front.adapter("y") == "later"
    for name in ("z", None, 5, ["x"]):
        assert front.adapter(name) is None


@pytest.mark.parametrize(
    ("given", "environment", "keys"),
    [
        (None, None, ()),
        (["a", "b"], None, ("a", "b")),
        ("a", "b", ("a",)),
        (["a", ""], "b", ("a",)),
        ([""], "b", ()),
        ([], "b", ("b",)),
        (None, "b", ("b",)),
        (None, "", ()),
    ],
)
def test_keys_are_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch, given: Any, environment: str | None, keys: tuple[str, ...]
) -> None:
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    assert front_of(state(api_key=given)).api_keys == keys


def test_origins_are_those_of_vllm() -> None:
    assert front_of(state()).cors["allow_origins"] == ()
    given = {"allowed_origins": ["https://a"], "allow_credentials": True, "allowed_methods": ["*"]}
    assert front_of(state(**given, allowed_headers=["x"])).cors == {
        "allow_origins": ["https://a"],
        "allow_credentials": True,
        "allow_methods": ["*"],
        "allow_headers": ["x"],
    }


def test_another_connector_or_none() -> None:
    with pytest.raises(
        EngineError, match="needs the KV connector 'InferScaleConnector', but vLLM runs 'Other'"
    ):
        front_of(state(connector="Other"))
    none = state()
    none.vllm_config.kv_transfer_config = None
    with pytest.raises(EngineError, match="but vLLM runs none"):
        front_of(none)


@pytest.mark.parametrize("server", [{"top_k": -1}, {"unknown": 1}, {"use_user_field": "yes"}])
def test_settings_that_are_refused(server: Any) -> None:
    with pytest.raises(InvalidConfig):
        front_of(state(server))


# requests ---------------------------------------------------------------------------------------


class Client:
    """vLLM's engine client: answers with outcomes, one a request."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.requests: list[tuple[Any, Any, str]] = []

    async def generate(self, prompt: Any, params: Any, name: str) -> Any:
        self.requests.append((prompt, params, name))
        outcome = self.outcomes.pop(0)
        yield SimpleNamespace(finished=False, kv_transfer_params={WIRE_KEY: "not yet"})
        yield SimpleNamespace(finished=True, kv_transfer_params=outcome)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[EngineSide, Client]]:
    params = SimpleNamespace(SamplingParams=lambda **settings: SimpleNamespace(**settings))
    monkeypatch.setitem(sys.modules, "vllm", params)  # type: ignore[arg-type]

    def make(*outcomes: Any) -> tuple[EngineSide, Client]:
        client = Client(*outcomes)
        return EngineSide(client, "model", SECRET), client

    return make


def test_a_request_carries_its_plan(side: Callable[..., tuple[EngineSide, Client]]) -> None:
    one, client = side({WIRE_KEY: {"captured": 1}, "other": 2}, {WIRE_KEY: {}})
    plan = Plan("model", "scope", segments=(Segment("k", (5, 6)),))
    assert asyncio.run(one.run((5, 6, 7), plan)) == {"captured": 1}
    assert asyncio.run(one.run((5, 6, 7), plan)) == {}
    (prompt, params, name), (_, _, other) = client.requests
    assert prompt == {"prompt_token_ids": [5, 6, 7], "cache_salt": salt_of(plan, SECRET)}
    assert from_wire(params.extra_args["kv_transfer_params"], SECRET, (5, 6, 7)) == plan
    assert (params.max_tokens, params.detokenize) == (1, False)
    assert name != other
    assert EngineSide(client, "model", SECRET)._start != one._start, "of another API process"


@pytest.mark.parametrize("outcome", [None, {}, {"other": 1}])
def test_an_engine_that_gives_no_account(
    side: Callable[..., tuple[EngineSide, Client]], outcome: Any
) -> None:
    one, _ = side(outcome)
    with pytest.raises(EngineError, match="gave no account"):
        asyncio.run(one.run((1,), Plan("model", "scope")))


def test_orders(side: Callable[..., tuple[EngineSide, Client]]) -> None:
    one, client = side({WIRE_KEY: {"answer": {"pages": 3}}}, {WIRE_KEY: {"rejected": "old"}})
    assert asyncio.run(one.order(Order("stats"))) == {"pages": 3}
    plan = from_wire(client.requests[0][1].extra_args["kv_transfer_params"], SECRET)
    assert plan is not None
    assert plan.order == Order("stats")
    with pytest.raises(EngineError, match=r"did not carry out the order 'forget'.*old"):
        asyncio.run(one.order(Order("forget", ("k",))))


def test_tools_without_vllm(side: Callable[..., tuple[EngineSide, Client]]) -> None:
    side()
    for tools in ([{"type": "function"}], "strange", None):
        assert tool_dicts(tools) is tools
