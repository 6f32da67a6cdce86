"""Token vectors instead of a network: how they are made, kept and used. A tiny model stands in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferscale import models
from inferscale.config import MemoryConfig
from inferscale.errors import EmbedderMismatch, EngineMissing, InvalidConfig
from inferscale.memory import Memory
from inferscale.retrieval import Embedder, StaticEmbedder, open_embedder, static
from inferscale.retrieval.static import STATIC_NAME, distil, ensure_static_embedder, weighted

WORDS = ["the", "a", "cat", "dog", "likes", "milk", "fish", "runs", "away", "from", "big", "red", "house"]
TEXTS = ["the cat likes milk", "a big red dog runs away", "fish", "dog dog dog", "the 🧀", "", "🧀"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of two layers with a vocabulary of a few words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "[unused0]"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), hidden_size=32, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def distilled(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("static") / "vectors"
    distil(source, target, lambda _: None, dim=8)
    return target


@pytest.fixture
def cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of models; the default embedder is the tiny one."""
    monkeypatch.setenv("INFERSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(static, "ensure_embedder", lambda progress: source)
    monkeypatch.setattr(models, "ensure_embedder", lambda progress: source)
    return tmp_path / "cache"


def test_it_keeps_the_contract_of_embedders(distilled: Path) -> None:
    embedder = StaticEmbedder(distilled)
    assert isinstance(embedder, Embedder)
    assert (embedder.name, embedder.dim) == ("vectors", 8)
    vectors = embedder.embed(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((len(TEXTS), 8), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.embed([]).shape == (0, 8)
    for text, expected in zip(TEXTS, vectors, strict=True):
        np.testing.assert_array_equal(embedder.embed([text])[0], expected)


def test_a_text_is_the_mean_of_its_tokens(distilled: Path) -> None:
    embedder = StaticEmbedder(distilled)
    table = np.load(distilled / "vectors.npy")
    ids = [5 + WORDS.index(word) for word in ("big", "red", "house")]
    mean = table[ids].mean(axis=0)
    for text in ("Big red  house", "big 🧀 red house"):  # what is unknown does not count
        np.testing.assert_allclose(embedder.embed([text])[0], mean / np.linalg.norm(mean), atol=1e-6)
    assert not table[[0, 1, 2, 3, 4, -1]].any()  # what is no text


def test_token_vectors_are_the_models_states(source: Path, distilled: Path) -> None:
    """Each is its token's state, projected and weighted, which leaves most of the angles."""
    from transformers import BertModel

    ids = torch.tensor([[2, token, 3] for token in range(5, 5 + len(WORDS))])
    with torch.no_grad():
        states = BertModel.from_pretrained(source).eval()(ids).last_hidden_state[:, 1].numpy()
    found = cosines(np.load(distilled / "vectors.npy")[5 : 5 + len(WORDS)])
    expected = cosines(states - states.mean(axis=0))
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.9


def cosines(vectors: np.ndarray) -> np.ndarray:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def test_rounding_does_not_turn_the_vectors() -> None:
    """Vectors made on another machine go together with these."""
    generator = np.random.default_rng(0)
    scales = np.linspace(3, 1, 12, dtype=np.float32)
    states = (generator.standard_normal((500, 12)) * scales).astype(np.float32)
    noisy = states + 1e-5 * generator.standard_normal(states.shape).astype(np.float32)
    first, second = weighted(states, [0], 6), weighted(noisy, [0], 6)
    cosine = (first * second).sum(axis=1)[1:] / np.linalg.norm(first[1:], axis=1) ** 2
    assert cosine.min() > 0.999
    assert first.shape == (500, 6)
    lengths = np.linalg.norm(first, axis=1)
    assert lengths[1:50].mean() < lengths[-50:].mean()  # frequent tokens weigh less


def test_it_is_made_once(cache: Path) -> None:
    said: list[str] = []
    folder = ensure_static_embedder(said.append)
    assert folder == cache / STATIC_NAME
    assert said[-1] == f"{STATIC_NAME}: ready in {folder}"
    assert "tokens through tiny-bert" in said[0]
    assert [path.name for path in cache.iterdir()] == [STATIC_NAME]
    said.clear()
    assert ensure_static_embedder(said.append) == folder
    assert said == []


def test_a_failure_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(static.np, "save", fail)
    with pytest.raises(EngineMissing, match=r"no space left.*INFERSCALE_CACHE"):
        ensure_static_embedder(lambda _: None)
    assert list(cache.iterdir()) == []


def test_a_folder_put_there_meanwhile_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def distilled_twice(source: Path, target: Path, progress: Any, dim: int = 8) -> None:
        distil(source, target, progress, 8)
        shutil.copytree(target, cache / STATIC_NAME)

    monkeypatch.setattr(static, "distil", distilled_twice)
    assert StaticEmbedder(ensure_static_embedder(lambda _: None)).dim == 8


def test_no_folder_with_vectors(tmp_path: Path, distilled: Path) -> None:
    with pytest.raises(EngineMissing, match="holds no token vectors"):
        _ = StaticEmbedder(tmp_path).dim
    broken = shutil.copytree(distilled, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(EngineMissing, match="Remove the folder"):
        StaticEmbedder(broken).embed(["cat"])


def test_memory_takes_it_by_name(cache: Path, tmp_path: Path) -> None:
    config = MemoryConfig(tmp_path / "data", embedder="static")
    with Memory(config) as memory:
        memory.add(["the cat likes milk", "a big dog runs away"], user_id="ana")
        assert memory.search("cat", user_id="ana")[0].fact.text == "the cat likes milk"
    with Memory(MemoryConfig(tmp_path / "data")) as other, pytest.raises(EmbedderMismatch, match=STATIC_NAME):
        other.search("cat", user_id="ana")
    with Memory(config) as again:
        assert len(again.search("dog", user_id="ana")) == 2
    assert open_embedder("static", progress=lambda _: None).name == STATIC_NAME


@pytest.mark.parametrize("device", ["", None, 0])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(InvalidConfig, match="embedder_device"):
        MemoryConfig("x", embedder_device=device)
