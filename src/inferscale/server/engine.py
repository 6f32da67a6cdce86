"""The one place that knows vLLM's API process: its state, its engine client, its way of rendering.

Read from `app.state` (vllm/entrypoints/openai/api_server.py, `init_app_state`), the same in 0.25 and 0.32.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.config import ConnectorConfig, connector_config
from inferscale.config_checks import from_mapping
from inferscale.errors import EngineError, InvalidInput
from inferscale.plan import WIRE_KEY, Order, Plan, salt_of, to_wire
from inferscale.prompt import ContentFormat, PromptBuilder
from inferscale.self_check import Probe, Seen
from inferscale.self_check.subject import seen_of
from inferscale.server_config import ServerConfig
from inferscale.tokenization import load_tokenizer

CONNECTOR = "InferScaleConnector"


@dataclass(frozen=True)
class Front:
    """What the server's memory knows of the engine it belongs to.

    accepts_ids: whether a chat's exact token ids can be handed over (vLLM 0.32 does); else vLLM renders
    the messages, and the connector finds the segments in its ids.
    """

    client: Any
    connector: ConnectorConfig
    server: ServerConfig
    max_model_len: int
    api_keys: tuple[str, ...]
    accepts_ids: bool
    is_on_gpu: bool
    block_size: int
    caches_prefixes: bool
    model_config: Any
    args: Any
    vllm_config: Any = None
    models: Any = None
    """vLLM's book of what it serves."""

    def adapter(self, name: object) -> Any:
        """vLLM's request for the LoRA adapter that is served under this name; None where there is none."""
        known = getattr(self.models, "lora_requests", None)
        return known.get(name) if isinstance(known, dict) and isinstance(name, str) else None

    @property
    def cors(self) -> dict[str, Any]:
        """vLLM's settings of CORS, as Starlette's middleware names them."""
        return {
            "allow_origins": getattr(self.args, "allowed_origins", ()),
            "allow_credentials": getattr(self.args, "allow_credentials", False),
            "allow_methods": getattr(self.args, "allowed_methods", ("GET",)),
            "allow_headers": getattr(self.args, "allowed_headers", ()),
        }

    @property
    def runtime_dir(self) -> Path:
        assert self.connector.runtime_dir is not None
        return Path(self.connector.runtime_dir)


def front_of(state: Any) -> Front:
    """Read vLLM's state. Raises EngineError where it has no connector of ours, and InvalidConfig."""
    config, args = state.vllm_config, state.args
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        given = "none" if transfer is None else repr(transfer.kv_connector)
        raise EngineError(
            f"MemoryMiddleware needs the KV connector {CONNECTOR!r}, but vLLM runs {given}. Start it with "
            "`inferscale serve`, or with the --kv-transfer-config of the README."
        )
    if config.parallel_config.data_parallel_size > 1:  # engines of dense models do not know it
        raise EngineError(
            f"vLLM runs {config.parallel_config.data_parallel_size} data-parallel engines, and the memory's "
            "KV would be in one of them. Start it without --data-parallel-size: one server for each replica."
        )
    connector = connector_config(transfer.kv_connector_extra_config, str(transfer.engine_id))
    settings = {"encryption_key_file": connector.encryption_key_file, **connector.server}
    server = from_mapping(ServerConfig, settings, 'kv_connector_extra_config["server"]')
    given_keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    keys = [given_keys] if isinstance(given_keys, str) else given_keys
    return Front(
        client=state.engine_client,
        connector=connector,
        server=server,
        max_model_len=int(config.model_config.max_model_len),
        api_keys=tuple(key for key in keys if key),
        accepts_ids=_accepts_ids(),
        block_size=int(config.cache_config.block_size or 16),
        caches_prefixes=bool(config.cache_config.enable_prefix_caching),
        is_on_gpu=str(getattr(config.device_config, "device_type", "")) != "cpu",
        model_config=config.model_config,
        args=args,
        vllm_config=config,
        models=getattr(state, "openai_serving_models", None),
    )


def _accepts_ids() -> bool:
    """Whether chats take `kv_transfer_params["prompt_token_ids"]`."""
    try:
        from vllm.renderers import online_renderer
    except ImportError:
        return False
    return hasattr(online_renderer, "_reused_prompt_token_ids")


def prompt_builder(front: Front) -> PromptBuilder:
    """For the model as vLLM serves it. Raises EngineError and EngineMissing."""
    model, args = front.model_config, front.args
    tokenizer = load_tokenizer(
        str(model.tokenizer), model.tokenizer_revision, trust_remote_code=bool(model.trust_remote_code)
    )
    template = getattr(args, "chat_template", None)
    if template is not None and Path(str(template)).is_file():
        template = Path(str(template)).read_text(encoding="utf-8")
    return PromptBuilder(
        tokenizer,
        chat_template=template,
        content_format=_content_format(front, tokenizer, template),
    )


