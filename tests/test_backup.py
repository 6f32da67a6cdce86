"""Backups are of one moment, whole or not there, private, and come back as they were."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes import ANA, add, open_catalog, open_memory
from inferscale.catalog import CATALOG_FILE, Catalog, VectorMark
from inferscale.cli.app import main
from inferscale.errors import CatalogError, InvalidInput, NewerCatalog
from inferscale.operations import backup as module
from inferscale.operations.backup import MANIFEST, backup, restore

SHAPES = ["copy", "copy.tar"]


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(tmp_path / "data")
    yield opened
    opened.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", SHAPES)
def test_a_backup_comes_back_as_it_was(catalog: Catalog, tmp_path: Path, name: str) -> None:
    facts = add(catalog, ANA, "one", "two", "Käse 🧀")
    catalog.passes.record("m", ANA, [facts[0].id], [facts[1].id], ["key"])
    catalog.retire(facts[2].id, facts[0].id, "why")
    copied = backup(tmp_path / "data", tmp_path / "b" / name)
    add(catalog, ANA, "stored after the backup")
    assert (copied.path, copied.num_facts) == (tmp_path / "b" / name, 2)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [name]
    restored = restore(tmp_path / "b" / name, tmp_path / "new" / "data")
    assert restored.num_facts == 2
    again = Catalog(tmp_path / "new" / "data")
    assert again.facts(ANA) == facts[:2]
    assert again.history(facts[2].id) == catalog.history(facts[2].id)
    assert again.passes.encodings("m", [facts[1].id]) == catalog.passes.encodings("m", [facts[1].id])
    assert again.epoch(ANA) == catalog.epoch(ANA)
    assert again.feed.vector_changes(VectorMark()).vectors.shape == (2, 4)
    again.close()
    assert [path.name for path in (tmp_path / "new" / "data").iterdir()] == [CATALOG_FILE]


def test_all_of_it_is_for_its_owner_only(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, "one")
    for name in SHAPES:
        backup(tmp_path / "data", tmp_path / name)
    assert mode(tmp_path / "copy") == 0o700
    assert {mode(path) for path in (tmp_path / "copy").iterdir()} == {0o600}
    assert mode(tmp_path / "copy.tar") == 0o600
    (tmp_path / "new").mkdir(mode=0o755)
    restore(tmp_path / "copy.tar", tmp_path / "new")
    assert (mode(tmp_path / "new"), mode(tmp_path / "new" / CATALOG_FILE)) == (0o700, 0o600)


def test_a_backup_while_others_write_is_of_one_moment(catalog: Catalog, tmp_path: Path) -> None:
    """Facts are stored in twos: no backup has half of one."""
    add(catalog, ANA, "first", "second")
    stopped = threading.Event()

    def write() -> None:
        while not stopped.is_set():
            add(catalog, ANA, *("x" * 3000, "y" * 3000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        counts = [backup(tmp_path / "data", tmp_path / f"{i}.tar").num_facts for i in range(5)]
    finally:
        stopped.set()
        writer.join()
    assert all(count % 2 == 0 for count in counts)
    assert counts == sorted(counts)
    restore(tmp_path / "4.tar", tmp_path / "new")
    again = Catalog(tmp_path / "new")
    assert again.count(ANA) == counts[4]
    again.close()


_KILLED = """
import os, signal, sys
from pathlib import Path
from inferscale.operations import backup
backup.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # when all of it was written
backup.backup(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("name", SHAPES)
def test_a_backup_that_is_killed_leaves_no_target(catalog: Catalog, tmp_path: Path, name: str) -> None:
    add(catalog, ANA, "one")
    target = tmp_path / "b" / name
    arguments = [sys.executable, "-c", _KILLED, str(tmp_path / "data"), str(target)]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    [left] = target.parent.iterdir()
    assert left.name.startswith(f".{name}.")
    assert mode(left) == 0o700
    assert backup(tmp_path / "data", target).num_facts == 1


def test_a_full_disk_leaves_nothing(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, ANA, "one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_private", full)
    with pytest.raises(CatalogError, match=r"No space left on device\. Free some space"):
        backup(tmp_path / "data", tmp_path / "b" / "copy")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_replaced(catalog: Catalog, tmp_path: Path, name: str) -> None:
    add(catalog, ANA, "one")
    backup(tmp_path / "data", tmp_path / name)
    with pytest.raises(InvalidInput, match="exists; give a name that does not"):
        backup(tmp_path / "data", tmp_path / name)
    with pytest.raises(InvalidInput, match="is not empty; restore into a new data folder"):
        restore(tmp_path / name, tmp_path / "data")


def test_what_is_no_backup_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, "one")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "text", tmp_path / "empty", tmp_path / "data"):
        with pytest.raises(InvalidInput, match="is no backup"):
            restore(source, tmp_path / "new")
    with pytest.raises(InvalidInput, match="does not exist"):
        restore(tmp_path / "none", tmp_path / "new")
    with pytest.raises(InvalidInput, match="holds no memory"):
        backup(tmp_path / "empty", tmp_path / "copy")
    with pytest.raises(InvalidInput, match=r"ends in \.tar"):
        backup(tmp_path / "data", tmp_path / "copy.tar.gz")
    assert not any((tmp_path / "new").iterdir())


