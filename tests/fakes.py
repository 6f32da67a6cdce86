"""Stand-ins that tests share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
