"""Stock `vllm serve` with the README's flags and nothing else: capture, inject, ask over the socket.

The plan comes over HTTP, signed with the secret of the engine's default runtime folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from harness.engine import EngineCache
from inferscale.config import default_runtime_dir
from inferscale.plan import WIRE_KEY, Plan, Segment, Span, salt_of, segment_key, to_wire
from inferscale.runtime.residency import ResidencyClient
from inferscale.runtime.secret import load_secret

pytestmark = pytest.mark.engine

README = Path(__file__).parents[2] / "README.md"
START_TIMEOUT_S = 150
FACT, QUESTION = list(range(100, 140)), [7, 8, 9]
_open = build_opener(ProxyHandler({})).open  # this machine's own port, whatever proxy is set


class Server(NamedTuple):
    """A running server and what its front end knows."""

    url: str
    runtime_dir: Path
    secret: bytes

    def complete(self, ids: Sequence[int], plan: Plan) -> dict[str, Any]:
        """The connector's outcome of a completion of `ids` that carries `plan`."""
        body = {
            "model": "tiny",
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": to_wire(plan, self.secret),
            "cache_salt": salt_of(plan, self.secret),
        }
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with _open(request, timeout=60) as response:
            outcome: dict[str, Any] = json.load(response)["kv_transfer_params"][WIRE_KEY]
        return outcome


def readme_config() -> dict[str, Any]:
    """The JSON behind `--kv-transfer-config` in the README."""
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "the README no longer shows the flags"
    config: dict[str, Any] = json.loads(found[1])
    return config


@pytest.fixture
def server(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[Server]:
    path = checkpoint("llama")
    engine_id = f"serve-{uuid.uuid4()}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "512"]
    command += ["--kv-transfer-config", json.dumps({**readme_config(), "engine_id": engine_id})]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    log_path = tmp_path / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    url, folder = f"http://127.0.0.1:{port}", Path(default_runtime_dir(engine_id))
    try:
        wait_until_it_answers(process, url, log_path)
        yield Server(url, folder, load_secret(folder))
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with _open(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    tail = log_path.read_text(errors="replace").splitlines()[-60:]
    pytest.fail("the server did not start:\n" + "\n".join(tail))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine process that it started; both are in the session made for them."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def test_stock_server_with_the_flags_of_the_readme(
    server: Server, checkpoint: Callable[[str], Path], engine: EngineCache
) -> None:
    model = engine(checkpoint("llama")).facts.model  # the same on every side
    key = segment_key(model, [3], FACT)
    captured = server.complete([3, *FACT], Plan(model, "s", captures=(Span(key, 1, 41),)))
    assert (captured["captured"], captured["captures"]) == (1, 1)
    client = ResidencyClient(server.runtime_dir)
    assert client.resident([key, "unknown"]) == [True, False]
    plan = Plan(model, "s", segments=(Segment(key, tuple(FACT)),))
    injected = server.complete(FACT + QUESTION, plan)
    assert (injected["injected_tokens"], injected["prefilled_tokens"]) == (40, 3)
    assert "reason" not in injected
    assert client.outcome(plan.id) == injected
    stats = client.stats()
    assert (stats["internal_errors"], stats["tokens_injected"]) == (0, 40)
    client.close()
