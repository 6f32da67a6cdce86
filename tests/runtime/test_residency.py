"""Socket and secret of the planner's channel: who may open it, junk, restarts, races."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inferscale.errors import EngineError
from inferscale.runtime.residency import ResidencyClient, ResidencyServer
from inferscale.runtime.secret import load_secret, open_runtime_dir


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because a socket path may have 107 bytes only."""
    base = tempfile.mkdtemp(prefix="ifs-")
    yield open_runtime_dir(str(Path(base) / "run"))
    shutil.rmtree(base)


@pytest.fixture
def connect(folder: Path) -> Iterator[Callable[..., ResidencyClient]]:
    clients: list[ResidencyClient] = []

    def make(**settings: Any) -> ResidencyClient:
        clients.append(ResidencyClient(folder, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


Connect = Callable[..., ResidencyClient]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if question["op"] == "residency":
        return {"resident": [key.startswith("in") for key in question["keys"]]}
    if question["op"] == "below":
        return {"below": [key.startswith("below") for key in question["keys"]]}
    if question["op"] == "outcome":
        return {"outcome": {"id": question["id"]} if question["id"] == "known" else None}
    if question["op"] == "stats":
        return {"stats": {"evictions": 0}}
    raise ValueError(f"unknown op {question['op']!r}")


@pytest.fixture
def server(folder: Path) -> Iterator[ResidencyServer]:
    server = ResidencyServer(folder, answer)
    yield server
    server.close()


def test_questions_and_answers(server: ResidencyServer, connect: Connect) -> None:
    client = connect()
    assert client.resident(["in1", "out", "in2"]) == [True, False, True]
    assert client.resident([]) == []
    assert client.below(["in1", "below1"]) == [False, True]
    assert client.below([]) == []
    assert client.outcome("known") == {"id": "known"}
    assert client.outcome("other") is None
    assert client.stats() == {"evictions": 0}


def test_only_the_owner_can_open_them(server: ResidencyServer, folder: Path) -> None:
    load_secret(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "residency.sock").stat().st_mode & 0o777 == 0o600
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_permissions_do_not_depend_on_the_umask(folder: Path) -> None:
    old = os.umask(0)
    try:
        inner = open_runtime_dir(str(folder / "a" / "b"))
        load_secret(inner)
    finally:
        os.umask(old)
    for path, mode in ((inner.parent, 0o700), (inner, 0o700), (inner / "secret", 0o600)):
        assert path.stat().st_mode & 0o777 == mode, path


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_open_to_others_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(EngineError, match=f"mode {mode:o}.*runtime_dir"):
        open_runtime_dir(str(folder))


def test_a_folder_that_others_could_exchange_is_refused(folder: Path) -> None:
    parent = folder / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(EngineError, match="exchange"):
        open_runtime_dir(str(parent / "run"))
    parent.chmod(0o1777)  # like /tmp: others cannot rename what is not theirs
    open_runtime_dir(str(parent / "run"))


def test_a_link_is_refused(folder: Path) -> None:
    (folder / "mine").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "mine")
    with pytest.raises(EngineError, match="symbolic link"):
        open_runtime_dir(str(folder / "link"))


def test_the_runtime_dir_may_exist(folder: Path) -> None:
    assert open_runtime_dir(str(folder)) == folder


def raw(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(str(folder / "residency.sock"))
    return connection


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"junk",
        b"\xff\xfe\x00",
        b"[]",
        b"5",
        b"null",
        b'{"op": "unknown"}',
        b"{}",
        b'{"op": "residency"}',
        b'{"op": "residency", "keys": 5}',
        b'{"op": "residency", "keys": [[]]}',
        b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:30]),
)
def test_junk_gets_an_error_and_the_connection_goes_on(
    server: ResidencyServer, folder: Path, line: bytes
) -> None:
    with raw(folder) as connection, connection.makefile("rb") as replies:
        connection.sendall(line + b"\n")
        assert set(json.loads(replies.readline())) == {"error"}
        connection.sendall(b'{"op": "stats"}\n')
        assert json.loads(replies.readline()) == {"stats": {"evictions": 0}}


def test_an_error_reaches_the_caller(folder: Path, connect: Connect) -> None:
    def fails(question: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("told so")

    server = ResidencyServer(folder, fails)
    with pytest.raises(EngineError, match="told so"):
        connect().stats()
    server.close()


def test_a_client_that_leaves_in_the_middle_disturbs_nobody(
    server: ResidencyServer, folder: Path, connect: Connect
) -> None:
    for _ in range(5):
        with raw(folder) as connection:
            connection.sendall(b'{"op": "stats"}\n{"op": "st')
    assert connect().stats() == {"evictions": 0}


def test_many_clients_at_once_and_one_client_in_many_threads(
    server: ResidencyServer, connect: Connect
) -> None:
    shared = connect()

    def ask(number: int) -> bool:
        client = shared if number % 2 else connect()
        keys = [f"in{number}", f"out{number}"] * (1 + number % 7)
        right = all(client.resident(keys) == [True, False] * (1 + number % 7) for _ in range(20))
        if client is not shared:
            client.close()
        return right

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(32)))


