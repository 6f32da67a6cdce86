"""A data folder gets a key, another one, or none: whole, alone, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fakes import ANA, add, open_catalog
from inferscale.catalog import CATALOG_FILE, Catalog
from inferscale.cli.app import main
from inferscale.config import KV_FOLDER
from inferscale.encryption import KEY_VARIABLE, EncryptionKey
from inferscale.errors import CatalogError, InvalidInput, WrongKey
from inferscale.facts import Fact, Turn
from inferscale.operations.rekey import rekey
from inferscale.pool.disk import DiskStore
from inferscale.runtime.folder_lock import FolderLock

FIRST, SECOND = EncryptionKey(b"1" * 32), EncryptionKey(b"2" * 32)
TEXT = "penguin-secret"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def facts(tmp_path: Path) -> list[Fact]:
    """Of a folder `data` that is not encrypted, with what other tables may hold."""
    with closing(open_catalog(tmp_path / "data")) as catalog:
        stored = add(catalog, ANA, TEXT, "two", "three", "four")
        catalog.passes.record("m", ANA, [stored[0].id], [stored[1].id], ["key"])
        catalog.update(stored[1], Turn("two again"), np.ones(4, dtype=np.float32))
        catalog.delete(stored[3].id)
        catalog.retire(stored[2].id, stored[0].id, "why")
        return catalog.facts(ANA)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def content(folder: Path, key: EncryptionKey | None) -> tuple[list[Fact], list[object]]:
    """Facts, and all rows of all tables."""
    with closing(Catalog(folder, key=key)) as catalog:
        facts = catalog.facts(ANA)
        with catalog._database.read() as connection:
            schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
            rows = [
                connection.execute(f'SELECT * FROM "{name}"').fetchall()
                for kind, name, _ in schema
                if kind == "table"
            ]
            numbers = [
                connection.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id")
            ]
    return facts, [schema, rows, numbers]


def test_a_folder_gets_a_key_another_and_none(tmp_path: Path, facts: list[Fact]) -> None:
    folder = tmp_path / "data"
    before = content(folder, None)
    key: EncryptionKey | None = None
    for new_key in (FIRST, SECOND, None):
        assert rekey(folder, key, new_key) == (folder, 2, new_key is not None)
        assert names(folder) == [CATALOG_FILE]
        assert (TEXT.encode() in (folder / CATALOG_FILE).read_bytes()) == (new_key is None)
        assert (folder / CATALOG_FILE).stat().st_mode & 0o777 == 0o600
        assert content(folder, new_key) == before
        with (
            closing(Catalog(folder, key=FIRST if new_key is None else None)) as catalog,
            pytest.raises(WrongKey),
        ):
            catalog.count(ANA)
        key = new_key
    with closing(open_catalog(folder)) as catalog:  # numbers of facts that are gone are not given again
        assert add(catalog, ANA, "five")[0].seq == 5


def test_the_old_file_holds_nothing_any_more(tmp_path: Path, facts: list[Fact]) -> None:
    os.link(tmp_path / "data" / CATALOG_FILE, tmp_path / "same file")
    rekey(tmp_path / "data", None, FIRST)
    assert set((tmp_path / "same file").read_bytes()) == {0}


def test_who_waited_for_the_old_file_finds_no_catalog(tmp_path: Path, facts: list[Fact]) -> None:
    os.link(tmp_path / "data" / CATALOG_FILE, tmp_path / "same file")
    rekey(tmp_path / "data", None, FIRST)
    with closing(sqlite3.connect(tmp_path / "same file")) as late, pytest.raises(sqlite3.DatabaseError):
        late.execute("CREATE TABLE t (x)")


def test_kv_on_disk_goes_with_the_old_key(tmp_path: Path, facts: list[Fact]) -> None:
    store = DiskStore(tmp_path / "data" / KV_FOLDER, "format", 0, 4)
    store.open()
    store.write("ab" * 16, memoryview(bytes(8)), 0)
    lock = FolderLock(store.folder.parent)
    with pytest.raises(CatalogError, match="an engine uses the KV"):
        rekey(tmp_path / "data", None, FIRST)
    assert store.read("ab" * 16, 2) is not None
    assert content(tmp_path / "data", None)[0] == facts
    lock.release()
    rekey(tmp_path / "data", None, FIRST)
    assert names(tmp_path / "data") == [CATALOG_FILE]


USER = """
import sys
from pathlib import Path
from inferscale.catalog import Catalog
from inferscale.facts import Scope
catalog = Catalog(Path(sys.argv[1]))
print(catalog.count(Scope()), flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused(tmp_path: Path, facts: list[Fact]) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdin is not None
    assert user.stdout is not None
    try:
        user.stdout.readline()
        with pytest.raises(CatalogError, match="is in use by another process"):
            rekey(tmp_path / "data", None, FIRST)
    finally:
        user.communicate()
    assert content(tmp_path / "data", None)[0] == facts
    rekey(tmp_path / "data", None, FIRST)


KILLED = """
import os, signal, sys
from pathlib import Path
from inferscale.catalog import rekey as module
from inferscale.encryption import EncryptionKey
from inferscale.operations.rekey import rekey
name = sys.argv[2]
owner = Path if name == "replace" else module
setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
rekey(Path(sys.argv[1]), None, EncryptionKey(b"1" * 32))
"""


@pytest.mark.parametrize(("step", "is_done"), [("_copy", 0), ("check_copy", 0), ("replace", 0), ("_zero", 1)])
def test_killed_on_the_way_it_leaves_one_whole_catalog(
    tmp_path: Path, facts: list[Fact], step: str, is_done: bool
) -> None:
    folder = tmp_path / "data"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), step], check=False)
    assert done.returncode == -signal.SIGKILL
    assert content(folder, FIRST if is_done else None)[0] == facts
    rekey(folder, FIRST if is_done else None, SECOND)
    assert names(folder) == [CATALOG_FILE]
    assert content(folder, SECOND)[0] == facts


