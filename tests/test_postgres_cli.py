"""Commands on a catalog in PostgreSQL: what works as with a folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fakes import WordEmbedder
from inferscale.cli.app import main
from inferscale.config import ConnectorConfig
from inferscale.doctor import diagnose
from inferscale.errors import InvalidConfig
from postgres_server import PostgresServer


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.retrieval.open_embedder", lambda *_: WordEmbedder())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_facts_are_added_found_deleted_and_audited(url: str, tmp_path: Path) -> None:
    where = ("--catalog", url, "--data-dir", tmp_path / "data")
    assert run("add", "My sister lives in Oslo.", "--user-id", "ana", *where).exit_code == 0
    found = run("search", "sister", "--user-id", "ana", *where)
    assert "Oslo" in found.output
    audited = run("audit", "--user-id", "ana", *where)
    assert audited.exit_code == 1
    assert "PostgreSQL" in audited.output
    listed = run("list", "--user-id", "ana", "--json", *where)
    assert run("delete", json.loads(listed.output)["id"], *where).exit_code == 0
    audited = run("audit", "--user-id", "ana", "--text", "My sister lives in Oslo.", *where)
    assert audited.exit_code == 0, audited.output
    unknown = run("audit", "--user-id", "bob", *where)
    assert "Nothing was ever stored in postgresql://" in unknown.output
    done = run("reembed", *where)
    assert (done.exit_code, "vectors are of words" in done.output) == (0, True)


@pytest.mark.parametrize(
    ("command", "instead"),
    [("backup", "pg_dump"), ("restore", "pg_restore"), ("rekey --no-encryption", "disks of its server")],
)
def test_what_works_on_a_folder_is_refused(command: str, instead: str, url: str, tmp_path: Path) -> None:
    name, *options = command.split()
    place = () if name == "rekey" else (tmp_path / "copy.tar",)
    refused = run(name, *place, *options, "--catalog", url)
    assert refused.exit_code != 0
    assert instead in refused.output
    assert url not in refused.output


def test_the_doctor_looks_at_it(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path))
    monkeypatch.setenv("INFERSCALE_CATALOG", url)
    [found] = [finding for finding in diagnose() if finding.name == "catalog"]
    assert found.ok
    assert "facts: 0" in found.detail
    monkeypatch.setenv("INFERSCALE_CATALOG", "postgresql://u:s3cret-word@127.0.0.1:1/x")
    [found] = [finding for finding in diagnose() if finding.name == "catalog"]
    assert not found.ok
    assert "cannot be reached" in found.detail
    assert "s3cret" not in f"{found}"


def test_serve_shows_no_password_and_asks_the_database_first(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("inferscale.serve_command.find_spec", lambda name: object())
    monkeypatch.setattr("inferscale.engine_budget.find_gpus", lambda workers: [])
    monkeypatch.setattr("inferscale.cli.serve.prepare_engine", lambda *, verbose: None)
    monkeypatch.delenv("INFERSCALE_CATALOG", raising=False)
    shared = tmp_path / "shared"
    shown = run("serve", "org/model", "--catalog", url, "--cold", shared, "--print-command")
    assert shown.exit_code == 0, shown.output
    assert postgres.password not in shown.output
    assert "Set $INFERSCALE_CATALOG for it" in shown.output
    assert f'"cold_location": "{shared}"' in shown.output
    started: list[dict[str, str]] = []
    monkeypatch.setattr("os.execvpe", lambda file, arguments, environment: started.append(environment))
    run("serve", "org/model", "--catalog", url, "--port", "0")
    assert started[0]["INFERSCALE_CATALOG"] == url
    refused = run("serve", "org/model", "--catalog", "postgresql://u:s3cret-word@127.0.0.1:1/x")
    assert refused.exit_code != 0
    assert "cannot be reached" in refused.output
    assert "s3cret" not in refused.output


def test_a_setting_with_a_password_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="FSSPEC_SFTP_PASSWORD") as error:
        ConnectorConfig(cold_location="sftp://user:s3cret@host/kv")
    assert "s3cret" not in str(error.value)
    assert ConnectorConfig(cold_location="s3://bucket/kv").cold_location == "s3://bucket/kv"
