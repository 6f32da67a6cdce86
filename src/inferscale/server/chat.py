"""Chats with memory: the body on its way to vLLM, the answer on its way back.

Everything about the answer stays vLLM's: tools, structured output, logprobs, several choices, streaming. Only
`messages` get the facts written into them, and a plan, a salt and (where vLLM takes them) the exact ids go
along. A chat whose messages memory cannot read goes on unchanged, and its `memory` object says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferscale.chat_plan import PreparedChat, facts_of
from inferscale.errors import InferScaleError, InvalidInput
from inferscale.plan import salt_of, to_wire
from inferscale.prompt import Draft
from inferscale.server.ask import MemoryAsk
from inferscale.server.engine import tool_dicts
from inferscale.server.keys import Caller
from inferscale.server.service import MemoryService
from inferscale.server.sides import Side

logger = logging.getLogger(__name__)

_ANSWER_TOKENS = 512
"""Room that facts leave for an answer whose length the caller does not limit."""
_FAILED = "the engine failed the chat with injected facts; they were prefilled as text"
_BEAMS = "vLLM's beam search sends its prompts without a plan; facts are prefilled as text"
_NO_ACCOUNT = "the engine gave no account of the chat's plan"
_CHANGES_RENDERING = frozenset(
    ("chat_template", "documents", "continue_final_message", "add_generation_prompt", "add_special_tokens",
     "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs", "echo", "truncate_prompt_tokens",
     "structural_tag", "include_reasoning")
)  # fmt: skip
"""Fields of a chat body with which vLLM's prompt may be another than ours: then it renders by itself."""


