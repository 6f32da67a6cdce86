"""A proxy for TCP in front of a database, which can be cut off: connections stay open, and nothing passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

_PORT = 5432


class Proxy:
    """From `address` to another; in threads that end with their connections."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """What is sent meanwhile arrives afterwards, as behind a network that lost packets."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    def close(self) -> None:
        self._passes.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._passes.wait()
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
        back.start()
        self._pump(client, server)
        back.join()
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._passes.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def through(stack: ExitStack, url: str) -> tuple[Proxy, str]:
    """A proxy in front of the server of this URL, and the URL through it."""
    parts = urlsplit(url)
    proxy = stack.enter_context(closing(Proxy(parts.hostname or "127.0.0.1", parts.port or _PORT)))
    host, port = proxy.address
    user, at, _ = parts.netloc.rpartition("@")
    return proxy, urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{port}"))
