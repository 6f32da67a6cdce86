"""What is PostgreSQL's alone: migrations side by side, sessions that break, settings with a password.

That a catalog means the same in both databases is tested where catalogs are (`both_databases`).
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg
import pytest

from fakes import ANA, DIM, WordEmbedder, add, open_memory
from inferscale.catalog import Catalog, StoredFact, migrations
from inferscale.catalog.opening import open_database
from inferscale.catalog.postgres import schema
from inferscale.catalog.postgres.dialect import translated
from inferscale.catalog.sql import EXACT, NUMBERS
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.config_checks import from_mapping
from inferscale.encryption import read_key
from inferscale.errors import (
    CatalogError,
    CatalogUnreachable,
    InvalidConfig,
    NewerCatalog,
)
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.server_config import ServerConfig
from postgres_server import PostgresServer, Replicas, find_binaries, running


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


# --- tables --------------------------------------------------------------------------------------


def test_both_databases_have_the_same_versions_and_columns(url: str, tmp_path: Path) -> None:
    assert len(migrations.MIGRATIONS) == schema.VERSION
    columns = []
    for given in (None, url):
        with closing(open_database(tmp_path, url=given)) as database, database.read() as connection:
            columns.append(dict(connection.tables()))
    in_sqlite, in_postgres = columns
    assert {name: found for name, found in in_sqlite.items() if not name.startswith("sqlite_")} == in_postgres


def test_replicas_that_start_at_once_migrate_once(url: str, tmp_path: Path) -> None:
    catalogs = [Catalog(tmp_path, url=url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(Catalog.count_rows, catalogs)) == [0] * 8
    for catalog in catalogs:
        catalog.close()


def test_a_migration_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", (*whole[:-1], (*whole[-1], "CREATE TABLE oh no")))
    with closing(Catalog("nowhere", url=url)) as catalog:
        with pytest.raises(CatalogError, match="syntax error"):
            catalog.count_rows()
        monkeypatch.undo()
        assert catalog.count_rows() == 0


def test_what_is_not_ours_or_too_new_is_refused(url: str, postgres: PostgresServer) -> None:
    execute(url, "CREATE TABLE facts (n integer)")
    with (
        closing(Catalog("nowhere", url=url)) as catalog,
        pytest.raises(CatalogError, match="another program's"),
    ):
        catalog.count_rows()
    execute(url, "DROP TABLE facts")
    with closing(Catalog("nowhere", url=url)) as catalog:
        catalog.count_rows()
    execute(url, f"UPDATE catalog_state SET version = {schema.VERSION + 1}")
    with (
        closing(Catalog("nowhere", url=url)) as catalog,
        pytest.raises(NewerCatalog, match="Nothing was changed"),
    ):
        catalog.count_rows()
    nowhere = f"{postgres.url}?options=-csearch_path%3Dnowhere"
    with closing(Catalog("nowhere", url=nowhere)) as catalog, pytest.raises(CatalogError, match="no schema"):
        catalog.count_rows()


def test_a_dump_is_a_backup(url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    binaries = find_binaries()
    assert binaries is not None
    name = url.rpartition("%3D")[2]
    dump = tmp_path / "dump.sql"
    with closing(Catalog(tmp_path, url=url)) as catalog:
        catalog.record_embedder("fake", DIM)
        facts = add(catalog, ANA, "one", "two")
        catalog.passes.record("m", ANA, [facts[0].id], [facts[1].id], ["key"])
        identity = catalog.identity()
    command = [binaries / "pg_dump", "--schema", name, "--file", dump, postgres.url]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    execute(postgres.url, f'DROP SCHEMA "{name}" CASCADE')
    command = [binaries / "psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", dump, postgres.url]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    with closing(Catalog(tmp_path, url=url)) as catalog:
        catalog.record_embedder("fake", DIM)
        assert catalog.facts(ANA) == facts
        assert catalog.identity() == identity
        [third] = add(catalog, ANA, "three")
        assert third.seq > facts[1].seq
        assert catalog.delete(facts[0].id).keys == ("key",)


def test_statements_are_said_in_its_words() -> None:
    assert translated(f"SELECT 1 FROM t WHERE a LIKE 'x_%' AND b IN {NUMBERS} AND c IS ?") == (
        "SELECT 1 FROM t WHERE a LIKE 'x_%%' AND b IN "
        "(SELECT jsonb_array_elements_text(%s::jsonb)::bigint AS value) AND c IS NOT DISTINCT FROM %s"
    )
    assert translated(EXACT).count("%s") == 3


def test_ids_longer_than_an_index_row_are_found(replica: Replicas) -> None:
    one, other = replica(), replica()
    rng = np.random.default_rng(0)
    longest = "".join(map(chr, rng.integers(0x4E00, 0x9FFF, 1000)))
    scope = Scope(longest, longest[::-1], longest[1:] + "x")
    [fact] = add(one, scope, "hello")
    add(one, Scope(longest), "of the user alone")
    assert other.facts(scope) == [fact]
    assert other.count(Scope(user_id=longest)) == 2
    assert other.delete(fact.id).epochs
    imported = [StoredFact(replace(fact, id=longest)), StoredFact(replace(fact, id=longest[::-1]))]
    vectors = np.zeros((2, DIM), dtype=np.float32)
    assert one.import_facts(imported, vectors).num_added == 2
    assert other.import_facts(imported, vectors).num_skipped == 2
    one.retire(longest, longest[::-1])
    assert [past.fact.id for past in other.past_facts(scope, 9)] == [longest]
    with pytest.raises(CatalogError, match="conflicting key value"):
        twice(one)


def test_scopes_are_told_apart_however_their_ids_are_split(replica: Replicas) -> None:
    catalog = replica()
    scopes = [Scope("ab", "c"), Scope("a", "bc"), Scope("abc"), Scope(None, "abc"), Scope(None, None, "abc")]
    for scope in scopes:
        add(catalog, scope, scope.describe())
    assert catalog.count_scopes() == len(scopes)
    assert [fact.text for scope in scopes for fact in catalog.facts(scope)][:1] == [scopes[0].describe()]


def twice(catalog: Catalog) -> None:
    """Store a fact under an id that another has."""
    with catalog._database.write() as connection:
        connection.execute(
            "INSERT INTO facts (id, scope, text, created_at, metadata) "
            "SELECT id, scope, text, created_at, metadata FROM facts"
        )


# --- sessions ------------------------------------------------------------------------------------


def test_sessions_that_the_server_ended_are_replaced(url: str, replica: Replicas) -> None:
    catalog = replica()
    add(catalog, ANA, "one")
    execute(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND application_name = 'inferscale' AND state = 'idle'",
    )
    assert catalog.count(ANA) == 1
    add(catalog, ANA, "two")
    assert catalog.count(ANA) == 2


def test_a_session_that_ends_within_a_write_leaves_nothing_of_it(url: str, replica: Replicas) -> None:
    catalog = replica()

    def write() -> None:
        with catalog._database.write() as connection:
            connection.execute("INSERT INTO meta (name, value) VALUES ('half', '1')")
            [pid] = connection.execute("SELECT pg_backend_pid()").fetchone()
            execute(url, f"SELECT pg_terminate_backend({pid})")
            connection.execute("INSERT INTO meta (name, value) VALUES ('whole', '1')")

    with pytest.raises(CatalogUnreachable):
        write()
    with catalog._database.read() as connection:
        assert connection.execute("SELECT name FROM meta WHERE name IN ('half', 'whole')").fetchall() == []


def test_a_writer_that_is_stopped_does_not_hold_up_others_for_ever(
    url: str, replica: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = replica(), replica()

    def write() -> None:
        with stopped._database.write() as connection:
            connection.execute("SET LOCAL idle_in_transaction_session_timeout = '300ms'")
            add(other, ANA, "waits, and is stored")
            connection.execute("SELECT 1")

    with pytest.raises(CatalogUnreachable):
        write()
    assert other.count(ANA) == 1
    assert stopped.count(ANA) == 1


def test_more_threads_than_sessions(replica: Replicas) -> None:
    catalog = replica()
    add(catalog, ANA, "one")
    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(lambda _: catalog.count(ANA), range(96))) == {1}


def test_use_after_a_fork_is_refused(replica: Replicas) -> None:
    catalog = replica()
    sessions = catalog._database._sessions
    sessions._process = -1
    with pytest.raises(CatalogError, match="fork"):
        catalog.count(ANA)
    sessions._process = os.getpid()


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    """Errors while it is gone, nothing that was acknowledged is lost, and nobody has to be started again."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed")
    with running(binaries) as server:
        stored: list[str] = []
        with Memory(MemoryConfig(tmp_path, catalog=server.url), embedder=WordEmbedder()) as memory:
            done = threading.Event()
            refused: list[Exception] = []

            def write() -> None:
                while not done.is_set():
                    try:
                        [fact] = memory.add(f"fact {len(stored)}", user_id="ana")
                        stored.append(fact.id)
                    except CatalogError as error:
                        refused.append(error)
                        time.sleep(0.02)

            writing = threading.Thread(target=write)
            writing.start()
            while len(stored) < 10:
                time.sleep(0.01)
            server.stop(at_once=True)
            with pytest.raises(CatalogUnreachable, match="cannot be reached") as error:
                memory.search("fact", user_id="ana")
            assert server.password not in str(error.value)
            while not refused:
                time.sleep(0.01)
            server.start()
            num_before = len(stored)
            while len(stored) < num_before + 5:
                time.sleep(0.01)
            done.set()
            writing.join()
            assert {type(one) for one in refused} == {CatalogUnreachable}
            there = {fact.id for fact in memory.get_all(user_id="ana")}
            assert set(stored) <= there
            assert len(there) <= len(stored) + 1  # a commit whose answer was lost may be there


