"""Engines that run in processes of their own, behind `OfflineEngine`: engine core, and one worker a rank.

The child that is driven here is a front end: it shares no memory with the connector and sees of it
what a front end sees, the socket and the outcomes.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.child import EngineHost, _token_bytes
from harness.engine import START_TIMEOUT_S, Engine, _fork_server
from harness.protocol import EngineFacts, EngineOptions
from inferscale.plan import Order


@dataclass(frozen=True)
class OfflineOptions(EngineOptions):
    """tensor_parallel_size: ranks, one core each; the pool's capacity is that of every rank."""

    tensor_parallel_size: int = 1


class OfflineProcess(Engine):
    """A front end with an engine behind it."""

    def __init__(self, options: OfflineOptions, log_path: Path) -> None:
        self.options = options
        self._log_path = log_path
        context = _fork_server()
        self._pipe, theirs = context.Pipe()
        # Not a daemon, since those may not have children.
        self._process = context.Process(target=main, args=(theirs, options, str(log_path)))
        self._process.start()
        theirs.close()
        self.facts: EngineFacts = self._receive("start", START_TIMEOUT_S)


def main(pipe: Connection, options: OfflineOptions, log_path: str) -> None:
    """Start the engine, then answer operations `(name, arguments)` until "close"; as `child.main`."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(dict(options.environment))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles a function of its sampler, which takes seconds
    host = None
    try:
        host = OfflineHost(options)
        pipe.send((True, host.facts()))
        while (operation := pipe.recv())[0] != "close":
            name, arguments = operation
            try:
                pipe.send((True, getattr(host, name)(*arguments)))
            except Exception:  # noqa: BLE001 — the tests get the traceback
                pipe.send((False, traceback.format_exc()))
    except EOFError:  # the tests are gone
        pass
    except BaseException:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
    if host is not None:
        host.close()
    os._exit(0)


class OfflineHost(EngineHost):
    """Every public method is an operation; those that look into the engine's memory do not work here."""

    def __init__(self, options: OfflineOptions) -> None:
        from inferscale.config import ConnectorConfig
        from inferscale.offline import OfflineEngine

        token_bytes = _token_bytes(options.checkpoint) // options.tensor_parallel_size
        self._offline = OfflineEngine(
            options.checkpoint,
            ConnectorConfig(
                pool_size_bytes=options.pool_tokens * token_bytes,
                page_size_tokens=options.page_size_tokens,
                compile_injection=options.compile_injection,
                host_size_bytes=options.host_tokens * token_bytes,
                disk_size_bytes="1GiB" if options.disk else 0,
                disk_dir=options.disk,
                tier_wait="always",
            ),
            {
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "seed": 0,
                "max_model_len": options.max_model_len,
                "max_num_seqs": options.max_num_seqs,
                "max_num_batched_tokens": options.max_num_batched_tokens,
                "block_size": options.block_size,
                "num_gpu_blocks_override": options.num_blocks,
                "enable_prefix_caching": options.enable_prefix_caching,
                "disable_log_stats": True,
                "max_logprobs": -1,
                "logprobs_mode": "raw_logits",
                "tensor_parallel_size": options.tensor_parallel_size,
                "distributed_executor_backend": "mp",
                "worker_extension_cls": "harness.offline.BreakableWorker",
                **json.loads(options.engine_args),
            },
        )
        self._llm = self._offline.llm
        self._engine = self._llm.llm_engine
        self._num_added = 0
        self._vocab_size = self._llm.model_config.get_vocab_size()

    def facts(self) -> EngineFacts:
        config = self._engine.vllm_config
        return EngineFacts(
            model=self._offline.fingerprint,
            secret=self._offline.secret,
            block_size=config.cache_config.block_size,
            num_blocks=config.cache_config.num_gpu_blocks,
            num_layers=config.model_config.get_num_layers(config.parallel_config),
            num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
            head_dim=config.model_config.get_head_size(),
        )

    def close(self) -> None:
        self._offline.close()

    def processes(self) -> dict[str, Any]:
        """Process ids of this front end and of each rank's worker."""
        return {"front_end": os.getpid(), "workers": self._llm.collective_rpc("process_id")}

    def runtime_dir(self) -> str:
        return str(self._offline.runtime_dir)

    # what a front end may ask -------------------------------------------------------------------

    def resident(self, keys: Sequence[str]) -> list[bool]:
        return self._offline.residency.resident(keys)

    def stats(self) -> dict[str, Any]:
        return self._offline.residency.stats()

    def order_stats(self) -> dict[str, Any]:
        """Statistics by an order, for which the engine takes a step in which the last reports arrive."""
        self._offline.order(Order("stats"))
        return self._offline.order(Order("stats"))

    def outcome(self, plan_id: str) -> dict[str, Any] | None:
        return self._offline.residency.outcome(plan_id)

    def order(self, order: Order) -> dict[str, Any]:
        return self._offline.order(order)

    def forget_everything(self) -> None:
        assert self._engine.reset_prefix_cache(reset_connector=True)

    # faults -------------------------------------------------------------------------------------

    def break_rank(self, rank: int, what: str) -> None:
        """From now on `what` ("capture" or "inject") raises on this rank only."""
        self._llm.collective_rpc("break_rank", args=(rank, what))

    def mend(self) -> None:
        self._llm.collective_rpc("mend")


class BreakableWorker:
    """What vLLM adds to its worker class (`worker_extension_cls`)."""

    rank: int

    def process_id(self) -> int:
        return os.getpid()

    def break_rank(self, rank: int, what: str) -> None:
        def fail(order: object) -> None:
            raise RuntimeError(f"{what} is broken on rank {rank}")

        if self.rank == rank:
            setattr(_mover(), what, fail)

    def mend(self) -> None:
        for what in ("capture", "inject"):
            vars(_mover()).pop(what, None)


def _mover() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.mover
