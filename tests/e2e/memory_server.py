"""A server with memory for the tests: `inferscale serve` as a user starts it, and an HTTP client for it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

START_TIMEOUT_S = 240
MODEL = "smol"


class MemoryServer:
    """A running server. `client` sends no key unless it is told to."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path
        self.client = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def call(
        self, method: str, path: str, body: Any = None, key: str | None = None, **params: Any
    ) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = self.client.request(method, path, json=body, headers=headers, params=params or None)
        kind = answer.headers.get("content-type", "")
        return answer.status_code, answer.json() if "json" in kind else answer.text

    def chat(
        self, question: str | list[dict[str, Any]], memory: Any = None, key: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The answer of a greedy chat; fails for any other status than 200."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
        if memory is not None:
            body["memory"] = memory
        status, answer = self.call("POST", "/v1/chat/completions", body, key)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def add(self, user: str, *texts: str, key: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Store facts and wait until they are in the pool."""
        body = {"user_id": user, "items": [{"text": text} for text in texts], **fields}
        status, answer = self.call("POST", "/v1/memories", body, key)
        assert status == 201, answer
        self.wait_encoded(user, key)
        return list(answer["data"])

    def wait_encoded(self, user: str, key: str | None = None, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            _, page = self.call("GET", "/v1/memories", key=key, user_id=user, limit=1000)
            if all(fact["injectable"] for fact in page["data"]):
                return
            time.sleep(0.1)
        pytest.fail(f"the facts of {user} are not encoded after {timeout_s} s:\n{self.log()[-3000:]}")

    def stop(self) -> None:
        """SIGTERM, as an operator does it."""
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the server and the engine process that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    model: Path,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[MemoryServer]:
    """flags: of `inferscale serve` and of vLLM. folder: for its memory and its log. Chats recompute no facts,
    so that memories of one fact are injected as well, unless a flag or the chat says more."""
    port = free_port()
    command = [sys.executable, "-m", "inferscale.cli", "serve", str(model), "--served-model-name", MODEL]
    command += ["--port", str(port), "--max-model-len", "2048", "--data-dir", str(folder / "memory")]
    command += ["--embedder-device", "cpu", "--tail", "0", *flags, *arguments]
    log_path = folder / "server.log"
    variables = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "INFO",  # other tests set another one, and some look into the log
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(environment or {}),
    }
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = MemoryServer(process, f"http://127.0.0.1:{port}", log_path)
    try:
        wait_until_it_answers(server)
        yield server
    finally:
        server.stop()


def wait_until_it_answers(server: MemoryServer) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if server.client.get("/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail("the server did not start:\n" + "\n".join(server.log().splitlines()[-60:]))


def events(text: str) -> list[str]:
    """The data of server-sent events, in order."""
    return re.findall(r"^data: (.*)$", text, re.MULTILINE)
