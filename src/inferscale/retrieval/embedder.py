"""Sentence embeddings: the contract, and all-MiniLM-L6-v2 and its kin through plain transformers.

Follows Sentence-BERT (Reimers and Gurevych 2019): mean over the token states, then L2 norm. Knows
nothing of facts and of where vectors are kept. torch and transformers are loaded on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from inferscale.errors import EngineMissing
from inferscale.retrieval.bert import BertEncoder, Network, network_of, pooled
from inferscale.retrieval.devices import DeviceChoice, as_choice
from inferscale.retrieval.lone_thread import alone
from inferscale.retrieval.precision import exact_products
from inferscale.retrieval.query_graphs import QueryGraphs

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 256
"""Only so many tokens of a text, special ones included, decide its vector, as the model was trained."""
MAX_BATCH_TOKENS = 8192
"""Upper bound of tokens in one forward pass, padding included."""

_SHORT_TOKENS = 64
"""Up to this length a single text is embedded by one thread."""
_WHAT = "the embedder"


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
    """encode: texts → token ids, special ones included and cut to the limit. graphs: on CUDA only."""

    encode: Callable[[Sequence[str]], list[list[int]]]
    network: Network
    dim: int
    pad_id: int
    device: torch.device
    graphs: QueryGraphs | None


class SentenceEmbedder:
    """A BERT-like encoder with mean pooling, in float32.

    path_or_name: a local folder, or a name on the Hugging Face hub. device: a torch device, or
    `auto` for a GPU where there is one with room; where that GPU fails, the model is loaded anew on the
    CPU. name: recorded with the vectors; by default the last part of `path_or_name`, so that a local copy
    and the hub's `sentence-transformers/all-MiniLM-L6-v2` are the same embedder.

    The vector of a text does not depend on the other texts of a call (to 1e-5). Of a text with
    more than 256 tokens the first 256 decide. A single text, which is what a search embeds, takes a
    shorter way: unpadded on a CPU, as a CUDA graph on a GPU. Raises EngineMissing where no model can
    be loaded, EngineError where a device that was named fails.
    """

    def __init__(
        self, path_or_name: str | Path, device: str | DeviceChoice = "cpu", name: str | None = None
    ) -> None:
        self._source = str(path_or_name)
        self._choice = as_choice(device)
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
            return self._choice.run(_WHAT, self._loaded).dim

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        with self._lock:
            return self._choice.run(_WHAT, lambda device: _embed(self._loaded(device), texts))

    def _loaded(self, device: torch.device) -> _Model:
        """The model on this device, which is another than before only after that one failed."""
        if self._model is None or self._model.device != device:
            self._model = None
            self._model = self._load(device)
        return self._model

    def _load(self, device: torch.device) -> _Model:
        import torch
        from transformers import AutoModel, AutoTokenizer

        is_local = Path(self._source).is_dir()
        try:
            with no_progress_bar():
                tokenizer: Any = AutoTokenizer.from_pretrained(self._source, local_files_only=is_local)
                model: Any = AutoModel.from_pretrained(self._source, local_files_only=is_local)
        except (OSError, ValueError) as error:
            raise EngineMissing(
                f"the embedder {self._source!r} is neither a folder with a model nor to be had from the "
                f"Hugging Face hub ({error}). Give the folder of a sentence-embedding model as embedder, "
                "or leave it out."
            ) from error
        max_tokens = min(
            MAX_TOKENS, int(tokenizer.model_max_length), int(model.config.max_position_embeddings)
        )
        dim = int(model.config.hidden_size)
        with torch.inference_mode():
            network = network_of(model.float().eval().to(device))
            # transformers' own networks may look at the mask on the host, which cannot be captured.
            has_graphs = device.type == "cuda" and isinstance(network, BertEncoder)
            graphs = QueryGraphs(network, device, dim, max_tokens) if has_graphs else None
        encode = _encoding(tokenizer, max_tokens)
        return _Model(encode, network, dim, tokenizer.pad_token_id or 0, device, graphs)


def _encoding(tokenizer: Any, max_tokens: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """Texts → ids as `tokenizer` gives them, without the time it takes around its fast backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return lambda texts: list(tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"])
    fast = Tokenizer.from_str(backend.to_str())
    fast.no_padding()
    fast.enable_truncation(max_tokens, direction=tokenizer.truncation_side)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:
            return [fast.encode(texts[0]).ids]
        return [encoding.ids for encoding in fast.encode_batch(list(texts))]

    return encode


def _embed(model: _Model, texts: Sequence[str]) -> NDArray[np.float32]:
    token_ids = model.encode(texts) if texts else []
    if len(token_ids) == 1 and model.graphs is not None:
        vector = model.graphs.embed(token_ids[0])
        if vector is not None:
            return vector.reshape(1, -1)
    is_short = len(token_ids) == 1 and len(token_ids[0]) <= _SHORT_TOKENS
    if is_short and model.device.type == "cpu":
        return alone("embed", lambda: _embed_batches(model, token_ids))
    return _embed_batches(model, token_ids)


def _embed_batches(model: _Model, token_ids: Sequence[list[int]]) -> NDArray[np.float32]:
    """float32 [n, dim] of the texts with these ids, padded only where their lengths differ."""
    import torch

    vectors = np.zeros((len(token_ids), model.dim), dtype=np.float32)
    with torch.inference_mode():
        for rows in _batches([len(ids) for ids in token_ids]):
            longest = max(1, len(token_ids[rows[-1]]))
            padded = np.full((len(rows), longest), model.pad_id, dtype=np.int64)
            lengths = np.array([len(token_ids[row]) for row in rows])
            for place, row in enumerate(rows):
                padded[place, : lengths[place]] = token_ids[row]
            is_padded = bool(lengths[0] < longest)
            mask = torch.from_numpy(np.arange(longest) < lengths[:, None]) if is_padded else None
            mask = None if mask is None else mask.to(model.device)
            ids = torch.from_numpy(padded).to(model.device)
            with exact_products(model.device):
                states = model.network(ids, mask)
            vectors[rows] = pooled(states, mask).cpu().numpy()
    return vectors


@contextmanager
def no_progress_bar() -> Iterator[None]:
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
    if batch:
        yield batch
