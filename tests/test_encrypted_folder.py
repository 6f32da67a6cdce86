"""An encrypted data folder: no file of it can be read without its key, and all works with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes import ANA, WordEmbedder, add, open_catalog
from inferscale.catalog import CATALOG_FILE, Catalog
from inferscale.cli.app import main
from inferscale.config import KV_FOLDER, ConnectorConfig, MemoryConfig
from inferscale.doctor import _data_folder
from inferscale.encryption import KEY_VARIABLE, EncryptionKey
from inferscale.errors import CatalogError, InvalidConfig, WrongKey
from inferscale.facts import Scope, Turn
from inferscale.memory import Memory
from inferscale.memory_llm import MemoryLLM
from inferscale.operations.audit import audit
from inferscale.operations.backup import backup, restore
from inferscale.operations.reembed import reembed
from inferscale.pool.disk import DiskStore
from inferscale.pool.sealing import Sealing
from inferscale.server_config import ServerConfig
from test_prompt import CHATML, tokenizer_with

SECRET = b"s" * 32
KEY = EncryptionKey(SECRET)
WORDS = [f"{word}-secret" for word in ("penguin", "earlier", "speaker", "user", "metadata", "block")]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(SECRET.hex())
    return path


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def opened(folder: Path, key_file: Path | None) -> Memory:
    return Memory(MemoryConfig(folder, encryption_key_file=key_file), embedder=WordEmbedder())


def fill(memory: Memory) -> str:
    """A fact with a history, a fact that is not true any more, and a block; the first one's id."""
    scope = {"user_id": WORDS[3]}
    [fact] = memory.add(f"an {WORDS[1]} text", **scope, speaker=WORDS[2], metadata={"m": WORDS[4]})
    memory.update(fact.id, text=f"a {WORDS[0]} text")
    [former] = memory.add(f"another {WORDS[1]}", **scope)
    memory.catalog.retire(former.id, fact.id, WORDS[0])
    memory.set_block("persona", f"a {WORDS[5]}", **scope)
    return fact.id


def files_with(folder: Path, *pieces: bytes) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(piece in path.read_bytes() for piece in pieces)
    }


def test_no_file_holds_a_text_an_id_or_a_vector(tmp_path: Path, key_file: Path) -> None:
    vector = WordEmbedder().embed([f"speaker-secret: a {WORDS[0]} text"]).tobytes()
    pieces = [word.encode() for word in WORDS]
    for name, key in (("plain", None), ("sealed", key_file)):
        with opened(tmp_path / name, key) as memory:
            fact_id = fill(memory)
            memory.search("penguin", user_id=WORDS[3])
            while_open = files_with(tmp_path / name, *pieces, vector, fact_id.encode())
            assert (tmp_path / name / f"{CATALOG_FILE}-wal").stat().st_size
        closed = files_with(tmp_path / name, *pieces, vector, fact_id.encode(), b"SQLite format")
        assert bool(while_open) == bool(closed) == (key is None)


def test_what_was_stored_is_found_again(tmp_path: Path, key_file: Path) -> None:
    with opened(tmp_path / "data", key_file) as memory:
        fact_id = fill(memory)
        memory.add([f"fact {number}" for number in range(50)], user_id="ana", metadata={"tags": ["Käse", 3]})
    with opened(tmp_path / "data", key_file) as memory:
        assert memory.search("penguin", user_id=WORDS[3])[0].fact.id == fact_id
        assert f"an {WORDS[1]} text" in [event.text for event in memory.history(fact_id)]
        found = memory.search("fact 7", user_id="ana", filters={"tags": {"contains": "Käse"}}, top_k=1)
        assert found[0].fact.text == "fact 7"
        memory.delete_all(user_id=WORDS[3])
        assert memory.count(user_id="ana") == 50
        with pytest.raises(CatalogError, match="not an SQLite database"):
            opened(tmp_path / "data", None).count(user_id="ana")


def message(folder: Path, key: EncryptionKey | None) -> str:
    with closing(Catalog(folder, key=key)) as catalog, pytest.raises(WrongKey) as refused:
        catalog.count(Scope())
    return str(refused.value)


