"""Embedders and the vector index. Importing this package loads neither torch nor transformers."""

from inferscale.retrieval.embedder import Embedder, SentenceEmbedder
from inferscale.retrieval.index import IndexHit, VectorIndex

__all__ = ["Embedder", "IndexHit", "SentenceEmbedder", "VectorIndex"]
