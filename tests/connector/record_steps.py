"""Record the scheduler outputs of one scenario as JSON: `data/steps-<vLLM version>-<runner>.json`.

    PYTHONPATH=src python tests/connector/record_steps.py v1
    PYTHONPATH=<folder with vLLM 0.25.1's Python source>:src python tests/connector/record_steps.py v2

The scenario runs on vLLM's own scheduler (see `symbolic_engine.py`), so the file holds what that
version hands to a connector: chunked prefill of a capture, a preemption in the middle of it, the
resume, an injection, a preemption behind it, a resume with another match, an abort. Of each step the
fields are kept that a connector or a model runner reads. `test_recorded_steps.py` replays the files.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def new_request(new: Any) -> dict[str, Any]:
    return {
        "req_id": new.req_id,
        "block_ids": [list(ids) for ids in new.block_ids],
        "num_computed_tokens": new.num_computed_tokens,
        "prompt_token_ids": list(new.prompt_token_ids),
        "prefill_token_ids": None if new.prefill_token_ids is None else list(new.prefill_token_ids),
    }


def cached_requests(cached: Any) -> dict[str, Any]:
    return {
        "req_ids": list(cached.req_ids),
        "resumed_req_ids": sorted(cached.resumed_req_ids),
        "new_block_ids": [
            None if ids is None else [list(group) for group in ids] for ids in cached.new_block_ids
        ],
        "num_computed_tokens": list(cached.num_computed_tokens),
        "num_output_tokens": list(cached.num_output_tokens),
    }


def scheduler_output(output: Any) -> dict[str, Any]:
    return {
        "scheduled_new_reqs": [new_request(new) for new in output.scheduled_new_reqs],
        "scheduled_cached_reqs": cached_requests(output.scheduled_cached_reqs),
        "num_scheduled_tokens": dict(output.num_scheduled_tokens),
        "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
        "finished_req_ids": sorted(output.finished_req_ids),
        "preempted_req_ids": None if output.preempted_req_ids is None else sorted(output.preempted_req_ids),
    }


def record(runner: str) -> list[dict[str, Any]]:
    """Every call that vLLM makes on the connector, in order."""
    from symbolic_engine import SymbolicEngine, key_of

    from inferscale.connector import connector as module
    from inferscale.plan import Order

    calls: list[dict[str, Any]] = []
    side_class = module.SchedulerSide

    class Recording(side_class):  # type: ignore[misc, valid-type]
        def num_matched_tokens(self, request: Any, num_computed: int) -> int:
            offered = super().num_matched_tokens(request, num_computed)
            calls.append(
                {"call": "match", "id": request.request_id, "computed": num_computed, "offered": offered}
            )
            return offered

        def claim(self, request: Any, block_ids: list[int], num_external: int) -> None:
            calls.append(
                {"call": "claim", "id": request.request_id, "blocks": block_ids, "external": num_external}
            )
            super().claim(request, block_ids, num_external)

        def build_orders(self, output: Any) -> Any:
            calls.append({"call": "build", "output": scheduler_output(output)})
            return super().build_orders(output)

        def complete(self, report: Any) -> None:
            calls.append({"call": "report", "done": sorted(report.done)})
            super().complete(report)

        def finish(self, request: Any) -> dict[str, Any] | None:
            calls.append({"call": "finish", "id": request.request_id})
            return super().finish(request)

    module.SchedulerSide = Recording  # type: ignore[misc]
    engine = SymbolicEngine(runner=runner, max_batched_tokens=32)
    fact, other, question = list(range(100, 130)), list(range(200, 217)), [7, 8, 9]

    def preempt(request_id: str) -> None:
        request = engine.scheduler.requests[request_id]
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)

    engine.encode("encode", [3] + fact + other, (1, 31), (31, 48))
    engine.step()
    preempt("encode")
    engine.run()
    engine.chat("chat", other + fact + question, other, fact, max_tokens=8)
    engine.chat("aborted", fact + question, fact, max_tokens=8)
    engine.step()
    engine.step()
    engine.abort("aborted")
    preempt("chat")
    engine.side.table.drop([key_of(fact)])
    engine.run()
    engine.order("order", Order("stats"))
    engine.run()
    engine.check_idle()
    engine.close()
    return calls


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm

        calls = record(sys.argv[1])
    DATA.mkdir(exist_ok=True)
    version = vllm.__version__ if vllm.__version__[0].isdigit() else "unknown"
    path = DATA / f"steps-{sys.argv[2] if len(sys.argv) > 2 else version}-{sys.argv[1]}.json"
    path.write_text("[\n" + ",\n".join("  " + json.dumps(call) for call in calls) + "\n]\n")
    print(path, len(calls))


if __name__ == "__main__":
    main()
