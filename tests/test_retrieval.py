"""Embedders and the vector index, against plain numpy and transformers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import WordEmbedder
from inferscale.errors import EngineError, EngineMissing, InvalidConfig, InvalidInput
from inferscale.retrieval import DeviceChoice, Embedder, SentenceEmbedder, VectorIndex, devices
from inferscale.retrieval import embedder as embedder_module
from inferscale.retrieval import index as index_module
from inferscale.retrieval.bert import BertEncoder, network_of, pooled
from inferscale.retrieval.index import _FIRST_CAPACITY, _SPARE
from inferscale.retrieval.lone_thread import alone
from inferscale.retrieval.query_graphs import LENGTHS, QueryGraphs, embed_padded, fill, padded_length

DIM = 8
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and busy test machines suffer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["listed", "masked", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where an index lies; `masked`: on the CPU, but with filters as on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "masked":
        monkeypatch.setattr(index_module, "_LISTED_ON", ())
    return "cuda" if request.param == "cuda" else "cpu"


def random_vectors(n: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def best(vectors: dict[int, np.ndarray], query: np.ndarray, k: int) -> list[int]:
    unit = query / np.linalg.norm(query)
    return sorted(vectors, key=lambda id: (-float(vectors[id] @ unit / np.linalg.norm(vectors[id])), -id))[:k]


# --- index ---------------------------------------------------------------------------------------


def test_search_is_exact_across_growth(device: str) -> None:
    count = 3 * _FIRST_CAPACITY + 5
    vectors = random_vectors(count)
    index = VectorIndex(DIM, device)
    for start in range(0, count, 97):
        rows = range(start, min(count, start + 97))
        index.add(rows, [id % 3 for id in rows], vectors[start : rows.stop])
    assert len(index) == count
    query = random_vectors(1, seed=1)[0]
    hits = index.search(query, 20)
    assert [hit.id for hit in hits] == best(dict(enumerate(vectors)), query, 20)
    cosine = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(cosine)[::-1][:20], atol=1e-5)
    only = {id: vector for id, vector in enumerate(vectors) if id % 3 == 1}
    assert [hit.id for hit in index.search(query, 20, [1])] == best(only, query, 20)
    assert [hit.id for hit in index.search(query, 10**6, {1})] == best(only, query, count)
    assert len(index.search(query, 10**6, {0, 1, 2, 99})) == count
    index.add([count], [50], query[None])  # a filter that covers a small part takes another path
    assert [tuple(hit) for hit in index.search(query, 10**6, {50, 51})] == [(count, pytest.approx(1))]
    index.remove([count])
    assert index.search(query, 5, []) == index.search(query, 5, [99]) == index.search(query, 0) == []


def test_filter_comes_before_top_k(device: str) -> None:
    index = VectorIndex(DIM, device)
    query = random_vectors(1)[0]
    index.add(range(1000), [0] * 1000, np.tile(query, (1000, 1)))
    index.add([1000, 1001], [1, 1], np.stack([-query, query + 1]))
    assert [hit.id for hit in index.search(query, 10, [1])] == [1001, 1000]


def test_equal_scores_come_newest_first(device: str) -> None:
    index = VectorIndex(DIM, device)
    vectors = random_vectors(3)
    noisy = np.tile(vectors[0], (40, 1)) * (1 + 1e-7 * np.arange(40, dtype=np.float32)[:, None])
    index.add(range(40), [0] * 40, noisy)
    index.add([40, 41], [0, 0], vectors[1:])
    hits = index.search(vectors[0], 5)
    assert [hit.id for hit in hits] == [39, 38, 37, 36, 35]
    assert len({hit.score for hit in hits}) == 1
    index.remove([38])
    assert [hit.id for hit in index.search(vectors[0], 3)] == [39, 37, 36]


def test_more_equal_scores_than_are_fetched(device: str) -> None:
    """Equal ones are found however many they are, in a filter as well."""
    count = 4 * (_SPARE + 5)
    index = VectorIndex(DIM, device)
    vectors = random_vectors(2)
    index.add(range(count), [id % 2 for id in range(count)], np.tile(vectors[:1], (count, 1)))
    index.add([count, count + 1], [0, 1], np.stack([vectors[1], -vectors[1]]))
    newest = list(range(count))[::-1]
    for k in (1, 5, 5 + _SPARE):
        assert [hit.id for hit in index.search(vectors[0], k)] == newest[:k]
        assert [hit.id for hit in index.search(vectors[0], k, [1])] == newest[::2][:k]
    assert [hit.id for hit in index.search(vectors[1], 2, [0])] == [count, newest[1]]


def test_a_filter_follows_the_table(device: str) -> None:
    index = VectorIndex(DIM, device)
    query = random_vectors(1)[0]
    index.add(range(40), [id % 4 for id in range(40)], random_vectors(40))

    def found(*codes: int) -> set[int]:
        return {hit.id for hit in index.search(query, 99, codes)}

    assert found(1) == set(range(1, 40, 4))
    assert found(1, 2) == found(2, 1) == set(range(1, 40, 4)) | set(range(2, 40, 4))
    index.add([40, 41], [1, 7], random_vectors(2, seed=1))
    assert found(1) == {*range(1, 40, 4), 40}
    assert found(7) == {41}
    index.remove([5, 41])
    assert found(1) == {*range(1, 40, 4), 40} - {5}
    assert found(7) == set()


def test_filters_are_remembered_up_to_so_many_bytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = VectorIndex(DIM, device)
    vectors = random_vectors(40)
    index.add(range(40), range(40), vectors)
    size_bytes = index._filter(index._table, 40, frozenset([1])).size_bytes()  # type: ignore[arg-type]
    assert size_bytes > 0
    monkeypatch.setattr(index_module, "_FILTER_BYTES", 3 * size_bytes)
    for code in (*range(10), 9, 8):
        assert [hit.id for hit in index.search(vectors[0], 5, [code])] == [code]
        kept = sum(filter.size_bytes() for filter in index._filters.values())
        assert kept == index._filter_bytes <= 3 * size_bytes
    assert list(index._filters) == [frozenset([code]) for code in (7, 8, 9)], "the oldest go first"
    monkeypatch.setattr(index_module, "_FILTER_BYTES", size_bytes - 1)
    assert [hit.id for hit in index.search(vectors[0], 5, [20])] == [20]
    assert frozenset([20]) not in index._filters, "one that is too large is used, not kept"
    index.remove([0])
    assert (index._filters, index._filter_bytes) == ({}, 0)
    monkeypatch.setattr(index_module, "_FILTER_BYTES", 2**20)
    monkeypatch.setattr(index_module, "_NUM_FILTERS", 2)
    for code in range(5):
        index.search(vectors[0], 5, [100 + code])  # no rows: as a list it takes no bytes
        assert len(index._filters) <= 2


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_adding_and_removing_in_any_order(data: st.DataObject) -> None:
    index, expected = VectorIndex(4), {}
    for step in range(data.draw(st.integers(1, 6))):
        added = data.draw(st.lists(st.integers(0, 30), unique=True))
        vectors = random_vectors(len(added), 4, seed=step)
        index.add(added, [id % 2 for id in added], vectors)
        expected.update(zip(added, vectors, strict=True))
        removed = data.draw(st.lists(st.integers(0, 30)))
        assert index.remove(removed) == len(set(removed) & set(expected))
        for id in removed:
            expected.pop(id, None)
        query = random_vectors(1, 4, seed=100 + step)[0]
        assert [hit.id for hit in index.search(query, 50)] == best(expected, query, 50)
        odd = {id: vector for id, vector in expected.items() if id % 2}
        assert [hit.id for hit in index.search(query, 3, [1])] == best(odd, query, 3)
        assert len(index) == len(expected)


def test_removed_vectors_are_overwritten() -> None:
    index = VectorIndex(DIM)
    vectors = random_vectors(10)
    index.add(range(10), range(10), vectors)
    index.remove([0, 4, 9])
    assert index._table is not None
    assert not index._table.vectors[7:].any()
    stored = index._table.vectors[:7].numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for id in (0, 4, 9):
        assert not (np.abs(stored - unit[id]).max(axis=1) < 1e-6).any()


def test_bad_vectors_change_nothing() -> None:
    index = VectorIndex(DIM)
    index.add([1], [0], random_vectors(1))
    nan = random_vectors(1)
    nan[0, 3] = np.nan
    for ids, codes, vectors in (
        ([1], [0], nan),
        ([2], [0], random_vectors(1, DIM + 1)),
        ([2, 2], [0, 0], random_vectors(2)),
        ([2], [0, 0], random_vectors(1)),
    ):
        with pytest.raises(InvalidInput):
            index.add(ids, codes, vectors)
    with pytest.raises(InvalidInput):
        index.search(nan[0], 1)
    assert [hit.id for hit in index.search(random_vectors(1)[0], 9)] == [1]
    assert 1 in index
    assert 2 not in index


def test_a_zero_vector_is_similar_to_nothing() -> None:
    index = VectorIndex(DIM)
    index.add([1, 2], [0, 0], np.stack([np.zeros(DIM, np.float32), np.ones(DIM, np.float32)]))
    assert [tuple(hit) for hit in index.search(np.ones(DIM, np.float32), 2)][1] == (1, 0.0)


def test_an_unknown_device_is_refused() -> None:
    for name in ("warp", "cuda:99"):
        with pytest.raises(InvalidConfig, match=f"embedder_device is '{name}'"):
            VectorIndex(DIM, name).add([1], [1], random_vectors(1))


def test_auto_is_a_gpu_where_there_is_one() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert DeviceChoice("auto").get().type == wanted
    index = VectorIndex(DIM, "auto")
    index.add([1], [1], random_vectors(1))
    assert index._table is not None
    assert index._table.vectors.device.type == wanted


def test_threads_share_an_index() -> None:
    index = VectorIndex(DIM)

    def work(number: int) -> None:
        for i in range(30):
            id = number * 100 + i
            index.add([id], [number], random_vectors(1, seed=id))
            assert {hit.id // 100 for hit in index.search(random_vectors(1)[0], 50, [number])} == {number}
            if i % 2:
                index.remove([id])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(index) == 8 * 15


def test_small_work_is_done_by_one_thread() -> None:
    torch.set_num_threads(2)

    def work() -> tuple[int, str]:
        return torch.get_num_threads(), threading.current_thread().name

    num_threads, name = alone("test", work)
    assert (num_threads, name[:15]) == (1, "inferscale-test")
    assert alone("test", work) == (num_threads, name)
    # Neither this thread nor a new one is changed by it.
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2
    with pytest.raises(ZeroDivisionError):
        alone("test", lambda: 1 // 0)
    torch.set_num_threads(1)
    assert alone("test", work) == (1, threading.current_thread().name)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    torch.set_num_threads(2)
    assert alone("test", lambda: 1) == 1
    child = os.fork()
    if child == 0:
        try:
            os._exit(alone("test", lambda: 7))
        finally:
            os._exit(1)
    deadline_s = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked process waits for a thread that it does not have")
    assert os.waitstatus_to_exitcode(done[1]) == 7
    assert alone("test", lambda: 2) == 2


# --- embedders -----------------------------------------------------------------------------------

WORDS = ["the", "a", "cat", "dog", "likes", "milk", "fish", "runs", "away", "from", "big", "red", "house"]
LONG = " ".join(WORDS * 30)
TEXTS = [" ".join(RNG.choice(WORDS, size=int(size))) for size in RNG.integers(1, 60, size=40)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of two layers with a vocabulary of a few words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n"
    )
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=300,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_embedder(tiny_model: Path) -> SentenceEmbedder:
    return SentenceEmbedder(tiny_model)


def test_embedders_keep_the_contract(sentence_embedder: SentenceEmbedder) -> None:
    for embedder in (sentence_embedder, WordEmbedder()):
        assert isinstance(embedder, Embedder)
        vectors = embedder.embed(TEXTS)
        assert vectors.shape == (len(TEXTS), embedder.dim)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert embedder.embed([]).shape == (0, embedder.dim)
    assert sentence_embedder.name == "tiny-bert"
    assert sentence_embedder.dim == 32


def test_nothing_is_loaded_before_it_is_needed() -> None:
    embedder = SentenceEmbedder("sentence-transformers/all-MiniLM-L6-v2")
    assert embedder.name == "all-MiniLM-L6-v2"
    assert SentenceEmbedder("some/where", name="mine").name == "mine"


def test_mean_pooling_over_the_mask_equals_transformers_alone(
    sentence_embedder: SentenceEmbedder, tiny_model: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    network = AutoModel.from_pretrained(tiny_model).eval()
    expected = []
    for text in TEXTS:  # one by one: no padding anywhere
        with torch.no_grad():
            states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy())
    np.testing.assert_allclose(sentence_embedder.embed(TEXTS), np.stack(expected), atol=1e-5)


def test_a_vector_does_not_depend_on_its_batch(
    sentence_embedder: SentenceEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = sentence_embedder.embed(TEXTS)
    order = RNG.permutation(len(TEXTS))
    shuffled = sentence_embedder.embed([TEXTS[i] for i in order])
    np.testing.assert_allclose(shuffled, together[order], atol=1e-5)
    monkeypatch.setattr(embedder_module, "MAX_BATCH_TOKENS", 200)
    np.testing.assert_allclose(sentence_embedder.embed(TEXTS), together, atol=1e-5)


def test_a_single_text_takes_another_way_to_the_same_vector(tiny_model: Path) -> None:
    torch.set_num_threads(2)  # short texts then have a thread of their own
    embedder = SentenceEmbedder(tiny_model)
    together = embedder.embed([*TEXTS, LONG])
    for text, expected in zip([*TEXTS, LONG], together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], expected, atol=1e-5)


def test_a_full_gpu_leaves_the_embedder_on_the_cpu(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("meta")  # stands for it
    monkeypatch.setattr(devices, "_free_gpu", lambda: gpu)
    load = SentenceEmbedder._load

    def loading(self: SentenceEmbedder, device: torch.device) -> Any:
        if device == gpu:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return load(self, device)

    monkeypatch.setattr(SentenceEmbedder, "_load", loading)
    choice = DeviceChoice("auto")
    embedder = SentenceEmbedder(tiny_model, choice)
    assert embedder.dim == 32
    np.testing.assert_allclose(
        embedder.embed(["cat"]), SentenceEmbedder(tiny_model).embed(["cat"]), atol=1e-6
    )
    assert choice.get().type == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(EngineError, match="embedder_device is 'meta', but the embedder failed"):
        SentenceEmbedder(tiny_model, "meta").embed(["cat"])


def test_an_embedder_whose_gpu_fills_up_is_loaded_anew(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On `meta` a model can be loaded, and the first text fails."""
    monkeypatch.setattr(devices, "_free_gpu", lambda: torch.device("meta"))
    embed = embedder_module._embed

    def embedding(model: Any, texts: Any) -> Any:
        if model.device.type == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return embed(model, texts)

    monkeypatch.setattr(embedder_module, "_embed", embedding)
    embedder = SentenceEmbedder(tiny_model, "auto")
    assert embedder.dim == 32
    np.testing.assert_allclose(
        embedder.embed(TEXTS[:3]), SentenceEmbedder(tiny_model).embed(TEXTS[:3]), atol=1e-6
    )


