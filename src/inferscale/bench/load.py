"""Closed-loop load on an engine: lanes that send one request after the other.

Works with `OfflineEngine`, and with stock vLLM through `StockEngine`; times are those of the caller: from
the start of a request's submission (signing its plan and vLLM's input processing are part of it) to
the return of the engine step that brought a token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from inferscale.errors import EngineError
from inferscale.offline import Answer, Generation, GenerationRequest

SAMPLING: Mapping[str, Any] = {"ignore_eos": True, "detokenize": False}
"""Of every request at engine level: as many tokens as were asked for, and no text made of them."""


class Server(Protocol):
    """What takes requests and answers them step by step, as `OfflineEngine` does."""

    def submit(self, request: GenerationRequest) -> str: ...

    def step(self) -> list[Answer]: ...

    def abort(self, names: Iterable[str]) -> None: ...


class Served(NamedTuple):
    """A request that is done."""

    request: GenerationRequest
    generation: Generation

    @property
    def ttft_ms(self) -> float:
        return self.generation.ttft_s * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time for each token behind the first; None for a single token."""
        num = len(self.generation.token_ids)
        if num < 2:
            return None
        return (self.generation.total_s - self.generation.ttft_s) * 1e3 / (num - 1)


def drive(server: Server, lanes: Sequence[Iterator[GenerationRequest]]) -> list[list[Served]]:
    """Run all lanes to their end: each sends its next request when its last one is done.

    Lanes may share one iterator: then so many of its requests are in flight. Results by lane, in order.
    """
    served: list[list[Served]] = [[] for _ in lanes]
    running: dict[str, tuple[int, GenerationRequest]] = {}

    def send(lane: int) -> None:
        request = next(lanes[lane], None)
        if request is not None:
            running[server.submit(request)] = (lane, request)

    try:
        for lane in range(len(lanes)):
            send(lane)
        while running:
            for answer in server.step():
                lane, request = running.pop(answer.name)
                served[lane].append(Served(request, answer.generation))
                send(lane)
    except BaseException:
        server.abort(list(running))  # or they would run on in the next measurement
        raise
    return served


class Window(NamedTuple):
    """What a stretch of steady load has done. served: (lane, which of its requests, request)."""

    seconds: float
    served: list[tuple[int, int, Served]]


def drive_steadily(server: Server, lanes: Sequence[Iterator[GenerationRequest]], num: int) -> Window:
    """Load without start and end: from when every lane has done its first request, until `num` more are done.

    The first requests are to be of different lengths, so that lanes do not run in step: else all of them
    would send at once again and again, which no users do. What is still running at the end is aborted.
    Counted is from the end of an engine's step to the end of another: what is done in the step of the last
    first request took its time before. Raises EngineError for a lane that ends too early.
    """
    running: dict[str, tuple[int, int, GenerationRequest]] = {}
    sent = [0] * len(lanes)
    num_first = len(lanes)
    start_s: float | None = None
    served: list[tuple[int, int, Served]] = []

    def send(lane: int) -> None:
        request = next(lanes[lane], None)
        if request is None:
            raise EngineError(
                f"Lane {lane} of {len(lanes)} has no request left behind its {sent[lane]} before {num} of "
                "all were counted: the engine does not serve all users alike. Let it run all of them at once "
                f"(--engine-arg max_num_seqs={len(lanes)}), or lower --users or --rounds."
            )
        running[server.submit(request)] = (lane, sent[lane], request)
        sent[lane] += 1

    try:
        for lane in range(len(lanes)):
            send(lane)
        while start_s is None or len(served) < num:
            for answer in server.step():
                lane, number, request = running.pop(answer.name)
                if number == 0:
                    num_first -= 1
                elif start_s is not None:
                    served.append((lane, number, Served(request, answer.generation)))
                send(lane)
            if start_s is None and num_first == 0:
                start_s = time.perf_counter()
        return Window(time.perf_counter() - start_s, served)
    finally:
        server.abort(list(running))


class StockEngine:
    """A `vllm.LLM` without the connector, driven as `OfflineEngine` drives its own."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._numbers = itertools.count(1)
        self._running: dict[str, list[float]] = {}

    def submit(self, request: GenerationRequest) -> str:
        from vllm import SamplingParams

        assert request.plan is None
        name = f"stock-{next(self._numbers)}"
        self._running[name] = [time.perf_counter()]
        params = SamplingParams(
            max_tokens=request.max_tokens, temperature=request.temperature, **request.sampling
        )
        self._engine.add_request(name, {"prompt_token_ids": list(request.token_ids)}, params)
        return name

    def step(self) -> list[Answer]:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        answers = []
        for output in outputs:
            times = self._running[output.request_id]
            if len(times) == 1:
                times.append(now_s)
            if output.finished:
                del self._running[output.request_id]
                completion = output.outputs[0]
                generation = Generation(
                    text=completion.text,
                    token_ids=tuple(completion.token_ids),
                    ttft_s=times[1] - times[0],
                    total_s=now_s - times[0],
                    num_cached_tokens=output.num_cached_tokens or 0,
                    outcome=None,
                    finish_reason=completion.finish_reason,
                )
                answers.append(Answer(output.request_id, generation))
        return answers

    def abort(self, names: Iterable[str]) -> None:
        self._engine.abort_request(list(names))
