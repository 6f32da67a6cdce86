"""What travels with a request: segments to inject, spans to capture, orders. Wire form, keys, salt.

A `Plan` rides in the request's `kv_transfer_params` under `"inferscale"`. It is signed with a
secret that only the front end and the connector can read (`runtime_dir/secret`), so a plan from
outside is rejected. This module knows neither vLLM nor torch nor the catalog. It is all that the
front end and the connector's two sides share of a request; what else they share is in the runtime
folder (`runtime`), the settings (`config`) and the fingerprint of
the model (`connector.compat`).

Wire history
    1   first form: id, model, scope, epoch, segments, captures, order, sig; a JSON object a plan
    2   columns as hexadecimal text, and the ids apart from them; one signature over both. Where the prompt
        begins with the segments, as nearly always, that signature is checked with the prompt's own ids: it
        then shows at once that the plan is ours and that the segments stand there
    3   the caller's own cache salt
    4   captures whose place is noted wrongly, for the self-check; segments that are the mean of two captures
    5   captures that servers share
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args, overload

from inferscale.errors import PlanRejected

WIRE_KEY = "inferscale"
WIRE_VERSION = 5
OTHER_MODEL = "the plan was made for another model or adapter"
"""Why a plan is not carried out whose model is not what the connector has, as after a reload of weights."""
ENCODER_VERSION = 1
"""Raised whenever the way a fact is rendered or encoded changes: old keys are then never reused."""

SegmentKind = Literal["text", "fact", "turn"]
SaltKind = Literal["inject", "encode", "text"]
OrderOp = Literal["forget", "stats", "prefetch"]
_ORDER_OPS: tuple[str, ...] = get_args(OrderOp)

_LETTER_OF: dict[SegmentKind, str] = {"text": "x", "fact": "f", "turn": "t"}
_KIND_OF: dict[str, SegmentKind] = {letter: kind for kind, letter in _LETTER_OF.items()}


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens whose KV may come from the pool.

    key: `segment_key` of its content. token_ids: the exact ids in the prompt. kind: `text` for
    system and tool texts, `fact`, or `turn` for an earlier turn of the conversation.
    """

    key: str
    token_ids: tuple[int, ...]
    kind: SegmentKind = "fact"


class Segments(Sequence[Segment]):
    """Segments by columns, as they travel: reading 50 of them makes no object for each.

    keys, lengths: one a segment. ids: the token ids of all, one behind the other, packed as int32.
    opens_prompt: known to be the beginning of the request's prompt. Raises ValueError for columns that do
    not fit together.
    """

    __slots__ = ("_kinds", "ids", "keys", "lengths", "opens_prompt")

    def __init__(
        self, keys: Sequence[str], lengths: Sequence[int], kinds: str, ids: bytes, opens_prompt: bool = False
    ) -> None:
        if not len(keys) == len(lengths) == len(kinds) or sum(lengths) * 4 != len(ids):
            raise ValueError("keys, lengths, kinds and ids of the segments do not agree")
        if not _KIND_OF.keys() >= set(kinds) or min(lengths, default=0) < 0:
            raise ValueError("a segment's kind is unknown, or its length negative")
        self.keys = keys
        self.lengths = lengths
        self._kinds = kinds
        self.ids = ids
        self.opens_prompt = opens_prompt

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Segments:
        listed = list(segments)
        ids = b"".join([_pack(segment.token_ids) for segment in listed])
        kinds = "".join(_LETTER_OF[segment.kind] for segment in listed)
        return cls([s.key for s in listed], [len(s.token_ids) for s in listed], kinds, ids)

    @property
    def kinds(self) -> str:
        """One letter a segment: x text, f fact, t turn."""
        return self._kinds

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Segment]:
        start = 0
        for key, length, kind in zip(self.keys, self.lengths, self._kinds, strict=True):
            ids = _unpack(self.ids[4 * start : 4 * (start + length)])
            yield Segment(key, tuple(ids), _KIND_OF[kind])
            start += length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((tuple(self.keys), self.ids))

    def __repr__(self) -> str:
        return f"Segments({list(self)!r})"


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt tokens `[start, end)` of this request, to be captured under `key`.

    misplaced_blocks: note them as if they stood so many of vLLM's blocks further on. Their keys are then
    turned wrongly when they are injected, which is what `self_check` wants of a few.
    part: 0: the whole segment. 1: the first of two captures of it, which nobody can use yet. 2: the second
    one; the mean of both, with keys turned to one place, is then the segment. Where the pool does not hold
    the first, the second is not captured.
    shared: whether servers that share copies of KV share this one: of a fact, whose deletion takes it back.
    """

    key: str
    start: int
    end: int
    misplaced_blocks: int = 0
    part: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Something the connector does in step with execution.

    forget: drop `keys`, and from now on reject plans of a scope digest in `epochs` that are older
    than its epoch. stats: return counters. prefetch: load those of `keys` that lie below the pool, in their
    order; nothing where one of `epochs` is older than what the connector was told. The first of these scopes
    is whose share of the pool is taken. The answer comes back in `kv_transfer_params`.
    """

    op: OrderOp
    keys: tuple[str, ...] = ()
    epochs: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the connector shall do for one request.

    id: chosen by the front end; the outcome is asked for under it. model: fingerprint of the
    served model. scope: digest of the memory scope. epoch: the scope's memory epoch. caller_salt: the
    caller's own `cache_salt`, which becomes part of ours.
    """

    model: str
    scope: str
    epoch: int = 0
    segments: Sequence[Segment] = ()
    captures: tuple[Span, ...] = ()
    order: Order | None = None
    id: str = ""
    caller_salt: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", secrets.token_hex(8))
        if not isinstance(self.segments, Segments):
            object.__setattr__(self, "segments", Segments.of(self.segments))

    @property
    def table(self) -> Segments:
        """The segments by columns."""
        return cast(Segments, self.segments)


def scope_digest(user_id: str | None, agent_id: str | None, run_id: str | None) -> str:
    """Digest of a scope, unambiguous for any strings (lengths are part of what is hashed)."""
    return hashlib.blake2b(json.dumps([user_id, agent_id, run_id]).encode(), digest_size=16).hexdigest()


def segment_key(model: str, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """Content hash of a segment: model fingerprint, everything it attends to, its own tokens.

    `prefix_ids` are all tokens before the segment in its encode pass (anchor, window, facts
    captured earlier in the same pass); empty for a text that starts the prompt.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{ENCODER_VERSION}\0{model}\0{len(prefix_ids)}\0".encode())
    digest.update(_pack(prefix_ids))
    digest.update(_pack(token_ids))
    return digest.hexdigest()


