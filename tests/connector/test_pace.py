"""Whether to wait for a load or to prefill: from measured rates only."""

from __future__ import annotations

import pytest

from inferscale.connector.pace import Pace


def pace_of(steps: list[tuple[int, float]], steps_at_once: int = 1) -> Pace:
    pace = Pace(steps_at_once)
    for num_tokens, now_s in steps:
        pace.note_step(num_tokens, now_s)
    return pace


def test_the_fastest_of_the_large_steps_counts() -> None:
    """Decoding steps say nothing of it, and a pause makes a step look slow."""
    pace = pace_of([(1000, 10.0), (1000, 10.5), (1000, 60.0), (64, 61.0), (64, 61.001), (2000, 62.0)])
    assert pace.prefill_tokens_per_s() == pytest.approx(2000)
    assert pace_of([(64, 0.0), (64, 0.1), (64, 0.2)]).prefill_tokens_per_s() is None


def test_a_step_that_begins_beside_another_does_not_end_it() -> None:
    """Asynchronous scheduling: the next step begins at once, the one after that when the first is done."""
    pace = pace_of([(3000, 10.0), (1, 10.001), (1, 11.5), (1, 11.51)], steps_at_once=2)
    assert pace.prefill_tokens_per_s() == pytest.approx(2000)


def test_old_steps_are_forgotten() -> None:
    """The engine was faster once: before others used the machine as well."""
    pace = pace_of([(1000, 0.0), (1000, 0.1)] + [(1000, 1.0 + number) for number in range(20)])
    assert pace.prefill_tokens_per_s() == pytest.approx(1000)


def test_what_was_never_measured_is_tried() -> None:
    pace = Pace()
    assert pace.is_worth_waiting(100, {"disk": 10**12}, 1.0)
    pace = pace_of([(1000, 0.0), (1000, 1.0)])
    assert pace.is_worth_waiting(100, {"disk": 10**12}, 1.0)


def test_one_slow_load_is_not_the_last() -> None:
    """Nothing is measured where nobody waits."""
    pace = pace_of([(1000, 0.0), (1000, 1.0)])
    for seconds, is_worth_it in ((100.0, True), (0.1, True), (0.1, True), (100.0, False)):
        pace.note_load("disk", 1_000, seconds, 1.0)
        assert pace.is_worth_waiting(100, {"disk": 1_000}, 2.0) == is_worth_it
    assert pace.is_worth_waiting(100, {"disk": 1_000}, 400.0), "it may have become faster since"


@pytest.mark.parametrize(
    ("sizes", "is_worth_it"),
    [
        ({"host": 9_000}, True),
        ({"host": 11_000}, False),
        ({"disk": 900}, True),
        ({"disk": 1_100}, False),
        ({"host": 6_000, "disk": 600}, False),
        ({"host": 4_000, "disk": 400}, True),
    ],
)
def test_loading_against_prefilling(sizes: dict[str, int], is_worth_it: bool) -> None:
    """1,000 tokens take a second; so do 10,000 bytes from host memory and 1,000 from disk."""
    pace = pace_of([(1000, 0.0), (1000, 1.0)])
    for seconds in (1.0, 100.0, 0.001):  # the middle one counts
        pace.note_load("host", 10_000, seconds, 1.0)
        pace.note_load("disk", 1_000, seconds, 1.0)
    assert pace.is_worth_waiting(1000, sizes, 2.0) == is_worth_it  # type: ignore[arg-type]


def test_a_load_without_a_time_says_nothing() -> None:
    pace = Pace()
    for _ in range(5):
        pace.note_load("host", 100, 0.0, 1.0)
        pace.note_load("host", 0, 1.0, 1.0)
    assert pace.load_bytes_per_s("host", 1.0) is None
