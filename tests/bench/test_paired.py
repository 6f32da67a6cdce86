"""Statistics of paired answers, against what can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inferscale.bench import paired
from inferscale.errors import InvalidInput


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = paired.mean(values)
    error = values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)
    assert paired.mean(values) == found


def test_a_constant_difference_has_no_spread_however_much_the_questions_differ() -> None:
    reference = np.random.default_rng(2).normal(0, 50, 100)
    found = paired.mean_difference(reference + 0.25, reference)
    assert found.value == pytest.approx(0.25)
    assert found.ci95 == pytest.approx((0.25, 0.25))
    assert paired.mean_difference(reference, reference + 0.25).value == pytest.approx(-0.25)


def test_the_recovered_share_is_of_the_means() -> None:
    nothing, text, inject = [4.0, 6.0], [2.0, 2.0], [2.5, 2.0]
    found = paired.recovered_share(nothing, text, inject)
    assert found.value == pytest.approx((5.0 - 2.25) / (5.0 - 2.0))
    assert found.ci95 == pytest.approx((1.5 / 2, 4 / 4))  # both resamples of one question twice
    assert paired.recovered_share(nothing, text, text).value == 1
    assert paired.recovered_share(nothing, text, nothing).value == 0


def test_no_benefit_has_no_share() -> None:
    assert all(math.isnan(number) for number in paired.recovered_share([1.0, 2.0], [1.0, 2.0], [1.0, 1.0]))


def test_more_questions_than_fit_into_one_draw() -> None:
    values = np.arange(paired._DRAWS_AT_ONCE // 1000, dtype=np.float64)
    found = paired.mean(values)
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(len(values)), rel=0.05)


def test_one_question() -> None:
    assert paired.mean([0.5]) == paired.Estimate(0.5, 0.5, 0.5)


@pytest.mark.parametrize("samples", [([], []), ([1.0], [1.0, 2.0])])
def test_samples_of_other_questions_are_refused(samples: tuple[list[float], list[float]]) -> None:
    with pytest.raises(InvalidInput, match="the same"):
        paired.mean_difference(*samples)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 1, 1.0),
        (0, 6, 2 / 2**6),
        (2, 8, 2 * (1 + 10 + 45) / 2**10),
        (8, 2, 2 * (1 + 10 + 45) / 2**10),
    ],
)
def test_mcnemar_counts_what_one_alone_got_right(only_first: int, only_second: int, p_value: float) -> None:
    first = [True] * only_first + [False] * only_second + [True, False] * 20
    second = [False] * only_first + [True] * only_second + [True, False] * 20
    assert paired.mcnemar(first, second) == (only_first, only_second, pytest.approx(p_value))


def test_mcnemar_of_many_questions() -> None:
    first, second = [True] * 900 + [False] * 700, [False] * 900 + [True] * 700
    found = paired.mcnemar(first, second)
    # The normal approximation: (|b - c| - 1) / sqrt(b + c) is 4.975.
    assert found.p_value == pytest.approx(math.erfc(4.975 / math.sqrt(2)), rel=0.05)


def test_clusters_are_drawn_whole() -> None:
    values, reference = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]
    found = paired.clustered_difference(values, reference, ["a", "a", "a", "b"])
    assert found.value == pytest.approx(0.75)
    # Two draws of two clusters: aa, ab, ba, bb; their means are 1, 3/4, 3/4 and 0.
    assert found.ci95 == (0.0, 1.0)
    alike = paired.clustered_difference([0.5, 0.7] * 20, [0.0, 0.2] * 20, [place // 2 for place in range(40)])
    assert alike.ci95 == pytest.approx((0.5, 0.5))


def test_one_cluster_says_nothing_of_others() -> None:
    with pytest.raises(InvalidInput, match="2 questions of 1 clusters"):
        paired.clustered_difference([1.0, 0.0], [0.0, 0.0], ["a", "a"])
    with pytest.raises(InvalidInput, match="each question needs its cluster"):
        paired.clustered_difference([1.0, 0.0], [0.0, 0.0], ["a", "b", "c"])
