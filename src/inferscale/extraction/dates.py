"""Relative words of time in English texts, with the date that they mean: `yesterday (6 May 2023)`.

Rules, not a model: what a word means follows from the day on which it was said, so that small models need
not count and dates of 2023 stay 2023. A date is added only where there is one reading: `next Friday` said
on a Tuesday, `in two days` that may be how long something took, `the last week of June`, `recently` and
words that name no year of their own stay as they are. Weeks begin on Monday.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import date, timedelta

_NUMBERS = {
    "a couple of": 2, "a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6,
    "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12,
}  # fmt: skip
_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_MONTHS = [
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
]  # fmt: skip

_NUMBER = rf"(?P<number>\d{{1,3}}|{'|'.join(_NUMBERS)})"
_UNIT = r"(?P<unit>day|week|fortnight|month|year)s?"
_PART = r"(?: (?:morning|afternoon|evening|night))?"
_END = r"(?:['’]s)?\b"
_GOES_ON = re.compile(r"\s{0,20}\([^)]{0,80}?\d| of (?!this\b)")
"""A bracket with a number, or whose: then the words are left alone."""
_COMES = r"(?:\b(?:will|won['’]t|shall|gonna|going to|due|leav(?:e|es|ing)|mov(?:e|es|ing)|arriv(?:e|es|ing)|"
_COMES += r"start(?:s|ing)?|fly(?:ing)?|flies)\b|['’]ll\b)"


def resolve(text: str, today: date) -> str:
    """`text`, said on `today`, with the date in brackets behind every relative word that has one meaning.

    A word that is followed by a bracket with a number in it is left alone, so a text can be resolved twice.
    """
    for pattern, meaning in _RULES:
        text = pattern.sub(lambda match, meaning=meaning: _with_date(match, meaning, today), text)  # type: ignore[misc]
    return text


def day_text(day: date) -> str:
    """`6 May 2023`."""
    return f"{day.day} {_month_text(day)}"


def _with_date(
    match: re.Match[str], meaning: Callable[[re.Match[str], date], str | None], today: date
) -> str:
    # Bounded, so that a long text takes no more than its length.
    if _GOES_ON.match(match.string, match.end()) or _before(match, 20).rstrip().endswith("("):
        return match[0]
    try:
        found = meaning(match, today)
    except OverflowError:  # before the year 1 or behind 9999
        return match[0]
    return match[0] if found is None else f"{match[0]} ({found})"


def _before(match: re.Match[str], num_chars: int) -> str:
    return match.string[max(0, match.start() - num_chars) : match.start()]


# what words mean ------------------------------------------------------------------------------


def _shifted(num_days: int) -> Callable[[re.Match[str], date], str]:
    return lambda match, today: day_text(today + timedelta(num_days))


def _week(num_weeks: int) -> Callable[[re.Match[str], date], str]:
    return lambda match, today: _span_text(_monday(today) + timedelta(weeks=num_weeks), 7)


def _month(num_months: int) -> Callable[[re.Match[str], date], str]:
    return lambda match, today: _month_text(_add_months(today, num_months))


def _year(num_years: int) -> Callable[[re.Match[str], date], str]:
    return lambda match, today: str(_add_months(today, 12 * num_years).year)


def _counted(sign: int) -> Callable[[re.Match[str], date], str]:
    """So many days, weeks, months or years from today; of longer ones the day is not known."""

    def meaning(match: re.Match[str], today: date) -> str:
        number = match["number"].lower()
        count = sign * (_NUMBERS[number] if number in _NUMBERS else int(number))
        unit = match["unit"].lower()
        if unit == "day":
            return day_text(today + timedelta(count))
        if unit == "month":
            return _month_text(_add_months(today, count))
        if unit == "year":
            return str(_add_months(today, 12 * count).year)
        return f"around {day_text(today + timedelta(weeks=count * (2 if unit == 'fortnight' else 1)))}"

    return meaning


def _coming_count(match: re.Match[str], today: date) -> str | None:
    """Only where the sentence speaks of what is to come: `I wrote it in two days` says how long it took."""
    sentence = re.split(r"[.!?\n]", _before(match, 300))[-1]
    return _counted(1)(match, today) if re.search(_COMES, sentence, re.IGNORECASE) else None


def _last_day(match: re.Match[str], today: date) -> str:
    """The newest such day before today."""
    return day_text(today - timedelta((today.weekday() - _day(match) - 1) % 7 + 1))


def _coming_day(match: re.Match[str], today: date) -> str:
    return day_text(today + timedelta((_day(match) - today.weekday() - 1) % 7 + 1))


def _next_day(match: re.Match[str], today: date) -> str | None:
    """The next such day, where that lies in the next week: else people mean the one or the other."""
    return _coming_day(match, today) if _day(match) <= today.weekday() else None


def _this_day(match: re.Match[str], today: date) -> str:
    return day_text(_monday(today) + timedelta(_day(match)))


def _last_weekend(match: re.Match[str], today: date) -> str:
    """The newest one that is over: on a Sunday, that of the week before."""
    return _span_text(_monday(today) - timedelta(2), 2)


def _this_weekend(match: re.Match[str], today: date) -> str:
    return _span_text(_monday(today) + timedelta(5), 2)


def _next_weekend(match: re.Match[str], today: date) -> str | None:
    return _span_text(_monday(today) + timedelta(12), 2) if today.weekday() >= 5 else None


def _last_named_month(match: re.Match[str], today: date) -> str:
    month = _MONTHS.index(match["month"].lower()) + 1
    return _month_text(date(today.year - (month >= today.month), month, 1))


def _next_named_month(match: re.Match[str], today: date) -> str | None:
    """Only where it lies in the next year: `next June`, said in May, may be this year's or the next."""
    month = _MONTHS.index(match["month"].lower()) + 1
    return _month_text(date(today.year + 1, month, 1)) if month <= today.month else None


