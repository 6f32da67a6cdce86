"""Plans that must not be followed: the prompt is prefilled as text, and the outcome says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.mixes import Author, Part, Stored, ids_of, segments_of
from inferscale.plan import WIRE_KEY, Order, Plan, Span, to_wire
from inferscale.windows import alone

pytestmark = pytest.mark.engine


class Scene:
    """A prompt of two facts that would be injected, and what the engine says without any plan."""

    def __init__(self, a: Author) -> None:
        self.a = a
        self.engine = a.engine
        self.facts: list[Stored] = a.store_facts([50, 70], alone())
        self.parts: list[Part] = [*self.facts, a.text(20)]
        self.ids = ids_of(self.parts)
        self.plan = self.engine.plan(segments=segments_of(self.parts))
        self.plain = self.engine.ask(self.ids, max_tokens=2).logits

    def refused(self, **changes: Any) -> dict[str, Any]:
        """Outcome of a request that is answered like the plain one, and injects nothing."""
        plan = changes.pop("plan", self.plan)
        self.engine.claims()
        answer = self.engine.ask(self.ids, plan, max_tokens=2, **changes)
        assert np.array_equal(answer.logits, self.plain)
        assert self.engine.claims() == []
        assert self.engine.stats()["internal_errors"] == 0
        assert answer.outcome is not None
        return answer.outcome


@pytest.fixture
def scene(author: Callable[..., Author]) -> Scene:
    return Scene(author("llama", block_size=32))


def test_the_plan_itself_is_followed(scene: Scene) -> None:
    """Otherwise the tests below would prove nothing."""
    answer = scene.engine.ask(scene.ids, scene.plan, max_tokens=2)
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 120
    assert np.abs(answer.logits - scene.plain).max() > 0.01


def test_prompt_logprobs(scene: Scene) -> None:
    """They need every prompt token computed; vLLM gives no logits of injected ones."""
    outcome = scene.refused(prompt_logprobs=True)
    assert "log-probabilities" in outcome["reason"]


def test_reading_the_prefix_cache_is_switched_off(scene: Scene) -> None:
    assert scene.refused(skip_reading_prefix_cache=True)["injected_tokens"] == 0


def test_another_model(scene: Scene) -> None:
    assert "another model" in scene.refused(plan=replace(scene.plan, model="0" * 32))["reason"]


@pytest.mark.parametrize("salt", [None, "inferscale-" + "0" * 32], ids=["none", "wrong"])
def test_salt(scene: Scene, salt: str | None) -> None:
    assert "cache_salt" in scene.refused(salt=salt)["reason"]


def test_salt_of_another_scope(scene: Scene) -> None:
    theirs = scene.engine.request(scene.ids, replace(scene.plan, scope="theirs")).salt
    assert "cache_salt" in scene.refused(salt=theirs)["reason"]


def test_stale_epoch(scene: Scene) -> None:
    changed = replace(scene.plan, scope="changed")  # the engine is shared: another test's scope stays fresh
    order = Order("forget", epochs=(("changed", 2),))
    answer = scene.engine.ask((5, 6), scene.engine.plan("admin", order=order))
    assert answer.outcome is not None
    assert answer.outcome["answer"] == {"dropped": 0}
    assert "changed after" in scene.refused(plan=replace(changed, epoch=1))["reason"]
    for followed in (replace(changed, epoch=2), scene.plan):
        fresh = scene.engine.ask(scene.ids, followed)
        assert fresh.outcome is not None
        assert fresh.outcome["injected_tokens"] == 120


def test_forgotten_keys(scene: Scene) -> None:
    order = Order("forget", keys=(scene.facts[0].key, "unknown"))
    answer = scene.engine.ask((5, 6), scene.engine.plan("admin", order=order))
    assert answer.outcome is not None
    assert answer.outcome["answer"] == {"dropped": 1}
    assert scene.engine.pooled(scene.facts[0].key) is None
    assert scene.refused()["injected_tokens"] == 0


def forged(original: Plan, secret: bytes, **fields: Any) -> dict[str, Any]:
    """The wire form of a plan with other parts: those of another plan, or these values."""
    body = dict(to_wire(original, secret)[WIRE_KEY])
    for name, value in fields.items():
        if isinstance(value, Plan):
            value = to_wire(value, secret)[WIRE_KEY][name]
        body[name] = value
    return {WIRE_KEY: body}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sig": "0" * 64}, "signature"),
        ({"sig": None}, "must be texts"),
        ({"plan": Plan("m", "theirs")}, "signature"),
        ({"ids": "00000000"}, "signature"),
        ({"v": 1}, "wire version 1"),
        ({"plan": "no hexadecimal"}, "malformed"),
    ],
    ids=["wrong", "none", "plan", "ids", "version", "form"],
)
def test_forged_plan(scene: Scene, fields: dict[str, Any], reason: str) -> None:
    params = forged(scene.plan, scene.engine.facts.secret, **fields)
    assert reason in scene.refused(params=params)["rejected"]


def test_plan_of_another_engine(scene: Scene) -> None:
    assert "signature" in scene.refused(params=to_wire(scene.plan, b"x" * 32))["rejected"]


@pytest.mark.parametrize("body", ["text", None, {}, {"v": 1, "sig": 7}], ids=repr)
def test_params_of_another_form(scene: Scene, body: Any) -> None:
    assert "rejected" in scene.refused(params={WIRE_KEY: body})


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": True}, {"other": {"v": 1}}])
def test_params_that_are_not_ours(scene: Scene, params: Any) -> None:
    answer = scene.engine.ask(scene.ids, params=params, max_tokens=2)
    assert answer.outcome is None
    assert np.array_equal(answer.logits, scene.plain)


@pytest.mark.parametrize("wrong", ["salt", "signature", "model"])
def test_refused_captures_store_nothing(scene: Scene, wrong: str) -> None:
    engine = scene.engine
    ids = scene.a.text(40)
    key = engine.key((), ids)
    plan = engine.plan(captures=(Span(key, 0, 40),))
    request = engine.request(ids, replace(plan, model="0" * 32) if wrong == "model" else plan)
    if wrong == "salt":
        request = replace(request, salt=None)
    elif wrong == "signature":
        request = replace(request, params=forged(plan, engine.facts.secret, sig="0" * 64))
    engine.generate([request])
    assert engine.resident([key]) == [False]
    engine.ask(ids, plan)
    assert engine.resident([key]) == [True]


@pytest.mark.parametrize("span", [(0, 41), (-1, 5), (7, 7), (9, 3), (41, 50)])
def test_captures_outside_the_prompt(scene: Scene, span: tuple[int, int]) -> None:
    engine = scene.engine
    ids = scene.a.text(40)
    captures = (Span("outside", *span), Span(engine.key((), ids), 0, 40))
    engine.ask(ids, engine.plan(captures=captures), max_tokens=3)
    assert engine.resident(["outside", engine.key((), ids)]) == [False, True]
    assert engine.stats()["internal_errors"] == 0


def test_scope_that_changes_during_an_encode_pass(author: Callable[..., Author]) -> None:
    """What may just have been forgotten is not stored any more."""
    a = author("llama", block_size=32, max_num_batched_tokens=48, max_num_seqs=16, pool_tokens=32768)
    engine = a.engine
    ids = a.text(200)
    key = engine.key(ids[:100], ids[100:])
    engine.add(engine.request(ids, engine.plan("changing", captures=(Span(key, 100, 200),))))
    engine.step()
    order = Order("forget", epochs=(("changing", 1),))
    engine.add(engine.request((5, 6), engine.plan("admin", order=order)))
    while engine.has_unfinished():
        engine.step()  # the order runs beside the last chunk, whose step would capture
    assert engine.resident([key]) == [False]
    engine.ask(ids, engine.plan("changing", epoch=1, captures=(Span(key, 100, 200),)))
    assert engine.resident([key]) == [True]
