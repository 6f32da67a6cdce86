"""Exact cosine search over all vectors of a catalog, on the torch device the operator chooses.

Rows belong to exact scopes, known here as integer codes only; a filter arrives as the set of
codes it covers, and the k best are taken after filtering. Scores are float32. Launching costs a small
search more than computing: product and filter are one operation on a GPU, top-k another, and ids stay
on the host. Knows nothing of text and storage.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.errors import InvalidInput
from inferscale.retrieval.devices import DeviceChoice, as_choice
from inferscale.retrieval.lone_thread import alone
from inferscale.retrieval.precision import exact_products

if TYPE_CHECKING:
    import torch

TIE = 1e-6
"""Scores this close are equal: the same text embedded in two calls differs by about 1e-7."""

_FIRST_CAPACITY = 256
_DOUBLED_ROWS = 65_536
"""A table of more rows grows by a quarter: what is not used yet takes memory all the same."""
_GATHER_BELOW = 8
"""On a CPU, rows of a filter are gathered before scoring where they are fewer than one in so many."""
_SPARE = 32
"""So many rows more than k are fetched at once, to find those that are as good as the k-th."""
_SMALL = 2_000_000
"""Up to so many numbers are searched by one thread of a CPU; it takes less than a millisecond."""
_LISTED_ON = ("cpu",)
"""Devices on which a filter is a list of rows: to make one, the rows are counted, and waited for."""
_NUM_FILTERS = 256
"""Filters whose rows are remembered until a row is added or removed."""
_FILTER_BYTES = 32 * 2**20
"""Upper bound of what they take together on the device: the oldest is forgotten first."""
_WHAT = "the search index"


class IndexHit(NamedTuple):
    """An id and its cosine similarity to the query."""

    id: int
    score: float


class VectorIndex:
    """float32 vectors [n, dim] with ids (larger is newer) and scope codes. Safe from several threads.

    device: a torch device, `auto`, or what was chosen for the embedder. With `auto` the rows move to the
    CPU where a GPU fails, such as for want of memory. Rows are dense: removal moves the last rows into the
    gaps and zeroes what they leave.
    """

    def __init__(self, dim: int, device: str | DeviceChoice = "cpu") -> None:
        self.dim = dim
        self._choice = as_choice(device)
        self._lock = threading.RLock()
        self._rows: dict[int, int] = {}
        self._table: _Table | None = None
        self._reserved = 0
        self._max_code = 0
        self._filters: dict[frozenset[int], _Filter] = {}
        self._filter_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: int) -> bool:
        return id in self._rows

    def reserve(self, num_rows: int) -> None:
        """Make the next table that is needed large enough for so many rows in all."""
        self._reserved = num_rows

    def add(self, ids: Sequence[int], scope_codes: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Add rows; vectors is float32 [n, dim] and is normalised here. Known ids are replaced.

        Raises InvalidInput for another shape, NaN or infinity; then nothing is added.
        """
        if not len(ids) == len(scope_codes) == len(set(ids)):
            raise InvalidInput(
                f"{len(ids)} ids ({len(set(ids))} different) and {len(scope_codes)} scope codes differ."
            )
        unit = self._unit(vectors, len(ids))
        with self._lock:
            self.remove(ids)
            self._choice.run(_WHAT, lambda device: self._add(device, ids, scope_codes, unit))

    def _add(
        self,
        device: torch.device,
        ids: Sequence[int],
        scope_codes: Sequence[int],
        unit: NDArray[np.float32],
    ) -> None:
        """Add new ids. After an error nothing counts as added."""
        first, end = len(self._rows), len(self._rows) + len(ids)
        self._max_code = max(self._max_code, *scope_codes) if scope_codes else self._max_code
        self._forget_filters()
        table = self._table = _grown(self._table_on(device), end, self._reserved, self.dim, device)
        with table.queue():
            table.vectors[first:end] = table.tensor(unit)
            table.codes[first:end] = table.tensor(np.asarray(scope_codes, dtype=np.int64))
        table.ids[first:end] = ids
        self._rows.update(zip(ids, range(first, end), strict=True))

    def remove(self, ids: Iterable[int]) -> int:
        """Remove rows and return how many there were; unknown ids are passed over."""
        with self._lock:
            known = {id for id in ids if id in self._rows}
            if known:
                self._choice.run(_WHAT, lambda device: self._remove(device, known))
            return len(known)

    def _remove(self, device: torch.device, ids: set[int]) -> None:
        """Remove known ids. After an error, which comes before rows are zeroed, it can be done again."""
        table = self._table_on(device)
        assert table is not None
        self._forget_filters()
        gone = sorted(self._rows[id] for id in ids)
        end, kept = len(self._rows), len(self._rows) - len(gone)
        holes = [row for row in gone if row < kept]
        movers = sorted(set(range(kept, end)) - set(gone))
        with table.queue():
            for tensor in table.tensors():
                if holes:
                    tensor[holes] = tensor[movers]
                tensor[kept:end] = 0
        for id in ids:
            del self._rows[id]
        table.ids[holes] = table.ids[movers]
        self._rows.update(zip(table.ids[holes].tolist(), holes, strict=True))

    def search(
        self,
        query: NDArray[np.float32],
        k: int,
        scope_codes: Collection[int] | None = None,
        ids: Collection[int] | None = None,
    ) -> list[IndexHit]:
        """The k best rows of the given scopes (None: of all), best first, equal scores newest first.

        query: float32 [dim]. ids: only these, whatever their scopes. Fewer than k where fewer exist. Scores
        closer than 1e-6 are equal and reported as the highest of them.
        """
        unit = self._unit(query.reshape(1, -1), 1)[0]
        codes = None if scope_codes is None else frozenset(scope_codes)
        with self._lock:
            if k <= 0 or not self._rows:
                return []
            found = self._choice.run(_WHAT, lambda device: self._search(device, unit, k, codes, ids))
        return [] if found is None else _ranked(found, k)

    def vectors_of(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The unit vectors of rows, float32 [n, dim], on the host; zeros for unknown ids."""
        with self._lock:
            known = [place for place, id in enumerate(ids) if id in self._rows]
            vectors = np.zeros((len(ids), self.dim), dtype=np.float32)
            if known:
                rows = np.array([self._rows[ids[place]] for place in known], dtype=np.int64)
                vectors[known] = self._choice.run(_WHAT, lambda device: self._gathered(device, rows))
            return vectors

    def _gathered(self, device: torch.device, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        table = self._table_on(device)
        assert table is not None
        if device.type == "cpu":
            gathered: NDArray[np.float32] = table.vectors.numpy()[rows]
            return gathered
        with table.queue():
            fetched: NDArray[np.float32] = table.vectors[table.tensor(rows)].cpu().numpy()
            return fetched

    def _search(
        self,
        device: torch.device,
        unit: NDArray[np.float32],
        k: int,
        codes: frozenset[int] | None,
        ids: Collection[int] | None,
    ) -> _Found | None:
        table, count = self._table_on(device), len(self._rows)
        assert table is not None
        if ids is not None:
            within: _Filter | None = self._listed(table, ids)
        else:
            within = None if codes is None else self._filter(table, count, codes)
        if within is not None and within.is_empty():
            return None
        return _searched(table, count, within, unit, k)

    def _listed(self, table: _Table, ids: Collection[int]) -> _Filter:
        rows = np.array(sorted(self._rows[id] for id in ids if id in self._rows), dtype=np.int64)
        with table.queue():
            return _Filter(table.tensor(rows), None)

    def _filter(self, table: _Table, count: int, codes: frozenset[int]) -> _Filter:
        """The rows of these scopes; remembered, within bounds, until rows change."""
        found = self._filters.get(codes)
        if found is not None:
            return found
        found = _filter_of(table, count, codes, self._max_code)
        size_bytes = found.size_bytes()
        if size_bytes > _FILTER_BYTES:
            return found
        while self._filters and (
            len(self._filters) >= _NUM_FILTERS or self._filter_bytes + size_bytes > _FILTER_BYTES
        ):
            oldest = next(iter(self._filters))
            self._filter_bytes -= self._filters.pop(oldest).size_bytes()
        self._filters[codes] = found
        self._filter_bytes += size_bytes
        return found

    def _forget_filters(self) -> None:
        self._filters.clear()
        self._filter_bytes = 0

    def _table_on(self, device: torch.device) -> _Table | None:
        """The table, moved to the device that is used now if it lies on another."""
        if self._table is not None and self._table.device != device:
            self._forget_filters()
            self._table = _moved(self._table, device)
        return self._table

    def _unit(self, vectors: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
        if vectors.shape != (num_rows, self.dim) or not np.isfinite(vectors).all():
            raise InvalidInput(
                f"vectors of the shape {vectors.shape} were given; {(num_rows, self.dim)} finite numbers "
                "are needed."
            )
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = (vectors / np.maximum(norms, 1e-12)).astype(np.float32, copy=False)
        return unit


@dataclass(frozen=True)
class _Table:
    """vectors float32 [capacity, dim] and codes int64 [capacity] on one device, ids int64 [capacity] on the
    host.

    stream: where all work on the device is queued, on CUDA; threads differ in their current stream.
    """

    vectors: torch.Tensor
    codes: torch.Tensor
    ids: NDArray[np.int64]
    stream: torch.cuda.Stream | None

    @property
    def device(self) -> torch.device:
        return self.vectors.device

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.vectors, self.codes

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Work inside is queued on the table's stream."""
        if self.stream is None:
            yield
            return
        import torch

        with torch.cuda.stream(self.stream):
            yield

    def tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """A copy on the device; CUDA has read the array when this returns, but is not waited for."""
        import torch

        on_host = torch.from_numpy(np.ascontiguousarray(array))
        return on_host.to(self.device, non_blocking=True)


def _moved(table: _Table, device: torch.device) -> _Table:
    """A copy on another device, made when all that was queued is done."""
    with table.queue():
        vectors, codes = (tensor.to(device) for tensor in table.tensors())
    return _Table(vectors, codes, table.ids, _stream(device))


def _grown(table: _Table | None, num_rows: int, reserved: int, dim: int, device: torch.device) -> _Table:
    """A table with room for `num_rows`: the same one, or a larger one with room for more, or for those
    reserved."""
    import torch

    if table is not None and len(table.ids) >= num_rows:
        return table
    old = 0 if table is None else len(table.ids)
    more = old if old < _DOUBLED_ROWS else old // 4
    capacity = max(_FIRST_CAPACITY, old + more, num_rows, reserved)
    stream = table.stream if table is not None else _stream(device)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        grown = _Table(
            torch.zeros((capacity, dim), dtype=torch.float32, device=device),
            torch.zeros(capacity, dtype=torch.int64, device=device),
            np.zeros(capacity, dtype=np.int64),
            stream,
        )
        if table is not None:
            grown.ids[:old] = table.ids
            for target, source in zip(grown.tensors(), table.tensors(), strict=True):
                target[:old] = source
    return grown


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    import torch

    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class _Filter(NamedTuple):
    """Some rows of a table of n: their numbers, int64 [m], or float32 [n], 0 inside and -inf outside."""

    rows: torch.Tensor | None
    penalty: torch.Tensor | None

    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    def is_empty(self) -> bool:
        """Whether it is known to hold no row."""
        return self.rows is not None and self.rows.shape[0] == 0

    def num_scored(self, count: int) -> int:
        """How many of `count` rows are multiplied with the query."""
        is_gathered = self.rows is not None and _GATHER_BELOW * self.rows.shape[0] < count
        return self.rows.shape[0] if self.rows is not None and is_gathered else count


def _filter_of(table: _Table, count: int, allowed: frozenset[int], max_code: int) -> _Filter:
    """The rows of the first `count` whose code is allowed."""
    import torch

    codes, known = table.codes[:count], [code for code in allowed if 0 <= code <= max_code]
    is_outside = np.ones(max_code + 1, dtype=np.bool_)
    is_outside[known] = False
    if codes.device.type in _LISTED_ON:
        listed = codes.numpy()  # numpy asks no other thread for help
        inside = listed == known[0] if len(known) == 1 else ~is_outside[listed]
        return _Filter(torch.from_numpy(np.flatnonzero(inside)), None)
    with table.queue():
        outside = codes != known[0] if len(known) == 1 else table.tensor(is_outside)[codes]
        zeros = torch.zeros(count, dtype=torch.float32, device=codes.device)
        return _Filter(None, zeros.masked_fill_(outside, -math.inf))


def _searched(table: _Table, count: int, within: _Filter | None, unit: NDArray[np.float32], k: int) -> _Found:
    """The k best of the filter's rows among the first `count`; see `_best`."""

    def search() -> _Found:
        with table.queue():
            query = table.tensor(unit)
            with exact_products(query.device):
                scores = _scores(table.vectors[:count], within, query)
            return _best(scores, table.ids, within, k)

    num_scored = within.num_scored(count) if within is not None else count
    is_small = num_scored * len(unit) <= _SMALL and table.device.type == "cpu"
    return alone("search", search) if is_small else search()


def _scores(vectors: torch.Tensor, within: _Filter | None, query: torch.Tensor) -> torch.Tensor:
    """Dot products of the filter's rows (None: of all) with the query: [n, dim], [dim] → [m].

    Without row numbers all n rows are scored, -inf those outside. On a CPU gathering the few rows of one
    user is cheaper than scoring everybody's; gathering many is not.
    """
    if within is None:
        return vectors @ query
    if within.rows is None:
        assert within.penalty is not None
        return within.penalty.addmv(vectors, query)
    if within.num_scored(vectors.shape[0]) < vectors.shape[0]:
        return vectors[within.rows] @ query
    return (vectors @ query)[within.rows]


class _Found(NamedTuple):
    """Scores float64 [m], in [-1, 1], and ids int64 [m], on the host."""

    scores: NDArray[np.float64]
    ids: NDArray[np.int64]


def _best(scores: torch.Tensor, ids: NDArray[np.int64], within: _Filter | None, k: int) -> _Found:
    """The k best of `scores`, [m] or -inf, and at least all that are equal to the k-th."""
    fetched = scores.topk(min(k + _SPARE, scores.shape[0]))
    found = _fetched(fetched.values, fetched.indices, ids, within)
    num_found = len(found.scores)
    has_all = num_found == scores.shape[0] or num_found < fetched.values.shape[0]
    if num_found <= k or has_all or found.scores[-1] < found.scores[k - 1] - TIE:
        return found
    # More are equal to the k-th than were fetched: ask for every one of them.
    near = (scores >= found.scores[k - 1] - TIE).nonzero().squeeze(-1)
    return _fetched(scores[near], near, ids, within)


def _fetched(
    scores: torch.Tensor, places: torch.Tensor, ids: NDArray[np.int64], within: _Filter | None
) -> _Found:
    """The scores [m] that are finite, with their ids, in their order.

    places: of the scores among the filter's rows, int64 [m].
    """
    rows = places if within is None or within.rows is None else within.rows[places]
    found_scores, found_rows = scores.cpu().numpy(), rows.cpu().numpy()
    is_row = found_scores > -math.inf
    # Rounding takes a product of unit vectors a little beyond 1.
    return _Found(found_scores[is_row].astype(np.float64).clip(-1, 1), ids[found_rows[is_row]])


def _ranked(found: _Found, k: int) -> list[IndexHit]:
    """The k best first; within a group of equal scores newest first, all with the group's best score."""
    order = np.lexsort((-found.ids, -found.scores))
    scores, ids = found.scores[order], found.ids[order]
    is_near = scores[:-1] - scores[1:] <= TIE
    if is_near[:k].any():
        scores, ids = _grouped(scores, ids)
    return [IndexHit(id, score) for id, score in zip(ids[:k].tolist(), scores[:k].tolist(), strict=True)]


def _grouped(scores: NDArray[np.float64], ids: NDArray[np.int64]) -> _Found:
    """Falling scores with those of a group made equal, and its ids made to fall."""
    scores, ids = scores.copy(), ids.copy()
    start = 0
    while start < len(scores):
        end = start + int(np.searchsorted(-scores[start:], TIE - scores[start], side="right"))
        scores[start:end] = scores[start]
        ids[start:end] = np.sort(ids[start:end])[::-1]
        start = end
    return _Found(scores, ids)
