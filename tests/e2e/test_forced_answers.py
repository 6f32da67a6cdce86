"""An answer that is forced token by token behind injected memory, as `bench.forced` does it.

The engine is held to each token, and what it says of all tokens is the model's: the mask that holds it
comes later. Only the first request injects all of the memory; the others find it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from harness.mixes import Author, expected_parts, ids_of, segments_of
from harness.reference import largest_difference
from inferscale.bench.forced import forced_requests
from inferscale.windows import sliding

pytestmark = pytest.mark.engine


def test_forced_answers_have_the_model_s_own_probabilities(author: Callable[..., Author]) -> None:
    a = author("llama")
    engine = a.engine
    head = a.store_texts([31])[0]
    facts = a.store_facts([40, 33, 64, 128], sliding(2, 2))
    parts = [head, *facts[::-1], a.text(20)]
    answer = a.text(4)
    num_memory = sum(len(part.ids) for part in (head, *facts))
    tolerance = 2 * a.baseline([len(ids_of(parts))] * 2)
    block = engine.facts.block_size
    plan = engine.plan("forced", segments=segments_of(parts))
    for memory in (plan, None):
        forced = forced_requests(ids_of(parts), answer, memory, 1)
        requests = [
            replace(
                engine.request(request.token_ids, request.plan),
                allowed=tuple(request.sampling["allowed_token_ids"]),
            )
            for request in forced
        ]
        answers = engine.generate(requests)
        assert [one.token_ids for one in answers] == [(token,) for token in answer]
        num_injected = 0 if memory is None else num_memory
        for place, one in enumerate(answers):
            known = expected_parts([*parts, answer[:place]] if place else parts, num_injected)
            assert largest_difference(one.logits, a.reference.logits_of(known)) <= tolerance
            assert np.isfinite(one.logits).all()
            if memory is not None:
                assert one.outcome is not None
                supplied = one.outcome["injected_tokens"] + one.outcome["cached_tokens"]
                assert supplied >= num_memory
        if memory is not None:
            assert answers[0].outcome["injected_tokens"] == num_memory
            assert answers[-1].outcome["cached_tokens"] >= num_memory // block * block
