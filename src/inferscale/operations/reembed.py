"""Another embedder for a data folder that is in use: all facts embedded anew, then switched to at once.

Servers go on with the old vectors until the switch; from then on they refuse to search and to store, and are
started again with the new embedder. Knows how texts are embedded, and no SQL (`catalog/next_vectors.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from inferscale.catalog.next_vectors import NextVectors, Progress
from inferscale.catalog.opening import open_existing
from inferscale.catalog.rows import EmbedderIdentity
from inferscale.encryption import EncryptionKey
from inferscale.facts import Turn, Wording
from inferscale.retrieval import Embedder
from inferscale.search import embedding_text

BATCH_FACTS = 256


class Reembedded(NamedTuple):
    """num_embedded: by this call, texts that were changed meanwhile counted again. num_facts: of the folder.
    is_new: False where its vectors were of this embedder already."""

    num_embedded: int
    num_facts: int
    is_new: bool


def reembed(
    data_dir: Path,
    embedder: Embedder,
    progress: Callable[[Progress], object] = lambda progress: None,
    batch_facts: int = BATCH_FACTS,
    key: EncryptionKey | None = None,
    url: str | None = None,
) -> Reembedded:
    """Embed every fact of a folder with another embedder and switch to it.

    May be killed and called again: it goes on where it was. Facts that are added, changed or deleted
    meanwhile are seen to. key: of an encrypted folder. url: of a catalog in PostgreSQL. Raises InvalidInput
    for a folder without memory, CatalogError where another re-embedding is begun beside this one.
    """
    database = open_existing(data_dir, key, url)
    vectors = NextVectors(database, EmbedderIdentity(embedder.name, embedder.dim))
    try:
        num_embedded, is_new = 0, vectors.begin()
        if is_new:
            num_embedded = _embed_missing(vectors, embedder, progress, batch_facts)
            while not vectors.switch():  # something was added since
                num_embedded += _embed_missing(vectors, embedder, progress, batch_facts)
        num_facts = vectors.progress().num_facts
        vectors.clear_old()
    finally:
        vectors.close()
    return Reembedded(num_embedded, num_facts, is_new)


def _embed_missing(
    vectors: NextVectors, embedder: Embedder, progress: Callable[[Progress], object], batch_facts: int
) -> int:
    """Embed what has no vector yet, in storage order; how many texts that were."""
    num_embedded, after = 0, 0
    done, num_facts = vectors.progress()
    progress(Progress(done, num_facts))
    while facts := vectors.missing(after, batch_facts):
        texts = [embedding_text(Turn(*Wording.of(fact))) for fact in facts]
        vectors.store(facts, embedder.embed(texts))
        num_embedded, after = num_embedded + len(facts), facts[-1].seq
        progress(Progress(min(done + num_embedded, num_facts), num_facts))
    return num_embedded
