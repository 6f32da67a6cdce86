"""Which tokens one encode pass holds and which of them it captures (Context-Window Encoding).

A fact encoded alone lacks the attention to what was said before it. A *sliding* pass is therefore

    anchor │ window │ captured facts, with what was said between them
           └ thrown away ┘

The anchor is the same for every pass of a model; the window is computed and thrown away. A sliding
pass captures many facts: each sees the window and all facts before it in the pass, so the cost for
one stored token falls from window + 1 facts to about (window + stride) / stride.

In a prompt, facts stand behind unrelated ones too. A *mixed* pass holds facts of all times, in an order
that has nothing to do with when they were said, and runs in both directions:

    anchor │ ab cd ef         anchor │ ef cd ab         KV of each: the mean of both

So each has seen all others of its group, half of its KV some of them and half the rest, and none is the one
that saw nothing. Neighbours (`a` and `b`: said one after the other) stay together, so that an answer is
encoded behind what it answers: mixed(60,2) keeps two, mixed(60) none. docs/log.md has what each gains;
the cost is that of sliding(20,20), about 2 computed tokens for a stored one.

Two directions of groups in the order of time gain nothing. A mixed pass needs many facts at once; few new
ones are encoded by sliding passes until there are enough (`encoder`).

Items are the facts of ONE exact scope in the order in which they were said, named by index; a pass
never holds anything else, so nothing leaks between scopes. This module knows neither texts nor
tokenizers nor the engine: lengths and ids come from `prompt`, the requests are made elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

from inferscale.config import MAX_MIXED, MAX_NEIGHBOURS, MIN_MIXED, EncodingConfig
from inferscale.errors import InvalidInput, TextTooLong

_T = TypeVar("_T")

_MIXED_ALLOWED = f"allowed are {MIN_MIXED} to {MAX_MIXED}"


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """How much stands before a captured fact, and how many one pass captures.

    window: at most so many items before the first captured one. stride: a pass reaches over at
    most so many items from its first captured one to its last. mixed: about so many facts are encoded
    together in both directions, where there are enough of them; 0: none. neighbours: so many that were said
    one after the other stay together there. Raises InvalidInput.
    """

    window: int
    stride: int
    mixed: int = 0
    neighbours: int = 1

    def __post_init__(self) -> None:
        check_mixed(self.mixed)
        if not 1 <= self.neighbours <= MAX_NEIGHBOURS:
            raise InvalidInput(
                f"the window policy is mixed with {self.neighbours} neighbours together; allowed are 1 to "
                f"{MAX_NEIGHBOURS}."
            )
        if self.window < 0 or self.stride < 1:
            raise InvalidInput(
                f"the window policy is window {self.window}, stride {self.stride}; the window must be "
                "0 or more facts and the stride 1 or more."
            )

    @classmethod
    def of(cls, encoding: EncodingConfig) -> WindowPolicy:
        return cls(encoding.window, encoding.stride, encoding.mixed, encoding.neighbours)

    def __str__(self) -> str:
        """The form that `parse_policy` reads."""
        if self.mixed:
            is_default = (self.window, self.stride) == (EncodingConfig.window, EncodingConfig.stride)
            few = "" if is_default else f",{self.window},{self.stride}"
            together = f",{self.neighbours}" if few or self.neighbours > 1 else ""
            return f"mixed({self.mixed}{together}{few})"
        if self.stride > 1:
            return f"sliding({self.window},{self.stride})"
        return f"window({self.window})" if self.window else "alone"


def alone() -> WindowPolicy:
    """Each fact by itself behind the anchor."""
    return WindowPolicy(0, 1)


def window(num_facts: int) -> WindowPolicy:
    """Each fact in a pass of its own, behind up to `num_facts` facts said before it."""
    return WindowPolicy(num_facts, 1)


def sliding(num_facts: int, stride: int) -> WindowPolicy:
    """Up to `stride` facts captured by one pass, behind up to `num_facts` facts said before them."""
    return WindowPolicy(num_facts, stride)


def mixed(
    num_facts: int,
    neighbours: int = 1,
    window: int = EncodingConfig.window,
    stride: int = EncodingConfig.stride,
) -> WindowPolicy:
    """About `num_facts` facts in one pass, in both directions, `neighbours` of them together; fewer as by
    `sliding(window, stride)`."""
    if not num_facts:
        raise InvalidInput(f"the window policy is mixed(0); {_MIXED_ALLOWED}.")
    return WindowPolicy(window, stride, num_facts, neighbours)


def check_mixed(num_facts: int) -> None:
    """Raise InvalidInput for a size of mixed groups that cannot be."""
    if num_facts and not MIN_MIXED <= num_facts <= MAX_MIXED:
        raise InvalidInput(f"the window policy mixes {num_facts} facts; {_MIXED_ALLOWED}.")


def parse_policy(text: str) -> WindowPolicy:
    """`alone`, `window(5)`, `sliding(20,20)` or `mixed(60,2)` → policy. Raises InvalidInput.

    `mixed(60)` is `mixed(60,1)`. `mixed(60,2,10,5)` is `mixed(60,2)` that encodes few facts as
    `sliding(10,5)` does.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([\d\s,]*)\))?\s*", text, flags=re.ASCII)
    if match is not None:
        numbers = [part.strip() for part in (match[2] or "").split(",")]
        values = [int(part) for part in numbers if part.isdigit()]
        complete = len(values) == len(numbers)
        if match[1] == "alone" and match[2] is None:
            return alone()
        if match[1] == "window" and complete and len(values) == 1:
            return window(values[0])
        if match[1] == "sliding" and complete and len(values) == 2:
            return sliding(values[0], values[1])
        if match[1] == "mixed" and complete and len(values) in (1, 2, 4):
            return mixed(*values)
    raise InvalidInput(
        f"the window policy is {text!r}; allowed are 'alone', 'window(W)', 'sliding(W,STRIDE)', "
        "'mixed(FACTS)', 'mixed(FACTS,NEIGHBOURS)' and 'mixed(FACTS,NEIGHBOURS,W,STRIDE)', for example "
        "'mixed(60,2)'."
    )


