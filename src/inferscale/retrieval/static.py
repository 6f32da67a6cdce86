"""A sentence embedder without a network: each token has one vector, a text is their weighted mean.

Follows Model2Vec (Tulkens and van Dongen 2024): every token of a sentence model's vocabulary goes
through the model once, alone; the vectors are reduced by principal components and weighted by smooth
inverse frequency (Arora et al. 2017), the frequency taken from the token's rank by Zipf's law, since
vocabularies list frequent tokens first. A query then takes tens of microseconds and neither torch nor
a GPU; it finds less than the model it was made of (`inferscale bench recall`).

Made once from the default embedder and kept beside the models.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from inferscale.errors import EngineMissing
from inferscale.models import EMBEDDER, ensure_embedder, models_dir
from inferscale.retrieval.embedder import no_progress_bar

if TYPE_CHECKING:
    from inferscale.retrieval.bert import Network

DIM = 256
VERSION = 1
"""Raised whenever the vectors change: those of another version are then another embedder's."""
STATIC_NAME = f"{EMBEDDER.name}-static-v{VERSION}"

_SIF = 1e-4
_BATCH_TOKENS = 1536
_SAY_EVERY = 10
_UNUSED = re.compile(r"\[unused\d+\]")
_VECTORS, _TOKENIZER, _ABOUT = "vectors.npy", "tokenizer.json", "inferscale.json"


class StaticEmbedder:
    """Token vectors from a folder that `distil` made; see the module. Loaded on first use.

    name: recorded with the vectors; by default the folder's. All tokens of a text count, however long
    it is. Safe from several threads. Raises EngineMissing for a folder that holds no token vectors.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self._folder = folder
        self._name = name or folder.name
        self._loaded: _Loaded | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> int:
        return int(self._load().vectors.shape[1])

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        loaded = self._load()
        result = np.zeros((len(texts), loaded.vectors.shape[1]), dtype=np.float32)
        for row, text in enumerate(texts):
            ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
            total = loaded.vectors[ids].sum(axis=0)
            norm = math.sqrt(total @ total)
            if norm > _NOTHING:
                np.divide(total, norm, out=result[row])
            else:
                result[row, 0] = 1.0  # no token that is known; a unit vector is promised all the same
        return result

    def _load(self) -> _Loaded:
        if self._loaded is None:
            try:
                vectors = np.load(self._folder / _VECTORS)
                tokenizer = Tokenizer.from_file(str(self._folder / _TOKENIZER))
                self._loaded = _Loaded(tokenizer, vectors)
            except Exception as error:  # a damaged tokenizer.json is a bare Exception
                raise EngineMissing(
                    f"{self._folder} holds no token vectors ({error}). Remove the folder; they are made "
                    "anew on the next use."
                ) from error
        return self._loaded


_NOTHING = 1e-9


class _Loaded(NamedTuple):
    """vectors: float32 [vocabulary, dim], weighted; zero for what is no text, such as the unknown token."""

    tokenizer: Tokenizer
    vectors: NDArray[np.float32]


def ensure_static_embedder(progress: Callable[[str], object] = print) -> Path:
    """Folder of the token vectors of the default embedder; made on the first call.

    Raises EngineMissing where the default embedder cannot be had or the cache cannot be written.
    """
    target = models_dir() / STATIC_NAME
    if (target / _ABOUT).is_file():
        return target
    source = ensure_embedder(progress)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{STATIC_NAME}-", dir=target.parent))
        try:
            distil(source, work / "model", progress)
            _put_in_place(work / "model", target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise EngineMissing(
            f"{STATIC_NAME} cannot be stored in {target.parent}: {error}. "
            "Set INFERSCALE_CACHE to a folder that can be written."
        ) from error
    progress(f"{STATIC_NAME}: ready in {target}")
    return target


def _put_in_place(built: Path, target: Path) -> None:
    """Rename `built` to `target`. What another process put there meanwhile is the same, and stays."""
    try:
        built.rename(target)
    except OSError:
        if not (target / _ABOUT).is_file():
            raise


def distil(source: Path, target: Path, progress: Callable[[str], object], dim: int = DIM) -> None:
    """Write the token vectors of the sentence model in `source` to the new folder `target`.

    dim: of the vectors, at most that of the model.
    """
    from transformers import AutoModel, AutoTokenizer

    from inferscale.retrieval.bert import network_of

    tokenizer: Any = AutoTokenizer.from_pretrained(str(source))
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    with no_progress_bar():
        network = network_of(AutoModel.from_pretrained(str(source)).float().eval())
    num_tokens = backend.get_vocab_size(with_added_tokens=True)
    no_text = {id for token, id in backend.get_vocab().items() if _UNUSED.fullmatch(token)}
    no_text.update(tokenizer.all_special_ids)
    states = _token_states(network, backend, num_tokens, source.name, progress)
    vectors = weighted(states, no_text, dim)
    target.mkdir(parents=True)
    np.save(target / _VECTORS, vectors)
    backend.save(str(target / _TOKENIZER))
    about = {"name": STATIC_NAME, "source": source.name, "version": VERSION}
    (target / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _token_states(
    network: Network, backend: Tokenizer, num_tokens: int, name: str, progress: Callable[[str], object]
) -> NDArray[np.float32]:
    """The model's state of each token alone between its special tokens, float32 [num_tokens, dim]."""
    import torch

    alone = backend.encode("a")
    places = [place for place, special in enumerate(alone.special_tokens_mask) if not special]
    before, behind = alone.ids[: places[0]], alone.ids[places[-1] + 1 :]
    states: list[NDArray[np.float32]] = []
    size = max(1, _BATCH_TOKENS // (len(before) + 1 + len(behind)))
    for start in range(0, num_tokens, size):
        ids = [[*before, token, *behind] for token in range(start, min(num_tokens, start + size))]
        with torch.inference_mode():
            states.append(network(torch.tensor(ids), None)[:, len(before)].numpy())
        if start // size % _SAY_EVERY == 0:
            progress(f"{STATIC_NAME}: {start} of {num_tokens} tokens through {name}")
    return np.concatenate(states)


def weighted(states: NDArray[np.float32], no_text: Collection[int], dim: int) -> NDArray[np.float32]:
    """Token vectors [n, dim] from states [n, d]: principal components, weighted by rarity.

    no_text: ids of tokens that no text holds; their vectors are zero, and they have no rank. The sign
    of each component is chosen by its largest entry, so that vectors made on another machine are the
    same (to rounding).
    """
    is_text = np.ones(len(states), dtype=np.bool_)
    is_text[list(no_text)] = False
    text = states[is_text].astype(np.float64)
    text -= text.mean(axis=0)
    _, components = np.linalg.eigh(text.T @ text)
    components = components[:, ::-1][:, :dim]
    largest = np.abs(components).argmax(axis=0)
    components = components * np.sign(components[largest, np.arange(components.shape[1])])
    share = 1.0 / np.arange(2, len(text) + 2)
    weight = _SIF / (_SIF + share / share.sum())
    vectors = np.zeros((len(states), components.shape[1]), dtype=np.float32)
    vectors[is_text] = text @ components * weight[:, None]
    return vectors
