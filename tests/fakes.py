"""Stand-ins that tests share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import Catalog
from inferscale.catalog.opening import open_database
from inferscale.catalog.sql import Database
from inferscale.config import MemoryConfig
from inferscale.facts import Fact, Scope, Turn
from inferscale.memory import Memory

DIM = 4
ANA = Scope(user_id="ana")


class WordEmbedder:
    """Bag of words: each word has a fixed random direction. Same words, same vector, whatever the call."""

    def __init__(self, dim: int = 32, name: str = "words") -> None:
        self.dim = dim
        self.name = name
        self.num_texts = 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_texts += len(texts)
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()) or ["\0"]:
                seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
                vectors[row] += np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(norms, 1e-12)).astype(np.float32)


def catalog_url(folder: Path) -> str | None:
    """Of the database that stands for a folder's file, in tests that run with both (`conftest`)."""
    return None


def catalog_variable(folder: Path) -> dict[str, str]:
    """What other processes of such a test need in their environment."""
    url = catalog_url(folder)
    return {} if url is None else {"INFERSCALE_CATALOG": url}


def database_of(folder: Path) -> Database:
    """The tables of a folder, past its catalog."""
    return open_database(folder, url=catalog_url(folder))


def rows_of(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything in the tables of a folder."""
    database = database_of(folder)
    with database.read() as connection:
        rows = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in connection.tables()}
    database.close()
    return rows


def open_catalog(folder: Path) -> Catalog:
    catalog = Catalog(folder)
    catalog.record_embedder("fake", DIM)
    return catalog


def add(catalog: Catalog, scope: Scope, *texts: str) -> list[Fact]:
    vectors = np.arange(len(texts) * DIM, dtype=np.float32).reshape(len(texts), DIM)
    return catalog.add_facts(scope, [Turn(text) for text in texts], vectors)


def ids(facts: list[Fact]) -> list[str]:
    return [fact.id for fact in facts]


def open_memory(folder: Path, **options: Any) -> Memory:
    options.setdefault("embedder", WordEmbedder())
    return Memory(MemoryConfig(data_dir=folder), **options)
