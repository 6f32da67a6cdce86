"""What a chat gives back: the answer, its times, and where each prompt token's KV came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from inferscale.facts import SearchHit
from inferscale.offline import Generation
from inferscale.plan import Plan
from inferscale.planner import Choice
from inferscale.prompt import Prompt

Mode = Literal["inject", "text", "none"]


class ChatTimings(NamedTuple):
    """Where the time to the first token went, in milliseconds; waiting for other calls is in none of them.

    embed_ms: the question's vector. search_ms: the best facts, their texts and keys. residency_ms:
    asking the engine which of them are in the pool, and encoding the system text where it was not.
    prompt_ms: all else before the submission: rendering, tokenization, choice and order of the facts,
    the plan. engine_ms: from the submission to the first token (`ChatResult.ttft_ms`).
    """

    embed_ms: float = 0.0
    search_ms: float = 0.0
    residency_ms: float = 0.0
    prompt_ms: float = 0.0
    engine_ms: float = 0.0

    @property
    def front_ms(self) -> float:
        """All that comes before the engine."""
        return self.embed_ms + self.search_ms + self.residency_ms + self.prompt_ms

    @property
    def total_ms(self) -> float:
        """From the question to the first token."""
        return self.front_ms + self.engine_ms


@dataclass(frozen=True)
class ChatResult:
    """An answer and what it cost.

    ttft_ms: from handing the request to the engine to the first token; e2e_ttft_ms: the same from
    the call of `chat`, so with search and planning; timings: its parts. Prompt tokens are either
    injected (from the pool), cached (vLLM's own prefix cache) or prefilled. num_missing_tokens: tokens
    of facts that were prefilled because their KV was not in the pool. num_left_out: facts found that
    did not fit.
    """

    text: str
    mode: Mode
    ttft_ms: float
    e2e_ttft_ms: float
    num_prompt_tokens: int
    num_injected_tokens: int
    num_cached_tokens: int
    num_prefilled_tokens: int
    num_missing_tokens: int
    num_output_tokens: int
    num_left_out: int
    hits: tuple[SearchHit, ...]
    reason: str | None = None
    timings: ChatTimings = field(default_factory=ChatTimings)


class PreparedChat(NamedTuple):
    """A chat that is ready to run.

    reason: why nothing is injected, where that is unusual. timings: of all but the engine.
    """

    prompt: Prompt
    choice: Choice
    hits: tuple[SearchHit, ...]
    plan: Plan | None
    reason: str | None
    timings: ChatTimings


def chat_result(mode: Mode, prepared: PreparedChat, generation: Generation, before_s: float) -> ChatResult:
    """Times and token counts of a finished chat. before_s: from the call of `chat` to the submission."""
    outcome = generation.outcome or {}
    num_prompt = len(prepared.prompt.token_ids)
    num_injected = int(outcome.get("injected_tokens", 0))
    num_cached = int(outcome.get("cached_tokens", generation.num_cached_tokens))
    num_missing = sum(candidate.num_tokens for candidate in prepared.choice.missing)
    if prepared.plan is not None:
        planned = sum(len(segment.token_ids) for segment in prepared.plan.segments)
        num_missing += max(0, planned - num_injected - num_cached)
    return ChatResult(
        text=generation.text,
        mode=mode,
        ttft_ms=generation.ttft_s * 1e3,
        e2e_ttft_ms=(generation.ttft_s + before_s) * 1e3,
        num_prompt_tokens=num_prompt,
        num_injected_tokens=num_injected,
        num_cached_tokens=num_cached,
        num_prefilled_tokens=num_prompt - num_injected - num_cached,
        num_missing_tokens=num_missing,
        num_output_tokens=len(generation.token_ids),
        num_left_out=prepared.choice.num_left_out,
        hits=prepared.hits,
        reason=outcome.get("reason") or outcome.get("rejected") or prepared.reason,
        timings=prepared.timings._replace(engine_ms=generation.ttft_s * 1e3),
    )
