"""What a lower tier keeps, and for whom."""

from __future__ import annotations

import random

import pytest

from inferscale.pool.tiers import Answers, Copy, Tier, TierAnswers


def copy(key: str, size: int = 10, owner: str = "ana") -> Copy:
    return Copy(key, 3, size, owner, is_ready=True)


def filled(*keys: str, share: float = 1.0, size: int = 10) -> Tier:
    tier = Tier("host", 40, share)
    for key in keys:
        assert tier.admit(copy(key, size)) is not None
    return tier


def test_the_oldest_goes_first() -> None:
    tier = filled("a", "b", "c", "d")
    assert tier.admit(copy("e")) == ["a"]
    assert tier.admit(copy("f", 20)) == ["b", "c"]
    assert sorted(tier.all_keys()) == ["d", "e", "f"]
    assert (tier.used_bytes, tier.num_evicted) == (40, 3)
    tier.check()


def test_what_was_used_again_stays_before_what_never_was() -> None:
    tier = filled("a", "b", "c", "d")
    tier.use("a")
    assert [tier.admit(copy(key)) for key in "efg"] == [["b"], ["c"], ["d"]]
    for key in "efg":
        tier.use(key)  # more than the protected part holds: the oldest of it goes back
    assert tier.admit(copy("h")) == ["a"]
    tier.check()


def test_only_what_is_whole_and_of_this_length_is_found() -> None:
    tier = Tier("host", 100, 1.0)
    tier.admit(Copy("a", 3, 10, "ana"))
    assert not tier.find("a", 3)
    tier.ready("a")
    assert tier.find("a", 3)
    assert not tier.find("a", 4)
    assert not tier.find("b", 3)


def test_what_is_being_read_stays() -> None:
    tier = filled("a", "b", "c", "d")
    loading = tier.get("a")
    assert loading is not None
    loading.is_loading = True
    assert tier.admit(copy("e")) == ["b"]
    assert tier.admit(copy("f", 40)) is None
    assert sorted(tier.all_keys()) == ["a", "c", "d", "e"]
    tier.check()


def test_an_owner_above_its_share_makes_room_itself() -> None:
    tier = Tier("host", 40, 0.5)
    tier.admit(copy("mine", owner="bob"))
    assert [tier.admit(copy(key)) for key in "abc"] == [[], [], []]  # there is room: a share is no limit then
    assert tier.admit(copy("d")) == ["a"]
    assert tier.admit(copy("mine too", owner="bob")) == ["mine"] or tier.get("mine") is not None
    assert tier.get("mine too") is not None
    assert tier.admit(copy("huge", 21)) is None
    tier.check()


def test_a_share_protects_others() -> None:
    tier = Tier("host", 100, 0.5)
    for number in range(5):
        tier.admit(copy(f"bob {number}", owner="bob"))
    for number in range(50):
        tier.admit(copy(f"ana {number}"))
    assert sum(key.startswith("bob") for key in tier.all_keys()) == 5
    tier.check()


def test_a_key_is_admitted_once() -> None:
    tier = filled("a")
    assert tier.admit(copy("a")) is None
    assert tier.used_bytes == 10


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_right_whatever_happens(seed: int) -> None:
    numbers = random.Random(seed)
    tier = Tier("disk", 200, 0.4)
    for _ in range(500):
        key = str(numbers.randrange(60))
        action = numbers.random()
        if action < 0.5:
            tier.admit(copy(key, numbers.randint(1, 40), numbers.choice("abc")))
        elif action < 0.8:
            tier.use(key)
        else:
            tier.remove(key)
        assert tier.used_bytes <= 200
        tier.check()


def test_answers_of_all_ranks() -> None:
    answers = Answers(2)
    assert answers.note(["a", "b"], []) == []
    assert answers.note(["a"], ["b"]) == [("a", True), ("b", False)]
    assert answers.note(["a", "a"], []) == [("a", True)]
    merged = TierAnswers(saved=["a"]).merge(TierAnswers(saved=["a"], not_loaded=["b"]))
    assert merged == TierAnswers(saved=["a", "a"], not_loaded=["b"])
    assert not TierAnswers()
