"""Scheduler side: owns the page table, claims resident runs, orders the workers.

What happens to a request with a plan::

    match     get_num_new_matched_tokens   locate segments, wait for those in lower tiers (`tiering`), offer
                                           the leading resident run
    claim     update_state_after_alloc     note the run and the blocks it goes to
    order     build_connector_meta         injection of this step; captures whose tokens this step computes
    report    update_connector_output      workers are done: commit captured segments
    finish    request_finished             outcome for the caller

It knows vLLM's objects only through the attributes it reads (`request.request_id`,
`scheduler_output.scheduled_new_reqs`, …), so it is tested from recorded outputs of both model
runners: resumed requests come in `scheduled_cached_reqs` under V1 and in `scheduled_new_reqs`
under V2 (vllm/v1/core/sched/scheduler.py). An exception here would end the engine, so the façade
wraps every hook; see `connector.py`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from inferscale.adapters import model_with_adapter
from inferscale.connector.captures import Captures, Capturing
from inferscale.connector.groups import NULL_BLOCK, CacheGroup
from inferscale.connector.locate import NO_RUN, Run, leading_run, locate
from inferscale.connector.messages import StepOrders, StepReport
from inferscale.connector.scheduled import allocated, computed_before
from inferscale.connector.state import Counters, RequestState, outcome_of, sizes_of
from inferscale.connector.tiering import Tiering, Wait
from inferscale.errors import EngineError, PlanRejected
from inferscale.plan import OTHER_MODEL, Order, Plan, from_wire, salt_of
from inferscale.pool.moves import GroupMoves, MovesBuilder, build_groups
from inferscale.pool.shared_tier import SharedTier
from inferscale.pool.table import PageTable

logger = logging.getLogger(__name__)

ADAPTER_UNKNOWN = (
    "the LoRA adapter was reloaded in place, or its files are not on this machine; load it under a new name"
)
STALE = "memory of this scope changed after the plan was made"
_FACT = "f"  # in the kinds of `Segments`
MAX_OUTCOMES = 4096
"""Outcomes kept for callers that ask over the socket; the oldest are forgotten."""


class SchedulerSide:
    """Page table and orders. All methods are called from the engine's scheduler thread. groups: vLLM's."""

    def __init__(
        self,
        table: PageTable,
        *,
        groups: Sequence[CacheGroup],
        row_bytes: int,
        model: str,
        secret: bytes,
        tiering: Tiering | None = None,
    ) -> None:
        self.table = table
        self.tiering = tiering
        self.groups = groups
        self.row_bytes = row_bytes
        self.model = model
        self.secret = secret
        self.counters = Counters()
        self._broken: dict[str, Any] = {}  # requests that must fail in this step, with their blocks
        # A request that still runs stands here itself: its outcome is made when somebody asks.
        self.outcomes: OrderedDict[str, dict[str, Any] | RequestState] = OrderedDict()
        self._requests: dict[str, RequestState] = {}
        self._rejected: dict[str, str] = {}
        self._followed: dict[str, RequestState] = {}  # of `_requests`, those whose blocks still matter
        # What vLLM was promised in the step being scheduled, by request id; with its KVCacheBlocks.
        self._claims: dict[str, tuple[Run, Any]] = {}
        self._captures = Captures(table, tiering, self.counters, groups)
        self._epochs: dict[str, int] = {}
        self._weights = 0  # how often the model has got other ones, as the workers tell
        self._to_compute: list[Any] = []  # requests that are to read no prefix cache from the next step on

    # match ------------------------------------------------------------------------------------

    def num_matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """Tokens behind `num_computed` that the pool can supply; 0 without a usable plan, None while segments
        come from a lower tier: vLLM asks again in the next step.

        May be called any number of times; it only remembers its last answer, which is what vLLM
        allocates for in the same scheduling call.
        """
        state = self._state_of(request)
        if state is None:
            return 0
        state.match = NO_RUN
        state.match_start = num_computed
        if state.plan.order is not None:
            return None if self._waits(state, num_computed) else 0
        if not state.can_inject or state.placement is None:
            return 0
        if self._is_stale(state.plan):  # forgotten since it was admitted: before a resume, or while it waited
            state.reason = STALE
            return 0
        if state.computes_all:
            return 0
        # The prefix cache has a pass that is encoded again, but gives it the end only: it is computed anew.
        is_pass = getattr(request, "max_tokens", None) == 1
        if is_pass and self._captures.is_out_of_reach(state, num_computed):
            state.computes_all = True
            self._to_compute.append(request)
            return None
        if getattr(request, "skip_reading_prefix_cache", False):
            state.reason = "prompt log-probabilities need every prompt token computed"
            return 0
        if self._waits(state, num_computed):
            return None
        # Never the whole prompt: the last token must be computed for its logits.
        limit = request.num_tokens - 1
        state.match = leading_run(state.placement, num_computed, limit, self.table.resident_run)
        return state.match.num_tokens

    def _waits(self, state: RequestState, num_computed: int) -> bool:
        if self.tiering is None:
            return False
        if not state.has_waited:
            state.has_waited = True
            if state.plan.order is not None:
                state.wait = self._prefetch(self.tiering, state.plan.order)
            else:
                assert state.placement is not None
                state.wait = self.tiering.prepare(state.placement, num_computed, state.plan.scope)
        if state.wait is not None and self.tiering.is_over(state.wait):
            state.wait = None
        return state.wait is not None

    def _prefetch(self, tiering: Tiering, order: Order) -> Wait | None:
        """Nothing where a scope's memory changed after the order was made, as with a plan."""
        is_stale = any(epoch < self._epochs.get(scope, 0) for scope, epoch in order.epochs)
        if order.op != "prefetch" or is_stale:
            return None
        return tiering.prefetch(order.keys, order.epochs[0][0] if order.epochs else "")

    def _state_of(self, request: Any) -> RequestState | None:
        request_id = request.request_id
        state = self._requests.get(request_id)
        if state is not None or request_id in self._rejected:
            return state
        params = request.kv_transfer_params
        if not params:
            return None
        try:
            plan = from_wire(params, self.secret, request.prompt_token_ids or ())
        except PlanRejected as error:
            self.counters.plans_rejected += 1
            self._rejected[request_id] = str(error)
            logger.warning("Request %s: its plan is ignored, the prompt is prefilled: %s", request_id, error)
            return None
        if plan is None:
            return None
        state = self._admit(request, plan)
        self._requests[request_id] = state
        if state.is_followed:
            self._followed[request_id] = state
        return state

    def _model_of(self, request: Any) -> str | None:
        """What the request's plan must name as its model: KV of one adapter is never another's. None for an
        adapter that cannot be told from what it was, or from others."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return self.model
        if getattr(adapter, "load_inplace", False):
            return None
        return model_with_adapter(self.model, adapter.lora_name, adapter.lora_int_id, adapter.lora_path)

    def _is_stale(self, plan: Plan) -> bool:
        return plan.epoch < self._epochs.get(plan.scope, 0)

    def _admit(self, request: Any, plan: Plan) -> RequestState:
        """Decide once whether this request may inject and capture, and where its segments are."""
        self.counters.requests += 1
        state = RequestState(plan, can_inject=False, num_prompt_tokens=request.num_prompt_tokens)
        prompt_ids = request.prompt_token_ids
        if plan.order is not None:
            return state
        model = self._model_of(request)
        if model is None:
            state.reason = ADAPTER_UNKNOWN
        elif plan.model != model:
            self.counters.plans_rejected += 1
            state.reason = OTHER_MODEL
        elif self._is_stale(plan):
            self.counters.plans_stale += 1
            state.reason = STALE
        elif prompt_ids is None:
            state.reason = "the prompt has no token ids"
        elif request.cache_salt != salt_of(plan, self.secret):
            # Without the salt, injected blocks would be found by exact requests.
            self.counters.plans_rejected += 1
            state.reason = "the request's cache_salt is not the plan's"
        elif getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
            state.reason = "the prompt has images, audio, video or embeddings"
        else:
            state.can_inject = True
            state.placement = locate(prompt_ids, plan.table)
            self.counters.segments_lost += state.placement.num_lost
        if state.reason is not None:
            logger.warning("Request %s: prefilled as text: %s", request.request_id, state.reason)
        return state

    # claim ------------------------------------------------------------------------------------

    def claim(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM allocated `blocks` (its KVCacheBlocks) for the request; `num_external` tokens are ours.

        Which blocks these are is told in the output of this step; asking them here takes long.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            assert num_external == 0
            return
        run, state.match = state.match.truncated(num_external), NO_RUN
        if run.entries:
            self.table.touch(run.entries)
            self._claims[request.request_id] = (run, blocks)
        if state.plan.order is None:
            self._count_use(state, run)
            state.note_claim(num_external)
            self._publish(state, state)

    def _count_use(self, state: RequestState, run: Run) -> None:
        counters, placement = self.counters, state.placement
        counters.tokens_injected += run.num_tokens
        if placement is None or state.num_claims:
            return
        first = bisect_right(placement.ends, state.match_start)  # those before it are in the prefix cache
        cached = placement.kinds.count(_FACT, 0, first)
        injected = placement.kinds.count(_FACT, first, first + len(run.entries))
        counters.segments_cached += cached
        counters.segments_injected += injected
        counters.segments_missing += state.plan.table.kinds.count(_FACT) - cached - injected

    # order ------------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """Orders for the workers in this step."""
        self._captures.begin()
        orders = StepOrders()
        orders.injection = self._build_injection(scheduler_output)
        self._follow_blocks(scheduler_output)
        orders.capture, orders.averaging = self._build_captures(scheduler_output)
        orders.failed_blocks = self._take_broken_blocks(scheduler_output)
        # Workers inject, then zero, then capture: a page may be read, and be taken again, in this very step.
        orders.zero_pages = self.table.take_freed_pages()
        if self.tiering is not None:
            self.tiering.pace.note_step(scheduler_output.total_num_scheduled_tokens, time.monotonic())
            orders.tiers = self.tiering.take_orders()
        self._claims.clear()
        while self._to_compute:  # now only: vLLM takes no waiting from a request that reads none
            self._to_compute.pop().skip_reading_prefix_cache = True
        # Only captures need a report; a step without tokens is not even reported by every model runner.
        orders.step = self._captures.close()
        orders.weights = self._weights
        return orders

    def _build_injection(self, scheduler_output: Any) -> GroupMoves:
        if not self._claims:
            return ()
        builders = [MovesBuilder(group.block_size) for group in self.groups]
        missing = dict(self._claims)
        for request_id, block_ids in allocated(scheduler_output, self._claims):
            run, _ = missing.pop(request_id)
            rows = b"".join([entry.packed_rows for entry in run.entries])
            first_row = run.segment_starts[0]
            for builder, group, ids in zip(builders, self.groups, block_ids, strict=True):
                start = max(run.start, group.held_from(run.end))  # what is before it, its layers never see
                if not group.holds(ids, start, run.end):
                    raise EngineError(f"vLLM gave no blocks for tokens {start} to {run.end} of {request_id}.")
                if start < run.end:
                    builder.add(rows[4 * (start - first_row) : 4 * (run.end - first_row)], start, ids)
        for request_id, (_, blocks) in missing.items():  # vLLM counts on KV that has no place to go
            self.fail_claim(request_id, blocks)
        return build_groups(builders)

    def _follow_blocks(self, scheduler_output: Any) -> None:
        """Keep the block lists of capturing requests, and carry out orders of new ones."""
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._requests:
                self.counters.preemptions += 1
                self._requests[request_id].block_ids = []
        if not self._followed:
            return
        for new in scheduler_output.scheduled_new_reqs:
            state = self._followed.get(new.req_id)
            if state is None:
                continue
            state.block_ids = [list(ids) for ids in new.block_ids]
            if state.plan.order is not None and state.answer is None:
                state.answer = self._execute(state.plan.order)
                del self._followed[new.req_id]
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._followed.get(request_id)
            if state is None or not state.plan.captures:
                continue
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                state.block_ids = []
            if new_blocks is not None:
                state.block_ids = state.block_ids or [[] for _ in self.groups]
                for known, more in zip(state.block_ids, new_blocks, strict=True):
                    known.extend(more)

    def _build_captures(self, scheduler_output: Any) -> tuple[GroupMoves, GroupMoves]:
        if not self._followed:
            return (), ()
        moves = self._captures.order(self._capturing(scheduler_output))
        self._followed = {name: state for name, state in self._followed.items() if state.is_followed}
        return moves

    def _capturing(self, scheduler_output: Any) -> Iterator[Capturing]:
        for request_id, num_computed in computed_before(scheduler_output):
            state = self._followed.get(request_id)
            if state is None or not state.plan.captures or not state.can_inject or not state.can_capture:
                continue
            if not self._is_stale(state.plan):  # else its facts may just have been forgotten
                num_tokens = scheduler_output.num_scheduled_tokens[request_id]
                yield Capturing(state, num_computed, num_computed + num_tokens)

    def _execute(self, order: Order) -> dict[str, Any]:
        if order.op == "stats":
            return self.stats()
        if order.op == "prefetch":
            return {"resident": sum(map(self.table.is_resident, order.keys))}
        for scope, epoch in order.epochs:
            self._epochs[scope] = max(epoch, self._epochs.get(scope, 0))
        if self.tiering is not None:
            self.tiering.forget(order.keys)
        return {"dropped": self.table.drop(order.keys)}

    def fail_claim(self, request_id: str, blocks: Any) -> None:
        """vLLM counts on our tokens and will not get them: the orders of this step fail the request."""
        self._broken[request_id] = blocks

    def _take_broken_blocks(self, scheduler_output: Any) -> list[int]:
        if not self._broken:
            return []
        broken, self._broken = self._broken, {}
        given = dict(allocated(scheduler_output, broken))
        failed: list[int] = []
        for request_id, blocks in broken.items():
            block_ids = given.get(request_id) or blocks.get_block_ids()
            state = self._requests.get(request_id)
            # The prefix-cache blocks in front are sound, and other requests may share them.
            start = 0 if state is None else state.match_start
            for group, ids in zip(self.groups, block_ids, strict=True):
                failed.extend(block for block in ids[start // group.block_size :] if block != NULL_BLOCK)
        return failed

    def fail_open_claims(self, scheduler_output: Any) -> StepOrders:
        """After an internal error in `build_orders`: undo the step and fail what was promised in it.

        The workers report the blocks, and vLLM fails those requests instead of answering from
        garbage. Requests that are open stop capturing: their block lists may have missed this step.
        """
        for request_id, (_, claimed) in self._claims.items():
            self.fail_claim(request_id, claimed)
        self._claims.clear()
        blocks = self._take_broken_blocks(scheduler_output)
        self._captures.undo()
        for state in self._requests.values():
            state.can_capture = False
        self._followed = {name: state for name, state in self._followed.items() if state.is_followed}
        return StepOrders(failed_blocks=sorted(set(blocks)))

    # report -----------------------------------------------------------------------------------

    def complete(self, report: StepReport) -> None:
        """The workers carried out these steps: commit what they captured, or abandon it."""
        if self.tiering is not None and report.tiers:
            self.tiering.complete(report.tiers)
        self._captures.complete(report)
        if report.weights > self._weights:
            self._renew(report.weights)

    def _renew(self, weights: int) -> None:
        """The model has other weights: nothing that was computed before counts any more, and plans must name
        it anew. The name is one that no other start or reload has: which weights these are is not known."""
        logger.warning("The model has got other weights: the pool is emptied, and facts are encoded anew")
        self._weights = weights
        self.counters.weight_reloads += 1
        self.model = hashlib.blake2b(
            secrets.token_bytes(16) + self.model.encode(), digest_size=16
        ).hexdigest()
        for state in self._requests.values():
            if state.plan.order is None:
                state.can_inject = state.can_capture = False
                state.reason = OTHER_MODEL
        self._followed = {name: state for name, state in self._followed.items() if state.is_followed}
        self.reset()

    # finish -----------------------------------------------------------------------------------

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Outcome of a finished or aborted request (see `outcome_of`), for its `kv_transfer_params`."""
        rejected = self._rejected.pop(request.request_id, None)
        if rejected is not None:
            return {"rejected": rejected}
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        self._followed.pop(request.request_id, None)
        self._captures.end(state)
        outcome = outcome_of(state, self.table)
        self._publish(state, outcome)
        return outcome

    def _publish(self, state: RequestState, outcome: dict[str, Any] | RequestState) -> None:
        """Of several requests with one plan (`n` above 1) the first counts: the others find its blocks."""
        plan_id = state.plan.id
        if self.outcomes.get(plan_id, state) is not state:
            return
        self.outcomes[plan_id] = outcome
        self.outcomes.move_to_end(plan_id)
        while len(self.outcomes) > MAX_OUTCOMES:
            self.outcomes.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes; plain numbers only."""
        return {
            **vars(self.counters),
            **sizes_of(self.table, self.row_bytes),
            **({} if self.tiering is None else self.tiering.stats()),
            "open_requests": len(self._requests),
            "open_steps": self._captures.num_unreported,
        }

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer the residency socket. Runs in another thread: reads, never mutates."""
        op = question.get("op")
        if op in ("residency", "below") and self.tiering is not None:
            self.tiering.look_up(question["keys"])
        if op == "residency":
            return {"resident": [self._has(key) for key in question["keys"]]}
        if op == "below":
            return {"below": [self._is_below(key) for key in question["keys"]]}
        if op == "keys":
            if question["tier"] == "cold":
                return {"keys": [] if self._shared is None else self._shared.keys_in(question["part"])}
            tiers = () if self.tiering is None else self.tiering.tiers
            return {"keys": next((tier.all_keys() for tier in tiers if tier.name == question["tier"]), [])}
        if op == "owns":
            return {"owns": self._shared is not None and self._shared.belongs_to(question["catalog"])}
        if op == "outcome":
            outcome = self.outcomes.get(question["id"])
            if isinstance(outcome, RequestState):
                outcome = outcome_of(outcome, self.table)
            return {"outcome": outcome}
        if op == "stats":
            return {"stats": self.stats()}
        if op == "engine":
            return {"engine": {"model": self.model}}
        raise ValueError(
            f"unknown op {op!r}; known are residency, below, keys, owns, outcome, stats and engine"
        )

    @property
    def _shared(self) -> SharedTier | None:
        return None if self.tiering is None else self.tiering.shared

    def _has(self, key: str) -> bool:
        """Whether a request can have this segment's KV: from the pool, or from below it."""
        return self.table.is_resident(key) or (
            self.tiering is not None and self.tiering.find(key) is not None
        )

    def _is_below(self, key: str) -> bool:
        return self.tiering is not None and self.tiering.is_below(key)

    def reset(self) -> None:
        """Forget all segments (vLLM's `reset_prefix_cache(reset_connector=True)`)."""
        self.table.clear()
        if self.tiering is not None:
            self.tiering.clear()
