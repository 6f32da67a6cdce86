"""What vLLM's scheduler output says of a step, in the shapes of both model runners."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any


def allocated(
    scheduler_output: Any, request_ids: Collection[str]
) -> Iterator[tuple[str, Sequence[list[int]]]]:
    """Those of these requests that begin or resume in this step, each with all of its blocks, by group."""
    num_left = len(request_ids)
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id in request_ids:
            num_left -= 1
            yield new.req_id, new.block_ids
    if num_left:  # model runner V1 tells of resumed requests here
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in request_ids and block_ids is not None:
                yield request_id, block_ids


def computed_before(scheduler_output: Any) -> list[tuple[str, int]]:
    """(request id, tokens computed before this step) of every scheduled request."""
    cached = scheduler_output.scheduled_cached_reqs
    return [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs] + list(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )
