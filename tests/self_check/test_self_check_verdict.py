"""Distances between distributions, and what a verdict says."""

from __future__ import annotations

import math

import pytest

from inferscale.self_check.verdict import Distances, Verdict, distance, judge, passed_over


def test_distance_is_the_root_mean_square_over_steps_and_tokens() -> None:
    text = [{1: -1.0, 2: -2.0}, {3: -0.5}]
    other = [{1: -1.3, 2: -2.0}, {3: -0.1}]
    assert distance(text, other, 20) == pytest.approx(math.sqrt((0.09 + 0.16) / 3))


def test_a_token_that_the_other_does_not_tell_counts_at_least_as_far_as_its_last() -> None:
    """A token that was forced is told beside the most likely ones, and is no bound."""
    assert distance([{1: -1.0}], [{2: -0.2, 3: -4.0, 9: -30.0}], 2) == pytest.approx(3.0)
    assert distance([{1: -5.0}], [{2: -0.2, 3: -4.0}], 2) == 0.0


@pytest.mark.parametrize("steps", [[], [{1: -1.0}, {1: -1.0}]])
def test_distance_wants_as_many_steps(steps: list[dict[int, float]]) -> None:
    with pytest.raises(ValueError):
        distance(steps, [{1: -1.0}] if steps else [], 20)


@pytest.mark.parametrize(
    ("dtype", "own", "moved", "wrong", "state"),
    [
        ("float32", 0.0, 0.0009, 1.0, "exact"),
        ("float32", 0.0, 0.02, 5.0, "refused"),  # one position off, of SmolLM2
        ("torch.float32", 0.0, 0.02, 5.0, "refused"),
        ("float32", 0.02, 0.035, 1.0, "exact"),  # an int8 pool
        ("bfloat16", 0.0, 0.09, 0.46, "exact"),
        ("bfloat16", 0.0, 0.29, 0.46, "refused"),
        ("bfloat16", 0.0, 0.4, 5.0, "exact"),  # a small share of a wrong turn
        ("bfloat16", 0.0, 0.1, 0.2, "insensitive"),
        ("float16", 0.0, 0.04, 0.1, "refused"),
        ("float32", 0.0, 0.0, 0.0, "insensitive"),
        ("float32", 0.0, float("nan"), 1.0, "refused"),
    ],
)
def test_judgement(dtype: str, own: float, moved: float, wrong: float, state: str) -> None:
    found = [Distances(own, moved, wrong, 0.0)] * 3
    assert judge(found, dtype).state == state


def test_one_trial_of_three_does_not_decide() -> None:
    good, bad = Distances(0.0, 0.0, 1.0, 0.0), Distances(0.0, 1.0, 1.0, 0.0)
    assert judge([good, bad, good], "float32").state == "exact"
    assert judge([bad, bad, good], "float32").state == "refused"


@pytest.mark.parametrize("far", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["own", "moved", "wrong"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_trial_that_tells_no_number_refuses(far: float, field: str, place: int, dtype: str) -> None:
    found = [Distances(0.0, 0.0, 1.0, 0.0)] * 3
    found[place] = found[place]._replace(**{field: far})
    assert judge(found, dtype).state == "refused"


def test_what_is_no_number_is_infinitely_far() -> None:
    """Also where the tokens are others, and only the least likely would be compared with."""
    assert distance([{1: -1.0}], [{1: math.nan}], 20) == math.inf
    assert distance([{1: -1.0}], [{2: math.nan, 3: math.nan}], 20) == math.inf
    assert distance([{1: math.nan}], [{1: -1.0}], 20) == math.inf


def test_what_a_verdict_says() -> None:
    numbers = {"moved": 0.5, "wrong": 1.25, "allowed": 0.005, "seconds": 0.82}
    refused = Verdict("refused", **numbers)
    assert refused.refusal == (
        "the self-check refused injection: for this model moved KV does not say what text says"
    )
    assert "0.5 nats from text; allowed 0.005, turned wrongly 1.2" in str(refused)
    assert "The check at first start" in str(refused)
    assert "not made sure with other tokens, since it rains. " in str(
        Verdict("refused", why="it rains", **numbers)  # type: ignore[arg-type]
    )
    assert "no rotation" in str(Verdict("refused", position=0.7, **numbers))
    assert str(Verdict("exact", **numbers)).endswith("0.8 s).")
    assert "found at an earlier start" in str(Verdict("exact", is_new=False, **numbers))
    assert str(passed_over("it rains")) == "Self-check: not carried out, since it rains. Facts are injected."
    off = Verdict("off")
    assert off.is_refusal
    assert not off.is_lasting
    assert off.refusal == "the engine was started without injection (--injection-path none)"
    assert str(off).startswith("Injection is off (--injection-path none)")
    with pytest.raises(ValueError):
        Verdict("perhaps")  # type: ignore[arg-type]