def test_a_wrong_key_a_missing_one_and_one_too_many_are_told_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    open_catalog(tmp_path / "plain").close()
    with closing(Catalog(tmp_path / "sealed", key=KEY)) as catalog:
        catalog.record_embedder("fake", 4)
    before = [(tmp_path / name / CATALOG_FILE).read_bytes() for name in ("plain", "sealed")]
    assert "is encrypted, or not an SQLite database" in message(tmp_path / "sealed", None)
    assert "cannot be read with this encryption key" in message(tmp_path / "sealed", EncryptionKey(b"o" * 32))
    assert "is not encrypted, and an encryption key is given" in message(tmp_path / "plain", KEY)
    assert [(tmp_path / name / CATALOG_FILE).read_bytes() for name in ("plain", "sealed")] == before
    assert capfd.readouterr() == ("", "")  # SQLCipher would write a log of its own


def test_a_damaged_page_is_an_error_and_no_answer(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path, key=KEY)) as catalog:
        catalog.record_embedder("fake", 4)
        add(catalog, ANA, *("text " * 100 for _ in range(50)))
    path = tmp_path / CATALOG_FILE
    content = bytearray(path.read_bytes())
    for place in range(4096 + 100, len(content), 4096):
        content[place] ^= 1
    path.write_bytes(content)
    with closing(Catalog(tmp_path, key=KEY)) as catalog, pytest.raises(CatalogError):
        catalog.facts(ANA)


def test_threads_and_processes_share_an_encrypted_folder(tmp_path: Path, key_file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from inferscale.catalog import Catalog\n"
        "from inferscale.encryption import find_key; from fakes import ANA, add\n"
        "catalog = Catalog(Path(sys.argv[1]), key=find_key(sys.argv[2]))\n"
        "catalog.record_embedder('fake', 4)\n"
        "for number in range(20): add(catalog, ANA, f'other {number}')\n"
    )
    with closing(Catalog(tmp_path / "data", key=KEY)) as catalog:
        catalog.record_embedder("fake", 4)
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "data"), str(key_file)], cwd=Path(__file__).parent
        )
        threads = [threading.Thread(target=lambda: add(catalog, ANA, *"abcde")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert other.wait() == 0
        assert catalog.count(ANA) == 40


KILLED = """
import sys
from pathlib import Path
from fakes import ANA, add
from inferscale.catalog import Catalog
from inferscale.encryption import find_key
catalog = Catalog(Path(sys.argv[1]), key=find_key(sys.argv[2]))
catalog.record_embedder("fake", 4)
for number in range(10**6):
    add(catalog, ANA, f"penguin {number}", f"second {number}")
    print(number, flush=True)
"""


def test_killed_while_adding_leaves_whole_transactions(tmp_path: Path, key_file: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "data"), str(key_file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert writer.stdout is not None
    for _ in range(30):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    last = 29 + len(writer.stdout.read().split())
    writer.wait()
    writer.stdout.close()
    assert not files_with(tmp_path / "data", b"penguin")
    with closing(Catalog(tmp_path / "data", key=KEY)) as catalog:
        texts = [fact.text for fact in catalog.facts(ANA)]
    assert len(texts) in (2 * (last + 1), 2 * (last + 2))
    assert texts[-1] == f"second {len(texts) // 2 - 1}"


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_a_backup_is_encrypted_and_comes_back(tmp_path: Path, name: str) -> None:
    with closing(Catalog(tmp_path / "data", key=KEY)) as catalog:
        catalog.record_embedder("fake", 4)
        facts = add(catalog, ANA, "a penguin", "another")
        assert backup(tmp_path / "data", tmp_path / "out" / name, KEY).num_facts == 2
    with pytest.raises(WrongKey):
        backup(tmp_path / "data", tmp_path / "out" / "none")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert not files_with(tmp_path / "out", b"penguin", b"SQLite format", facts[0].id.encode())
    source, new = tmp_path / "out" / name, tmp_path / "new"
    with pytest.raises(WrongKey, match=r"is encrypted\. Give its encryption key"):
        restore(source, new)
    with pytest.raises(WrongKey, match="cannot be read with this encryption key"):
        restore(source, new, EncryptionKey(b"o" * 32))
    assert list(new.iterdir()) == []
    assert restore(source, new, KEY).num_facts == 2
    with closing(Catalog(new, key=KEY)) as again:
        assert again.facts(ANA) == facts


def test_a_plain_backup_is_not_restored_with_a_key(tmp_path: Path) -> None:
    open_catalog(tmp_path / "data").close()
    backup(tmp_path / "data", tmp_path / "copy")
    with pytest.raises(WrongKey, match="is not encrypted, and an encryption key is given"):
        restore(tmp_path / "copy", tmp_path / "new", KEY)


def test_an_audit_reads_what_is_encrypted(tmp_path: Path, key_file: Path) -> None:
    folder = tmp_path / "data"
    with opened(folder, key_file) as memory:
        facts = memory.add(["a penguin", "a walrus"], user_id="ana")
        memory.catalog.passes.record("m", ANA, [], [facts[0].id], ["ab" * 16])
    store = DiskStore(folder / KV_FOLDER, "format", 0, 4, Sealing(KEY))
    store.open()
    store.write("ab" * 16, memoryview(bytes(8)), 0)
    found = {finding.what: finding for finding in audit(folder, ANA, ["a penguin"], key=KEY).findings}
    assert found["segments of the scope's facts"].num_found == 1
    assert found["free pages"].num_found is None
    with pytest.raises(WrongKey):
        audit(folder, ANA)


def test_an_encrypted_folder_gets_another_embedder(tmp_path: Path, key_file: Path) -> None:
    with opened(tmp_path / "data", key_file) as memory:
        memory.add(["a penguin", "a walrus"], user_id="ana")
    other = WordEmbedder(16, "other")
    assert reembed(tmp_path / "data", other, key=KEY).num_embedded == 2
    config = MemoryConfig(tmp_path / "data", encryption_key_file=key_file)
    with Memory(config, embedder=other) as memory:
        assert memory.search("walrus", user_id="ana", top_k=1)[0].fact.text == "a walrus"


def test_the_variable_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET.hex())
    with opened(tmp_path / "data", None) as memory:
        memory.add("a penguin", user_id="ana")
    assert not files_with(tmp_path, b"penguin")
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "data"))
    assert (_data_folder().ok, "facts: 1" in _data_folder().detail) == (True, True)
    monkeypatch.setenv(KEY_VARIABLE, "no key")
    assert "holds no encryption key" in _data_folder().detail


