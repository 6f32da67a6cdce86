"""The scheduler side replayed from what vLLM 0.25.1 and 0.32.0 handed to it, for both model runners.

The files in `data/` were made by `record_steps.py`; no vLLM is needed to read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.connector.groups import CacheGroup
from inferscale.connector.messages import StepOrders, StepReport
from inferscale.connector.scheduler import SchedulerSide
from inferscale.plan import Order, Plan, Segment, Span, salt_of, segment_key, to_wire
from inferscale.pool.table import PageTable

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("steps-*.json"))
SECRET = b"s" * 32
FACT, OTHER, QUESTION = list(range(100, 130)), list(range(200, 217)), [7, 8, 9]
BLOCK_SIZE = 16


def key_of(ids: list[int]) -> str:
    return segment_key("m", [], ids)


PLANS = {
    "encode": Plan("m", "s", captures=(Span(key_of(FACT), 1, 31), Span(key_of(OTHER), 31, 48))),
    "chat": Plan("m", "s", segments=tuple(Segment(key_of(ids), tuple(ids)) for ids in (OTHER, FACT))),
    "aborted": Plan("m", "s", segments=(Segment(key_of(FACT), tuple(FACT)),)),
    "order": Plan("m", "s", order=Order("stats")),
}
PROMPTS = {
    "encode": [3, *FACT, *OTHER],
    "chat": OTHER + FACT + QUESTION,
    "aborted": FACT + QUESTION,
    "order": [1],
}


def output_of(record: dict[str, Any]) -> SimpleNamespace:
    """A SchedulerOutput as far as it was recorded; the types are those of vLLM."""
    cached = dict(record["scheduled_cached_reqs"])
    cached["resumed_req_ids"] = set(cached["resumed_req_ids"])
    cached["new_block_ids"] = [None if ids is None else tuple(ids) for ids in cached["new_block_ids"]]
    preempted = record["preempted_req_ids"]
    return SimpleNamespace(
        **{
            **record,
            "scheduled_new_reqs": [
                SimpleNamespace(**{**new, "block_ids": tuple(new["block_ids"])})
                for new in record["scheduled_new_reqs"]
            ],
            "scheduled_cached_reqs": SimpleNamespace(**cached),
            "finished_req_ids": set(record["finished_req_ids"]),
            "preempted_req_ids": None if preempted is None else set(preempted),
        }
    )


def request_of(name: str) -> SimpleNamespace:
    prompt = PROMPTS[name]
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_tokens=len(prompt),
        kv_transfer_params=to_wire(PLANS[name], SECRET),
        cache_salt=salt_of(PLANS[name], SECRET),
    )


class Replay:
    """Feeds the recorded calls to a scheduler side of its own."""

    def __init__(self, path: Path) -> None:
        self.side = SchedulerSide(
            PageTable(64, 4), groups=[CacheGroup(BLOCK_SIZE)], row_bytes=8, model="m", secret=SECRET
        )
        self.requests = {name: request_of(name) for name in PLANS}
        self.blocks: dict[str, list[int]] = {}
        self.orders: list[StepOrders] = []
        self.outcomes: dict[str, Any] = {}
        self.calls = json.loads(path.read_text())

    def run(self) -> None:
        for call in self.calls:
            getattr(self, call["call"])(call)
            self.side.table.check()

    def match(self, call: dict[str, Any]) -> None:
        if call["computed"] == 48:
            self.side.table.drop([key_of(FACT)])
        assert self.side.num_matched_tokens(self.requests[call["id"]], call["computed"]) == call["offered"]

    def claim(self, call: dict[str, Any]) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (call["blocks"],))
        self.side.claim(self.requests[call["id"]], blocks, call["external"])

    def build(self, call: dict[str, Any]) -> None:
        output = output_of(call["output"])
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is not None:
                kept = [] if name in cached.resumed_req_ids else self.blocks[name]
                self.blocks[name] = kept + ids[0]
        self.orders.append(self.side.build_orders(output))

    def report(self, call: dict[str, Any]) -> None:
        self.side.complete(StepReport(set(call["done"])))

    def finish(self, call: dict[str, Any]) -> None:
        self.outcomes[call["id"]] = self.side.finish(self.requests[call["id"]])

    def slots(self, name: str, start: int, end: int) -> list[int]:
        blocks = self.blocks[name]
        return [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]


def test_both_runners_of_both_versions_were_recorded() -> None:
    assert [path.stem for path in FILES] == [
        f"steps-{version}-{runner}" for version in ("0.25.1", "0.32.0") for runner in ("v1", "v2")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_shapes_differ_as_the_scheduler_side_expects(path: Path) -> None:
    outputs = [call["output"] for call in json.loads(path.read_text()) if call["call"] == "build"]
    preempted = [name for output in outputs for name in output["preempted_req_ids"] or ()]
    assert preempted == ["encode", "chat"]
    new = [request["req_id"] for output in outputs for request in output["scheduled_new_reqs"]]
    resumed = [name for output in outputs for name in output["scheduled_cached_reqs"]["resumed_req_ids"]]
    if path.stem.endswith("v2"):
        assert new == ["encode", "encode", "chat", "aborted", "chat", "order"]
        assert resumed == []
    else:
        assert new == ["encode", "chat", "aborted", "order"]
        assert resumed == ["encode", "chat"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_replay(path: Path) -> None:
    replay = Replay(path)
    replay.run()
    captures = [orders.capture[0] for orders in replay.orders if orders.capture]
    injections = [orders.injection[0] for orders in replay.orders if orders.injection]
    # The first span ends in the first chunk, the second in the one after the resume.
    assert [len(capture.expand(BLOCK_SIZE).rows) for capture in captures] == [30, 17]
    slots = [slot for capture in captures for slot in capture.expand(BLOCK_SIZE).slots.tolist()]
    assert slots == replay.slots("encode", 1, 48)
    assert len(injections) == 1
    injected = injections[0].expand(BLOCK_SIZE)
    assert injected.slots.tolist() == replay.slots("chat", 0, 47) + replay.slots("aborted", 0, 30)
    assert injected.positions.tolist() == [*range(47), *range(30)]
    stats = replay.side.stats()
    assert stats["open_requests"] == stats["open_steps"] == 0
    assert stats["preemptions"] == 2
    assert stats["captures"] == 2
    assert replay.outcomes["chat"]["injected_tokens"] == 47
    assert replay.outcomes["chat"]["resumes"] == 1
    assert replay.outcomes["aborted"]["injected_tokens"] == 30
    assert replay.outcomes["order"]["answer"]["resident_segments"] == 1


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem.endswith("v1")], ids=lambda path: path.stem
)
def test_v1_resumes_are_followed_without_the_preempted_ids(path: Path) -> None:
    """vLLM documents `preempted_req_ids` for V2 only; under V1 the resume itself says that blocks are new."""
    replay = Replay(path)
    for call in replay.calls:
        if call["call"] == "build":
            call["output"]["preempted_req_ids"] = None
    replay.run()
    slots = [
        slot
        for orders in replay.orders
        if orders.capture
        for slot in orders.capture[0].expand(BLOCK_SIZE).slots.tolist()
    ]
    assert slots == replay.slots("encode", 1, 48)
