"""A `MemoryLLM` in a process of its own, driven over a pipe; errors arrive as they were raised."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from harness.child import turn_wrongly
from harness.engine import OPERATION_TIMEOUT_S, START_TIMEOUT_S, EngineFailed, _fork_server
from inferscale.facts import Fact
from inferscale.self_check import Verdict


@dataclass(frozen=True)
class MemoryOptions:
    """What `MemoryLLM` is started with. data_dir: folder of the memory; pool: bytes, or a text."""

    model: str
    data_dir: str
    pool: int | str = "64MiB"
    window: int = 20
    stride: int = 20
    mixed: int = 0
    max_model_len: int = 1024
    default_system: str | None = None
    runtime_dir: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)


class Sent(NamedTuple):
    """A request that reached the engine. segments, captures: of its plan, 0 without one."""

    token_ids: tuple[int, ...]
    text: str
    segments: int
    captures: int


class MemoryProcess:
    """One `MemoryLLM`; `add`, `chat`, … are its methods. Raises what its start raised."""

    def __init__(self, options: MemoryOptions, log_path: Path) -> None:
        context = _fork_server()
        self._log_path = log_path
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, options, str(log_path)), daemon=True)
        self._process.start()
        theirs.close()
        self._receive("start", START_TIMEOUT_S)

    def __getattr__(self, name: str) -> Any:
        """A method of `MemoryLLM`, or an operation of `MemoryHost`."""
        if name.startswith("_"):
            raise AttributeError(name)

        def operation(*arguments: Any, **settings: Any) -> Any:
            self._pipe.send((name, arguments, settings))
            return self._receive(name, OPERATION_TIMEOUT_S)

        return operation

    def _receive(self, name: str, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                self._process.kill()
                raise EngineFailed(f"{name}: no answer in {timeout_s} s.\n{self.log[-4000:]}")
            is_good, reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineFailed(f"{name}: the process ended: {error!r}\n{self.log[-4000:]}") from error
        if not is_good:
            raise reply
        return reply

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def close(self) -> None:
        try:
            self._pipe.send(("close", (), {}))
        except OSError:
            pass
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def main(pipe: Connection, options: MemoryOptions, log_path: str) -> None:
    """Start, then answer operations `(name, arguments, settings)` until "close"."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # other tests set another one, and some look into the log
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles a function of its sampler, which takes seconds
    try:
        host = MemoryHost(options)
        pipe.send((True, None))
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        pipe.send((False, _portable(error)))
        os._exit(1)
    while True:
        try:
            name, arguments, settings = pipe.recv()
        except EOFError:  # the tests are gone
            break
        if name == "close":
            break
        try:
            method = getattr(host, name, None) or getattr(host.llm, name)
            pipe.send((True, method(*arguments, **settings)))
        except Exception as error:  # noqa: BLE001 — the tests get the error
            traceback.print_exc()
            pipe.send((False, _portable(error)))
    host.llm.close()
    sys.stdout.flush()
    os._exit(0)


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return EngineFailed(traceback.format_exc())
    return error


class MemoryHost:
    """Every public method is an operation."""

    def __init__(self, options: MemoryOptions) -> None:
        from fakes import WordEmbedder
        from inferscale.config import ConnectorConfig, EncodingConfig, MemoryConfig
        from inferscale.memory_llm import MemoryLLM

        system = {} if options.default_system is None else {"default_system": options.default_system}
        self.llm = MemoryLLM(
            options.model,
            MemoryConfig(options.data_dir),
            encoding=EncodingConfig(options.window, options.stride, options.mixed),
            embedder=WordEmbedder(),
            connector=ConnectorConfig(
                pool_size_bytes=options.pool, compile_injection=False, runtime_dir=options.runtime_dir
            ),
            engine_args={
                "enforce_eager": True,
                "seed": 0,
                "block_size": 32,
                "max_model_len": options.max_model_len,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                **options.engine_args,
            },
            **system,
        )
        self._sent: list[Sent] = []
        submit = self.llm.engine._submit
        decode = self.llm.engine.llm.get_tokenizer().decode

        def recorded(request: Any, answers: Any) -> str:
            plan = request.plan
            segments, captures = (len(plan.segments), len(plan.captures)) if plan else (0, 0)
            ids = tuple(request.token_ids)
            self._sent.append(Sent(ids, decode(list(ids)), segments, captures))
            return submit(request, answers)

        self.llm.engine._submit = recorded  # type: ignore[method-assign]

    def verdict(self) -> Verdict:
        """Of the self-check."""
        return self.llm.verdict

    def check_again(self, factor: float) -> Verdict:
        """The self-check once more, as at a start, with keys moved by `factor` times what they should be."""
        turn_wrongly(factor)
        self.llm.engine.connector = replace(self.llm.engine.connector, self_check="always")
        self.llm._check_engine()
        return self.llm.verdict

    def sent(self) -> list[Sent]:
        """What reached the engine since the last call, in order; orders too."""
        sent, self._sent = self._sent, []
        return sent

    def resident(self, facts: Sequence[Fact]) -> list[bool]:
        """Whether the KV of each fact is in the pool."""
        keys = self.llm.encoder.keys(fact.id for fact in facts)
        there = dict(zip(keys, self.llm.engine.residency.resident(list(keys.values())), strict=True))
        return [there.get(fact.id, False) for fact in facts]

    def keys(self, facts: Sequence[Fact]) -> list[str | None]:
        found = self.llm.encoder.keys(fact.id for fact in facts)
        return [found.get(fact.id) for fact in facts]

    def resident_keys(self, keys: Sequence[str]) -> list[bool]:
        return self.llm.engine.residency.resident(keys)

    def complete(self, messages: Any, schema: Any, num_answers: int) -> list[dict[str, Any]]:
        """Answers of the engine as the model of extraction."""
        model = self.llm.memory.extraction.model
        return [model.complete(messages, schema, 120, 1.0) for _ in range(num_answers)]

    def infer_once(self, content: Any, **given: Any) -> Any:
        """`add(…, infer=True)` without a second attempt: each takes the model seconds."""
        inference = self.llm.memory.extraction
        inference.config = replace(inference.config, retries=0)
        return self.llm.add(content, infer=True, **given)

    def infer_scripted(self, answers: list[dict[str, Any]], content: Any, **given: Any) -> Any:
        """`add(…, infer=True)` with these answers in the place of a model's."""
        from inferscale.extraction import Inference

        class Script:
            def complete(self, *question: Any) -> dict[str, Any]:
                return answers.pop(0)

        own, self.llm.memory.extraction = self.llm.memory.extraction, Inference(Script())
        try:
            return self.llm.add(content, infer=True, **given)
        finally:
            self.llm.memory.extraction = own

    def epoch(self, user_id: str) -> int:
        return self.llm.memory.epoch(user_id=user_id)

    def num_tokens(self, facts: Sequence[Fact]) -> list[int]:
        return [len(self.llm.prompts.fact_ids(fact)) for fact in facts]

    def head(self, messages: Sequence[Any]) -> tuple[int, ...]:
        return self.llm.prompts.draft(messages).head_ids

    def anchor(self) -> tuple[int, ...]:
        return self.llm.prompts.anchor_ids

    def chat_in_threads(self, questions: Sequence[str], **settings: Any) -> list[Any]:
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(lambda question: self.llm.chat(question, **settings), questions))

    def break_injection(self) -> None:
        """The worker cannot inject any more."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        def fail(*orders: object) -> None:
            raise RuntimeError("broken by a test")

        get_kv_transfer_group().worker.mover.inject = fail

    def mend(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        del get_kv_transfer_group().worker.mover.inject

    def break_encoding(self, is_broken: bool) -> None:
        """Encode passes raise, as when the catalog is locked or the engine is gone."""
        if not is_broken:
            del self.llm.runner.run
            return

        def fail(*arguments: object) -> None:
            raise RuntimeError("broken by a test")

        self.llm.runner.run = fail  # type: ignore[method-assign, assignment]

    def break_residency(self, is_broken: bool) -> None:
        """The engine does not answer on its socket."""
        if not is_broken:
            del self.llm.engine.residency.resident
            return
        from inferscale.errors import EngineError

        def fail(keys: object) -> None:
            raise EngineError("broken by a test")

        self.llm.engine.residency.resident = fail  # type: ignore[method-assign, assignment]

    def forget(self, keys: Sequence[str]) -> dict[str, Any]:
        """The pool loses these segments, as by an eviction."""
        from inferscale.plan import Order

        return self.llm.engine.order(Order("forget", tuple(keys)))

    def shrink_pool(self, num_pages: int) -> None:
        """Empty the pool and leave so many pages of it; 0 leaves all."""
        side = self.llm.engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
        table = side.table
        table.abandon("occupied")
        table.clear()
        assert table.num_free_pages == table.num_pages
        if num_pages:
            occupied = (table.num_pages - num_pages) * table.page_size_tokens
            assert table.reserve("occupied", occupied) is not None
        self.llm.engine.reset_prefix_cache()