@dataclass(frozen=True, slots=True)
class EncodePass:
    """One encode request: its items in the order they were said, and which of them it captures.

    items: indices, consecutive. captured: those whose KV is kept, ascending, never empty; the last
    item is one of them. Items before the first captured one are the window; items between captured
    ones are context only.
    """

    items: tuple[int, ...]
    captured: tuple[int, ...]

    @property
    def window(self) -> tuple[int, ...]:
        """The items before the first captured one."""
        return self.items[: self.items.index(self.captured[0])]


class ItemSpan(NamedTuple):
    """Tokens `[start, end)` of a pass that are those of `item`."""

    item: int
    start: int
    end: int


class PassTokens(NamedTuple):
    """The token ids of a pass, anchor first, and where its captured items stand, ascending."""

    token_ids: tuple[int, ...]
    spans: tuple[ItemSpan, ...]


def plan_passes(
    lengths: Sequence[int],
    needs: Sequence[bool],
    policy: WindowPolicy,
    *,
    anchor_tokens: int,
    max_tokens: int,
) -> list[EncodePass]:
    """Passes that capture every needed item exactly once, in order.

    lengths: tokens of each item, in the order they were said. needs: which items must be captured.
    anchor_tokens, max_tokens: tokens of the anchor, and the most that one pass may hold with it.

    An item that needs no capture is kept in a pass as context between two that do where that costs
    no more than a pass of its own for the later one. A pass ends early where the items behind its window
    would not fit; then the window loses its oldest items until the pass fits.

    Raises TextTooLong for a needed item that does not fit behind the anchor, and InvalidInput for
    lists of different lengths and items without tokens.
    """
    if len(lengths) != len(needs):
        raise InvalidInput(f"{len(lengths)} lengths and {len(needs)} needs were given; one of each per item.")
    room = max_tokens - anchor_tokens
    for item, length in enumerate(lengths):
        if length < 1:
            raise InvalidInput(f"item {item} has {length} tokens; an item has at least one.")
        if needs[item] and length > room:
            raise TextTooLong(
                f"the text has {length} tokens; behind the {anchor_tokens} tokens of the anchor there is "
                f"room for {max(room, 0)} of the model's {max_tokens}. Split the text."
            )
    passes: list[EncodePass] = []
    wanted = [item for item, needed in enumerate(needs) if needed]
    done = 0
    while done < len(wanted):
        first = wanted[done]
        num = _num_captured(lengths, wanted, done, policy, anchor_tokens, room)
        last = wanted[done + num - 1]
        start = _window_start(lengths, first, policy, room - sum(lengths[first : last + 1]))
        passes.append(EncodePass(tuple(range(start, last + 1)), tuple(wanted[done : done + num])))
        done += num
    return passes