def test_a_failure_leaves_nothing_of_the_copy(
    tmp_path: Path, facts: list[Fact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CatalogError, match="No space left on device"):
        rekey(tmp_path / "data", None, FIRST)
    assert names(tmp_path / "data") == [CATALOG_FILE]
    assert content(tmp_path / "data", None)[0] == facts


def test_what_a_killed_one_left_is_removed(tmp_path: Path, facts: list[Fact]) -> None:
    (tmp_path / "data" / f".{CATALOG_FILE}.rekey").write_bytes(b"half")
    rekey(tmp_path / "data", None, FIRST)
    assert names(tmp_path / "data") == [CATALOG_FILE]


def test_wrong_keys_change_nothing(tmp_path: Path, facts: list[Fact]) -> None:
    folder = tmp_path / "data"
    with pytest.raises(WrongKey, match="is not encrypted"):
        rekey(folder, FIRST, SECOND)
    rekey(folder, None, FIRST)
    for key, what in ((None, "is encrypted"), (SECOND, "cannot be read with this encryption key")):
        with pytest.raises(WrongKey, match=what):
            rekey(folder, key, EncryptionKey(b"3" * 32))
    with pytest.raises(InvalidInput, match="nothing to change"):
        rekey(folder, None, None)
    with pytest.raises(InvalidInput, match="holds no memory"):
        rekey(tmp_path, None, FIRST)
    assert content(folder, FIRST)[0] == facts


def test_the_command(tmp_path: Path, facts: list[Fact]) -> None:
    key_file = tmp_path / "key"
    key_file.touch(0o600)
    key_file.write_text("31" * 32)
    on = ["rekey", "--data-dir", str(tmp_path / "data")]
    for arguments in ([], ["--no-encryption", "--new-key-file", str(key_file)]):
        refused = CliRunner().invoke(main, [*on, *arguments])
        assert (refused.exit_code, "Give either --new-key-file" in refused.stderr) == (1, True)
    done = CliRunner().invoke(main, [*on, "--new-key-file", str(key_file)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "data")), done.output
    assert "2 facts, encrypted with the new key." in done.stderr
    assert content(tmp_path / "data", FIRST)[0] == facts
    given = ["--encryption-key-file", str(key_file)]
    done = CliRunner().invoke(main, [*on, *given, "--new-key-file", "-"], input="32" * 32 + "\n")
    assert done.exit_code == 0, done.output
    key_file.write_text("32" * 32)
    done = CliRunner().invoke(main, [*on, *given, "--no-encryption", "--json"])
    assert (done.exit_code, '"is_encrypted": false' in done.stdout) == (0, True), done.output
    assert content(tmp_path / "data", None)[0] == facts
