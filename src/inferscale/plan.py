"""What travels with a request: segments to inject, spans to capture, orders. Wire form, keys, salt.

A `Plan` rides in the request's `kv_transfer_params` under `"inferscale"`. It is signed with a
secret that only the front end and the connector can read (`runtime_dir/secret`), so a plan from
outside is rejected. This module knows neither vLLM nor torch nor the catalog. It is all that the
front end and the connector's two sides share of a request; what else they share is in the runtime
folder (`connector.secret`, `residency`, `refusal`), the settings (`config`) and the fingerprint of
the model (`connector.compat`).

Wire history
    1   first form: id, model, scope, epoch, segments, captures, order, sig; a JSON object a plan
    2   one hexadecimal text: a JSON head, then the ids of all segments as int32; signed as it is, so that
        the connector reads a plan of 50 facts in a few tens of microseconds
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, overload

from inferscale.errors import PlanRejected

WIRE_KEY = "inferscale"
WIRE_VERSION = 2
ENCODER_VERSION = 1
"""Raised whenever the way a fact is rendered or encoded changes: old keys are then never reused."""

SegmentKind = Literal["text", "fact", "turn"]
OrderOp = Literal["forget", "stats"]

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
    """

    __slots__ = ("_kinds", "ids", "keys", "lengths")

    def __init__(self, keys: Sequence[str], lengths: Sequence[int], kinds: str, ids: bytes) -> None:
        if not len(keys) == len(lengths) == len(kinds) or sum(lengths) * 4 != len(ids):
            raise ValueError("keys, lengths, kinds and ids of the segments do not agree")
        if not {str}.issuperset(map(type, keys)) or not {int}.issuperset(map(type, lengths)):
            raise ValueError("a segment's key is no text, or its length no whole number")
        if not _KIND_OF.keys() >= set(kinds) or min(lengths, default=0) < 0:
            raise ValueError("a segment's kind is unknown, or its length negative")
        self.keys = keys
        self.lengths = lengths
        self._kinds = kinds
        self.ids = ids

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
    """Prompt tokens `[start, end)` of this request, to be captured under `key`."""

    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Order:
    """Something the connector does in step with execution.

    forget: drop `keys`, and from now on reject plans of a scope digest in `epochs` that are older
    than its epoch. stats: return counters. The answer comes back in `kv_transfer_params`.
    """

    op: OrderOp
    keys: tuple[str, ...] = ()
    epochs: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the connector shall do for one request.

    id: chosen by the front end; the outcome is asked for under it. model: fingerprint of the
    served model. scope: digest of the memory scope. epoch: the scope's memory epoch.
    """

    model: str
    scope: str
    epoch: int = 0
    segments: Sequence[Segment] = ()
    captures: tuple[Span, ...] = ()
    order: Order | None = None
    id: str = ""

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


def cache_salt(secret: bytes, model: str, scope: str, epoch: int, *, is_encoding: bool = False) -> str:
    """Salt of vLLM's prefix cache for requests that inject (or, with `is_encoding`, that capture only).

    Blocks with injected KV are found again only by requests of the same scope and epoch, and
    never by an exact request: without the secret the salt cannot be guessed. Nor by an encode pass:
    what it captures must have seen exactly the tokens of its pass, since its key says so.
    """
    kind = "encode" if is_encoding else "salt"
    text = f"{kind}\0{ENCODER_VERSION}\0{model}\0{scope}\0{epoch}"
    return "inferscale-" + hmac.digest(secret, text.encode(), "sha256").hex()[:32]


def salt_of(plan: Plan, secret: bytes) -> str:
    """The salt that the request of `plan` must carry."""
    is_encoding = bool(plan.captures) and not plan.segments
    return cache_salt(secret, plan.model, plan.scope, plan.epoch, is_encoding=is_encoding)


def to_wire(plan: Plan, secret: bytes) -> dict[str, Any]:
    """`kv_transfer_params` that carry `plan`, signed."""
    table, order = plan.table, plan.order
    head = {
        "id": plan.id,
        "model": plan.model,
        "scope": plan.scope,
        "epoch": plan.epoch,
        "keys": list(table.keys),
        "lengths": list(table.lengths),
        "kinds": table.kinds,
        "captures": [[c.key, c.start, c.end] for c in plan.captures],
        "order": None
        if order is None
        else [order.op, list(order.keys), [list(epoch) for epoch in order.epochs]],
    }
    # JSON as written here has no line break, so the first one ends the head.
    raw = json.dumps(head, separators=(",", ":")).encode() + b"\n" + table.ids
    body = {"v": WIRE_VERSION, "plan": raw.hex(), "sig": _sign(raw, secret)}
    return {WIRE_KEY: body}


def from_wire(params: object, secret: bytes) -> Plan | None:
    """The plan in a request's `kv_transfer_params`, or None where there is none.

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
    text, signature = body.get("plan"), body.get("sig")
    if not isinstance(text, str) or not isinstance(signature, str):
        raise PlanRejected("the plan is malformed: 'plan' and 'sig' must be texts.")
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise PlanRejected(f"the plan is malformed: {error}.") from error
    given = signature.encode("utf-8", "surrogatepass")
    if not hmac.compare_digest(given, _sign(raw, secret).encode()):
        raise PlanRejected("the plan's signature is wrong: it was not made by this server's front end.")
    head, _, ids = raw.partition(b"\n")
    try:
        fields = json.loads(head)
        order = fields["order"]
        return Plan(
            model=str(fields["model"]),
            scope=str(fields["scope"]),
            epoch=int(fields["epoch"]),
            segments=Segments(fields["keys"], fields["lengths"], fields["kinds"], ids),
            captures=tuple([Span(str(key), int(start), int(end)) for key, start, end in fields["captures"]]),
            order=None if order is None else _read_order(order),
            id=str(fields["id"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PlanRejected(f"the plan is malformed: {error}.") from error


def _read_order(order: Any) -> Order:
    op, keys, epochs = order
    if op not in ("forget", "stats"):
        raise ValueError(f"order {op!r} is unknown; known are 'forget' and 'stats'")
    return Order(cast(OrderOp, op), tuple(keys), tuple((str(s), int(e)) for s, e in epochs))


def _sign(raw: bytes, secret: bytes) -> str:
    return hmac.digest(secret, b"%d\0" % WIRE_VERSION + raw, "sha256").hex()


def _short(value: object) -> str:
    """A value from outside for an error text: whole only where it is small and plain."""
    return repr(value)[:40] if isinstance(value, int | float | str) else f"of type {type(value).__name__}"


def _pack(ids: Sequence[int]) -> bytes:
    packed = array("i", ids)
    assert packed.itemsize == 4
    return packed.tobytes()


def _unpack(raw: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(raw)
    return ids.tolist()
