"""The catalog: facts, their history, vectors, encodings and epochs in one SQLite file.

The only SQL of the project.
"""

from inferscale.catalog.catalog import CATALOG_FILE, Catalog
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.remembered import RememberedReads
from inferscale.catalog.results import (
    Deletion,
    FoundFacts,
    ScopeDeletion,
    ScopeEpoch,
    Update,
    VectorChanges,
    VectorMark,
)

__all__ = [
    "CATALOG_FILE",
    "Catalog",
    "Deletion",
    "EncodePass",
    "Encoding",
    "FoundFacts",
    "NewPass",
    "RememberedReads",
    "ScopeDeletion",
    "ScopeEpoch",
    "Update",
    "VectorChanges",
    "VectorMark",
]