# dates ----------------------------------------------------------------------------------------


def _day(match: re.Match[str]) -> int:
    return _DAYS.index(match["day"].lower())


def _monday(day: date) -> date:
    return day - timedelta(day.weekday())


def _add_months(day: date, num_months: int) -> date:
    years, month = divmod(day.month - 1 + num_months, 12)
    year = day.year + years
    if not date.min.year <= year <= date.max.year:
        raise OverflowError(year)
    return date(year, month + 1, min(day.day, calendar.monthrange(year, month + 1)[1]))


def _month_text(day: date) -> str:
    return f"{_MONTHS[day.month - 1].capitalize()} {day.year}"


def _span_text(first: date, num_days: int) -> str:
    """`1 to 7 May 2023`, `29 May to 4 June 2023` or with both years."""
    last = first + timedelta(num_days - 1)
    if first.year != last.year:
        return f"{day_text(first)} to {day_text(last)}"
    start = str(first.day) if first.month == last.month else day_text(first).rsplit(" ", 1)[0]
    return f"{start} to {day_text(last)}"


def _rule(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)


_ONE_DAY = rf"(?P<day>{'|'.join(_DAYS)})"
_ONE_MONTH = rf"(?P<month>{'|'.join(_MONTHS)})"
# `the last week` is the seven days before, and `every last Friday` no day at all.
_ALONE = r"(?<!\bthe\s)(?<!\bevery\s)(?<!\beach\s)(?<!\bvery\s)\b"

_RULES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], date], str | None]], ...] = (
    (_rule(rf"\b(?:the )?day before yesterday{_END}"), _shifted(-2)),
    (_rule(rf"\b(?:the )?day after tomorrow{_END}"), _shifted(2)),
    (_rule(rf"\byesterday{_PART}{_END}"), _shifted(-1)),
    (_rule(rf"\blast night{_END}"), _shifted(-1)),
    (_rule(rf"\btomorrow{_PART}{_END}"), _shifted(1)),
    (_rule(rf"\b(?:today|tonight|this (?:morning|afternoon|evening)){_END}"), _shifted(0)),
    (_rule(rf"\b{_NUMBER} {_UNIT} ago\b"), _counted(-1)),
    (_rule(rf"\b{_NUMBER} {_UNIT} from (?:now|today)\b"), _counted(1)),
    (_rule(rf"\bin {_NUMBER} {_UNIT}(?:['’]s?)?(?: time)?\b"), _coming_count),
    (_rule(r"\bthe week before last\b"), _week(-2)),
    (_rule(r"\bthe week after next\b"), _week(2)),
    (_rule(r"\bthe month before last\b"), _month(-2)),
    (_rule(r"\bthe month after next\b"), _month(2)),
    (_rule(r"\bthe year before last\b"), _year(-2)),
    (_rule(r"\bthe year after next\b"), _year(2)),
    (_rule(rf"{_ALONE}last weekend{_END}"), _last_weekend),
    (_rule(rf"\bthis weekend{_END}"), _this_weekend),
    (_rule(rf"{_ALONE}next weekend{_END}"), _next_weekend),
    (_rule(rf"{_ALONE}last week{_END}"), _week(-1)),
    (_rule(rf"\bthis week{_END}"), _week(0)),
    (_rule(rf"{_ALONE}next week{_END}"), _week(1)),
    (_rule(rf"{_ALONE}last month{_END}"), _month(-1)),
    (_rule(rf"\bthis month{_END}"), _month(0)),
    (_rule(rf"{_ALONE}next month{_END}"), _month(1)),
    (_rule(rf"{_ALONE}last year{_END}"), _year(-1)),
    (_rule(rf"\bthis year{_END}"), _year(0)),
    (_rule(rf"{_ALONE}next year{_END}"), _year(1)),
    (_rule(rf"{_ALONE}last {_ONE_DAY}{_PART}{_END}"), _last_day),
    (_rule(rf"\b(?:this )?coming {_ONE_DAY}{_PART}{_END}"), _coming_day),
    (_rule(rf"\bthis {_ONE_DAY}{_PART}{_END}"), _this_day),
    (_rule(rf"{_ALONE}next {_ONE_DAY}{_PART}{_END}"), _next_day),
    (_rule(rf"{_ALONE}last {_ONE_MONTH}{_END}"), _last_named_month),
    (_rule(rf"{_ALONE}next {_ONE_MONTH}{_END}"), _next_named_month),
)
