"""The same answers scored by Hugging Face transformers in float32, to check what the engine says.

Nothing here is the engine's or the kernels': text is one forward pass on the CPU. For injected facts the
encode passes are run as well, the facts' KV is cut out of them, keys are moved by a rotation that is written
out here in float64, and the rest of the prompt is computed behind all of that. What two passes capture is the
mean of both, once moved, as long as they are on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inferscale.bench.asked import Case
from inferscale.bench.harness import BenchRun
from inferscale.bench.score_cache import AnswerScore
from inferscale.encoder import EncodeJob
from inferscale.plan import Plan, Span

_HALF_SPLIT = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose rotary pairs are dimension i and i + half."""

_Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, float32 [1, heads, tokens, dim]."""


class Check(NamedTuple):
    """An answer that the engine has scored. jobs: passes that the facts of its plan come from."""

    case: Case
    score: AnswerScore
    mode: str
    policy: str | None = None
    jobs: Sequence[EncodeJob] = ()


class Reference:
    """A model in float32. model: a folder or hub name."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @property
    def can_inject(self) -> bool:
        """Whether it knows how this model's keys are moved."""
        rotary = getattr(self._model.model, "rotary_emb", None)
        is_plain = rotary is not None and getattr(rotary, "attention_scaling", None) == 1.0
        return is_plain and self._model.config.model_type in _HALF_SPLIT

    @torch.inference_mode()
    def logprobs(self, case: Case, jobs: Sequence[EncodeJob] = ()) -> list[float]:
        """Log-probabilities of the answer's tokens; with `jobs`, behind the injected facts of the plan."""
        cache = self._injected(case.plan, jobs) if case.plan is not None else None
        start = 0 if cache is None else int(cache.get_seq_length())
        ids = torch.tensor([[*case.prompt, *case.answer_ids][start:]])
        positions = torch.arange(start, start + ids.shape[1])[None]
        kept = len(case.answer_ids) + 1
        logits = self._model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=kept).logits[
            0, :-1
        ]
        found = logits.float().log_softmax(-1)
        return [float(found[place, token]) for place, token in enumerate(case.answer_ids)]

    def _injected(self, plan: Plan, jobs: Sequence[EncodeJob]) -> Any:
        """A cache that holds the plan's segments where the prompt begins."""
        from transformers import DynamicCache

        places: dict[str, dict[int, tuple[int, Span]]] = {}
        for number, job in enumerate(jobs):
            for span in job.captures:
                places.setdefault(span.key, {})[span.part] = (number, span)
        encoded: dict[int, _Layers] = {}
        parts: list[_Layers] = []
        at = 0
        for key, length in zip(plan.table.keys, plan.table.lengths, strict=True):
            captured = []
            for number, span in places[key].values():
                if number not in encoded:
                    encoded[number] = self._encode(jobs[number].token_ids)
                captured.append(self._cut(encoded[number], span, at))
            parts.append(_mean(captured))
            at += length
        cache = DynamicCache()
        for layer in range(len(parts[0])):
            keys, values = (torch.cat([part[layer][kind] for part in parts], dim=2) for kind in range(2))
            cache.update(keys, values, layer)
        return cache

    def _cut(self, layers: _Layers, span: Span, at: int) -> _Layers:
        """The KV of a span, moved to position `at`."""
        cut = [(k[:, :, span.start : span.end], v[:, :, span.start : span.end]) for k, v in layers]
        return [(self._moved(k, at - span.start), v) for k, v in cut]

    def _encode(self, ids: Sequence[int]) -> _Layers:
        cache = self._model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _moved(self, keys: Tensor, delta: int) -> Tensor:
        angles = delta * self._model.model.rotary_emb.inv_freq.to(torch.float64)
        cos, sin = angles.cos(), angles.sin()
        num = len(angles)
        exact = keys.to(torch.float64)
        first, second, rest = exact[..., :num], exact[..., num : 2 * num], exact[..., 2 * num :]
        moved = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return moved.to(torch.float32)


def _mean(captured: Sequence[_Layers]) -> _Layers:
    """Of each layer's keys and values in all of these: their direction from the sum, their length from the
    mean length."""
    if len(captured) == 1:
        return captured[0]

    def mean(vectors: tuple[Tensor, ...]) -> Tensor:
        lengths = torch.stack([torch.linalg.vector_norm(vector, dim=-1) for vector in vectors])
        return torch.nn.functional.normalize(torch.stack(vectors).sum(0), dim=-1) * lengths.mean(0)[..., None]

    layers = (zip(*layer, strict=True) for layer in zip(*captured, strict=True))
    return [(mean(keys), mean(values)) for keys, values in layers]


def add_reference_checks(run: BenchRun, model: str, checks: Sequence[Check], k: int) -> None:
    """Rows with how far the engine's NLLs are from the reference's, one value a question."""
    reference = Reference(model)
    arms = dict.fromkeys((check.mode, check.policy) for check in checks)
    for mode, policy in arms:
        if mode == "inject" and not reference.can_inject:
            continue
        chosen = [check for check in checks if (check.mode, check.policy) == (mode, policy)]
        nlls = [-float(np.mean(reference.logprobs(check.case, check.jobs))) for check in chosen]
        differences = [check.score.nll - nll for check, nll in zip(chosen, nlls, strict=True)]
        config = {
            "policy": policy,
            "reference": "Hugging Face transformers, float32, CPU",
            "reference_nll": round(float(np.mean(nlls)), 4),
            "mean_difference": round(float(np.mean(differences)), 4),
        }
        absolute = [abs(difference) for difference in differences]
        run.add("difference_to_reference", "nats/token", absolute, mode=mode, k=k, config=config)
