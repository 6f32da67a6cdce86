"""Fixtures that all tests share: the catalog's two databases.

A module whose tests hold for both says `pytestmark = pytest.mark.usefixtures("both_databases")`: each of them
then runs with catalogs in SQLite and, on a server that is started for the session, in PostgreSQL. A test that
looks into the SQLite file is marked `sqlite_only`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postgres_server import MISSING, PostgresServer, Replicas, find_binaries, running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that all tests share, each with tables of its own. Nobody stops it."""
    pytest.importorskip("psycopg")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(MISSING)
    with running(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def both_databases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which one it is. A folder's catalog lies in PostgreSQL as if it was opened with a URL."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        _place_in_postgres(server, monkeypatch)
    return request.param


@pytest.fixture
def in_postgres(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    _place_in_postgres(postgres, monkeypatch)
    return postgres


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """Of tables of the test's own."""
    return postgres.schema_url(f"t{uuid.uuid4().hex[:12]}")


@pytest.fixture
def replica(url: str, tmp_path: Path) -> Iterator[Replicas]:
    """Makes catalogs that share one database, as processes on several machines do."""
    from fakes import DIM
    from inferscale.catalog import Catalog

    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(Catalog(tmp_path / str(len(made)), url=url, **options))
        made[-1].record_embedder("fake", DIM)
        return made[-1]

    yield make
    for catalog in made:
        catalog.close()


def _place_in_postgres(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import fakes
    from inferscale.catalog import catalog, opening
    from inferscale.operations import reembed

    def url_of(data_dir: str | Path) -> str:
        return server.schema_url(schema_of(data_dir))

    def open_there(data_dir: str | Path, key: object = None, url: str | None = None) -> object:
        return opening.open_database(data_dir, None, url or url_of(data_dir))

    monkeypatch.setattr(fakes, "catalog_url", url_of)
    monkeypatch.setattr(catalog, "open_database", open_there)
    monkeypatch.setattr(reembed, "open_existing", open_there)


def schema_of(data_dir: str | Path) -> str:
    """A schema for the tables of a folder."""
    return f"s{hashlib.blake2b(str(Path(data_dir).absolute()).encode(), digest_size=12).hexdigest()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def runs(item: pytest.Item) -> bool:
        given = getattr(item, "callspec", None)
        is_postgres = given is not None and given.params.get("both_databases") == "postgres"
        return not (is_postgres and item.get_closest_marker("sqlite_only"))

    kept = [item for item in items if runs(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
