"""The memory API: an application of its own, in front of vLLM's. The middleware has checked the key before.

Errors that are raised on purpose, and refusals of a body, are answered in OpenAI's form (`http.answer_to`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from inferscale.errors import InferScaleError, InvalidInput
from inferscale.facts import Scope, Turn
from inferscale.server import models
from inferscale.server.http import answer_to, error_body, headers_with
from inferscale.server.keys import Caller, Forbidden
from inferscale.server.service import MemoryService
from inferscale.turns import Content, read_expiry

logger = logging.getLogger(__name__)

PREFIX = "/v1/memories"
_POOL = (
    "pages",
    "free_pages",
    "page_size_tokens",
    "pool_bytes",
    "pool_capacity_bytes",
    "resident_segments",
    "evictions",
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": models.ErrorAnswer} for status in (400, 401, 403, 404, 413, 429, 500, 503)
}
_ERRORS["default"] = {"model": models.ErrorAnswer, "description": "Any other error"}  # there is no 422
_SHOWN_CHARS = 100
_MAX_FILTER = 20_000

_Id = Annotated[str | None, Query(max_length=1000)]


def _scope(user_id: _Id = None, agent_id: _Id = None, run_id: _Id = None) -> Scope:
    return Scope(user_id, agent_id, run_id)


def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)  # without the middleware nobody is let in


_Scope = Annotated[Scope, Depends(_scope)]
_Caller = Annotated[Caller, Depends(_caller)]


def memory_api(service: MemoryService) -> FastAPI:
    """The application; `request.state.caller` says who asks."""
    api = FastAPI(
        title="InferScale memory",
        description="Long-term memory of the users of this server. Chats use it by a `memory` object.",
        docs_url=f"{PREFIX}/docs",
        openapi_url=f"{PREFIX}/openapi.json",
        redoc_url=None,
        dependencies=[Depends(HTTPBearer(auto_error=False, description="Where the server has API keys."))],
        responses=_ERRORS,
        redirect_slashes=False,
    )
    _answer_errors(api)
    _add_routes(api, service)
    _add_operator_routes(api, service)
    _add_block_routes(api, service)
    _add_routes_of_one(api, service)  # last: `{fact_id}` would match the words above
    return api


def _add_routes(api: FastAPI, service: MemoryService) -> None:
    @api.post(PREFIX, status_code=201)
    async def add(body: models.AddBody, caller: _Caller) -> models.AddedList:
        """Store memories. They can be searched at once, and injected when they are encoded."""
        given: dict[str, Any] = {
            "speaker": body.speaker,
            "said_at": body.said_at,
            "metadata": body.metadata,
            "expires_at": body.expires_at,
        }
        if body.infer:
            inferred = await service.infer(caller, body.scope(), _contents(body), **given)
            return models.AddedList(
                data=[models.memory_of(fact) for fact in inferred.facts],
                pending=service.gate.num_waiting,
                events=[models.Change(**event._asdict()) for event in inferred.events],
                warning=inferred.warning,
            )
        facts = await service.add(caller, body.scope(), _contents(body), **given)
        return models.AddedList(
            data=[models.memory_of(fact) for fact in facts], pending=service.gate.num_waiting
        )

    @api.post(f"{PREFIX}/search")
    async def search(body: models.SearchBody, caller: _Caller) -> models.FoundList:
        """The memories that fit a query best, best first. score: their similarity, whatever their place."""
        hits = await service.search(caller, body.scope(), body.query, body.top_k, body.filters)
        return models.FoundList(data=[models.found_memory(fact, score) for fact, score in hits])

    @api.get(PREFIX)
    async def page(
        scope: _Scope,
        caller: _Caller,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(max_length=200)] = None,
        filters: Annotated[str | None, Query(max_length=_MAX_FILTER, description="JSON")] = None,
    ) -> models.MemoryPage:
        """The memories that pass the filters, oldest first. after: `next_cursor` of the page before."""
        found = await service.page(caller, scope, limit, after, _filters(filters))
        return models.MemoryPage(
            data=[models.memory_of(fact) for fact in found.facts],
            has_more=found.next_cursor is not None,
            next_cursor=found.next_cursor,
        )

    @api.delete(PREFIX)
    async def delete_all(scope: _Scope, caller: _Caller) -> models.Deleted:
        """Delete every memory of a scope."""
        return models.Deleted(deleted=await service.delete_all(caller, scope))


def _add_operator_routes(api: FastAPI, service: MemoryService) -> None:
    @api.post(f"{PREFIX}/warm", status_code=202)
    async def warm(
        caller: _Caller, body: Annotated[models.ScopeBody | None, Body()] = None
    ) -> models.Warming:
        """Encode what is not in the pool; without a scope everything, as far as there is room."""
        return models.Warming(pending=await service.warm(caller, Scope() if body is None else body.scope()))

    @api.get(f"{PREFIX}/stats")
    async def stats(scope: _Scope, caller: _Caller) -> models.StatsAnswer:
        """Numbers of a scope, or of all."""
        found = await service.stats(caller, scope)
        pool = {name: int(found.counters[name]) for name in _POOL if name in found.counters}
        return models.StatsAnswer(
            facts=found.num_facts,
            injectable=found.num_injectable,
            pending=found.num_pending,
            injection=found.injection,
            self_check=models.self_check_of(found.verdict),
            pool=pool,
            counters={name: int(value) for name, value in found.counters.items() if name not in pool},
        )

    @api.put(f"{PREFIX}/injection")
    async def switch(body: models.InjectionBody, caller: _Caller) -> models.Injection:
        """Inject, or have the same facts as text, in every chat that this API process answers."""
        caller.check_operator()
        service.injects = body.enabled
        return models.Injection(
            enabled=service.injects, reason=service.verdict.refusal if body.enabled else None
        )


def _add_block_routes(api: FastAPI, service: MemoryService) -> None:
    @api.get(f"{PREFIX}/blocks")
    async def blocks(scope: _Scope, caller: _Caller) -> models.BlockList:
        """The core blocks of a chat with this scope, by name."""
        found = await service.blocks(caller, scope)
        return models.BlockList(data=[models.block_of(block) for block in found])

    @api.get(f"{PREFIX}/blocks/{{name}}")
    async def blocks_of_name(name: str, scope: _Scope, caller: _Caller) -> models.BlockList:
        """Those of this name: one of each user, agent and run that the scope covers."""
        found = await service.blocks(caller, scope)
        return models.BlockList(data=[models.block_of(block) for block in found if block.fact.block == name])

    @api.put(f"{PREFIX}/blocks/{{name}}")
    async def set_block(name: str, body: models.BlockBody, caller: _Caller) -> models.Block:
        """Store a core block under exactly this scope, in place of the one of that name, if any."""
        return models.block_of(await service.set_block(caller, body.scope(), name, body.text))

    @api.delete(f"{PREFIX}/blocks/{{name}}")
    async def delete_block(name: str, scope: _Scope, caller: _Caller) -> models.Deleted:
        """Delete a core block of exactly this scope."""
        await service.delete_block(caller, scope, name)
        return models.Deleted(deleted=1)


def _filters(given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    try:
        read = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidInput('filters are no JSON; give an object such as {"topic": "travel"}.') from error
    return cast("dict[str, Any] | None", read)  # whether it is an object is seen where it is read


def _add_routes_of_one(api: FastAPI, service: MemoryService) -> None:
    @api.get(f"{PREFIX}/{{fact_id}}")
    async def get(fact_id: str, caller: _Caller) -> models.Memory:
        return models.memory_of(await service.get(caller, fact_id))

    @api.put(f"{PREFIX}/{{fact_id}}")
    async def change(fact_id: str, body: models.ChangeBody, caller: _Caller) -> models.Memory:
        """Change a memory under the same id; what it was stays in its history."""
        changes = {name: getattr(body, name) for name in body.model_fields_set}
        for name in ("text", "metadata"):
            if name in changes and changes[name] is None:
                raise InvalidInput(f"{name} is null; leave it out to keep it as it is.")
        return models.memory_of(await service.update(caller, fact_id, changes))

    @api.delete(f"{PREFIX}/{{fact_id}}")
    async def delete(fact_id: str, caller: _Caller) -> models.Deleted:
        """Delete a memory with its history: it is in no answer to a request that begins after this one."""
        await service.delete(caller, fact_id)
        return models.Deleted(id=fact_id, deleted=1)

    @api.get(f"{PREFIX}/{{fact_id}}/history")
    async def history(fact_id: str, caller: _Caller) -> models.History:
        """How a memory was stored and changed, oldest first."""
        events = await service.history(caller, fact_id)
        return models.History(data=[models.event_of(event) for event in events])


def _contents(body: models.AddBody) -> Content | Sequence[Content]:
    given = [value for value in (body.text, body.messages, body.items) if value is not None]
    if len(given) != 1:
        raise InvalidInput(
            f"{len(given) or 'none'} of 'text', 'messages' and 'items' were given; give exactly one of them."
        )
    if body.items is not None:
        return [
            Turn(item.text, item.speaker, item.said_at, item.metadata or {}, read_expiry(item.expires_at))
            for item in body.items
        ]
    return cast("Content | Sequence[Content]", given[0])


def _answer_errors(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def refused(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _answer(400, error_body(400, f"The body is no JSON: {first['ctx']['error']}."))
        place = [str(part) for part in first["loc"][1:]]  # behind `body` or `query`
        if not place and first["type"] == "model_attributes_type":
            text = "The body is no JSON object. Send one, with `Content-Type: application/json`."
            return _answer(400, error_body(400, text))
        name = _shown(".".join(place)) or None
        message = f"{name or 'the body'}: {first['msg']}."
        return _answer(400, error_body(400, message, "invalid_value", name))

    @api.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {_shown(request.url.path)}: {error.detail}."
        return _answer(error.status_code, error_body(error.status_code, message), error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        status, body = answer_to(error)
        if status >= 500 and isinstance(error, InferScaleError):  # others are raised again, to be logged
            logger.error("%s below %s failed: %s", request.method, PREFIX, error)
        return _answer(status, body, dict(headers_with(error)))

    for kind in (InferScaleError, Forbidden, Exception):
        api.add_exception_handler(kind, failed)


def _answer(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """As ASCII: what a caller sent may hold halves of characters."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
