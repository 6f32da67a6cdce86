"""Statistics of two systems that answered the same questions: paired bootstrap, and McNemar's test.

Deterministic: resamples are drawn with a fixed seed. Questions are drawn as independent, so an interval says
nothing of other conversations than those that were asked about; `clustered_difference` draws conversations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.errors import InvalidInput

NUM_RESAMPLES = 10_000
_DRAWS_AT_ONCE = 2**22

Values = Sequence[float] | NDArray[np.float64]
_Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def ci95(self) -> tuple[float, float]:
        return self.low, self.high


class McNemar(NamedTuple):
    """num_only_first, num_only_second: questions that one system alone got right. p_value: exact,
    two-sided."""

    num_only_first: int
    num_only_second: int
    p_value: float


def mean(values: Values) -> Estimate:
    """The mean over questions."""
    return _bootstrap([values], lambda means: means[0])


def mean_difference(values: Values, reference: Values) -> Estimate:
    """The mean of `values - reference`, question by question."""
    return _bootstrap([values, reference], lambda means: means[0] - means[1])


def clustered_difference(values: Values, reference: Values, clusters: Sequence[Hashable]) -> Estimate:
    """As `mean_difference`, but whole clusters of questions are drawn, such as conversations.

    clusters: of each question. Raises InvalidInput for fewer than two of them, of which nothing can be drawn.
    """
    _check([values, reference])
    places = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    if len(places) < 2 or len(clusters) != len(values):
        raise InvalidInput(
            f"{len(clusters)} questions of {len(places)} clusters were given for {len(values)} values; each "
            "question needs its cluster, and there must be two at least."
        )
    codes = np.array([places[name] for name in clusters])
    differences = np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    sums = np.bincount(codes, weights=differences)
    sizes = np.bincount(codes)
    picks = np.random.default_rng(0).integers(0, len(places), size=(NUM_RESAMPLES, len(places)))
    low, high = np.percentile(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1), (2.5, 97.5))
    return Estimate(float(differences.mean()), float(low), float(high))


def recovered_share(nothing: Values, reference: Values, values: Values) -> Estimate:
    """(nothing - values) / (nothing - reference), of means: the share of the reference's benefit over nothing
    that `values` keep. Every resample divides its own means; NaN where there is no benefit."""

    def share(means: _Floats) -> _Floats:
        benefit = means[0] - means[1]
        kept: _Floats = np.full_like(benefit, np.nan)
        np.divide(means[0] - means[2], benefit, out=kept, where=benefit != 0)
        return kept

    return _bootstrap([nothing, reference, values], share)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Whether two systems are right equally often, from which questions each got right."""
    _check([first, second])
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    num = only_first + only_second
    # Of questions that one alone got right, either is as likely: twice the smaller tail of a binomial.
    tail = sum(math.comb(num, k) for k in range(min(only_first, only_second) + 1))
    return McNemar(only_first, only_second, min(1.0, 2 * tail / 2**num))


def _bootstrap(samples: Sequence[Values], statistic: Callable[[_Floats], _Floats]) -> Estimate:
    """`statistic` of the samples' means, [samples, resamples] → [resamples]; a resample of questions is the
    same for all samples."""
    _check(samples)
    table = np.asarray(samples, dtype=np.float64)
    num = table.shape[1]
    generator = np.random.default_rng(0)
    drawn: list[_Floats] = []
    done = 0
    while done < NUM_RESAMPLES:
        at_once = min(NUM_RESAMPLES - done, max(1, _DRAWS_AT_ONCE // num))
        picks = generator.integers(0, num, size=(at_once, num))
        drawn.append(statistic(table[:, picks].mean(axis=2)))
        done += at_once
    value = float(statistic(table.mean(axis=1, keepdims=True))[0])
    low, high = (
        np.nanpercentile(np.concatenate(drawn), (2.5, 97.5)) if not math.isnan(value) else (value, value)
    )
    return Estimate(value, float(low), float(high))


def _check(samples: Sequence[Sequence[float] | NDArray[np.float64]]) -> None:
    lengths = [len(sample) for sample in samples]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise InvalidInput(
            f"samples of {', '.join(map(str, lengths))} questions were given; each needs the same "
            "questions, at least one."
        )
