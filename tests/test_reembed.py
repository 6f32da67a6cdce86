"""Another embedder: old and new vectors are never mixed, whatever happens meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from fakes import (
    ANA,
    DIM,
    WordEmbedder,
    add,
    catalog_variable,
    database_of,
    open_catalog,
    open_memory,
    rows_of,
)
from inferscale.catalog import Catalog
from inferscale.catalog.next_vectors import NextVectors
from inferscale.catalog.rows import EmbedderIdentity
from inferscale.cli.app import main
from inferscale.errors import CatalogError, EmbedderMismatch, InvalidInput
from inferscale.operations.reembed import reembed

pytestmark = pytest.mark.usefixtures("both_databases")

TEXTS = [f"the {animal} is called {animal[::-1]}" for animal in ("dog", "cat", "cow", "hen", "fox", "owl")]


class Turned(WordEmbedder):
    """Of the same size as the old one, and comparable with nothing of it."""

    def __init__(self, name: str = "turned", before: Callable[[], object] | None = None) -> None:
        super().__init__(name=name)
        self._before = before

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self._before is not None:
            self._before()
        return -super().embed(texts)[:, ::-1].copy()


def tables(folder: Path) -> dict[str, int]:
    return {name: len(rows) for name, rows in rows_of(folder).items() if name.startswith("vectors")}


def test_a_folder_changes_its_embedder(tmp_path: Path) -> None:
    with open_memory(tmp_path) as memory:
        memory.add(TEXTS, user_id="ana", speaker="Ana", said_at="8 May 2023")
        before = [hit.fact.text for hit in memory.search("the cow", user_id="ana", top_k=1)]
    with (
        open_memory(tmp_path, embedder=Turned()) as memory,
        pytest.raises(EmbedderMismatch, match=r"inferscale reembed --(data-dir|catalog) "),
    ):
        memory.search("the cow", user_id="ana")
    seen = []
    done = reembed(tmp_path, Turned(), seen.append, batch_facts=4)
    assert (done.num_embedded, done.num_facts, done.is_new) == (6, 6, True)
    assert [tuple(progress) for progress in seen] == [(0, 6), (4, 6), (6, 6)]
    with open_memory(tmp_path, embedder=Turned()) as memory:
        [hit] = memory.search("Ana (8 May 2023): the cow is called woc", user_id="ana", top_k=1)
        assert [hit.fact.text] == before
        assert hit.score == pytest.approx(1)
        memory.add("the ant is called tna", user_id="ana")
        assert len(memory.search("ant", user_id="ana")) == 7
    assert tables(tmp_path) == {"vectors": 7, "vectors_next": 0}
    again = reembed(tmp_path, Turned())
    assert (again.num_embedded, again.is_new) == (0, False)


def test_servers_go_on_until_the_switch_and_are_refused_then(tmp_path: Path) -> None:
    """The new embedder has as many dimensions: nothing but its name tells the vectors apart."""
    with open_memory(tmp_path) as old:
        facts = old.add(TEXTS, user_id="ana")
        calls = []

        def meanwhile() -> None:
            calls.append(old.search("the fox", user_id="ana", top_k=1)[0].fact.text)
            if len(calls) == 1:
                old.add("the bee is called eeb", user_id="ana")
                old.update(facts[0].id, text="the dog was renamed to max")
                old.update(facts[1].id, metadata={"seen": True})
                old.delete(facts[2].id)
            if len(calls) == 3:  # after the first batch: its vector is there already
                old.update(facts[3].id, text="the hen was renamed to gil")

        done = reembed(tmp_path, Turned(before=meanwhile), batch_facts=2)
        assert set(calls) == {TEXTS[4]}
        assert done.num_facts == 6
        for refused in (
            lambda: old.search("the fox", user_id="ana"),
            lambda: old.add("one more", user_id="ana"),
            lambda: old.update(facts[5].id, text="other words"),
        ):
            with pytest.raises(EmbedderMismatch, match=r"'turned' with 32 .* not of 'words'"):
                refused()
        old.update(facts[5].id, metadata={"no": "vector"})
        old.delete(facts[5].id)  # done, although the index can follow no more
    with open_memory(tmp_path, embedder=Turned()) as new:
        for fact in new.get_all(user_id="ana"):
            [hit] = new.search(fact.text, user_id="ana", top_k=1)
            assert (hit.fact, hit.score) == (fact, pytest.approx(1, abs=1e-5))
        assert len(new.get_all(user_id="ana")) == 5


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_reembed import Turned
from inferscale.operations.reembed import reembed
left = [2]
def die():
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
reembed(Path(sys.argv[1]), Turned(before=die), batch_facts=2, url=os.environ.get("INFERSCALE_CATALOG"))
"""