def _content_format(front: Front, tokenizer: Any, template: str | None) -> ContentFormat:
    given = getattr(front.args, "chat_template_content_format", None) or "auto"
    try:
        from vllm.renderers.hf import resolve_chat_template_content_format

        found = resolve_chat_template_content_format(
            template, None, given, tokenizer, model_config=front.model_config
        )
    except (ImportError, TypeError, AttributeError):
        found = given
    return "openai" if found == "openai" else "string"


class EngineSide:
    """Runs what is no chat: encode passes and orders, as requests of one token.

    adapter: vLLM's request for the LoRA adapter that all but orders run under.
    """

    def __init__(self, client: Any, model: str, secret: bytes, adapter: Any = None) -> None:
        self.model = model
        self.secret = secret
        self._client = client
        self._under = {} if adapter is None else {"lora_request": adapter}
        self._start = uuid.uuid4().hex[:8]  # several API processes share the engine
        self._numbers = itertools.count(1)

    def under(self, adapter: Any, model: str) -> EngineSide:
        """The same engine under another adapter or none, with the model that plans then name."""
        return EngineSide(self._client, model, self.secret, adapter)

    async def run(self, token_ids: tuple[int, ...], plan: Plan) -> dict[str, Any]:
        """The connector's outcome of a request with this plan. Raises EngineError without one."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            extra_args={"kv_transfer_params": to_wire(plan, self.secret)},
        )
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": salt_of(plan, self.secret)}
        name = f"inferscale-{self._start}-{next(self._numbers)}"
        found: dict[str, Any] | None = None
        under = {} if plan.order is not None else self._under
        async for output in self._client.generate(prompt, params, name, **under):
            if output.finished:
                found = (output.kv_transfer_params or {}).get(WIRE_KEY)
        if found is None:
            raise EngineError("The engine gave no account of a request of the memory; its log may say why.")
        return found

    async def probe(self, probe: Probe) -> Seen:
        """What a request of the self-check brings."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=probe.max_tokens,
            temperature=0.0,
            extra_args={"kv_transfer_params": to_wire(probe.plan, self.secret)},
            **probe.sampling,
        )
        prompt = {"prompt_token_ids": list(probe.token_ids), "cache_salt": salt_of(probe.plan, self.secret)}
        name = f"inferscale-{self._start}-{next(self._numbers)}"
        seen = Seen((), None)
        async for output in self._client.generate(prompt, params, name):
            if output.finished:
                outcome = (output.kv_transfer_params or {}).get(WIRE_KEY)
                seen = seen_of(output.outputs[0].logprobs, outcome)
        return seen

    async def complete(
        self,
        token_ids: tuple[int, ...],
        schema: Mapping[str, Any] | None,
        max_tokens: int,
        temperature: float,
    ) -> str:
        """The text that the model answers, held to a JSON schema where one is given.

        Its prefix cache is its own: nobody learns from a later answer's time what was asked. Raises
        InvalidInput for what vLLM refuses, EngineError where the answer does not come.
        """
        from vllm import SamplingParams

        text: str | None = None
        try:
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **_held_to(schema))
            prompt = {"prompt_token_ids": list(token_ids), "cache_salt": uuid.uuid4().hex}
            name = f"inferscale-{self._start}-{next(self._numbers)}"
            async for output in self._client.generate(prompt, params, name):
                if output.finished and output.outputs[0].finish_reason != "error":
                    text = str(output.outputs[0].text)
        except Exception as error:
            refused = isinstance(error, TypeError | ValueError | NotImplementedError)
            if refused or type(error).__name__ == "VLLMValidationError":
                raise InvalidInput(f"vLLM does not take this request: {error}") from error
            raise
        if text is None:
            raise EngineError("The engine failed a request of the memory; its log may say why.")
        return text

    async def order(self, order: Order) -> dict[str, Any]:
        """Carry out an order in step with execution. Raises EngineError."""
        outcome = await self.run((0,), Plan(self.model, scope="", order=order))
        if "answer" not in outcome:
            raise EngineError(f"The engine did not carry out the order {order.op!r}: {outcome}")
        answer: dict[str, Any] = outcome["answer"]
        return answer


def _held_to(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ValueError where this vLLM has no structured outputs."""
    if schema is None:
        return {}
    try:
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError as error:
        raise ValueError("it has no structured outputs") from error
    return {"structured_outputs": StructuredOutputsParams(json=dict(schema))}


def tool_dicts(tools: object) -> Any:
    """Tools as vLLM hands them to a chat template: with the fields that it adds by itself."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    except ImportError:
        return tools
    if not isinstance(tools, list):
        return tools
    try:
        return [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in tools]
    except ValueError:  # vLLM says what is wrong with them
        return tools
