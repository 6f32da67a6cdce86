"""Which words of a sentence must not change for it to say the same."""

from __future__ import annotations

import pytest

from inferscale.extraction.wording import anchors, differ_in_detail, is_merged, plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ana has 2 cats.", "Ana has 3 cats."),
        ("Ana lives in Oslo.", "Ana lives in Bergen."),
        ("Ana is allergic to nuts.", "Ana is not allergic to nuts."),
        ("Ana eats meat.", "Ana doesn’t eat meat."),
        ("Ana gave Ben a book.", "Ben gave Ana a book."),
        ("It was on 6 May 2023.", "It was on 6 May 2024."),
    ],
)
def test_details_that_contradict(one: str, other: str) -> None:
    assert differ_in_detail(one, other)
    assert differ_in_detail(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ana likes hiking in the Alps.", "Ana enjoys hiking in the Alps."),
        ("Ana's cat is called Bo.", "Ana has a cat called Bo."),
        ("", ""),
    ],
)
def test_details_that_agree(one: str, other: str) -> None:
    assert not differ_in_detail(one, other)


def test_case_space_and_a_full_stop_do_not_matter_and_signs_do() -> None:
    assert plain(" Ana  likes TEA. ") == plain("ana likes tea")
    assert plain("Ana likes C.") != plain("Ana likes C++.")


def test_numbers_and_names() -> None:
    assert anchors("Yesterday Ana's friend Ben paid 3.50 to the BBC") == {"ana", "ben", "3.50", "bbc"}


@pytest.mark.parametrize(
    ("merged", "is_good"),
    [
        ("Ana's sister Ines lives in Bergen since 2023.", True),
        ("Ines lives in Bergen since 2023.", True),
        ("Ines lives in Bergen since 2024.", False),  # nobody said so
        ("Ines lives in Bergen.", False),  # the year is lost
        ("Ines and Tom live in Bergen since 2023.", False),  # who is Tom?
        (" . ", False),
        ("Ines lives in Bergen since 2023. " + "Really. " * 20, False),
    ],
)
def test_what_a_merged_sentence_may_say(merged: str, is_good: bool) -> None:
    assert is_merged(merged, "Ana's sister Ines lives in Oslo.", "Ines moved to Bergen in 2023.") == is_good
