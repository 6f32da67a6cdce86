"""How probable a given answer is behind a prompt, token by token, through the engine as it is.

vLLM scores given tokens with `prompt_logprobs` only, and requests with those read no external KV; a logits
processor of ours would make vLLM 0.25 use another model runner. So for each token of the answer one
request is made:

    prompt │ answer[:i]  →  one token, only answer[i] is allowed

Raw log-probabilities (`logprobs_mode="raw_logprobs"`) are those of the model, from before that mask. The
prefix cache supplies to request i what request 0 has computed or injected.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.errors import EngineError
from inferscale.offline import Generation, GenerationRequest
from inferscale.plan import Plan

NUM_COMPARED = 256
"""Most likely tokens of the reference, over which distributions are compared."""
NUM_RETURNED = 1024
"""Most likely tokens that others return: nearly always all of those of the reference."""
ENGINE_ARGS: dict[str, Any] = {"logprobs_mode": "raw_logprobs", "max_logprobs": NUM_RETURNED}
"""What the engine has to be started with."""

_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True)
class TokenScore:
    """One token of an answer.

    logprob: of the token. ids, logprobs: the most likely tokens, most likely first; int32 and float32 [n].
    """

    logprob: float
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def best_id(self) -> int:
        return int(self.ids[0])

    def packed(self) -> list[Any]:
        """For JSON; exact. Bytes of equal weight stand together, which compresses to a third."""
        both = np.concatenate(
            [self.ids.astype("<i4").view(np.uint8), self.logprobs.astype("<f4").view(np.uint8)]
        )
        shuffled = both.reshape(-1, 4).T.tobytes()
        return [self.logprob, base64.b64encode(zlib.compress(shuffled, 9)).decode()]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> TokenScore:
        logprob, text = packed
        shuffled = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
        ids, logprobs = np.split(np.ascontiguousarray(shuffled.reshape(4, -1).T).reshape(-1), 2)
        return cls(float(logprob), ids.view("<i4"), logprobs.view("<f4"))


class Divergence(NamedTuple):
    """kl: in nats. missing: probability that the reference gives to tokens whose probability the other did
    not return; they count as part of the rest, which can only make `kl` smaller."""

    kl: float
    missing: float


def forced_requests(
    prompt: Sequence[int], answer: Sequence[int], plan: Plan | None, num_logprobs: int
) -> list[GenerationRequest]:
    """One request for each token of the answer; those of one plan inject the same segments."""
    requests = []
    for place, token in enumerate(answer):
        sampling = {
            "allowed_token_ids": [token],
            "logprobs": num_logprobs,
            "flat_logprobs": True,
            "detokenize": False,
            "ignore_eos": True,
        }
        own = None if plan is None else replace(plan, id="")  # outcomes are told apart by it
        requests.append(GenerationRequest([*prompt, *answer[:place]], 1, own, sampling=sampling))
    return requests


def read_score(generation: Generation, token: int) -> TokenScore:
    """What a forced request says of its token. Raises EngineError where the engine did something else."""
    if generation.finish_reason == "error":
        raise EngineError("The engine failed a request; its log (--verbose) says why.")
    flat = generation.logprobs
    if tuple(generation.token_ids) != (token,) or flat is None or not flat.token_ids:
        raise EngineError(
            f"The engine was held to token {token} and answered {list(generation.token_ids)}, with "
            f"{'no' if flat is None else len(flat.token_ids)} log-probabilities; this vLLM cannot score "
            "answers."
        )
    # The sampled token comes first, then the most likely ones, which may hold it again.
    ids = np.asarray(flat.token_ids[1:], dtype=np.int32)
    logprobs = np.asarray(flat.logprobs[1:], dtype=np.float32)
    order = np.argsort(-logprobs, kind="stable")
    return TokenScore(float(flat.logprobs[0]), ids[order], logprobs[order])


def divergence(reference: TokenScore, other: TokenScore, token: int) -> Divergence:
    """KL(reference ‖ other) over the reference's most likely tokens and all others as one.

    token: the one that was forced, whose probability is known of both.
    """
    known = dict(zip(other.ids.tolist(), other.logprobs.tolist(), strict=True)) | {token: other.logprob}
    first = reference.logprobs[:NUM_COMPARED].astype(np.float64)
    second = np.array([known.get(id, np.nan) for id in reference.ids[:NUM_COMPARED].tolist()])
    is_known = ~np.isnan(second)
    missing = float(np.exp(first[~is_known]).sum())
    first, second = first[is_known], second[is_known]
    p, q = np.exp(first), np.exp(second)
    rests = [max(1.0 - float(part.sum()), _LEAST_PROBABILITY) for part in (p, q)]
    kl = float((p * (first - second)).sum()) + rests[0] * float(np.log(rests[0] / rests[1]))
    return Divergence(max(kl, 0.0), missing)
