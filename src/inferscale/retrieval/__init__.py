"""Embedders and the vector index. Importing this package loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inferscale.retrieval.devices import DeviceChoice
from inferscale.retrieval.embedder import Embedder, SentenceEmbedder
from inferscale.retrieval.hybrid import HybridSearch, Query
from inferscale.retrieval.index import IndexHit, VectorIndex
from inferscale.retrieval.lexical import LexicalIndex
from inferscale.retrieval.static import StaticEmbedder

STATIC = "static"
"""The name that chooses the token vectors of `retrieval.static` as embedder."""


def open_embedder(
    source: str | Path | None,
    device: str | DeviceChoice = "cpu",
    progress: Callable[[str], object] = print,
) -> Embedder:
    """The embedder that `source` names, see `MemoryConfig.embedder`; its parts are loaded on first use.

    None and `static` fetch or make what they need now, and tell `progress`. Raises EngineMissing.
    """
    from inferscale.models import ensure_embedder
    from inferscale.retrieval.static import ensure_static_embedder

    if source == STATIC:
        return StaticEmbedder(ensure_static_embedder(progress))
    return SentenceEmbedder(source if source is not None else ensure_embedder(progress), device)


__all__ = [
    "STATIC",
    "DeviceChoice",
    "Embedder",
    "HybridSearch",
    "IndexHit",
    "LexicalIndex",
    "Query",
    "SentenceEmbedder",
    "StaticEmbedder",
    "VectorIndex",
    "open_embedder",
]
