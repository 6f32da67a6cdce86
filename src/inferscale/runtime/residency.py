"""Residency and outcomes for the planner, over a Unix socket that only its owner can open.

The scheduler side answers; the front end asks. One JSON object a line each way:

    {"op": "residency", "keys": [...]}   → {"resident": [true, ...]}
    {"op": "below", "keys": [...]}       → {"below": [true, ...]}
    {"op": "keys", "tier": "disk"}       → {"keys": [...]}
    {"op": "keys", "tier": "cold", "part": "ab"} → {"keys": [...]}, of the store that servers share
    {"op": "owns", "catalog": "..."}     → {"owns": true}, whether what lies in that store is of this catalog
    {"op": "outcome", "id": "..."}       → {"outcome": {...} | null}
    {"op": "stats"}                      → {"stats": {...}}
    {"op": "engine"}                     → {"engine": {"model": "fingerprint"}}

An answer may be one step old: a plan's segments are looked up again when vLLM allocates, and what
went away in between is prefilled.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferscale.errors import EngineError

logger = logging.getLogger(__name__)

SOCKET_NAME = "residency.sock"
_STORE_TIMEOUT_S = 60.0
"""Of what a store on other machines is asked for."""
_SILENCE_S = 1.0
"""So long nobody asks again where an answer did not come: whoever waits meanwhile would wait as long."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class ResidencyServer:
    """Serves `answer` on `folder/residency.sock` from daemon threads until `close`."""

    def __init__(self, folder: Path, answer: Answer) -> None:
        self.path = folder / SOCKET_NAME
        if len(os.fsencode(self.path)) > 107:
            raise EngineError(
                f"The socket path {self.path} is longer than 107 bytes; set runtime_dir to a shorter one."
            )
        self.path.unlink(missing_ok=True)
        self._connections: set[socket.socket] = set()
        handler = type(
            "Handler", (_Handler,), {"answer": staticmethod(answer), "connections": self._connections}
        )
        self._server = _Server(str(self.path), handler)
        self.path.chmod(0o600)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="inferscale-residency", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):  # or their threads would go on answering for this engine
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    """A connection beyond the queue is refused at once (EAGAIN); the default of 5 is soon full."""


class _Handler(socketserver.StreamRequestHandler):
    answer: Answer
    connections: set[socket.socket]

    def handle(self) -> None:
        self.connections.add(self.connection)
        with suppress(ConnectionError):  # the client left, or the server was closed
            for line in self.rfile:
                try:
                    reply = self.answer(json.loads(line))
                except Exception as error:  # the root of this thread; the caller gets the error
                    logger.exception("Residency request failed")
                    reply = {"error": str(error)}
                self.wfile.write(json.dumps(reply).encode() + b"\n")

    def finish(self) -> None:
        self.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()


class ResidencyClient:
    """Asks the scheduler side of one engine. Safe to use from several threads; reconnects by itself."""

    def __init__(self, folder: Path, *, timeout_s: float = 5.0) -> None:
        self._path = folder / SOCKET_NAME
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._silent_until_s = 0.0
        self._socket: socket.socket | None = None
        self._buffer = b""

    def resident(self, keys: Sequence[str]) -> list[bool]:
        """Which segments are in the pool, or can be loaded into it, now; in the order of `keys`."""
        if not keys:
            return []
        return [bool(flag) for flag in self._ask({"op": "residency", "keys": list(keys)})["resident"]]

    def below(self, keys: Sequence[str]) -> list[bool]:
        """Which segments are not in the pool and can be loaded into it; in the order of `keys`."""
        if not keys:
            return []
        return [bool(flag) for flag in self._ask({"op": "below", "keys": list(keys)})["below"]]

    def keys(self, tier: str) -> list[str]:
        """Keys of all segments in a lower tier; none where there is no such tier."""
        return [str(key) for key in self._ask({"op": "keys", "tier": tier})["keys"]]

    def shared_keys(self, part: str) -> list[str]:
        """Keys of all segments in one part of the store that servers share."""
        return [str(key) for key in self._ask_aside({"op": "keys", "tier": "cold", "part": part})["keys"]]

    def owns_shared(self, catalog: str) -> bool:
        """Whether servers share a store, and what lies there is of this catalog."""
        return bool(self._ask_aside({"op": "owns", "catalog": catalog})["owns"])

    def outcome(self, plan_id: str) -> dict[str, Any] | None:
        """What became of a plan, as soon as its request was scheduled; None if unknown."""
        outcome: dict[str, Any] | None = self._ask({"op": "outcome", "id": plan_id})["outcome"]
        return outcome

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._ask({"op": "stats"})["stats"]
        return stats

    def model(self) -> str:
        """Fingerprint of the served model."""
        return str(self._ask({"op": "engine"})["engine"]["model"])

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _ask_aside(self, question: dict[str, Any]) -> dict[str, Any]:
        """Over a connection of its own: no chat waits until a store elsewhere is listed."""
        aside = ResidencyClient(self._path.parent, timeout_s=_STORE_TIMEOUT_S)
        try:
            return aside._ask(question)
        finally:
            aside.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() < self._silent_until_s:
                raise EngineError(f"The engine has just not answered on {self._path}. Is it running?")
            for attempt in (1, 2):
                try:
                    reply = self._exchange(question)
                    break
                except OSError as error:
                    self._disconnect()
                    if attempt == 2 or isinstance(error, TimeoutError):
                        if isinstance(error, TimeoutError):
                            self._silent_until_s = time.monotonic() + _SILENCE_S
                        raise EngineError(
                            f"The engine does not answer on {self._path}: {error}. Is it running?"
                        ) from error
        if "error" in reply:
            raise EngineError(f"The engine could not answer: {reply['error']}")
        return reply

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(self._timeout_s)
            self._socket.connect(str(self._path))
            self._buffer = b""
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        while b"\n" not in self._buffer:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _disconnect(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None
