"""The catalog: facts, their history, vectors, encodings and epochs, in SQLite or PostgreSQL.

The only SQL of the project.
"""

from inferscale.catalog.catalog import Catalog
from inferscale.catalog.imports import Ended, Imported, Revision, StoredFact
from inferscale.catalog.opening import CATALOG_FILE
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.quotas import Quota
from inferscale.catalog.remembered import RememberedReads
from inferscale.catalog.results import (
    Added,
    Deletion,
    FoundBlocks,
    FoundFacts,
    ScopeDeletion,
    ScopeEpoch,
    Update,
    VectorChanges,
    VectorMark,
)
from inferscale.catalog.traces import CatalogTraces, TableTraces

__all__ = [
    "CATALOG_FILE",
    "Added",
    "Catalog",
    "CatalogTraces",
    "Deletion",
    "EncodePass",
    "Encoding",
    "Ended",
    "FoundBlocks",
    "FoundFacts",
    "Imported",
    "NewPass",
    "Quota",
    "RememberedReads",
    "Revision",
    "ScopeDeletion",
    "ScopeEpoch",
    "StoredFact",
    "TableTraces",
    "Update",
    "VectorChanges",
    "VectorMark",
]