def cache_salt(
    secret: bytes, model: str, scope: str, epoch: int, kind: SaltKind = "inject", caller_salt: str = ""
) -> str:
    """Salt of vLLM's prefix cache for requests of a scope that inject, capture only (`encode`), or have the
    scope's facts as plain text.

    Blocks with injected KV are found again only by requests of the same scope and epoch, and
    never by an exact request: without the secret the salt cannot be guessed. Nor by an encode pass:
    what it captures must have seen exactly the tokens of its pass, since its key says so. Nor by the same
    facts as text. What the caller salts its requests with keeps them apart from its others as well.
    """
    name = "salt" if kind == "inject" else kind
    text = f"{name}\0{ENCODER_VERSION}\0{model}\0{scope}\0{epoch}"
    return _salt(secret, f"{text}\0{caller_salt}" if caller_salt else text)


@lru_cache(maxsize=4096)
def _salt(secret: bytes, text: str) -> str:
    return "inferscale-" + hmac.digest(secret, text.encode(), "sha256").hex()[:32]


def salt_of(plan: Plan, secret: bytes) -> str:
    """The salt that the request of `plan` must carry."""
    kind: SaltKind = "encode" if plan.captures and not plan.segments else "inject"
    return cache_salt(secret, plan.model, plan.scope, plan.epoch, kind, plan.caller_salt)


def to_wire(plan: Plan, secret: bytes) -> dict[str, Any]:
    """`kv_transfer_params` that carry `plan`, signed."""
    table, order = plan.table, plan.order
    head = [
        plan.id,
        plan.model,
        plan.scope,
        plan.epoch,
        [[c.key, c.start, c.end, c.misplaced_blocks, c.part, int(c.shared)] for c in plan.captures],
        None if order is None else [order.op, list(order.keys), [list(epoch) for epoch in order.epochs]],
        plan.caller_salt,
    ]
    keys = ",".join(table.keys)
    if table.keys and (keys.count(",") != len(table.keys) - 1 or "\n" in keys):
        raise ValueError("a segment's key holds a comma or a line break.")
    # JSON as written here has no line break. The lengths come last, since their bytes may look like one.
    lines = (json.dumps(head, separators=(",", ":")), table.kinds, keys)
    raw = b"\n".join([*(line.encode() for line in lines), array("i", table.lengths).tobytes()])
    body = {
        "v": WIRE_VERSION,
        "plan": raw.hex(),
        "ids": table.ids.hex(),
        "sig": _sign(raw, table.ids, secret),
    }
    return {WIRE_KEY: body}