def mixed_groups(names: Sequence[str], size: int, neighbours: int = 1) -> list[tuple[int, ...]]:
    """Items in groups of about `size`, none above 1.5 times that: indices, in the order of a pass.

    names: of each item, such as its text, in the order they were said. The order is by a hash of these: as
    good as random, and the same items give the same groups. neighbours: so many stand together, in their
    order; fewer than that at the end of a group only.
    """
    chunks = [tuple(range(start, len(names))[:neighbours]) for start in range(0, len(names), neighbours)]
    seen: Counter[str] = Counter()
    places: list[tuple[bytes, tuple[int, ...]]] = []
    for chunk in chunks:
        name = "\0".join(names[item] for item in chunk)
        digest = hashlib.blake2b(f"{seen[name]}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16)
        places.append((digest.digest(), chunk))
        seen[name] += 1
    order = [chunk for _, chunk in sorted(places)]
    num = max(1, (2 * len(names) + size) // (2 * size))  # len / size, rounded
    return [aligned(group) for group in _even_parts(order, num)] if order else []


def aligned(chunks: Iterable[Sequence[_T]]) -> tuple[_T, ...]:
    """The items of these chunks of neighbours, in an order in which whole chunks stand where `backwards`
    looks for them: shorter ones last."""
    return tuple(item for chunk in sorted(chunks, key=len, reverse=True) for item in chunk)


def backwards(items: Sequence[_T], neighbours: int) -> tuple[_T, ...]:
    """The other direction of a mixed pass: the chunks of `neighbours` items from the last to the first, each
    in its own order."""
    starts = range(0, len(items), neighbours)
    return tuple(item for start in reversed(starts) for item in items[start : start + neighbours])


def split_group(lengths: Sequence[int], room: int, neighbours: int = 1) -> list[range]:
    """A mixed group in as few parts of its items as fit `room` tokens each, about equally many in each.

    lengths: tokens of each item, none above `room`. Chunks of neighbours are not cut, but where one alone
    has more than `room`.
    """
    assert all(length <= room for length in lengths)
    items = range(len(lengths))
    chunks = [items[start : start + neighbours] for start in range(0, len(lengths), neighbours)]
    if any(sum(lengths[item] for item in chunk) > room for chunk in chunks):
        chunks = [items[item : item + 1] for item in items]
    num = max(1, -(-sum(lengths) // room)) if lengths else 0
    while True:
        parts = [items[part[0].start : part[-1].stop] for part in _even_parts(chunks, num) if part]
        if all(sum(lengths[item] for item in part) <= room for part in parts):
            return parts
        num += 1


def _even_parts(items: Sequence[_T], num: int) -> list[tuple[_T, ...]]:
    borders = [len(items) * part // num for part in range(num + 1)] if num else []
    return [tuple(items[start:end]) for start, end in pairwise(borders)]


def pass_tokens(
    anchor_ids: Sequence[int], items_ids: Sequence[Sequence[int]], encode_pass: EncodePass
) -> PassTokens:
    """The ids of a pass and the spans to capture. items_ids: token ids of each item, by index."""
    token_ids = list(anchor_ids)
    spans: list[ItemSpan] = []
    captured = set(encode_pass.captured)
    for item in encode_pass.items:
        start = len(token_ids)
        token_ids.extend(items_ids[item])
        if item in captured:
            spans.append(ItemSpan(item, start, len(token_ids)))
    return PassTokens(tuple(token_ids), tuple(spans))


def attended(encode_pass: EncodePass, item: int) -> tuple[int, ...]:
    """The items that `item` attends to in this pass: all before it. Raises ValueError if absent."""
    return encode_pass.items[: encode_pass.items.index(item)]


def cost(passes: Sequence[EncodePass], lengths: Sequence[int], anchor_tokens: int) -> float:
    """Tokens computed for one stored token; 0.0 without any pass."""
    stored = sum(lengths[item] for p in passes for item in p.captured)
    computed = sum(anchor_tokens + sum(lengths[item] for item in p.items) for p in passes)
    return computed / stored if stored else 0.0


def _num_captured(
    lengths: Sequence[int],
    wanted: Sequence[int],
    done: int,
    policy: WindowPolicy,
    anchor_tokens: int,
    room: int,
) -> int:
    """How many of `wanted[done:]` the next pass captures, at least one."""
    first = wanted[done]
    tokens = lengths[first]
    num = 1
    for item in wanted[done + 1 :]:
        gap = sum(lengths[wanted[done + num - 1] + 1 : item])
        tokens += gap + lengths[item]
        if item - first >= policy.stride or tokens > room:
            break
        own_start = _window_start(lengths, item, policy, room - lengths[item])
        if gap > anchor_tokens + sum(lengths[own_start:item]):
            break
        num += 1
    return num


def _window_start(lengths: Sequence[int], first: int, policy: WindowPolicy, room: int) -> int:
    """First item of the window before item `first`, where `room` tokens are left for it."""
    start = first
    while start > 0 and first - start < policy.window and lengths[start - 1] <= room:
        start -= 1
        room -= lengths[start]
    return start