def test_a_client_connects_again_after_the_server_was_started_again(folder: Path, connect: Connect) -> None:
    first = ResidencyServer(folder, answer)
    client = connect()
    assert client.stats() == {"evictions": 0}
    first.close()
    with pytest.raises(EngineError, match=r"does not answer on .*residency\.sock.*running"):
        client.stats()
    second = ResidencyServer(folder, lambda question: {"stats": {"evictions": 2}})
    assert client.stats() == {"evictions": 2}
    second.close()


def test_a_client_notices_that_the_server_behind_its_connection_is_another(
    folder: Path, connect: Connect
) -> None:
    first = ResidencyServer(folder, answer)
    client = connect()
    assert client.stats() == {"evictions": 0}
    first.close()
    second = ResidencyServer(folder, lambda question: {"stats": {"evictions": 2}})
    assert client.stats() == {"evictions": 2}, "the old server still answers from its threads"
    second.close()


def test_a_server_that_hangs_is_an_error_and_not_a_wait_for_ever(
    folder: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscale.runtime.residency._SILENCE_S", 0.0)
    waiting = threading.Event()
    server = ResidencyServer(folder, lambda question: {"stats": {}} if waiting.wait(5) else {})
    client = connect(timeout_s=0.1)
    with pytest.raises(EngineError, match="does not answer"):
        client.stats()
    waiting.set()
    assert client.stats() == {}, "the late answer to the first question is not taken for this one"
    server.close()


def test_while_a_server_hangs_others_do_not_wait_as_well(folder: Path, connect: Connect) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / "residency.sock"))
        listening.listen(64)
        listening.setblocking(False)
        client = connect(timeout_s=0.2)

        def ask(number: int) -> str:
            with pytest.raises(EngineError) as error:
                client.model()
            return str(error.value)

        with ThreadPoolExecutor(8) as pool:
            errors = list(pool.map(ask, range(8)))
        assert sum("has just not answered" in error for error in errors) == 7
        listening.accept()[0].close()
        with pytest.raises(BlockingIOError):  # one of eight has asked
            listening.accept()


def test_nobody_waits_while_a_shared_store_is_listed(folder: Path, connect: Connect) -> None:
    is_listed = threading.Event()

    def slow(question: dict[str, Any]) -> dict[str, Any]:
        if question["op"] == "keys":
            return {"keys": ["k"] if is_listed.wait(10) else []}
        return answer(question)

    server = ResidencyServer(folder, slow)
    client = connect(timeout_s=2.0)
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(client.shared_keys, "ab")
        assert client.stats() == {"evictions": 0}
        assert not listing.done()
        is_listed.set()
        assert listing.result() == ["k"]
    server.close()


def test_no_engine(connect: Connect) -> None:
    with pytest.raises(EngineError, match="Is it running"):
        connect().resident(["k"])


def test_a_stale_socket_file_is_replaced(folder: Path, connect: Connect) -> None:
    (folder / "residency.sock").touch()
    server = ResidencyServer(folder, answer)
    assert connect().stats() == {"evictions": 0}
    server.close()
    assert not (folder / "residency.sock").exists()


def test_a_long_path_says_what_to_set(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    with pytest.raises(EngineError, match=r"107 bytes; set runtime_dir"):
        ResidencyServer(deep, answer)


def _load(path: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(load_secret(open_runtime_dir(path)))


def test_eight_processes_that_race_get_one_secret(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(2):
        path = str(folder / f"race{number}")
        barrier, results = context.Barrier(8), context.Queue()
        processes = [context.Process(target=_load, args=(path, barrier, results)) for _ in range(8)]
        for process in processes:
            process.start()
        secrets = {results.get(timeout=10) for _ in processes}
        for process in processes:
            process.join()
        assert len(secrets) == 1
        assert [entry.name for entry in Path(path).iterdir()] == ["secret"], "no draft is left"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_secret_says_so(folder: Path, content: bytes) -> None:
    (folder / "secret").write_bytes(content)
    with pytest.raises(EngineError, match="damaged"):
        load_secret(folder)


def test_a_burst_of_connections_is_not_refused(server: ResidencyServer, connect: Connect) -> None:
    barrier = threading.Barrier(100)

    def ask(_: int) -> bool:
        client = connect()
        barrier.wait()
        return client.resident(["in"]) == [True]

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(ask, range(100)))