def load_network(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder).eval()


def test_the_plain_bert_equals_transformers(tiny_model: Path) -> None:
    model = load_network(tiny_model)
    network = network_of(model)
    assert isinstance(network, BertEncoder)
    ids = torch.from_numpy(RNG.integers(5, 18, size=(3, 20)))
    mask = torch.arange(20) < torch.tensor([[20], [7], [1]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        states = network(ids, mask)
        torch.testing.assert_close(states[mask], expected[mask], atol=1e-5, rtol=0)
        unmasked = model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(network(ids, None), unmasked, atol=1e-5, rtol=0)
        model.config.hidden_act = "relu"  # not the plain one any more: transformers runs it
        other = network_of(model)
        assert not isinstance(other, BertEncoder)
        torch.testing.assert_close(other(ids, None), unmasked, atol=1e-5, rtol=0)


def test_padding_changes_no_vector(tiny_model: Path) -> None:
    """What a CUDA graph computes, here without one."""
    network = network_of(load_network(tiny_model))
    assert [padded_length(n, LENGTHS) for n in (1, 16, 17, 256, 257)] == [16, 16, 32, 256, None]
    for num_tokens in (1, 3, 15, 16):
        token_ids = RNG.integers(5, 18, size=num_tokens).tolist()
        with torch.inference_mode():
            expected = pooled(network(torch.tensor([token_ids]), None), None)[0]
            for length in LENGTHS:
                buffer = torch.full((1 + length,), 7)  # what an earlier text left there
                fill(buffer, token_ids)
                torch.testing.assert_close(embed_padded(network, buffer), expected, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_give_the_vectors_of_the_eager_pass(tiny_model: Path) -> None:
    on_gpu, on_cpu = SentenceEmbedder(tiny_model, "cuda"), SentenceEmbedder(tiny_model)
    texts = [*TEXTS, LONG, "cat", ""]
    together = on_gpu.embed(texts)  # a batch is eager
    np.testing.assert_allclose(together, on_cpu.embed(texts), atol=1e-4)
    assert on_gpu._model is not None
    graphs = on_gpu._model.graphs
    assert isinstance(graphs, QueryGraphs)
    for _ in range(2):  # what one text leaves in the buffers is not seen by the next
        for text, expected in zip(texts, together, strict=True):
            np.testing.assert_allclose(on_gpu.embed([text])[0], expected, atol=1e-5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: on_gpu.embed([text])[0], texts * 3))
    np.testing.assert_allclose(np.stack(found), np.tile(together, (3, 1)), atol=1e-5)
    assert graphs.embed(list(range(5, 15)) * 30) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_tf32_on_a_gpu_whatever_the_process_allows(tiny_model: Path) -> None:
    """Vectors and scores are those of a CPU to far less than the 1e-3 that TF32 costs."""
    vectors = random_vectors(5000, 384)
    torch.set_float32_matmul_precision("high")
    try:
        on_gpu = SentenceEmbedder(tiny_model, "cuda")
        alone_on_gpu, together_on_gpu = on_gpu.embed([LONG]), on_gpu.embed([LONG, *TEXTS])
        index = VectorIndex(384, "cuda")
        index.add(range(5000), [0] * 5000, vectors)
        found = index.search(vectors[0], 50)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    together = SentenceEmbedder(tiny_model).embed([LONG, *TEXTS])
    np.testing.assert_allclose(alone_on_gpu[0], together[0], atol=1e-5)
    np.testing.assert_allclose(together_on_gpu, together, atol=1e-5)
    cosine = vectors @ vectors[0] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[0])
    np.testing.assert_allclose([hit.score for hit in found], np.sort(cosine)[::-1][:50], atol=2e-6)


def test_only_the_first_256_tokens_decide(sentence_embedder: SentenceEmbedder) -> None:
    start = " ".join(["cat"] * 254)  # and two special tokens
    vectors = sentence_embedder.embed([start, start + " dog" * 100_000, "dog " + start])
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)
    assert np.abs(vectors[2] - vectors[0]).max() > 1e-3