def from_wire(params: object, secret: bytes, prompt_ids: Sequence[int] = ()) -> Plan | None:
    """The plan in a request's `kv_transfer_params`, or None where there is none.

    prompt_ids: of the request; where they begin with the segments, `opens_prompt` of the plan's table is set.
    Raises PlanRejected for a wrong form, version or signature. Accepts any object: the params of
    a request may come from outside and be a string.
    """
    if not isinstance(params, Mapping) or WIRE_KEY not in params:
        return None
    body = params[WIRE_KEY]
    if not isinstance(body, Mapping):
        raise PlanRejected(f"the plan is a {type(body).__name__}, not an object.")
    if body.get("v") != WIRE_VERSION:
        raise PlanRejected(
            f"the plan has wire version {_short(body.get('v'))}; this connector reads {WIRE_VERSION}."
        )
    text, ids_text, signature = body.get("plan"), body.get("ids"), body.get("sig")
    if not (isinstance(text, str) and isinstance(ids_text, str) and isinstance(signature, str)):
        raise PlanRejected("the plan is malformed: 'plan', 'ids' and 'sig' must be texts.")
    given = signature.encode("utf-8", "surrogatepass")
    try:
        raw = bytes.fromhex(text)
        opening = _pack_opening(prompt_ids, len(ids_text) // 8)
        opens_prompt = bool(opening) and hmac.compare_digest(given, _sign(raw, opening, secret).encode())
        ids = opening if opens_prompt else bytes.fromhex(ids_text)
    except ValueError as error:
        raise PlanRejected(f"the plan is malformed: {error}.") from error
    if not opens_prompt and not hmac.compare_digest(given, _sign(raw, ids, secret).encode()):
        raise PlanRejected("the plan's signature is wrong: it was not made by this server's front end.")
    try:
        head, kinds, keys, packed_lengths = raw.split(b"\n", 3)
        plan_id, model, scope, epoch, captures, order, caller_salt = json.loads(head)
        segments = Segments(
            keys.decode().split(",") if kinds else [],
            _unpack(packed_lengths),
            kinds.decode(),
            ids,
            opens_prompt,
        )
        return Plan(
            model=str(model),
            scope=str(scope),
            epoch=int(epoch),
            segments=segments,
            captures=tuple([_read_span(*span) for span in captures]),
            order=None if order is None else _read_order(order),
            id=str(plan_id),
            caller_salt=str(caller_salt),
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PlanRejected(f"the plan is malformed: {error}.") from error


def _pack_opening(prompt_ids: Sequence[int], num_tokens: int) -> bytes:
    """The first ids of a prompt as `_pack` packs them; nothing where they are no int32."""
    opening = prompt_ids[:num_tokens]
    try:
        return struct.pack(f"{len(opening)}i", *opening)  # twice as fast as array
    except struct.error:
        return b""


def _read_span(key: Any, start: Any, end: Any, misplaced: Any, part: Any, shared: Any) -> Span:
    return Span(str(key), int(start), int(end), int(misplaced), int(part), bool(shared))


def _read_order(order: Any) -> Order:
    op, keys, epochs = order
    if not {str}.issuperset(map(type, keys)):
        raise ValueError("a key of the order is no text")
    if op not in _ORDER_OPS:
        raise ValueError(f"order {op!r} is unknown; known are {', '.join(_ORDER_OPS)}")
    return Order(cast(OrderOp, op), tuple(keys), tuple((str(s), int(e)) for s, e in epochs))


def _sign(raw: bytes, ids: bytes, secret: bytes) -> str:
    # Keyed BLAKE2 (RFC 7693) is a MAC by itself, and starts faster than HMAC does through OpenSSL.
    digest = hashlib.blake2b(b"%d %d\0" % (WIRE_VERSION, len(raw)), key=secret[:64], digest_size=32)
    digest.update(raw)
    digest.update(ids)
    return digest.hexdigest()


def _short(value: object) -> str:
    """A value from outside for an error text: whole only where it is small and plain."""
    if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 1e9):
        return repr(value)[:40]
    return f"of type {type(value).__name__}"


def _pack(ids: Sequence[int]) -> bytes:
    packed = array("i", ids)
    assert packed.itemsize == 4
    return packed.tobytes()


def _unpack(raw: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(raw)
    return ids.tolist()
