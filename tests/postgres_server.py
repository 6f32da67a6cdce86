"""A PostgreSQL server of the tests' own, from Debian's package or any other installation."""

from __future__ import annotations

import getpass
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

Replicas = Callable[..., Any]
"""Makes a catalog on a database that all of its catalogs share."""
MISSING = "no PostgreSQL server is installed (Debian: apt-get install postgresql)"


def find_binaries() -> Path | None:
    """The folder with `initdb` and `postgres`, of the newest version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path and shutil.which("postgres") else None


class PostgresServer:
    """Stopped and started at will; keeps its data meanwhile. Commits do not wait for the disk."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.port = _free_port()
        self.password = secrets.token_hex(8)
        self._binaries = binaries
        self._folder = folder
        self._user = _other_user() if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        password_file = folder / "password"
        password_file.write_text(self.password)
        password_file.chmod(0o644)
        options = ["-A", "scram-sha-256", "-U", "tester", f"--pwfile={password_file}", "-E", "UTF8"]
        self._run("initdb", "-D", str(folder / "data"), "--no-sync", "--locale=C.UTF-8", *options)

    @property
    def url(self) -> str:
        return f"postgresql://tester:{self.password}@127.0.0.1:{self.port}/postgres"

    def schema_url(self, schema: str) -> str:
        """Of tables of their own."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
        return f"{self.url}?options={quote('-csearch_path=' + schema)}"

    def start(self) -> None:
        import psycopg

        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._folder),
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_connections": "200",
            "autovacuum": "off",
        }
        given = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._folder / "data", *given],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                **self._as_user(),
            )
        for _ in range(600):
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:])

    def stop(self, *, at_once: bool = True) -> None:
        """at_once: as if its machine lost power (SIGQUIT); else sessions end in order."""
        if self._process is not None:
            self._process.send_signal(3 if at_once else 2)
            self._process.wait(60)
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binaries / program, *arguments],
            cwd=self._folder,
            capture_output=True,
            check=False,
            **self._as_user(),
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")

    def _as_user(self) -> dict[str, object]:
        """PostgreSQL refuses to run as root."""
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


@contextmanager
def running(binaries: Path) -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="inferscale-postgres-"))
    server = PostgresServer(binaries, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            pass
    raise RuntimeError(f"PostgreSQL does not run as {getpass.getuser()}, and there is no user to run it as")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
