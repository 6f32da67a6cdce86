"""An encode pass as the requests that run it: token ids, spans to capture, and their keys.

Knows neither facts nor the engine. A mixed pass (`windows`) is two requests with the same keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from inferscale.plan import Span, segment_key
from inferscale.windows import EncodePass, backwards, pass_tokens


class PassRun(NamedTuple):
    """One direction of a pass. captures: of its items behind the window, in their order in it."""

    token_ids: tuple[int, ...]
    captures: tuple[Span, ...]


def pass_runs(
    owner: str,
    anchor_ids: Sequence[int],
    items_ids: Sequence[Sequence[int]],
    num_window: int = 0,
    directions: int = 1,
    neighbours: int = 1,
) -> list[PassRun]:
    """A pass over anchor and items in one direction, or in both; owner: what its keys name as their model.

    neighbours: so many items keep their order in the second direction. In both, an item has the same key,
    made of what stands before it in either.
    """
    items = tuple(range(len(items_ids)))
    passes = [EncodePass(items, items[num_window:])]
    if directions == 2:
        other = backwards(items, neighbours)
        passes.append(EncodePass(other, other))
    runs = [pass_tokens(anchor_ids, items_ids, encode_pass) for encode_pass in passes]
    prefixes: dict[int, list[array[int]]] = {}
    for run in runs:
        ids = array("i", run.token_ids)  # the whole prefix is hashed for every key: slices must be cheap
        for item, start, _ in run.spans:
            prefixes.setdefault(item, []).append(ids[:start])
    keys = {item: _key(owner, before, items_ids[item]) for item, before in prefixes.items()}
    found = []
    for number, run in enumerate(runs, start=1):
        part = number if directions == 2 else 0
        spans = (Span(keys[item], start, end, part=part) for item, start, end in run.spans)
        found.append(PassRun(run.token_ids, tuple(spans)))
    return found


def _key(owner: str, prefixes: Sequence[array[int]], token_ids: Sequence[int]) -> str:
    """That of a mixed pass names the length of its first prefix and how both captures become one: it is
    unambiguous, and never that of a pass in one direction."""
    if len(prefixes) == 1:
        return segment_key(owner, prefixes[0], token_ids)
    first, second = prefixes
    return segment_key(f"{owner}+mixed, mean of the same length {len(first)}", first + second, token_ids)
