from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from inferscale.dates import read_date, read_time


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8 May 2023, 1:56 pm", (2023, 5, 8, 13, 56)),
        ("1:56 pm on 8 May, 2023", (2023, 5, 8, 13, 56)),
        ("2023-05-08T13:56:00+02:00", (2023, 5, 8, 11, 56)),
        ("2023-05-08 13:56Z", (2023, 5, 8, 13, 56)),
        ("May 8th, 2023", (2023, 5, 8)),
        ("25/12/2023", (2023, 12, 25)),
    ],
)
def test_a_time_that_is_named(text: str, wanted: tuple[int, int, int]) -> None:
    assert read_time(text) == datetime(*wanted, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "yesterday",
        "7 May",
        "May 2023",
        "2023",
        "13:56",
        "4/5/2023",
        "2023-13-45",
        "10 am 2023-05-08 EST",
    ]
    + ["8 May 2023 " * 20, "\ud800 1", "99999999999999999999"],
)
def test_nothing_is_guessed(text: str | None) -> None:
    assert read_time(text) is None


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("2023-05-08T00:30:00+02:00", date(2023, 5, 8)),  # in UTC it is the day before
        ("8 May 2023, 11:56 pm", date(2023, 5, 8)),
        ("8 May", None),
        (None, None),
    ],
)
def test_a_day_is_that_of_the_time_zone_that_is_named(text: str | None, day: date | None) -> None:
    assert read_date(text) == day
