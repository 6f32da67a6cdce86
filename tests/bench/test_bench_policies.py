"""Policies that benchmarks compare, as texts."""

from __future__ import annotations

import pytest

from inferscale.bench.policies import USUAL, Policy, parse_policies
from inferscale.config import DEFAULT_TAIL, EncodingConfig
from inferscale.errors import InvalidInput
from inferscale.tail import Tail
from inferscale.windows import WindowPolicy


@pytest.mark.parametrize(
    ("text", "policy", "name"),
    [
        ("alone", Policy(WindowPolicy(0, 1)), "alone"),
        (" anchor ", Policy(WindowPolicy(0, 1)), "alone"),
        ("anchor+tail3", Policy(WindowPolicy(0, 1), Tail(3)), "alone+tail3"),
        ("window(5)", Policy(WindowPolicy(5, 1)), "window(5)"),
        ("sliding(20, 10) + tail 10", Policy(WindowPolicy(20, 10), Tail(10)), "sliding(20,10)+tail10"),
        ("sliding(20,20)+tail0", Policy(WindowPolicy(20, 20)), "sliding(20,20)"),
        ("mixed( 60 )", Policy(WindowPolicy(20, 20, 60)), "mixed(60)"),
        ("mixed(60, 2)", Policy(WindowPolicy(20, 20, 60, 2)), "mixed(60,2)"),
        ("mixed(8,1,2,3)+tail5", Policy(WindowPolicy(2, 3, 8), Tail(5)), "mixed(8,1,2,3)+tail5"),
        ("alone+tail10%", Policy(WindowPolicy(0, 1), Tail(share=0.1)), "alone+tail10%"),
        ("alone + tail 300 tokens", Policy(WindowPolicy(0, 1), Tail(tokens=300)), "alone+tail300t"),
        ("alone+chronological", Policy(WindowPolicy(0, 1), order="chronological"), "alone+chronological"),
        ("alone + session+tail2", Policy(WindowPolicy(0, 1), Tail(2), "session"), "alone+tail2+session"),
        ("alone+best-last", Policy(WindowPolicy(0, 1)), "alone"),
        ("alone+tail10%,5", Policy(WindowPolicy(0, 1), Tail(5, share=0.1)), "alone+tail5,10%"),
    ],
)
def test_read_and_written(text: str, policy: Policy, name: str) -> None:
    assert Policy.parse(text) == policy
    assert str(policy) == name
    assert Policy.parse(name) == policy


def test_several_each_once_in_their_order() -> None:
    assert [str(policy) for policy in parse_policies("window(5); anchor;alone ;")] == ["window(5)", "alone"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ; ",
        "tail5",
        "sliding(20,20)+tail",
        "alone+tail5+tail5",
        "alone+last1",
        "alone++tail5",
        "alone+",
        "alone+chronological+session",
        "alone+session+session",
        "alone+session5",
        "alone+tail5x",
        "alone+tail-1",
        "+tail5",
        "best",
    ],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(InvalidInput, match="polic"):
        parse_policies(text)


def test_the_default_is_the_configuration_s() -> None:
    encoding = EncodingConfig()
    window = WindowPolicy(encoding.window, encoding.stride, encoding.mixed, encoding.neighbours)
    assert Policy.default() == Policy(window, Tail.parse(DEFAULT_TAIL))
    assert Policy.parse("mixed(60)+tail6,12%") == Policy.default()
    assert Policy.parse("mixed(60)") != Policy.default(), "no tail is named: none is recomputed"


def test_policies_with_the_same_prompts() -> None:
    """With the best fact last, the tail changes nothing of the prompt."""
    plain, tail = Policy.parse("alone"), Policy.parse("window(5)+tail2")
    assert plain.arrangement == tail.arrangement == USUAL
    told = {
        str(Policy.parse(f"alone{suffix}").arrangement)
        for suffix in ("", "+tail2", "+tail2+session", "+session+tail2", "+session", "+chronological")
    }
    assert told == {"best-last", "tail2+session", "session", "chronological"}
    one, other = Policy.parse("window(5)+tail2+session"), Policy.parse("alone+session+tail2")
    assert one.arrangement == other.arrangement
