"""What a chat gives back: the answer, its times, and where each prompt token's KV came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferscale.chat_plan import ChatTimings, Mode, PreparedChat
from inferscale.facts import SearchHit
from inferscale.offline import Generation


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


def chat_result(mode: Mode, prepared: PreparedChat, generation: Generation, before_s: float) -> ChatResult:
    """Times and token counts of a finished chat. before_s: from the call of `chat` to the submission."""
    outcome = generation.outcome or {}
    num_prompt = len(prepared.prompt.token_ids)
    num_injected = int(outcome.get("injected_tokens", 0))
    num_cached = int(outcome.get("cached_tokens", generation.num_cached_tokens))
    num_missing = prepared.num_missing_tokens
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