def test_killed_it_goes_on_where_it_was(tmp_path: Path) -> None:
    with open_memory(tmp_path) as memory:
        memory.add(TEXTS, user_id="ana")
    arguments = [sys.executable, "-c", _KILLED, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, **catalog_variable(tmp_path)}
    assert subprocess.run(arguments, check=False, env=environment).returncode == -9
    assert tables(tmp_path) == {"vectors": 6, "vectors_next": 4}
    with open_memory(tmp_path) as memory:
        assert memory.search(TEXTS[0], user_id="ana")[0].score == pytest.approx(1)
    embedder = Turned()
    done = reembed(tmp_path, embedder)
    assert (done.num_embedded, embedder.num_texts) == (2, 2)
    with open_memory(tmp_path, embedder=Turned()) as memory:
        assert memory.search(TEXTS[0], user_id="ana")[0].score == pytest.approx(1)


def test_killed_after_the_switch_the_old_vectors_go_with_the_next_call(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    add(catalog, ANA, "one", "two")
    catalog.close()
    vectors = NextVectors(database_of(tmp_path), EmbedderIdentity("other", DIM))
    assert vectors.begin()
    vectors.store(vectors.missing(0, 10), np.ones((2, DIM), dtype=np.float32))
    assert vectors.switch()
    vectors.close()
    assert tables(tmp_path) == {"vectors": 2, "vectors_old": 2, "vectors_next": 0}
    other = Catalog(tmp_path)
    other.delete_all(ANA)  # a deletion reaches old vectors, too
    other.close()
    assert tables(tmp_path) == {"vectors": 0, "vectors_old": 0, "vectors_next": 0}
    assert not reembed(tmp_path, WordEmbedder(DIM, "other")).is_new
    assert tables(tmp_path) == {"vectors": 0, "vectors_next": 0}


def test_no_switch_while_a_fact_has_no_vector(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    add(catalog, ANA, "one")
    vectors = NextVectors(database_of(tmp_path), EmbedderIdentity("other", 8))
    assert vectors.begin()
    [fact] = vectors.missing(0, 10)
    add(catalog, ANA, "two")
    vectors.store([fact], np.ones((1, 8), dtype=np.float32))
    assert not vectors.switch()
    assert catalog.facts(ANA)[0].text == "one"
    catalog.record_embedder("fake", DIM)
    with pytest.raises(InvalidInput, match=r"\(1, 8\) is needed"):
        vectors.store([fact], np.ones((1, DIM), dtype=np.float32))
    vectors.close()
    catalog.close()


def test_another_one_begun_meanwhile_ends_the_first(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    add(catalog, ANA, "one")
    catalog.close()
    first = NextVectors(database_of(tmp_path), EmbedderIdentity("first", DIM))
    second = NextVectors(database_of(tmp_path), EmbedderIdentity("second", DIM))
    assert first.begin()
    facts = first.missing(0, 10)
    first.store(facts, np.ones((1, DIM), dtype=np.float32))
    assert second.begin()
    assert second.progress() == (0, 1)
    for step in (lambda: first.store(facts, np.ones((1, DIM), dtype=np.float32)), first.switch):
        with pytest.raises(CatalogError, match="one for 'second' was begun meanwhile"):
            step()
    first.close()
    second.close()


@pytest.mark.sqlite_only
def test_a_folder_without_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no memory"):
        reembed(tmp_path, Turned())


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_memory(tmp_path) as memory:
        memory.add(TEXTS, user_id="ana")
    monkeypatch.setattr("inferscale.retrieval.open_embedder", lambda *_: Turned())
    done = CliRunner().invoke(main, ["reembed", "--embedder", "turned", "--data-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "6 of 6" in done.stderr
    assert done.stdout == "6 facts have vectors of turned.\n"


def test_core_blocks_have_no_vectors_and_stay(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    add(catalog, ANA, "one")
    catalog.set_block(ANA, "persona", "You are a pirate.")
    catalog.close()
    done = reembed(tmp_path, WordEmbedder(DIM, "other"))
    assert (done.num_embedded, done.num_facts) == (1, 1)
    again = Catalog(tmp_path)
    assert [block.text for block in again.blocks(ANA).blocks] == ["You are a pirate."]
    again.close()