def test_commands_take_the_key(tmp_path: Path, key_file: Path) -> None:
    with opened(tmp_path / "data", key_file) as memory:
        fill(memory)
    arguments = ["backup", str(tmp_path / "copy"), "--data-dir", str(tmp_path / "data")]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1
    assert "Give its encryption key" in refused.stderr
    done = CliRunner().invoke(main, [*arguments, "--encryption-key-file", str(key_file)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("given", [None, "/another"])
def test_the_engine_gets_the_key_file_of_the_memory(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    class Started(Exception):
        pass

    def start(model: str, connector: ConnectorConfig, _: object) -> None:
        assert connector.encryption_key_file == (given or str(key_file))
        raise Started

    monkeypatch.setattr("inferscale.memory_llm.OfflineEngine", start)
    monkeypatch.setattr("inferscale.memory_llm._tokenizer", lambda *_: tokenizer_with(CHATML))
    config = MemoryConfig(tmp_path / "data", encryption_key_file=key_file)
    with pytest.raises(Started):
        MemoryLLM("model", config, connector=ConnectorConfig(encryption_key_file=given))


def test_a_wrong_sort_of_setting_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="encryption_key_file is 1"):
        ConnectorConfig(encryption_key_file=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="encryption_key_file is ''"):
        ServerConfig(encryption_key_file="")
    assert ServerConfig(encryption_key_file="/k").memory.encryption_key_file == "/k"


def test_without_sqlcipher_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.catalog.drivers._sqlcipher", None)
    missing = r"SQLCipher is not installed.*inferscale\[encryption\]"
    with closing(Catalog(tmp_path, key=KEY)) as catalog, pytest.raises(InvalidConfig, match=missing):
        catalog.count(ANA)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.record_embedder("fake", 4)
        catalog.add_facts(ANA, [Turn("a")], WordEmbedder(4).embed(["a"]))


def test_without_cryptography_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(InvalidConfig, match=r"cryptography is not installed.*inferscale\[encryption\]"):
        Sealing(KEY)
