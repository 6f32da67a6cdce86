"""The self-check through the offline engine: with the small transformer in the place of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.check_runner import check_engine
from inferscale.config import ConnectorConfig
from inferscale.offline import Generation, GenerationRequest
from inferscale.prompt import PromptBuilder
from inferscale.self_check import Probe, Verdict
from test_prompt import CHATML, tokenizer_with

sys.path.append(str(Path(__file__).parent / "self_check"))
from toy_engine import VOCAB, ToyEngine


class FakeEngine:
    """`OfflineEngine` with the small transformer."""

    fingerprint = "m"

    def __init__(self, toy: ToyEngine, **settings: Any) -> None:
        self.toy = toy
        self.connector = ConnectorConfig(**settings)
        model = SimpleNamespace(
            max_model_len=4096, dtype="torch.float32", max_logprobs=-1, logprobs_mode="raw_logits"
        )
        config = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> Generation:
        plan = request.plan
        assert plan is not None
        allowed = request.sampling.get("allowed_token_ids")
        shown: Any = SimpleNamespace(
            captures=plan.captures,
            order=plan.order,
            segments=[
                SimpleNamespace(key=s.key, token_ids=tuple(token % VOCAB for token in s.token_ids))
                for s in plan.segments
            ],
        )
        ids = tuple(token % VOCAB for token in request.token_ids)
        forced = None if allowed is None else allowed[0] % VOCAB
        told = self.toy.answer(
            Probe(ids, shown, request.max_tokens, request.sampling.get("logprobs"), forced)
        )
        steps = [{t: SimpleNamespace(logprob=value) for t, value in step.items()} for step in told.steps]
        return Generation("", (0,), 0.0, 0.0, 0, told.outcome, "length", steps)


def check(folder: Path, toy: ToyEngine, **settings: Any) -> Verdict:
    prompts = PromptBuilder(tokenizer_with(CHATML))
    return check_engine(FakeEngine(toy, **settings), prompts, folder)  # type: ignore[arg-type]


def test_the_first_start_checks_and_the_next_remembers(tmp_path: Path) -> None:
    first, second = (check(tmp_path, ToyEngine()) for _ in range(2))
    assert (first.state, first.is_new, second.state, second.is_new) == ("exact", True, "exact", False)


def test_a_refusal_is_said_at_every_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        caplog.clear()
        verdict = check(tmp_path, ToyEngine(turn=lambda delta: 0.0))
        assert verdict.is_refusal
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", str(verdict))]


def test_an_engine_that_breaks_in_the_second_round_leaves_the_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(ToyEngine):
        def answer(self, probe: Probe) -> Any:
            if sum(bool(earlier.plan.captures) for earlier in self.log) >= 3 and probe.plan.captures:
                raise RuntimeError("the engine is gone")
            self.log.append(probe)
            return super().answer(probe)

    verdict = check(tmp_path, Breaking(turn=lambda delta: 0.0))
    assert (verdict.state, verdict.why) == ("refused", "it failed (RuntimeError)")
    assert "the engine is gone" in caplog.text


def test_a_check_that_fails_keeps_nobody_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(ToyEngine):
        def answer(self, probe: Probe) -> Any:
            raise RuntimeError("the engine is gone")

    verdict = check(tmp_path, Gone())
    assert (verdict.state, verdict.is_refusal) == ("unknown", False)
    assert "the engine is gone" in caplog.text
    assert check(tmp_path, ToyEngine(), self_check="never").why == "self_check is 'never'"
