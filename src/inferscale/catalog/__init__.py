"""The catalog: facts, vectors, encodings and epochs in one SQLite file. The only SQL of the project."""

from inferscale.catalog.catalog import CATALOG_FILE, Catalog, Deletion, ScopeEpoch, VectorChanges, VectorMark
from inferscale.catalog.passes import EncodePass, Encoding

__all__ = [
    "CATALOG_FILE",
    "Catalog",
    "Deletion",
    "EncodePass",
    "Encoding",
    "ScopeEpoch",
    "VectorChanges",
    "VectorMark",
]