def test_threads_share_an_embedder(sentence_embedder: SentenceEmbedder) -> None:
    expected = sentence_embedder.embed(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: sentence_embedder.embed(TEXTS[i:]), range(8)))
    for i, vectors in enumerate(found):
        np.testing.assert_allclose(vectors, expected[i:], atol=1e-5)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match="embedder"):
        _ = SentenceEmbedder(tmp_path).dim


def test_loading_prints_nothing(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    SentenceEmbedder(tiny_model).embed(["cat"])
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_all_minilm_knows_what_is_similar() -> None:
    from inferscale.models import EMBEDDER, is_present, model_path

    if not is_present(EMBEDDER):
        pytest.skip("all-MiniLM-L6-v2 is not in the cache; `make setup` fetches it")
    embedder = SentenceEmbedder(model_path(EMBEDDER))
    assert (embedder.name, embedder.dim) == ("all-MiniLM-L6-v2", 384)
    query, near, far = embedder.embed(
        ["What is the name of her dog?", "My puppy is called Rex.", "The train leaves at nine."]
    )
    assert float(query @ near) > float(query @ far) + 0.2


def test_room_for_rows_is_made_once() -> None:
    """A growing table holds old and new rows at a time, and rows that are not used yet take memory."""
    index = VectorIndex(DIM)
    index.reserve(1000)
    for start in range(0, 1000, 100):
        vectors = np.eye(DIM, dtype=np.float32)[np.arange(100) % DIM]
        index.add(range(start, start + 100), [1] * 100, vectors)
    assert index._table is not None
    assert len(index._table.ids) == 1000
    index.add([1000], [1], np.eye(DIM, dtype=np.float32)[:1])
    assert len(index._table.ids) == 2000
    assert len(index) == 1001
