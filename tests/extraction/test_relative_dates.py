"""Relative words of time and the dates that they mean."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.extraction.dates import resolve

SUNDAY = date(2023, 5, 7)


@pytest.mark.parametrize(
    ("phrase", "meaning"),
    [
        ("yesterday", "6 May 2023"),
        ("Yesterday evening", "6 May 2023"),
        ("yesterday's", "6 May 2023"),
        ("last night", "6 May 2023"),
        ("today", "7 May 2023"),
        ("this morning", "7 May 2023"),
        ("tonight", "7 May 2023"),
        ("tomorrow", "8 May 2023"),
        ("tomorrow morning", "8 May 2023"),
        ("the day before yesterday", "5 May 2023"),
        ("the day after tomorrow", "9 May 2023"),
        ("two days ago", "5 May 2023"),
        ("10 days ago", "27 April 2023"),
        ("a day ago", "6 May 2023"),
        ("a week ago", "around 30 April 2023"),
        ("a couple of weeks ago", "around 23 April 2023"),
        ("a fortnight ago", "around 23 April 2023"),
        ("three months ago", "February 2023"),
        ("six months ago", "November 2022"),
        ("two years ago", "2021"),
        ("3 days from now", "10 May 2023"),
        ("last week", "24 to 30 April 2023"),
        ("this week", "1 to 7 May 2023"),
        ("next week", "8 to 14 May 2023"),
        ("the week before last", "17 to 23 April 2023"),
        ("last weekend", "29 to 30 April 2023"),
        ("this weekend", "6 to 7 May 2023"),
        ("last month", "April 2023"),
        ("this month", "May 2023"),
        ("next month", "June 2023"),
        ("the month before last", "March 2023"),
        ("last year", "2022"),
        ("this year", "2023"),
        ("next year", "2024"),
        ("the year before last", "2021"),
        ("last Friday", "5 May 2023"),
        ("last friday night", "5 May 2023"),
        ("last Sunday", "30 April 2023"),
        ("next Friday", "12 May 2023"),
        ("this coming Monday", "8 May 2023"),
        ("this Saturday", "6 May 2023"),
        ("last March", "March 2023"),
        ("last May", "May 2022"),
        ("last December", "December 2022"),
        ("next March", "March 2024"),
    ],
)
def test_a_word_gets_the_date_that_it_means(phrase: str, meaning: str) -> None:
    assert resolve(f"We met {phrase} and talked.", SUNDAY) == f"We met {phrase} ({meaning}) and talked."


@pytest.mark.parametrize(
    ("phrase", "day", "meaning"),
    [
        ("yesterday", date(2023, 1, 1), "31 December 2022"),
        ("yesterday", date(2024, 3, 1), "29 February 2024"),
        ("yesterday", date(2023, 3, 1), "28 February 2023"),
        ("tomorrow", date(2023, 12, 31), "1 January 2024"),
        ("last week", date(2023, 6, 7), "29 May to 4 June 2023"),
        ("last week", date(2023, 1, 4), "26 December 2022 to 1 January 2023"),
        ("last month", date(2023, 1, 31), "December 2022"),
        ("last month", date(2023, 3, 31), "February 2023"),
        ("next month", date(2023, 12, 31), "January 2024"),
        ("a year ago", date(2024, 2, 29), "2023"),
        ("last Friday", date(2023, 1, 2), "30 December 2022"),
        ("last Friday", date(2023, 5, 12), "5 May 2023"),
        ("last January", date(2023, 1, 15), "January 2022"),
    ],
)
def test_borders_of_months_and_years(phrase: str, day: date, meaning: str) -> None:
    assert resolve(f"It was {phrase}.", day) == f"It was {phrase} ({meaning})."


@pytest.mark.parametrize(
    "text",
    [
        "I read the last week of June is the hottest.",
        "Over the last year I slept badly.",
        "I wrote it in two days.",
        "We met recently, some time ago, the other day.",
        "We may meet on Friday or in May.",
        "next Wednesday",  # said on a Tuesday: tomorrow, or in eight days
        "next June",
        "Every last Friday we dance.",
        "last week of May, next month of rest",
        "yesterdays and todays are no words here",
        "",
    ],
)
def test_what_has_no_one_meaning_stays(text: str) -> None:
    assert resolve(text, date(2023, 5, 9)) == text


def test_what_is_to_come_in_two_weeks() -> None:
    assert (
        resolve("I'll fly home in two weeks.", SUNDAY) == "I'll fly home in two weeks (around 21 May 2023)."
    )
    assert resolve("We are going to move in a month. I did it in a day.", SUNDAY) == (
        "We are going to move in a month (June 2023). I did it in a day."
    )


def test_what_has_a_date_already_stays() -> None:
    assert resolve("yesterday (6 May 2023)", SUNDAY) == "yesterday (6 May 2023)"


def test_the_ends_of_time() -> None:
    assert resolve("999 years ago, yesterday", date(1, 1, 1)) == "999 years ago, yesterday"
    assert resolve("tomorrow", date(9999, 12, 31)) == "tomorrow"


_PHRASES = st.sampled_from(
    ["yesterday", "tomorrow", "last week", "next month", "two days ago", "last Friday", "in a week"]
    + ["I will go", "the", "(", "of", "\n", "."]
)


@given(st.lists(_PHRASES, max_size=12).map(" ".join), st.dates(date(1950, 1, 1), date(2100, 1, 1)))
def test_resolving_twice_adds_nothing_and_takes_nothing(text: str, day: date) -> None:
    once = resolve(text, day)
    assert resolve(once, day) == once
    rest = iter(once)
    assert all(char in rest for char in text)  # in this order


@given(st.dates(date(2023, 1, 2), date(2023, 12, 30)), st.sampled_from(["yesterday", "tomorrow", "today"]))
def test_dates_of_2023_stay_2023(day: date, word: str) -> None:
    shift = {"yesterday": -1, "tomorrow": 1, "today": 0}[word]
    assert resolve(word, day).endswith(f"{(day + timedelta(shift)).day} {day + timedelta(shift):%B} 2023)")


@pytest.mark.parametrize("part", ["in two days I today ", "today ( ", "in " + " " * 50])
def test_a_long_text_takes_no_more_than_its_length(part: str) -> None:
    """With what is looked at beside each word unbounded, this takes minutes."""
    resolve(part * (300_000 // len(part)), date(2023, 5, 7))
