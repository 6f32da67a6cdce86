"""Sentence embeddings: the contract, and all-MiniLM-L6-v2 and its kin through plain transformers.

Follows Sentence-BERT (Reimers and Gurevych 2019): mean over the token states, then L2 norm. Knows
nothing of facts and of where vectors are kept. torch and transformers are loaded on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inferscale.errors import EngineMissing
from inferscale.retrieval.index import torch_device

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 256
"""Only so many tokens of a text, special ones included, decide its vector, as the model was trained."""
MAX_BATCH_TOKENS = 8192
"""Upper bound of tokens in one forward pass, padding included."""


@runtime_checkable
class Embedder(Protocol):
    """Text → unit vectors. Equal names promise comparable vectors; the catalog records the name."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [n, dim], each row of L2 norm 1. May be called from several threads."""
        ...


class _Model(NamedTuple):
    tokenizer: Any
    network: Any
    device: torch.device
    max_tokens: int


class SentenceEmbedder:
    """A BERT-like encoder with mean pooling, in float32.

    path_or_name: a local folder, or a name on the Hugging Face hub. device: a torch device.
    name: recorded with the vectors; by default the last part of `path_or_name`, so that a local
    copy and the hub's `sentence-transformers/all-MiniLM-L6-v2` are the same embedder.

    The vector of a text does not depend on the other texts of a call (to 1e-5). Of a text with
    more than 256 tokens the first 256 decide. Raises EngineMissing where no model can be loaded.
    """

    def __init__(self, path_or_name: str | Path, device: str = "cpu", name: str | None = None) -> None:
        self._source = str(path_or_name)
        self._device = device
        self._name = name or Path(self._source).name
        self._model: _Model | None = None
        # Also held while embedding: a fast tokenizer cannot be borrowed by two threads.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> int:
        with self._lock:
            return int(self._load().network.config.hidden_size)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import torch

        with self._lock, torch.inference_mode():
            model = self._load()
            vectors = np.zeros((len(texts), model.network.config.hidden_size), dtype=np.float32)
            if not texts:
                return vectors
            encoded = model.tokenizer(list(texts), truncation=True, max_length=model.max_tokens)
            token_ids: list[list[int]] = encoded["input_ids"]
            for rows in _batches([len(ids) for ids in token_ids]):
                batch = model.tokenizer.pad(
                    {"input_ids": [token_ids[row] for row in rows]}, return_tensors="pt"
                )
                inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
                states = model.network(**inputs).last_hidden_state
                vectors[rows] = _pooled(states, inputs["attention_mask"]).cpu().numpy()
            return vectors

    def _load(self) -> _Model:
        if self._model is not None:
            return self._model
        from transformers import AutoModel, AutoTokenizer

        device = torch_device(self._device, "embedder_device")
        is_local = Path(self._source).is_dir()
        try:
            with _no_progress_bar():
                tokenizer: Any = AutoTokenizer.from_pretrained(self._source, local_files_only=is_local)
                network: Any = AutoModel.from_pretrained(self._source, local_files_only=is_local)
        except (OSError, ValueError) as error:
            raise EngineMissing(
                f"the embedder {self._source!r} is neither a folder with a model nor to be had from the "
                f"Hugging Face hub ({error}). Give the folder of a sentence-embedding model as embedder, "
                "or leave it out."
            ) from error
        limit = min(MAX_TOKENS, int(tokenizer.model_max_length), int(network.config.max_position_embeddings))
        self._model = _Model(tokenizer, network.float().eval().to(device), device, limit)
        return self._model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes a moment only, and transformers' bar would stand in the caller's terminal."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers in groups of similar length, so that little padding is computed."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[row] > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _pooled(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Mean of the unmasked states, L2-normalised: [n, tokens, dim] and [n, tokens] → [n, dim]."""
    import torch

    mask = attention_mask.unsqueeze(-1).to(states.dtype)
    mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
    return torch.nn.functional.normalize(mean, dim=-1)
