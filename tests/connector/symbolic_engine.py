"""vLLM's real scheduler with our connector, and a worker that keeps symbols instead of KV.

A slot of the paged cache and a row of the pool hold a `Symbol` for each KV cache group: token id, the
position its key is rotated to, and a digest of everything it attended to, which is what its groups see. So a
test sees at once whether injection, capture, preemption or page reuse put the wrong KV somewhere: in every
"forward pass" each position that attention reads is compared with the request's tokens, and a captured span
with what a cold prefill of the encode request would hold. Both shapes of scheduler output (model runner V1
and V2) and pipelined steps (async scheduling) run through the same code. Also runs under vLLM 0.25.1 (see
`record_steps.py`).
"""

from __future__ import annotations

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from inferscale.connector.connector import InferScaleConnector, WorkerReport
from inferscale.connector.groups import CacheGroup
from inferscale.connector.messages import StepOrders, StepReport
from inferscale.plan import WIRE_KEY, Order, Plan, Segment, Span, salt_of, segment_key, to_wire
from inferscale.pool.moves import GroupMoves
from inferscale.pool.tiers import Save, TierAnswers

BLOCK_SIZE = 16
PAGE_SIZE = 4
TOKEN_BYTES = 64  # of one layer: one head of eight float32 elements, keys and values
FULL = CacheGroup(BLOCK_SIZE)
SCOPE = "scope"


class Symbol(NamedTuple):
    """What stands for one token's KV."""

    token_id: int
    position: int
    context: int


def sees_from(group: CacheGroup, position: int) -> int:
    """The first token that one at this position attends to."""
    if group.window:
        return max(0, position - group.window + 1)
    return position // group.chunk * group.chunk if group.chunk else 0


class Seen:
    """Digests of what the tokens of a prompt attend to in one group, in order."""

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self.rolling = 0
        self.contexts: list[int | None] = []

    def append(self, context: int | None) -> None:
        self.contexts.append(context)
        self.rolling = hash((self.rolling, context))

    def at(self, position: int) -> int:
        if self.group.sees_all:
            return self.rolling
        return hash(tuple(self.contexts[sees_from(self.group, position) : position]))


def cold_contexts(token_ids: Sequence[int], groups: Sequence[CacheGroup]) -> list[int]:
    """Digest of what each token of a prompt attends to when nothing is injected."""
    seen = [Seen(group) for group in groups]
    contexts: list[int] = []
    for position, token_id in enumerate(token_ids):
        contexts.append(hash((tuple(one.at(position) for one in seen), token_id)))
        for one in seen:
            one.append(contexts[-1])
    return contexts


def sampled_token(position: int) -> int:
    """The token that the "model" generates at a position; known in advance, as workers know it."""
    return 900 + position % 64


def key_of(token_ids: Sequence[int]) -> str:
    return segment_key("m", [], token_ids)


def segment(token_ids: Sequence[int]) -> Segment:
    return Segment(key_of(token_ids), tuple(token_ids))


def model_folder() -> str:
    folder = tempfile.mkdtemp(prefix="ifs-model-")
    LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        intermediate_size=16,
        vocab_size=1000,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def spec_of(group: CacheGroup) -> Any:
    """vLLM's own."""
    shape: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 8 * BLOCK_SIZE // group.block_size,  # the bytes of a block are those of the others
        "dtype": torch.float32,
    }
    if group.window:
        return SlidingWindowSpec(**shape, sliding_window=group.window)
    if group.chunk:
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.chunk)
    return FullAttentionSpec(**shape)


