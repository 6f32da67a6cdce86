"""Without keys: only this machine, and no web page from elsewhere."""

from __future__ import annotations

import socket

import pytest

from inferscale.server.keys import Forbidden, check_near, is_loopback


def is_near(
    client: str | None = "127.0.0.1",
    host: str | None = "localhost:8000",
    origin: str | None = None,
    **options: object,
) -> bool:
    settings = {"anyone": False, "origins": (), **options}
    try:
        check_near(client, host, origin, **settings)  # type: ignore[arg-type]
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("host", [None, "localhost", "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine(host: str | None) -> None:
    assert is_loopback(host)
    assert is_near(client=host)


@pytest.mark.parametrize(
    "host",
    ["", "192.0.2.7", "10.0.0.1", "0.0.0.0", "::", "::ffff:192.0.2.7", "example.org", "testclient", "127.1"],
)
def test_addresses_of_others(host: str) -> None:
    assert not is_loopback(host)
    assert not is_near(client=host)
    assert is_near(client=host, anyone=True)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "localhost",
        "LOCALHOST:80",
        "localhost.",
        "api.localhost:9",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.0.2.1",
    ],
)
def test_names_that_are_this_machine(host: str | None) -> None:
    assert is_near(host=host)


def test_the_own_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Workstation")
    assert is_near(host="workstation:8000")
    assert not is_near(host="workstation.evil.example:8000")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "[",
        "]:",
    ],
)
def test_a_name_that_was_made_to_point_here(host: str) -> None:
    """DNS rebinding: for the browser this is the page's own server."""
    assert not is_near(host=host)
    assert not is_near(host=host, origin=f"http://{host}")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:8000",
        "http://localhost:3000",
        "https://localhost",
        "http://127.0.0.1:5",
        "http://[::1]:8000",
    ],
)
def test_pages_of_this_machine(origin: str) -> None:
    assert is_near(origin=origin)


@pytest.mark.parametrize(
    "origin",
    [
        "", "null", "file://", "http://evil.example", "http://evil.example:8000", "http://192.0.2.9",
        "http://localhost.evil.example", "chrome-extension://abcdef", "http://[", "localhost:8000",
    ],
)  # fmt: skip
def test_pages_from_elsewhere(origin: str) -> None:
    assert not is_near(origin=origin)
    assert not is_near(origin=origin, anyone=True)
    assert is_near(origin=origin, origins=[origin])


def test_a_page_of_this_server_behind_a_proxy() -> None:
    remote = {"client": "192.0.2.7", "host": "memory.example", "anyone": True}
    assert is_near(origin="https://memory.example", **remote)  # type: ignore[arg-type]
    assert not is_near(origin="https://other.example", **remote)  # type: ignore[arg-type]


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(Forbidden, match=r"--api-key .* --allow-remote-without-key"):
        check_near("192.0.2.7", None, None, anyone=False, origins=())
    with pytest.raises(Forbidden, match="--allowed-origins"):
        check_near("127.0.0.1", None, "null", anyone=False, origins=())
