"""Forcing an answer token by token, and comparing distributions."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inferscale.bench import forced
from inferscale.bench.forced import TokenScore, divergence, forced_requests, read_score
from inferscale.errors import EngineError
from inferscale.offline import Generation
from inferscale.plan import Plan, Segment


def score(probabilities: dict[int, float], token: int = 0, gold: float = 0.5) -> TokenScore:
    """A score whose most likely tokens have these probabilities."""
    ordered = sorted(probabilities.items(), key=lambda item: -item[1])
    ids = np.array([id for id, _ in ordered], dtype=np.int32)
    logprobs = np.log(np.array([p for _, p in ordered], dtype=np.float32))
    return TokenScore(math.log(probabilities.get(token, gold)), ids, logprobs)


def test_one_request_a_token_each_held_to_it() -> None:
    plan = Plan("model", "scope", segments=(Segment("key", (1, 2), "text"),))
    requests = forced_requests((1, 2, 3), (7, 8), plan, 99)
    assert [list(request.token_ids) for request in requests] == [[1, 2, 3], [1, 2, 3, 7]]
    assert [request.sampling["allowed_token_ids"] for request in requests] == [[7], [8]]
    assert all(request.max_tokens == 1 and request.sampling["logprobs"] == 99 for request in requests)
    assert "prompt_logprobs" not in requests[0].sampling  # it would switch injection off
    plans = [request.plan for request in requests]
    assert all(one is not None and one.table.keys == plan.table.keys for one in plans)
    assert len({one.id for one in plans if one is not None} | {plan.id}) == 3
    assert [request.plan for request in forced_requests((1,), (2,), None, 9)] == [None]


def generation(ids: list[int], values: list[float], token: int = 5, **changes: Any) -> Generation:
    flat = SimpleNamespace(token_ids=ids, logprobs=values)
    given: dict[str, Any] = {"finish_reason": "length", "logprobs": flat} | changes
    return Generation("", (token,), 0.1, 0.1, 0, None, **given)


def test_the_forced_token_comes_first_and_the_others_by_probability() -> None:
    read = read_score(generation([5, 9, 4, 5], [-3.0, -0.5, -0.25, -3.0]), 5)
    assert (read.logprob, read.best_id) == (-3.0, 4)
    assert read.ids.tolist() == [4, 9, 5]
    again = TokenScore.unpacked(read.packed())
    assert again.logprob == read.logprob
    assert again.ids.tolist() == read.ids.tolist()
    assert again.logprobs.tolist() == read.logprobs.tolist()


@pytest.mark.parametrize(
    "answer",
    [
        generation([5, 4], [-1.0, -2.0], token=6),
        generation([5, 4], [-1.0, -2.0], logprobs=None),
        generation([5, 4], [-1.0, -2.0], finish_reason="error"),
    ],
    ids=["another token", "no logprobs", "failed"],
)
def test_what_the_engine_did_not_do(answer: Generation) -> None:
    with pytest.raises(EngineError):
        read_score(answer, 5)


def test_equal_distributions_have_no_divergence() -> None:
    same = score({0: 0.5, 1: 0.25, 2: 0.125})
    assert divergence(same, same, 0) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_divergence_counts_all_other_tokens_as_one() -> None:
    text, other = score({0: 0.5, 1: 0.25}), score({1: 0.5, 0: 0.25, 7: 0.125})
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.25)
    assert divergence(text, other, 0) == pytest.approx((expected, 0.0), abs=1e-6)


def test_tokens_that_the_other_did_not_return_count_to_the_rest() -> None:
    text, other = score({0: 0.5, 1: 0.25}), score({0: 0.25, 9: 0.25})
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(text, other, 0) == pytest.approx((expected, 0.25), abs=1e-6)


def test_the_forced_token_is_known_of_both() -> None:
    text = score({0: 0.5, 1: 0.25})
    other = replace(score({1: 0.5}), logprob=math.log(0.125))
    expected = 0.5 * math.log(0.5 / 0.125) + 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.375)
    assert divergence(text, other, 0) == pytest.approx((expected, 0.0), abs=1e-6)


def test_only_the_most_likely_tokens_are_compared() -> None:
    num = forced.NUM_COMPARED
    p = dict.fromkeys(range(num), 0.5 / num) | {num + id: 0.1 / num for id in range(num)}
    q = dict(p)
    q[num + 1], q[num + 2] = q[num + 1] * 1.5, q[num + 2] * 0.5  # behind the 256th
    assert divergence(score(p), score(q), 0).kl == pytest.approx(0.0, abs=1e-9)


def test_rounding_does_not_make_it_infinite_or_negative() -> None:
    sure, other = score({0: 1.0}), score({0: 0.999, 1: 0.001})
    assert 0 <= divergence(sure, other, 0).kl < 0.002
    assert math.isfinite(divergence(other, sure, 0).kl)
