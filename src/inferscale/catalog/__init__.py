"""The catalog: facts, vectors, encodings and epochs in one SQLite file. The only SQL of the project."""

from inferscale.catalog.catalog import (
    CATALOG_FILE,
    Catalog,
    Deletion,
    FoundFacts,
    ScopeEpoch,
    VectorChanges,
    VectorMark,
)
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.remembered import RememberedReads

__all__ = [
    "CATALOG_FILE",
    "Catalog",
    "Deletion",
    "EncodePass",
    "Encoding",
    "FoundFacts",
    "NewPass",
    "RememberedReads",
    "ScopeEpoch",
    "VectorChanges",
    "VectorMark",
]
