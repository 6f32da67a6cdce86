"""Runs in an engine's process: vLLM in-process, driven by operations that come over a pipe.

Looks into vLLM only to observe: raw pages, block lists, claims. Whatever is compared with a
reference comes from vLLM's public interface (logits) or from the raw memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch._dynamo

from harness.protocol import Answer, EngineFacts, EngineOptions, Request, RunningRequest


def main(pipe: Connection, options: EngineOptions, log_path: str) -> None:
    """Start the engine, then answer operations `(name, arguments)` until "close"."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(dict(options.environment))
    torch.set_num_threads(options.num_threads)  # before any parallel region; vLLM keeps it
    # vLLM compiles one small function of its sampler, which takes seconds; unneeded here.
    torch._dynamo.config.disable = not options.compile_injection
    try:
        host = EngineHost(options)
        pipe.send((True, host.facts()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:  # the tests are gone
            break
        if name == "close":
            break
        try:
            reply = (True, getattr(host, name)(*arguments))
        except Exception:  # noqa: BLE001  (the root of this process: the tests get the traceback)
            reply = (False, traceback.format_exc())
        pipe.send(reply)
    host.close()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own exit handlers take seconds and have nothing to save


class EngineHost:
    """One engine. Every public method is an operation."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._folder = tempfile.TemporaryDirectory(prefix="inferscale-e2e-")
        transfer = None
        if options.pool_tokens:
            transfer = KVTransferConfig(
                kv_connector="InferScaleConnector",
                kv_connector_module_path="inferscale.connector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "pool_size_bytes": options.pool_tokens * _token_bytes(options.checkpoint),
                    "page_size_tokens": options.page_size_tokens,
                    "pool_dtype": options.pool_dtype,
                    "tier_wait": "always",
                    "compile_injection": options.compile_injection,
                    "injection_path": options.injection_path,
                    "host_size_bytes": options.host_tokens * _token_bytes(options.checkpoint),
                    "disk_size_bytes": "1GiB" if options.disk else 0,
                    "disk_dir": options.disk,
                    "cold_location": options.cold,
                    "encryption_key_file": options.key_file,
                    "runtime_dir": self._folder.name,
                },
            )
        arguments: dict[str, Any] = {
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
            "kv_transfer_config": transfer,
        }
        self._llm = LLM(options.checkpoint, **{**arguments, **json.loads(options.engine_args)})
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._connector = self._scheduler.connector
        self._claims: list[tuple[str, int]] = []
        self._num_added = 0
        self._num_drafts = 0
        self._count_drafts()
        self._vocab_size = self._llm.model_config.get_vocab_size()
        if self._connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self._side = self._connector.scheduler
            self._worker = get_kv_transfer_group().worker
            self._record_claims()

    def _count_drafts(self) -> None:
        take = self._scheduler.update_draft_token_ids

        def counted(drafts: Any) -> None:
            self._num_drafts += sum(map(len, drafts.draft_token_ids))
            take(drafts)

        self._scheduler.update_draft_token_ids = counted

    def _record_claims(self) -> None:
        claim = self._connector.update_state_after_alloc

        def recorded(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self._claims.append((request.request_id, num_external_tokens))
            claim(request, blocks, num_external_tokens)

        self._connector.update_state_after_alloc = recorded

    def facts(self) -> EngineFacts:
        model = self._llm.model_config
        parallel = self._core.vllm_config.parallel_config
        cache = self._core.vllm_config.cache_config
        return EngineFacts(
            model=self._side.model if self._connector else "",
            secret=self._side.secret if self._connector else b"",
            block_size=cache.block_size,
            num_blocks=cache.num_gpu_blocks,
            num_layers=model.get_num_layers(parallel),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_dim=model.get_head_size(),
        )

    def close(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()
        self._folder.cleanup()

    # whole requests -----------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests at once, so that vLLM schedules as many as fit into each step."""
        outputs = self._llm.generate(
            [self._prompt(r) for r in requests],
            [self._sampling(r) for r in requests],
            use_tqdm=False,
            lora_request=[_adapter(r) for r in requests] if any(r.adapter for r in requests) else None,
        )
        return [self._answer(output) for output in outputs]

    def _prompt(self, request: Request) -> Any:
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids)}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        return prompt

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams

        extra = None if request.params is None else {"kv_transfer_params": request.params}
        return SamplingParams(
            max_tokens=request.max_tokens,
            n=request.num_answers,
            temperature=0 if request.num_answers == 1 else 1,
            seed=7,
            logprobs=-1,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if request.prompt_logprobs else None,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            allowed_token_ids=None if request.allowed is None else list(request.allowed),
            extra_args=extra,
        )

    def ask_all(self, request: Request) -> list[Answer]:
        """Every answer of a request that wants several, which are sampled."""
        [output] = self._llm.generate([self._prompt(request)], [self._sampling(request)], use_tqdm=False)
        return [self._answer(output, number) for number in range(request.num_answers)]

    def _answer(self, output: Any, number: int = 0) -> Answer:
        completion = output.outputs[number]
        flat = completion.logprobs
        num_steps = len(completion.token_ids)
        logits = np.full((num_steps, self._vocab_size), np.nan, dtype=np.float32)
        for step in range(num_steps):
            part = slice(flat.start_indices[step], flat.end_indices[step])
            logits[step, flat.token_ids[part]] = flat.logprobs[part]
        assert not np.isnan(logits).any(), "vLLM did not return every token's logit"
        params = output.kv_transfer_params or {}
        return Answer(
            token_ids=tuple(completion.token_ids),
            logits=logits,
            outcome=params.get("inferscale"),
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=completion.finish_reason,
        )

    def turn_wrongly(self, factor: float) -> None:
        """Injection moves keys by `factor` times what it should; 1 mends it."""
        turn_wrongly(factor)

    # step by step -------------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request; returns the id that `step`, `abort` and `running` use."""
        name = f"step-{self._num_added}"
        self._num_added += 1
        adapter = _adapter(request)
        self._engine.add_request(name, self._prompt(request), self._sampling(request), lora_request=adapter)
        return name

    def step(self) -> dict[str, Answer]:
        """One engine step; the requests that finished in it."""
        return {o.request_id: self._answer(o) for o in self._engine.step() if o.finished}

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    def has_unfinished(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def running(self, name: str) -> RunningRequest:
        """Where a request that `add` returned lies now. KeyError when it is gone."""
        request = next(
            r for i, r in self._scheduler.requests.items() if i == name or i.startswith(name + "-")
        )
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return RunningRequest(tuple(blocks[0]), request.num_computed_tokens, request.status.name == "RUNNING")

    def windows(self) -> list[tuple[int, int, int]]:
        """(block size, window, chunk) of each KV cache group; window and chunk are 0 where all is seen."""
        return [tuple(group) for group in self._side.groups]

    def blocks_of_groups(self, name: str) -> list[list[int]]:
        """Of a request that `add` returned, in each KV cache group; 0 is the null block."""
        request_id = next(i for i in self._scheduler.requests if i == name or i.startswith(name + "-"))
        return [list(ids) for ids in self._scheduler.kv_cache_manager.get_block_ids(request_id)]

    def preempt_all(self) -> None:
        """Throw every running request out, as vLLM does when blocks run out, and forget its blocks."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    # what lies in memory ------------------------------------------------------------------------

    def clear_pages(self) -> None:
        """Forget vLLM's prefix cache and overwrite every page with a number no kernel computes."""
        assert not self.has_unfinished()
        assert self._llm.reset_prefix_cache()
        for cache in self._caches():
            cache.fill_(12345.0)

    def reset_prefix_cache(self) -> None:
        assert self._llm.reset_prefix_cache()

    def raw_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of whole blocks, all layers, straight from vLLM's tensors."""
        num_blocks = self._core.vllm_config.cache_config.num_gpu_blocks
        found = []
        for block_id in block_ids:
            parts = []
            for cache in self._caches():
                dim = next(
                    d for d in range(2) if cache.shape[d] % num_blocks == 0 and cache.shape[d] >= num_blocks
                )
                ratio = cache.shape[dim] // num_blocks
                part = cache.narrow(dim, block_id * ratio, ratio).contiguous()
                parts.append(part.numpy().tobytes())
            found.append(b"".join(parts))
        return found

    def paged(self, block_ids: Sequence[int], num_tokens: int) -> Any:
        """KV of a request's first tokens; float32 [layers, 2, tokens, num_kv_heads, head_dim]."""
        from inferscale.connector.layout import flat_storage

        size = self._core.vllm_config.cache_config.block_size
        positions = torch.arange(num_tokens)
        slots = torch.tensor(list(block_ids))[positions // size] * size + positions % size
        layers = []
        for layer, layout in zip(self._worker.layers, self._worker._layouts, strict=True):
            rows = flat_storage(layer.cache)[layout.element_index(slots)]
            layers.append(
                rows.view(num_tokens, 2, layer.num_kv_heads, layer.head_dim).transpose(0, 1).numpy()
            )
        return np.stack(layers)

    def pooled(self, key: str) -> Any:
        """KV of a segment in the pool, as `paged`; None when it is not resident."""
        entry = self._side.table.get(key)
        if entry is None or not entry.is_resident:
            return None
        slab = self._worker.slab
        rows = torch.from_numpy(entry.rows.astype(np.int64))
        return slab.format.decode(slab.data[rows]).permute(1, 2, 0, 3, 4).contiguous().numpy()

    def _caches(self) -> list[Any]:
        if self._connector is not None:
            return [layer.cache for layer in self._worker.layers]
        context = self._core.vllm_config.compilation_config.static_forward_context
        return [layer.kv_cache for layer in context.values()]

    # vLLM's features ----------------------------------------------------------------------------

    def sleep_and_wake(self, level: int) -> None:
        """As `/sleep` and `/wake_up` do; on a CPU the memory itself stays."""
        self._llm.sleep(level)
        self._llm.wake_up()

    def reload_weights(self, folder: str) -> None:
        """Load other weights of the same form; vLLM leaves its caches as they are."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def num_draft_tokens(self) -> int:
        """Tokens that were guessed so far, by the count of the runner's drafts."""
        return self._num_drafts

    # the connector's books ----------------------------------------------------------------------

    def outcome(self, plan_id: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._side.answer({"op": "outcome", "id": plan_id})["outcome"]
        return found

    def model(self) -> str:
        """As plans must name it now."""
        return str(self._side.model)

    def claims(self) -> list[tuple[str, int]]:
        """(request id, external tokens) that vLLM counted as ours since the last call, in order."""
        claims, self._claims = self._claims, []
        return claims

    def stats(self) -> dict[str, Any]:
        return dict(self._side.stats())

    def resident(self, keys: Sequence[str]) -> list[bool]:
        found: list[bool] = self._side.answer({"op": "residency", "keys": list(keys)})["resident"]
        return found

    def check_table(self) -> None:
        """Raise unless every page of the pool has one owner and the counts agree with the entries."""
        table = self._side.table
        table.check()
        entries = list(table._entries.values())
        assert sum(e.is_resident and not e.is_dropped for e in entries) == table.num_resident

    def forget(self, keys: Sequence[str]) -> int:
        """Drop segments at once, without a request."""
        return int(self._side.table.drop(keys))

    def forget_everything(self) -> None:
        """As after a start: an empty pool, no prefix cache, no claims noted."""
        if self._connector is not None:
            self._side.table.clear()
        self._claims = []
        self.reset_prefix_cache()

    def zeroed_pages(self) -> int:
        """How many of the pool's free pages hold zeros only."""
        table, slab = self._side.table, self._worker.slab
        pages = slab.data.view(table.num_pages, -1)
        return sum(not bool(pages[page].any()) for page in table._free)

    # vLLM's books -------------------------------------------------------------------------------

    def num_free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _adapter(request: Request) -> Any:
    from vllm.lora.request import LoRARequest

    return None if request.adapter is None else LoRARequest(*request.adapter)


def _token_bytes(checkpoint: str) -> int:
    """KV of one token in float32, from the model's configuration; of latent attention more than it needs."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * head_dim * 4)


def turn_wrongly(factor: float) -> None:
    """From now on the portable path of this process moves keys by `factor` times what it should."""
    from inferscale import rope
    from inferscale.connector import movement

    def turned(deltas: Any, rotary: Any) -> Any:
        return rope.delta_cos_sin((deltas * factor).to(deltas.dtype), rotary)

    movement.delta_cos_sin = turned  # type: ignore[attr-defined]