_NOT_FOR_TEMPLATES = frozenset(
    ("self", "conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length",
     "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs")
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that a caller's `chat_template_kwargs` cannot set."""


@dataclass
class Turn:
    """One chat with memory, from the request to the end of the answer."""

    ask: MemoryAsk
    caller: Caller
    said: list[dict[str, Any]]
    """What the caller says in this request: not what was said before, not what memory adds."""
    prepared: PreparedChat | None = None
    reason: str | None = None
    answer: list[str] = field(default_factory=list)
    draft: Draft | None = None
    has_calls: bool = False
    """The answer calls tools."""
    is_talk: bool = False
    """Something was said before this question."""
    caller_salt: str = ""
    side: Side | None = None
    """Of the model that the chat names; known once its memory is searched."""

    @property
    def wants_answer(self) -> bool:
        """Whether the text of the answer is needed when it is complete."""
        return self.ask.store or (self.plan_id is not None and self.is_talk)

    @property
    def plan_id(self) -> str | None:
        plan = self.prepared.plan if self.prepared is not None else None
        return None if plan is None else plan.id


async def begin(service: MemoryService, caller: Caller, body: dict[str, Any], ask: MemoryAsk) -> Turn:
    """Write the memory into `body`. Raises InvalidInput where the `memory` object cannot be carried out.

    What vLLM refuses in the rest of the body is left to it: such a chat goes on as it came.
    """
    service.check_readable(caller, ask.scope)
    messages = body.get("messages")
    turn = Turn(ask, caller, new_turns(messages), is_talk=_is_talk(messages))
    mode = ask.mode if service.injects or ask.mode != "inject" else "text"
    if mode == "none":
        return turn
    has_beams = mode == "inject" and bool(body.get("use_beam_search"))
    mode = "text" if has_beams else mode
    params, salt = body.get("kv_transfer_params"), body.get("cache_salt")
    if not isinstance(params, dict | None) or not (salt is None or (isinstance(salt, str) and salt)):
        turn.reason = "kv_transfer_params or cache_salt cannot be read"
        return turn
    caller_salt = salt or ""
    side = turn.side = await service.sides.of(body.get("model"))
    try:
        draft = side.planner.prompts.draft(messages or (), template_kwargs=_template_kwargs(body))
        prepared = await service.prepare(
            draft,
            caller,
            ask.scope,
            ask.top_k,
            mode,
            ask.tail,
            _answer_tokens(service, body),
            caller_salt,
            ask.within,
            ask.order,
            side,
        )
    except InvalidInput as error:  # vLLM says what is wrong, or can do what memory cannot
        turn.reason = str(error)
        return turn
    turn.prepared, turn.draft, turn.caller_salt = prepared, draft, caller_salt
    turn.reason = _BEAMS if has_beams else prepared.reason
    if ask.mode == "inject" and service.verdict.is_refusal:
        turn.reason = service.verdict.refusal
        service.metrics.refused_chats.inc()
    if prepared.choice.front or prepared.choice.tail:
        _write(service, turn, body)
    return turn


def again_as_text(service: MemoryService, turn: Turn, body: dict[str, Any]) -> None:
    """Write the same facts into `body`, as it came, for a chat that the engine failed with a plan."""
    assert turn.prepared is not None
    logger.warning("A chat whose injection failed is answered from text")
    service.metrics.failed_injections.inc()
    turn.prepared, turn.reason = turn.prepared._replace(plan=None), _FAILED
    _write(service, turn, body)


def _write(service: MemoryService, turn: Turn, body: dict[str, Any]) -> None:
    prepared, draft, side, caller_salt = turn.prepared, turn.draft, turn.side, turn.caller_salt
    assert prepared is not None
    assert draft is not None
    assert side is not None
    front, tail = facts_of(prepared.choice.front), facts_of(prepared.choice.tail)
    params = dict(body.get("kv_transfer_params") or {})
    if service.front.accepts_ids and not _CHANGES_RENDERING & {
        name for name, v in body.items() if v is not None
    }:
        params["prompt_token_ids"] = list(prepared.prompt.token_ids)
    if prepared.plan is not None:
        params |= to_wire(prepared.plan, side.engine.secret)
        body["cache_salt"] = salt_of(prepared.plan, side.engine.secret)
    else:
        given = (turn.caller, turn.ask.scope, prepared.epoch, caller_salt)
        body["cache_salt"] = service.text_salt(side, *given)
    if params:
        body["kv_transfer_params"] = params
    body["messages"] = draft.rewritten(body["messages"], front, tail)


async def use_of(service: MemoryService, turn: Turn, usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `memory` object of an answer. usage: vLLM's own account, where the answer has one."""
    prepared, plan_id = turn.prepared, turn.plan_id
    outcome = await service.outcome(plan_id) if plan_id is not None else {}
    prompt = outcome.get("prompt_tokens") or (usage or {}).get("prompt_tokens")
    if prompt is None and prepared is not None:
        prompt = len(prepared.prompt.token_ids)
    injected, missing = int(outcome.get("injected_tokens", 0)), 0
    cached = outcome.get("cached_tokens")
    if cached is None:
        cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if prepared is not None:
        missing = prepared.num_missing_tokens + prepared.num_lost_tokens(injected + int(cached))
    unknown = _NO_ACCOUNT if plan_id is not None and not outcome else None
    turn.reason = outcome.get("reason") or outcome.get("rejected") or turn.reason or unknown
    use: dict[str, Any] = {
        "mode": turn.ask.mode if service.injects or turn.ask.mode != "inject" else "text",
        "facts": [] if prepared is None else _used(prepared),
        "blocks": [] if prepared is None else _used_blocks(prepared),
        "prompt_tokens": prompt,
        "injected_tokens": injected,
        "cached_tokens": int(cached),
        "prefilled_tokens": None if prompt is None else int(prompt) - injected - int(cached),
        "missing_tokens": missing,
        "left_out": 0 if prepared is None else prepared.choice.num_left_out,
        "reason": turn.reason,
        "stored": turn.ask.store,
    }
    if prepared is not None:
        timings = prepared.timings
        use["timings_ms"] = {
            "embed": round(timings.embed_ms, 3),
            "search": round(timings.search_ms, 3),
            "residency": round(timings.residency_ms, 3),
            "prompt": round(timings.prompt_ms, 3),
        }
    service.metrics.answered(use)
    return use


def _used_blocks(prepared: PreparedChat) -> list[str]:
    """The names of the core blocks in the prompt."""
    in_prompt = {fact.id for fact in facts_of([*prepared.choice.front, *prepared.choice.tail])}
    return [block.block for block in prepared.blocks if block.id in in_prompt and block.block is not None]


def _used(prepared: PreparedChat) -> list[dict[str, Any]]:
    """The facts in the prompt, best first."""
    in_prompt = {fact.id for fact in facts_of([*prepared.choice.front, *prepared.choice.tail])}
    return [
        {
            "id": hit.fact.id,
            "text": hit.fact.text,
            "speaker": hit.fact.speaker,
            "said_at": hit.fact.said_at,
            "score": round(hit.score, 4),
        }
        for hit in prepared.hits
        if hit.fact.id in in_prompt
    ]


async def finish(service: MemoryService, turn: Turn) -> None:
    """The answer is complete: encode its turn, and remember what was new, if the caller wants that."""
    await _keep(service, turn)
    if not turn.ask.store:
        return
    answer = "".join(turn.answer)
    said = [*turn.said, {"role": "assistant", "content": answer}] if answer.strip() else turn.said
    if not said:
        return
    try:
        if turn.ask.infers:
            await service.infer(turn.caller, turn.ask.scope, said)
        else:
            await service.add(turn.caller, turn.ask.scope, said)
    except InvalidInput as error:
        logger.warning("The turns of a chat were not remembered: %s", type(error).__name__)
    except Exception:  # the answer is out; this is the root of what follows it
        logger.exception("The turns of a chat were not remembered")


async def _keep(service: MemoryService, turn: Turn) -> None:
    """The next question finds the KV of this turn, where this one's facts could be injected."""
    plan = None if turn.prepared is None else turn.prepared.plan
    if plan is None or turn.draft is None or turn.reason is not None or not turn.is_talk:
        return
    assert turn.side is not None
    answer = "".join(turn.answer)
    foretold = answer if answer.strip() and not turn.has_calls else None
    try:
        await service.keep_turn(turn.side, turn.draft, plan, turn.caller, turn.ask.scope, foretold)
    except InferScaleError as error:
        logger.warning("The turns of a chat are not encoded: %s", type(error).__name__)
    except Exception:  # the answer is out; this is the root of what follows it
        logger.exception("The turns of a chat are not encoded")


def new_turns(messages: object) -> list[dict[str, Any]]:
    """What the user says behind the last answer, as plain text; blank messages are passed over."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    roles = [message.get("role") for message in messages]
    start = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    if any(message.get("tool_calls") for message in messages[:start][-1:]):
        # In the middle of tool calls: what the user said stands in front of them, and was new then.
        return []
    said = []
    for message in messages[start:]:
        text = _plain_text(message.get("content"))
        if message.get("role") == "user" and text.strip():
            name = message.get("name")
            said.append({"role": "user", "content": text} | ({"name": name} if isinstance(name, str) else {}))
    return said


def _is_talk(messages: object) -> bool:
    """Whether something was said before the question. Most single questions are never gone on with, and
    their pass would push facts out of the pool; a talk that goes on prefills its first turn once."""
    given = messages if isinstance(messages, list) else []
    return len([m for m in given if isinstance(m, dict) and m.get("role") == "user"]) > 1


def _plain_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else ()
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM hands to the chat template beside the messages."""
    given = body.get("chat_template_kwargs")
    options = dict(given) if isinstance(given, dict) else {}
    for name in _NOT_FOR_TEMPLATES & options.keys():
        del options[name]
    tools = body.get("tools")
    if tools and body.get("tool_choice") != "none":
        options["tools"] = tool_dicts(tools)
    for name in ("documents", "add_generation_prompt", "continue_final_message"):
        if body.get(name) is not None:
            options[name] = body[name]
    return options


def _answer_tokens(service: MemoryService, body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return min(_ANSWER_TOKENS, service.front.max_model_len // 4)


# the answer on its way back ---------------------------------------------------------------------


def finished_answer(turn: Turn, body: dict[str, Any], use: Mapping[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed, with its `memory`. What the connector told goes no further."""
    hide_params(body)
    choices = body.get("choices") or [{}]
    message = choices[0].get("message") or {}
    if isinstance(message.get("content"), str):
        turn.answer.append(message["content"])
    turn.has_calls = bool(message.get("tool_calls"))
    body["memory"] = dict(use)
    return body


def hide_params(body: dict[str, Any]) -> None:
    params = body.get("kv_transfer_params")
    if isinstance(params, dict) and "inferscale" in params:
        rest = {name: value for name, value in params.items() if name != "inferscale"}
        body["kv_transfer_params"] = rest or None


def event_of(raw: bytes) -> dict[str, Any] | None:
    """The object of one server-sent event; None for what has none."""
    lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
    try:
        found = json.loads(b"\n".join(lines))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def note_delta(turn: Turn, event: Mapping[str, Any]) -> None:
    """Collect the text of the first choice."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("index") != 0:
            continue
        if isinstance(delta.get("content"), str):
            turn.answer.append(delta["content"])
        turn.has_calls = turn.has_calls or bool(delta.get("tool_calls"))