class SymbolicWorker:
    """Carries out orders on symbols, and tracks blocks as the model runners do."""

    def __init__(self, groups: Sequence[CacheGroup], *, is_v2: bool, reports_without_forward: bool) -> None:
        self.groups = groups
        self.is_v2 = is_v2
        self.reports_without_forward = reports_without_forward
        self.cache: list[dict[int, Symbol]] = [{} for _ in groups]  # of each group, by slot
        self.pool: dict[int, list[Symbol]] = {}  # by row; of all groups
        self.blocks: dict[str, list[list[int]]] = {}
        self.failing_captures = False
        self.captures_are_exact = True
        self.failed_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        self.lower: dict[
            tuple[str, str], tuple[list[list[Symbol]], int]
        ] = {}  # by tier and key; and the origin
        self.coming: list[list[Any]] = []  # [steps that are left, load]
        self.load_steps = 2
        self.failing_loads = False
        self.failing_saves = False
        self.answers = TierAnswers()

    def execute(self, output: Any, requests: dict[str, Request]) -> tuple[StepReport | None, set[int]]:
        orders: StepOrders = output.kv_connector_metadata.orders
        report = StepReport()
        self.before_forward(orders)
        failed, self.failed_blocks = self.failed_blocks, set()
        self.track_blocks(output)
        self.finish_loads()
        if output.total_num_scheduled_tokens:
            self.forward(output, requests, failed)
        elif not self.reports_without_forward:
            return None, failed
        if orders.step:
            if self.failing_captures:
                report.failed_captures.add(orders.step)
            else:
                self.capture(orders.capture, requests)
                self.average(orders.averaging)
            report.done.add(orders.step)
            if orders.tiers is not None:
                self.save(orders.tiers.saves, report)
        report.tiers, self.answers = self.answers, TierAnswers()
        return (report if report.done or report.tiers else None), failed

    def save(self, saves: list[Save], report: StepReport) -> None:
        for save in saves:
            if report.failed_captures or self.failing_saves:
                self.answers.not_saved += save.answers()
                continue
            garbage = [Symbol(-1, -1, -1)] * len(self.groups)  # of a piece whose capture failed
            symbols = [self.pool.get(row, garbage) for row in rows_of(save.packed_rows)]
            for index in range(len(self.groups)):
                for position, symbol in enumerate(symbols, save.origin):
                    assert symbol is garbage or symbol[index].position == position
            for tier in save.tiers:
                self.lower[tier, save.key] = (symbols, save.origin)
            self.answers.saved += save.answers()

    def finish_loads(self) -> None:
        for item in self.coming:
            item[0] -= 1
        done = [load for left, load in self.coming if left <= 0]
        self.coming = [item for item in self.coming if item[0] > 0]
        for load in done:
            found = self.lower.get((load.source, load.key))
            if found is None or self.failing_loads:
                self.answers.not_loaded.append(load.key)
                continue
            self.pool.update(zip(rows_of(load.packed_rows), found[0], strict=True))
            if load.keep:
                self.lower["host", load.key] = found
            self.answers.loaded.append(load.key)

    def capture(self, moves: GroupMoves, requests: dict[str, Request]) -> None:
        exact = {
            (token_id, position, context)
            for request in requests.values()
            for position, (token_id, context) in enumerate(
                zip(
                    request.prompt_token_ids,
                    cold_contexts(request.prompt_token_ids, self.groups),
                    strict=True,
                )
            )
        }
        for index, row, slot, position in self.each(moves):
            symbol = self.cache[index][slot]
            assert symbol.position == position
            assert not self.captures_are_exact or symbol in exact, (
                f"captured {symbol}: not as a cold prefill has it"
            )
            self.pool.setdefault(row, [Symbol(-1, -1, -1)] * len(self.groups))[index] = symbol

    def average(self, moves: GroupMoves) -> None:
        for index, row, slot, position in self.each(moves):
            first, second = self.pool[row][index], self.cache[index][slot]
            assert first.token_id == second.token_id
            assert second.position == position
            self.pool[row][index] = second._replace(context=hash(("mean", first.context, second.context)))

    def each(self, moves: GroupMoves) -> Iterator[tuple[int, int, int, int]]:
        """(group, row, slot, position) of all tokens."""
        assert len(moves) in (0, len(self.groups))
        for index, of_group in enumerate(moves):
            if of_group is not None:
                columns = of_group.expand(self.groups[index].block_size)
                for row, slot, position in zip(*(column.tolist() for column in columns), strict=True):
                    assert slot >= self.groups[index].block_size, "the null block is nobody's"
                    yield index, row, slot, position

    def before_forward(self, orders: StepOrders) -> None:
        self.failed_blocks.update(orders.failed_blocks)
        for index, row, slot, position in self.each(orders.injection):
            self.cache[index][slot] = self.pool[row][index]._replace(position=position)
        for page in [] if orders.zero_pages is None else orders.zero_pages.tolist():
            for row in range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE):
                self.pool.pop(row, None)
        if orders.tiers is not None:
            for drop in orders.tiers.drops:
                for key in drop.keys:
                    self.lower.pop((drop.tier, key), None)
            self.coming += [[self.load_steps, load] for load in orders.tiers.loads]

    def track_blocks(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.blocks.pop(request_id, None)
        if self.is_v2:
            for request_id in output.preempted_req_ids or ():
                self.blocks.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        assert not (self.is_v2 and cached.resumed_req_ids)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.blocks[request_id] = [list(ids) for ids in blocks]
            elif blocks is not None:
                for known, more in zip(self.blocks[request_id], blocks, strict=True):
                    known.extend(more)

    def slot(self, request_id: str, index: int, position: int) -> int:
        size = self.groups[index].block_size
        block = self.blocks[request_id][index][position // size]
        assert block, f"{request_id} reads position {position} from the null block"
        return block * size + position % size

    def forward(self, output: Any, requests: dict[str, Request], failed: set[int]) -> None:
        for request_id, computed, tokens in scheduled(output):
            request = requests[request_id]
            if failed.intersection(block for ids in self.blocks[request_id] for block in ids):
                self.failed_requests.add(request_id)
            seen = [Seen(group) for group in self.groups]
            for position in range(computed + tokens):
                expected = (token_at(request, position), position)
                if position >= computed:
                    context = hash((tuple(one.at(position) for one in seen), expected[0]))
                    for index, cache in enumerate(self.cache):
                        cache[self.slot(request_id, index, position)] = Symbol(*expected, context)
                for index, one in enumerate(seen):
                    one.append(self.read(request_id, index, expected, computed))

    def read(self, request_id: str, index: int, expected: tuple[int, int], computed: int) -> int | None:
        """What a step behind `computed` tokens finds; None where its tokens do not look."""
        _, position = expected
        if position < sees_from(self.groups[index], computed):
            return None
        if request_id in self.failed_requests:  # its next step may be on its way already
            return None
        found = self.cache[index].get(self.slot(request_id, index, position))
        assert found is not None and found[:2] == expected, (
            f"{request_id} reads {found} where {expected} belongs"
        )
        return found.context


def rows_of(packed_rows: bytes) -> list[int]:
    return np.frombuffer(packed_rows, dtype=np.int32).tolist()


def token_at(request: Request, position: int) -> int:
    if position < request.num_prompt_tokens:
        return request.prompt_token_ids[position]
    return sampled_token(position)


def scheduled(output: Any) -> list[tuple[str, int, int]]:
    """(request id, tokens computed before, tokens of this step) of every scheduled request, in the order in
    which they were scheduled: a later one may find blocks of an earlier one in the prefix cache."""
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(request_id, before[request_id], n) for request_id, n in output.num_scheduled_tokens.items()]


class SymbolicEngine:
    """Schedules, executes and reports; `depth` steps are scheduled before the first is reported."""

    _model: str | None = None

    def __init__(
        self,
        *,
        runner: str = "v1",
        depth: int = 1,
        num_blocks: int = 64,
        max_batched_tokens: int = 64,
        pool_pages: int = 64,
        reports_without_forward: bool = True,
        prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
        **extra: Any,
    ) -> None:
        init_none_hash(sha256)
        if SymbolicEngine._model is None:
            SymbolicEngine._model = model_folder()
        self.runtime_dir = tempfile.mkdtemp(prefix="ifs-")
        settings = {
            "pool_size_bytes": pool_pages * PAGE_SIZE * TOKEN_BYTES * len(groups),
            "page_size_tokens": PAGE_SIZE,
            "runtime_dir": str(Path(self.runtime_dir) / "run"),
            **extra,
        }
        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            model_config=ModelConfig(
                model=SymbolicEngine._model, skip_tokenizer_init=True, max_model_len=512, dtype="float32"
            ),
            load_config=LoadConfig(load_format="dummy"),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=max_batched_tokens,
                max_num_seqs=8,
                max_model_len=512,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=depth > 1,
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
            kv_transfer_config=KVTransferConfig(
                kv_connector="InferScaleConnector",
                kv_connector_module_path="inferscale.connector",
                kv_role="kv_both",
                kv_connector_extra_config=settings,
            ),
        )
        config.cache_config.num_gpu_blocks = num_blocks
        self.depth = depth
        hash_block_size = math.gcd(*(group.block_size for group in groups))
        self.scheduler = (AsyncScheduler if depth > 1 else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"model.layers.{index}.self_attn.attn"], spec_of(group))
                    for index, group in enumerate(groups)
                ],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*(group.block_size for group in groups)),
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = runner == "v2"
        connector = self.scheduler.connector
        assert isinstance(connector, InferScaleConnector)
        assert connector.scheduler is not None
        self.connector = connector
        self.side = connector.scheduler
        self.worker = SymbolicWorker(
            groups, is_v2=runner == "v2", reports_without_forward=reports_without_forward
        )
        self.hasher = get_request_block_hasher(hash_block_size, sha256) if prefix_caching else None
        self.in_flight: deque[Any] = deque()
        self.outcomes: dict[str, dict[str, Any] | None] = {}
        self.finish_reasons: dict[str, str] = {}
        self.outputs: list[Any] = []

    # requests ---------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        plan: Plan | None = None,
        *,
        max_tokens: int = 1,
        params: Any = None,
        salt: str | None = "plan",
        **sampling: Any,
    ) -> Request:
        if plan is not None:
            params = to_wire(plan, self.side.secret)
        if salt == "plan":
            salt = None if plan is None else salt_of(plan, self.side.secret)
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}, **sampling
            ),
            None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def plan(self, **fields: Any) -> Plan:
        return Plan(**{"model": self.side.model, "scope": SCOPE, **fields})

    def encode(
        self, request_id: str, prompt: Sequence[int], *spans: tuple[int, int], epoch: int = 0, part: int = 0
    ) -> Request:
        """Capture spans of a prompt; the key of a span is that of its tokens alone. part: of all."""
        captures = tuple(Span(key_of(prompt[start:end]), start, end, part=part) for start, end in spans)
        return self.add(request_id, prompt, self.plan(captures=captures, epoch=epoch))

    def chat(
        self,
        request_id: str,
        prompt: Sequence[int],
        *segments: Sequence[int],
        max_tokens: int = 1,
        epoch: int = 0,
    ) -> Request:
        plan = self.plan(segments=tuple(segment(ids) for ids in segments), epoch=epoch)
        return self.add(request_id, prompt, plan, max_tokens=max_tokens)

    def order(self, request_id: str, order: Order) -> Request:
        return self.add(request_id, [1], self.plan(order=order))

    def abort(self, request_id: str) -> None:
        request = self.scheduler.requests.get(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if request is not None:
            self.finish_reasons[request_id] = "abort"

    # steps ------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """One scheduling pass; the step waits in `in_flight` for `report`."""
        output = self.scheduler.schedule()
        requests = {
            request_id: self.scheduler.requests[request_id] for request_id in output.num_scheduled_tokens
        }
        # A chunk that does not reach the last known token samples nothing.
        sampling = {request_id for request_id, request in requests.items() if not request.is_prefill_chunk}
        self.in_flight.append((output, requests, sampling))
        self.outputs.append(output)
        self.side.table.check()
        return output

    def report(self) -> None:
        """Execute the oldest step in flight and hand its output to the scheduler."""
        output, requests, sampling = self.in_flight.popleft()
        report, failed = self.worker.execute(output, requests)
        ids = list(output.num_scheduled_tokens)
        tokens = {
            request_id: [sampled_token(computed + n)] if request_id in sampling else []
            for request_id, computed, n in scheduled(output)
        }
        kv_output = KVConnectorOutput(
            kv_connector_worker_meta=None if report is None else WorkerReport(report),
            invalid_block_ids=failed,
        )
        result = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[tokens[request_id] for request_id in ids],
                kv_connector_output=kv_output,
            ),
        )
        for outputs in result.values():
            for item in outputs.outputs:
                if item.finish_reason is not None:
                    params = item.kv_transfer_params
                    self.outcomes[item.request_id] = None if params is None else params[WIRE_KEY]
                    self.finish_reasons[item.request_id] = str(item.finish_reason)
        self.side.table.check()

    def step(self) -> Any:
        """Schedule one step; report the oldest as soon as `depth` steps are in flight."""
        output = self.schedule()
        if len(self.in_flight) >= self.depth:
            self.report()
        return output

    def drain(self) -> None:
        while self.in_flight:
            self.report()

    def run(self, max_steps: int = 400) -> None:
        """Until nothing is left to do, as the engine's own loop."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError("requests are left after max_steps")
        self.drain()

    def check_idle(self) -> None:
        """Nothing is written, open or leaked once no request is left."""
        stats = self.side.stats()
        assert stats["open_requests"] == stats["open_steps"] == 0, stats
        assert stats["internal_errors"] == 0, stats
        if self.side.tiering is not None:
            assert stats["tier_loads_open"] == 0, stats
            for tier in self.side.tiering.tiers:
                tier.check()
                assert not any(copy.is_loading for copy in map(tier.get, tier.all_keys()) if copy)
        assert not self.side._claims
        assert not self.side._rejected
        idle = [
            entry.is_idle for entry in self.side.table._entries.values()
        ]  # resident, or the first of two parts
        assert all(idle), "an entry is being written for ever"
        self.side.table.check()

    def close(self) -> None:
        self.scheduler.shutdown()
