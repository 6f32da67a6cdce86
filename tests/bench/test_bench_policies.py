"""Policies that benchmarks compare, as texts."""

from __future__ import annotations

import pytest

from inferscale.bench.policies import Policy, parse_policies
from inferscale.config import EncodingConfig
from inferscale.errors import InvalidInput
from inferscale.windows import WindowPolicy


@pytest.mark.parametrize(
    ("text", "policy", "name"),
    [
        ("alone", Policy(WindowPolicy(0, 1)), "alone"),
        (" anchor ", Policy(WindowPolicy(0, 1)), "alone"),
        ("anchor+tail3", Policy(WindowPolicy(0, 1), 3), "alone+tail3"),
        ("window(5)", Policy(WindowPolicy(5, 1)), "window(5)"),
        ("sliding(20, 10) + tail 10", Policy(WindowPolicy(20, 10), 10), "sliding(20,10)+tail10"),
    ],
)
def test_read_and_written(text: str, policy: Policy, name: str) -> None:
    assert Policy.parse(text) == policy
    assert str(policy) == name
    assert Policy.parse(name) == policy


def test_several_each_once_in_their_order() -> None:
    assert [str(policy) for policy in parse_policies("window(5); anchor;alone ;")] == ["window(5)", "alone"]


@pytest.mark.parametrize(
    "text", ["", " ; ", "tail5", "sliding(20,20)+tail", "alone+tail5+tail5", "alone+last1", "best"]
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(InvalidInput, match="polic"):
        parse_policies(text)


def test_the_default_is_the_configuration_s() -> None:
    encoding = EncodingConfig()
    assert Policy.default().window == WindowPolicy(encoding.window, encoding.stride)