# --- settings ------------------------------------------------------------------------------------


def test_no_error_shows_the_password(url: str, postgres: PostgresServer, tmp_path: Path) -> None:
    wrong = postgres.url.replace(postgres.password, "s3cr%65t-word")
    bad = [
        wrong,
        "postgresql://tester:s3cret-word@127.0.0.1:1/postgres",
        "postgresql://tester:s3cret-word@127.0.0.1:1/postgres?nonsense=1",
        "postgresql://tester:s3cret-word@[::/x",
        "postgresql://tester:s3cret-word@no-such-host.invalid/x",
        "postgresql://tester:s3cr/et-word@127.0.0.1:1/postgres",
        "postgresql://tester:7/s3cret-word@127.0.0.1:1/postgres",
        "postgresql://tester:s3cret-word",
    ]
    for given in bad:
        with pytest.raises((CatalogError, InvalidConfig)) as error:
            Catalog(tmp_path, url=given).count_rows()
        shown = f"{error.value!r} {error.value.__cause__!r}"
        assert "s3cr" not in shown
        assert "tester:" not in shown
        assert error.value.__suppress_context__ or error.value.__context__ is None
    config = MemoryConfig(tmp_path, catalog=bad[1])
    assert "s3cr" not in repr(config)
    catalog = Catalog(tmp_path, url=url)
    assert re.fullmatch(r"postgresql://127\.0\.0\.1:\d+/postgres", catalog.place)


