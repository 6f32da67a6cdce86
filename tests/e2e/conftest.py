"""Fixtures of the end-to-end tests. Engines and references are shared by the whole session."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness.checkpoints import make_checkpoint
from harness.engine import EngineCache
from harness.mixes import Author
from harness.reference import Reference


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model by name: a family of `checkpoints`, or "smollm2"."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(name: str) -> Path:
        return _demo_model() if name == "smollm2" else make_checkpoint(name, folder)

    return find


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one model one after the other, so that its engine starts once. Wide ones are asked for."""
    if "wide" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("wide") is not None:
                item.add_marker(pytest.mark.skip(reason="run with `pytest -m wide`"))
    ours = [index for index, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ordered = sorted((items[index] for index in ours), key=_model_of)
    for index, item in zip(ours, ordered, strict=True):
        items[index] = item


def _model_of(item: pytest.Item) -> str:
    parameters = getattr(item, "callspec", None)
    return "" if parameters is None else str(parameters.params.get("model", ""))


def _words(path: Path) -> list[tuple[int, ...]]:
    """Token ids of common words: a trained model is far from itself on random ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    words = (
        "the a of and to in that it was her his they said about after because before garden river train "
        "letter doctor sister kitchen winter school market music window money village summer mountain . , ."
    )
    return [tuple(tokenizer.encode(word if word in ".," else " " + word)) for word in words.split()]


def _demo_model() -> Path:
    from inferscale.errors import EngineMissing
    from inferscale.models import ensure_demo_model

    try:
        return ensure_demo_model()
    except EngineMissing as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    """`engine(checkpoint, **options)` gives a running engine with these options (`EngineOptions`)."""
    engines = EngineCache(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Reference]]:
    """`reference(name)` gives the Hugging Face model of `checkpoint(name)`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other are slow where other processes run
    known: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in known:
            known[name] = Reference(checkpoint(name))
        return known[name]

    yield find
    torch.set_num_threads(num_threads)


@pytest.fixture
def author(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    engine: EngineCache,
    reference: Callable[[str], Reference],
) -> Callable[..., Author]:
    """`author(name, **options)` gives an author for an engine of that model, with an empty pool.

    Its texts are the same in every run and differ from test to test.
    """
    seed = zlib.crc32(request.node.name.encode())

    def make(name: str, **options: object) -> Author:
        running = engine(checkpoint(name), **options)
        running.forget_everything()
        return Author(running, reference(name), seed, _words(checkpoint(name)) if name == "smollm2" else None)

    return make
