"""Reranking: a model that reads the question and a fact together, and the contract for others.

A cross-encoder (Nogueira and Cho 2019) costs one forward pass a fact, so only the best found are read. Knows
nothing of facts and of how they were found. torch and transformers are loaded on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from inferscale.errors import EngineMissing
from inferscale.retrieval.embedder import no_progress_bar

MAX_TOKENS = 512
_BATCH = 32


@runtime_checkable
class Reranker(Protocol):
    """How well texts answer a question."""

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """One number a text; higher is better. May be called from several threads."""
        ...


class CrossEncoder:
    """A sequence classifier with one output, such as `cross-encoder/ms-marco-MiniLM-L6-v2`, on the CPU.

    path_or_name: a local folder, or a name on the Hugging Face hub. Of several outputs the last counts, which
    is `relevant` where there are two. Raises EngineMissing, on first use, where no model can be loaded.
    """

    def __init__(self, path_or_name: str | Path) -> None:
        self._source = str(path_or_name)
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()  # a fast tokenizer cannot be borrowed by two threads

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        import torch

        found: list[float] = []
        with self._lock, torch.inference_mode():
            tokenizer, model = self._model()
            for start in range(0, len(texts), _BATCH):
                batch = list(texts[start : start + _BATCH])
                inputs = tokenizer(
                    [query] * len(batch), batch, padding=True, truncation=True, max_length=MAX_TOKENS,
                    return_tensors="pt",
                )  # fmt: skip
                found += model(**inputs).logits[:, -1].float().tolist()
        return found

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            is_local = Path(self._source).is_dir()
            try:
                with no_progress_bar():
                    tokenizer: Any = AutoTokenizer.from_pretrained(self._source, local_files_only=is_local)
                    model: Any = AutoModelForSequenceClassification.from_pretrained(
                        self._source, local_files_only=is_local
                    )
            except (OSError, ValueError) as error:
                raise EngineMissing(
                    f"the reranker {self._source!r} is neither a folder with a model nor to be had from the "
                    f"Hugging Face hub ({error}). Give the folder of a cross-encoder as reranker, or "
                    "leave it out."
                ) from error
            self._loaded = (tokenizer, model.float().eval())
        return self._loaded