@pytest.mark.parametrize("given", ["mysql://x/y", "/var/lib/catalog", "", 7])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(InvalidConfig, match="no URL of a PostgreSQL database"):
        MemoryConfig("x", catalog=given)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://u:s3cret@h/d",
        "postgresql://u:?s3cret@h/d",
        "postgresql://u:#s3cret@h/d",
        "postgresql://h/d?user=u&password=s3cret",
        "postgresql://h/d#?password=s3cret",
        "postgresql://h/d?sslpassword=s3cret",
    ],
)
def test_the_servers_setting_holds_no_password(given: str) -> None:
    with pytest.raises(InvalidConfig, match=r"\$INFERSCALE_CATALOG instead") as error:
        from_mapping(ServerConfig, {"catalog": given}, "server")
    assert "s3cret" not in str(error.value)
    assert ServerConfig(catalog="postgresql://u@h/d").memory.catalog == "postgresql://u@h/d"


def test_a_key_beside_it_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="does not encrypt"):
        Catalog(tmp_path, key=read_key("ab" * 32, "here"), url=url)


def test_the_environment_names_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCALE_CATALOG", url)
    with open_memory(tmp_path / "a") as one:
        one.add("hello", user_id="ana")
    with open_memory(tmp_path / "b") as other:
        assert other.get_all(user_id="ana")[0].text == "hello"
    assert not (tmp_path / "a").exists()


def test_a_folder_that_is_named_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCALE_CATALOG", "postgresql://u@127.0.0.1:1/x")
    with Memory(MemoryConfig(tmp_path / "a", catalog=IN_FOLDER), embedder=WordEmbedder()) as memory:
        memory.add("hello", user_id="ana")
    assert (tmp_path / "a" / "catalog.sqlite3").is_file()


def test_several_facts_are_stored_with_the_oldest_psycopg(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(psycopg.Cursor, "results", raising=False)  # 3.2 has none
    with Memory(MemoryConfig(tmp_path, catalog=url), embedder=WordEmbedder()) as memory:
        added = memory.add(["one", "two", "three"], user_id="ana")
        assert [fact.text for fact in memory.get_all(user_id="ana")] == [fact.text for fact in added]
        assert len({fact.seq for fact in added}) == 3
