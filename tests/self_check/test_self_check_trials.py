"""The check on a small transformer: what it lets pass, what it refuses, what it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
from toy_engine import SUBJECT, ToyEngine

from inferscale.self_check import Verdict, conduct


def verdict_of(engine: ToyEngine, **changes: Any) -> Verdict:
    verdict = engine.run(conduct(SUBJECT._replace(**changes)))
    assert isinstance(verdict, Verdict)
    return verdict


def test_exact_relocation_is_told_from_a_wrong_turn() -> None:
    engine = ToyEngine()
    verdict = verdict_of(engine)
    assert (verdict.state, verdict.refusal) == ("exact", None)
    assert verdict.moved < 1e-6
    assert verdict.own == 0.0
    assert verdict.position < 1e-6
    assert verdict.wrong > 0.02
    assert not engine.pool, "what was captured for the check is forgotten"


def test_moved_segments_are_turned_both_ways_by_several_distances() -> None:
    turned: set[float] = set()

    def noted(delta: int) -> float:
        turned.add(delta)
        return float(delta)

    verdict_of(ToyEngine(turn=noted))
    for length in (16, 20, 24):
        assert turned >= {-3, length - 3, 2 * length - 3, 3 * length - 3}


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda delta: 0.0, id="not at all"),
        pytest.param(lambda delta: -delta, id="backwards"),
        pytest.param(lambda delta: delta / 2, id="half"),
        pytest.param(lambda delta: delta + 1, id="one further"),
        pytest.param(lambda delta: delta * 1.05, id="five percent more"),
        pytest.param(lambda delta: delta % 64, id="as if positions ended at 64"),
    ],
)
def test_a_wrong_rotation_is_refused(turn: Any) -> None:
    verdict = verdict_of(ToyEngine(turn=turn))
    assert verdict.state == "refused"
    assert verdict.refusal is not None
    assert verdict.position < 1e-6
    assert "no rotation" not in str(verdict)


def test_learned_positions_are_refused_with_the_reason() -> None:
    verdict = verdict_of(ToyEngine(learned=1.0))
    assert verdict.state == "refused"
    assert "changes with its position: no rotation can mend that" in str(verdict)


def test_an_attention_sink_is_refused() -> None:
    assert verdict_of(ToyEngine(sink=50.0)).state == "refused"


def test_a_model_that_would_not_show_a_wrong_turn_is_insensitive_and_injects() -> None:
    verdict = verdict_of(ToyEngine(scale=0.01, turn=lambda delta: 0.0))
    assert (verdict.state, verdict.is_refusal) == ("insensitive", False)


def test_what_the_pool_rounds_is_no_error_of_the_rotation() -> None:
    """The same noise where nothing is turned measures it."""
    verdict = verdict_of(ToyEngine(noise=0.1))
    assert verdict.state == "exact"
    assert verdict.moved > 0.001, "more than float32 may have without that noise"


def test_a_refusal_is_made_sure_with_other_tokens() -> None:
    engine = ToyEngine(turn=lambda delta: 0.0)
    verdict_of(engine)
    twice = {probe.token_ids[0] for probe in engine.log if probe.plan.captures}
    engine = ToyEngine()
    verdict_of(engine)
    once = {probe.token_ids[0] for probe in engine.log if probe.plan.captures}
    assert (len(once), len(twice)) == (3, 6)


class Faltering(ToyEngine):
    """Turns nothing, and does not get through the second round."""

    fault: str = ""

    def answer(self, probe: Any) -> Any:
        num_passes = sum(bool(earlier.plan.captures) for earlier in self.log)
        seen = super().answer(probe)
        if num_passes <= 3:
            return seen
        if self.fault == "raises":
            raise RuntimeError("the engine is gone")
        if self.fault == "fails":
            return seen._replace(steps=())
        return seen._replace(outcome={**(seen.outcome or {}), self.fault: 0})


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("captured", "the pool took 0 of its 9 segments"),
        ("fails", "the engine failed a request of it"),
        ("injected_tokens", "the engine injected 0 of 64 tokens"),
        ("raises", "it failed (RuntimeError)"),
    ],
)
def test_a_refusal_stays_where_it_cannot_be_made_sure(
    fault: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Faltering(turn=lambda delta: 0.0)
    engine.fault = fault
    verdict = verdict_of(engine)
    assert (verdict.state, verdict.is_lasting) == ("refused", True)
    assert verdict.moved > verdict.allowed, "the numbers of the first round"
    assert f"not made sure with other tokens, since {why}" in str(verdict)
    assert ("the engine is gone" in caplog.text) == (fault == "raises")


def test_a_second_round_that_passes_lifts_the_refusal() -> None:
    engine = ToyEngine()
    engine.turn = lambda delta: delta if sum(bool(probe.plan.captures) for probe in engine.log) > 3 else 0.0
    assert verdict_of(engine).state == "exact"


def test_arms_of_a_trial_never_find_each_others_blocks() -> None:
    engine = ToyEngine()
    verdict_of(engine)
    verdict_of(engine)
    scopes = [probe.plan.scope for probe in engine.log if probe.plan.order is None]
    assert len(set(scopes)) == len(scopes), "nor those of another check on the same engine"


@pytest.mark.parametrize(
    ("engine", "changes", "why"),
    [
        (ToyEngine(loses=True), {}, "the pool took 0 of its 9 segments"),
        (ToyEngine(), {"max_tokens": 99}, "tokens of context, and the model has 99"),
        (ToyEngine(), {"text_ids": (1, 2, 3)}, "its text has 3 different tokens"),
        (ToyEngine(), {"max_logprobs": 0}, "tells no log-probabilities"),
    ],
)
def test_what_cannot_be_checked_is_not_held_against_the_model(
    engine: ToyEngine, changes: Any, why: str
) -> None:
    verdict = verdict_of(engine, **changes)
    assert (verdict.state, verdict.is_refusal, verdict.is_lasting) == ("unknown", False, False)
    assert why in str(verdict)
    assert not engine.pool


def test_an_engine_that_injects_nothing_or_fails_is_not_judged() -> None:
    class Cold(ToyEngine):
        def answer(self, probe: Any) -> Any:
            seen = super().answer(probe)
            return seen._replace(outcome={**(seen.outcome or {}), "injected_tokens": 0})

    class Broken(ToyEngine):
        def answer(self, probe: Any) -> Any:
            seen = super().answer(probe)
            return seen._replace(steps=()) if probe.plan.segments else seen

    assert "injected 0 of 64 tokens" in str(verdict_of(Cold()))
    assert "failed a request" in str(verdict_of(Broken()))


def test_without_raw_logprobs_no_token_is_forced() -> None:
    engine = ToyEngine()
    assert verdict_of(engine, is_raw=False, max_logprobs=-1).state == "exact"
    assert {probe.allowed for probe in engine.log} == {None}
    assert {probe.max_tokens for probe in engine.log} == {1}
    assert "allowed_token_ids" not in engine.log[0].sampling
