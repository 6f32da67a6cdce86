"""The reranker puts what was found into its order; a tiny cross-encoder with made-up weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from fakes import WordEmbedder, open_memory
from inferscale.config import MemoryConfig, RetrievalConfig
from inferscale.errors import EngineMissing
from inferscale.memory import Memory
from inferscale.retrieval.reranker import CrossEncoder

WORDS = ["[PAD]", "[UNK]", "tea", "is", "hot", "green", "who", "likes"]


class Longest:
    """The longer a text, the better."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        self.asked.append(len(texts))
        return [float(len(text)) for text in texts]


def test_the_best_found_are_read_again(tmp_path: Path) -> None:
    reranker = Longest()
    config = MemoryConfig(tmp_path, retrieval=RetrievalConfig(reranked=3))
    with Memory(config, embedder=WordEmbedder(), reranker=reranker) as memory:
        memory.add(["tea", "tea is hot", "tea is green and good", "the car " + 50 * "x"], user_id="ana")
        found = memory.search("tea is hot", user_id="ana", top_k=2)
        assert [hit.fact.text for hit in found] == ["tea is green and good", "tea is hot"]
        assert max(hit.score for hit in memory.search("tea is hot", user_id="ana")) == pytest.approx(1)
        assert reranker.asked == [3, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cross")
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        made
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=1, max_position_embeddings=512,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(made)
    return made


def test_scores_do_not_depend_on_the_batch(folder: Path) -> None:
    encoder = CrossEncoder(folder)
    texts = ["tea is hot", "green tea", "hot " * 900, *["tea"] * 40]
    together = encoder.scores("who likes tea", texts)
    alone: list[Any] = [encoder.scores("who likes tea", [text])[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(set(together[:3])) == 3
    assert encoder.scores("x", []) == []


def test_one_is_loaded_by_name(folder: Path, tmp_path: Path) -> None:
    config = MemoryConfig(tmp_path, reranker=folder)
    with Memory(config, embedder=WordEmbedder()) as memory:
        memory.add(["tea is hot", "green tea"], user_id="ana")
        texts = [hit.fact.text for hit in memory.search("who likes tea", user_id="ana")]
        scores = CrossEncoder(folder).scores("who likes tea", texts)
        assert scores == sorted(scores, reverse=True)


def test_without_a_model_the_first_search_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with open_memory(tmp_path, reranker=CrossEncoder(tmp_path / "empty")) as memory:
        memory.add("tea is hot", user_id="ana")
        with pytest.raises(EngineMissing, match="reranker"):
            memory.search("tea", user_id="ana")
