"""The self-check on real engines: what is moved rightly passes, what is moved wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.checkpoints import FAMILIES
from harness.engine import Engine
from harness.mixes import Author
from inferscale.self_check import Probe, Seen, Subject, Verdict, conduct

pytestmark = pytest.mark.engine

_TOLD = 20


def check(engine: Engine, text_ids: tuple[int, ...]) -> Verdict:
    subject = Subject(engine.facts.model, text_ids, engine.options.max_model_len, "float32", _TOLD, True)
    checking = conduct(subject)
    try:
        probes = next(checking)
        while True:
            probes = checking.send(seen_of(engine, probes))
    except StopIteration as end:
        verdict: Verdict = end.value
    return verdict


def seen_of(engine: Engine, probes: list[Probe]) -> list[Seen]:
    requests = [
        engine.request(
            probe.token_ids,
            probe.plan,
            max_tokens=probe.max_tokens,
            allowed=None if probe.allowed is None else (probe.allowed,),
        )
        for probe in probes
    ]
    seen = []
    for answer in engine.generate(requests):
        steps = []
        for logits, chosen in zip(answer.logits.astype(np.float64), answer.token_ids, strict=True):
            logprobs = logits - np.logaddexp.reduce(logits)
            told = {*np.argsort(-logprobs)[:_TOLD].tolist(), chosen}
            steps.append({token: float(logprobs[token]) for token in told})
        seen.append(Seen(tuple(steps), answer.outcome))
    return seen


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_passes_and_would_not_with_keys_moved_wrongly(
    author: Callable[..., Author], model: str
) -> None:
    a = author(model)
    text = tuple(range(60, 90))
    before = a.engine.stats()
    verdict = check(a.engine, text)
    assert verdict.state == "exact", verdict
    assert verdict.moved < verdict.allowed / 5, "there is room for larger models"
    assert verdict.position < verdict.allowed
    after = a.engine.stats()
    assert after["resident_segments"] == before["resident_segments"]
    assert (after["internal_errors"], after["plans_rejected"]) == (0, 0)
    try:
        for factor in (0.0, -1.0, 0.9):
            a.engine.turn_wrongly(factor)
            assert check(a.engine, text).state == "refused", factor
    finally:
        a.engine.turn_wrongly(1.0)
