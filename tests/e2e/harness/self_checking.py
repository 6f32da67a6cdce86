"""The product's self-check, carried out on an engine of the tests."""

from __future__ import annotations

import numpy as np

from harness.engine import Engine
from inferscale.self_check import Probe, Seen, Subject, Verdict, conduct

_TOLD = 20


def self_check(engine: Engine, text_ids: tuple[int, ...]) -> Verdict:
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
