"""Exact cosine search over all vectors of a catalog, on the torch device the operator chooses.

Rows belong to exact scopes, known here as integer codes only; a filter arrives as the set of
codes it covers, and the k best are taken after filtering. Knows nothing of text and storage.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.errors import InvalidConfig, InvalidInput

if TYPE_CHECKING:
    import torch

TIE = 1e-6
"""Scores this close are equal: the same text embedded in two calls differs by about 1e-7."""

_FIRST_CAPACITY = 256
_GATHER_BELOW = 8
"""Rows of a filter are gathered before scoring where they are fewer than one in so many."""


class IndexHit(NamedTuple):
    """An id and its cosine similarity to the query."""

    id: int
    score: float


def torch_device(name: str, setting: str) -> torch.device:
    """The torch device `name`. Raises InvalidConfig, naming `setting`, where this machine has none such."""
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidConfig(
            f"{setting} is {name!r}, which torch cannot use here ({str(error).splitlines()[0]}). "
            "Allowed are 'cpu' and the accelerators of this machine, such as 'cuda' or 'cuda:0'."
        ) from error


class VectorIndex:
    """float32 vectors [n, dim] with ids (larger is newer) and scope codes. Safe from several threads.

    Rows are dense: removal moves the last rows into the gaps and zeroes what they leave.
    """

    def __init__(self, dim: int, device: str = "cpu") -> None:
        self.dim = dim
        self._device_name = device
        self._lock = threading.RLock()
        self._rows: dict[int, int] = {}
        self._table: _Table | None = None
        self._max_code = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id: int) -> bool:
        return id in self._rows

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
            first, end = len(self._rows), len(self._rows) + len(ids)
            self._max_code = max(self._max_code, *scope_codes) if scope_codes else self._max_code
            table = self._table = _grown(self._table, end, self.dim, self._device_name)
            table.vectors[first:end] = _tensor(unit, table)
            table.ids[first:end] = _tensor(np.asarray(ids, dtype=np.int64), table)
            table.codes[first:end] = _tensor(np.asarray(scope_codes, dtype=np.int64), table)
            self._rows.update(zip(ids, range(first, end), strict=True))

    def remove(self, ids: Iterable[int]) -> int:
        """Remove rows and return how many there were; unknown ids are passed over."""
        with self._lock:
            gone = sorted({self._rows.pop(id) for id in set(ids) if id in self._rows})
            if not gone or self._table is None:
                return 0
            table, end = self._table, len(self._rows) + len(gone)
            kept = len(self._rows)
            holes = [row for row in gone if row < kept]
            movers = sorted(set(range(kept, end)) - set(gone))
            if holes:
                moved_ids = table.ids[movers].tolist()
                for tensor in table:
                    tensor[holes] = tensor[movers]
                self._rows.update(zip(moved_ids, holes, strict=True))
            for tensor in table:
                tensor[kept:end] = 0
            return len(gone)

    def search(
        self, query: NDArray[np.float32], k: int, scope_codes: Collection[int] | None = None
    ) -> list[IndexHit]:
        """The k best rows of the given scopes (None: of all), best first, equal scores newest first.

        query: float32 [dim]. Fewer than k where fewer exist. Scores closer than 1e-6 are equal and
        reported as the highest of them.
        """
        unit = self._unit(query.reshape(1, -1), 1)[0]
        with self._lock:
            table, count = self._table, len(self._rows)
            if table is None or k <= 0 or count == 0:
                return []
            rows = None if scope_codes is None else _rows_of(table.codes[:count], scope_codes, self._max_code)
            if rows is not None and rows.shape[0] == 0:
                return []
            scores = _scores(table.vectors[:count], rows, _tensor(unit, table)).clamp(-1, 1)
            threshold = scores.topk(min(k, scores.shape[0])).values[-1]
            near = (scores >= threshold - TIE).nonzero().squeeze(-1)
            ids = table.ids[near if rows is None else rows[near]]
            found = [
                IndexHit(id, score) for id, score in zip(ids.tolist(), scores[near].tolist(), strict=True)
            ]
        return _ranked(found)[:k]

    def _unit(self, vectors: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
        if vectors.shape != (num_rows, self.dim) or not np.isfinite(vectors).all():
            raise InvalidInput(
                f"vectors of the shape {vectors.shape} were given; {(num_rows, self.dim)} finite numbers "
                "are needed."
            )
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
        return unit


class _Table(NamedTuple):
    """vectors float32 [capacity, dim], ids int64 [capacity], codes int64 [capacity], on one device."""

    vectors: torch.Tensor
    ids: torch.Tensor
    codes: torch.Tensor


def _grown(table: _Table | None, num_rows: int, dim: int, device_name: str) -> _Table:
    """A table with room for `num_rows`: the same one, or one of at least twice the capacity."""
    import torch

    if table is not None and table.ids.shape[0] >= num_rows:
        return table
    old = 0 if table is None else table.ids.shape[0]
    capacity = max(_FIRST_CAPACITY, 2 * old, num_rows)
    device = torch_device(device_name, "embedder_device") if table is None else table.ids.device
    grown = _Table(
        torch.zeros((capacity, dim), dtype=torch.float32, device=device),
        torch.zeros(capacity, dtype=torch.int64, device=device),
        torch.zeros(capacity, dtype=torch.int64, device=device),
    )
    if table is not None:
        for target, source in zip(grown, table, strict=True):
            target[:old] = source
    return grown


def _rows_of(codes: torch.Tensor, allowed: Collection[int], max_code: int) -> torch.Tensor:
    """Rows whose code is allowed, int64 [m]."""
    import torch

    is_allowed = torch.zeros(max_code + 1, dtype=torch.bool)
    is_allowed[[code for code in allowed if 0 <= code <= max_code]] = True
    return is_allowed.to(codes.device)[codes].nonzero().squeeze(-1)


def _scores(vectors: torch.Tensor, rows: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """Dot products of `rows` (None: all) with the query: [n, dim], [m], [dim] → [m].

    Gathering the few rows of one user is cheaper than scoring everybody's; gathering many is not.
    """
    if rows is None:
        return vectors @ query
    if _GATHER_BELOW * rows.shape[0] < vectors.shape[0]:
        return vectors[rows] @ query
    return (vectors @ query)[rows]


def _tensor(array: NDArray[np.float32] | NDArray[np.int64], table: _Table) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(table.ids.device)


def _ranked(found: list[IndexHit]) -> list[IndexHit]:
    """Best first; within a group of equal scores newest first, all with the group's best score."""
    ranked: list[IndexHit] = []
    group: list[IndexHit] = []
    for hit in [*sorted(found, key=lambda hit: -hit.score), None]:
        if hit is not None and group and group[0].score - hit.score <= TIE:
            group.append(hit)
            continue
        ranked += [IndexHit(id, group[0].score) for id in sorted((h.id for h in group), reverse=True)]
        group = [] if hit is None else [hit]
    return ranked
