"""benchmarks/drill.py: what its judges see, and the proxy that cuts a database off."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def users() -> Iterator[ModuleType]:
    yield load("drill_users")
    del sys.modules["drill_users"]


@pytest.fixture(scope="module")
def proxies() -> Iterator[ModuleType]:
    yield load("drill_proxy")
    del sys.modules["drill_proxy"]


def call(
    users: ModuleType,
    start: float,
    op: str = "chat",
    status: Any = 200,
    replica: str | None = "r1",
    user: str = "ana",
) -> Any:
    return users.Call(start, start + 1, user, op, status, replica)


# answers -----------------------------------------------------------------------------------------


def test_the_code_of_another_is_seen(users: ModuleType) -> None:
    ana, bob = users.User("ana"), users.User("bob")
    ana.check("chat", f"the code is {ana.code}")
    assert not ana.problems
    ana.check("chat", f"the code is {ana.code}, or {bob.code}")
    assert ana.problems == ["ana: the answer to chat holds 1 codes of others"]


def test_what_was_deleted_is_seen(users: ModuleType) -> None:
    ana = users.User("ana", deleted={"id-1": "Note 1 of ana."})
    ana.check("search", '{"data": []}')
    assert not ana.problems
    ana.check("search", '{"id": "id-1"}')
    ana.check("chat", "… Note 1 of ana. …")
    assert len(ana.problems) == 2


def test_lost_and_strange_facts(users: ModuleType) -> None:
    ana = users.User("ana", kept={"1": "a", "2": "b"}, deleted={"3": "c"}, unsure={"d"})
    assert users.lost(ana, {"1": "a", "2": "b", "9": "d"}) == []
    assert users.strangers(ana, {"1": "a", "2": "b", "9": "d"}) == []
    assert users.lost(ana, {"1": "a", "2": "changed", "3": "c"}) == ["2", "3"]
    assert users.lost(ana, {"1": "a"}) == ["2"]
    assert users.strangers(ana, {"1": "a", "5": "a", "6": "e"}) == ["a", "e"]


# errors ------------------------------------------------------------------------------------------


def test_only_stores_on_the_killed_replica_may_fail(users: ModuleType) -> None:
    kill = users.Outage("kill", 10.0, 11.0, ("add",))
    excused = [(9.5, "add", 503)]
    unexcused = [
        (9.5, "chat", 503),
        (9.5, "add", 500),
        (9.5, "add", None),
        (3.0, "add", 503),
        (11.5, "add", 503),
    ]
    for start, op, status in [*excused, *unexcused]:
        failed = call(users, start, op, status)
        assert users.errors_of([failed]) == [failed]
        assert users.is_excused(failed, [kill]) is ((start, op, status) in excused)


def test_all_may_fail_while_the_database_is_cut_off(users: ModuleType) -> None:
    partition = users.Outage("partition", 10.0, 20.0, None)
    assert users.is_excused(call(users, 19.5, "chat", None), [partition])
    assert not users.is_excused(call(users, 20.5, "chat", 503), [partition])


def test_a_deletion_that_was_sent_twice_is_no_error(users: ModuleType) -> None:
    assert users.errors_of([call(users, 0, "delete", 404), call(users, 0, "add", 201)]) == []
    assert len(users.errors_of([call(users, 0, "chat", 404)])) == 1


def test_affinity(users: ModuleType) -> None:
    ana = [call(users, n, replica="r1") for n in range(3)] + [call(users, 3, replica="r2")]
    bob = [call(users, n, replica="r2", user="bob") for n in range(4)]
    ignored = [call(users, 1, "delete", replica="r9"), call(users, 1, status=None, replica=None)]
    assert users.affinity([*ana, *bob, *ignored], 0, 10) == 7 / 8
    assert users.affinity([*ana, *bob], 0, 3.5) == 1.0
    assert users.affinity([], 0, 10) == 0.0


# the proxy ---------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says everything again."""

    def serve(peer: socket.socket) -> None:
        with peer:
            while data := peer.recv(100):
                peer.sendall(data)

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            return

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_nothing_passes_while_it_is_cut_off(proxies: ModuleType, echo: int) -> None:
    with closing(proxies.Proxy("127.0.0.1", echo)) as proxy, socket.create_connection(proxy.address) as peer:
        peer.settimeout(10)
        peer.sendall(b"one")
        assert peer.recv(10) == b"one"
        with proxy.cut_off():
            peer.sendall(b"two")
            peer.settimeout(0.2)
            with pytest.raises(TimeoutError):
                peer.recv(10)
        peer.settimeout(10)
        assert peer.recv(10) == b"two"


def test_a_connection_that_ends_ends_behind_it(proxies: ModuleType, echo: int) -> None:
    with closing(proxies.Proxy("127.0.0.1", echo)) as proxy:
        before = threading.active_count()
        with socket.create_connection(proxy.address) as peer:
            peer.settimeout(10)
            peer.sendall(b"x")
            peer.recv(1)
        for _ in range(500):
            if threading.active_count() <= before:
                return
            time.sleep(0.01)
        pytest.fail("threads of the connection go on")


def test_the_url_through_it(proxies: ModuleType) -> None:
    with ExitStack() as stack:
        proxy, url = proxies.through(stack, "postgresql://me:pw@db.example:6000/facts?options=x")
        assert url == f"postgresql://me:pw@127.0.0.1:{proxy.address[1]}/facts?options=x"