def test_damage_is_seen_before_anything_is_there(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, *("a text" * 500 for _ in range(50)))
    backup(tmp_path / "data", tmp_path / "copy")
    content = bytearray((tmp_path / "copy" / CATALOG_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "copy" / CATALOG_FILE).write_bytes(content)
    with pytest.raises(CatalogError, match="checksum"):
        restore(tmp_path / "copy", tmp_path / "new")
    assert not any((tmp_path / "new").iterdir())


def reseal(folder: Path) -> None:
    about = json.loads((folder / MANIFEST).read_text())
    about["sha256"] = module._sha256(folder / CATALOG_FILE)
    (folder / MANIFEST).write_text(json.dumps(about))


def test_a_backup_of_a_newer_version_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, "one")
    backup(tmp_path / "data", tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / CATALOG_FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    reseal(tmp_path / "copy")
    with pytest.raises(NewerCatalog):
        restore(tmp_path / "copy", tmp_path / "new")


def test_only_the_two_files_of_a_tar_are_read(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, "one")
    backup(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "evil").write_text("evil")
    with tarfile.open(tmp_path / "copy.tar", "w") as tar:
        tar.add(tmp_path / "evil", "../outside")
        for name in (CATALOG_FILE, MANIFEST):
            tar.add(tmp_path / "copy" / name, name)
    restore(tmp_path / "copy.tar", tmp_path / "new" / "data")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data"]


def test_on_the_command_line(tmp_path: Path) -> None:
    with open_memory(tmp_path / "data") as memory:
        memory.add("my dog is called rex", user_id="ana")
        done = CliRunner().invoke(
            main, ["backup", str(tmp_path / "copy.tar"), "--data-dir", str(tmp_path / "data"), "--json"]
        )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_facts"] == 1
    shutil.rmtree(tmp_path / "data")
    done = CliRunner().invoke(
        main, ["restore", str(tmp_path / "copy.tar"), "--data-dir", str(tmp_path / "data")]
    )
    assert done.exit_code == 0, done.output
    with open_memory(tmp_path / "data") as memory:
        assert [fact.text for fact in memory.get_all(user_id="ana")] == ["my dog is called rex"]


def test_a_backup_with_pages_that_do_not_fit_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """The checksum is right: the catalog was damaged before it was copied."""
    add(catalog, ANA, *("a text" * 500 for _ in range(50)))
    backup(tmp_path / "data", tmp_path / "copy")
    connection = sqlite3.connect(tmp_path / "copy" / CATALOG_FILE)
    connection.execute("DELETE FROM facts WHERE seq = 7")  # without foreign keys: its vector stays
    connection.commit()
    connection.close()
    reseal(tmp_path / "copy")
    with pytest.raises(CatalogError, match="a row of vectors belongs to nothing"):
        restore(tmp_path / "copy", tmp_path / "new")
