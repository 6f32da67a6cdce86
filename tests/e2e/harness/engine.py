"""Engines in child processes: start, drive, share, end."""

from __future__ import annotations

import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.protocol import Answer, EngineFacts, EngineOptions, Request, RunningRequest
from inferscale.plan import Plan, salt_of, segment_key, to_wire

START_TIMEOUT_S = 180
OPERATION_TIMEOUT_S = 180


class EngineFailed(Exception):
    """An operation raised in the engine's process, or the process is gone."""


class Engine:
    """One vLLM in a process of its own."""

    def __init__(self, options: EngineOptions, log_path: Path) -> None:
        context = _fork_server()
        from harness.child import main

        self.options = options
        self._log_path = log_path
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, options, str(log_path)), daemon=True)
        self._process.start()
        theirs.close()
        self.facts: EngineFacts = self._receive("start", START_TIMEOUT_S)

    def __getattr__(self, name: str) -> Any:
        """Any operation of `child.EngineHost`."""
        if name.startswith("_"):
            raise AttributeError(name)

        def operation(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            return self._receive(name, OPERATION_TIMEOUT_S)

        return operation

    def _receive(self, name: str, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                self._process.kill()
                raise EngineFailed(f"{name}: no answer in {timeout_s} s.\n{self._log_tail()}")
            is_good, reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineFailed(
                f"{name}: the engine's process ended: {error!r}\n{self._log_tail()}"
            ) from error
        if not is_good:
            raise EngineFailed(f"{name}:\n{reply}")
        return reply

    def _log_tail(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-40:])

    @property
    def log(self) -> str:
        """Everything the engine has printed and logged so far."""
        return self._log_path.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def close(self) -> None:
        try:
            self._pipe.send(("close", ()))
        except OSError:
            pass
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    # requests -----------------------------------------------------------------------------------

    def request(self, ids: Sequence[int], plan: Plan | None = None, **changes: Any) -> Request:
        """A request with `plan` signed and salted as the front end does it."""
        request = Request(tuple(ids))
        if plan is not None:
            salt = salt_of(plan, self.facts.secret)
            request = replace(request, params=to_wire(plan, self.facts.secret), salt=salt)
        return replace(request, **changes)

    def ask(self, ids: Sequence[int], plan: Plan | None = None, **changes: Any) -> Answer:
        """One request, alone in the engine."""
        answers: list[Answer] = self.generate([self.request(ids, plan, **changes)])
        return answers[0]

    def plan(self, scope: str = "test", **parts: Any) -> Plan:
        return Plan(self.facts.model, scope, **parts)

    def key(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        return segment_key(self.facts.model, prefix_ids, token_ids)

    def prefill(self, request: Request) -> tuple[str, RunningRequest]:
        """Add a request alone and step until its prompt is computed; it stays in the engine."""
        name: str = self.add(replace(request, max_tokens=8))
        while True:
            self.step()
            running: RunningRequest = self.running(name)
            if running.num_computed_tokens >= len(request.ids):
                return name, running


class EngineCache:
    """Engines by configuration; at most `limit` alive, the one not used for longest ends first."""

    def __init__(self, folder: Path, limit: int = 2) -> None:
        self._folder = folder
        self._limit = limit
        self._engines: OrderedDict[EngineOptions, Engine] = OrderedDict()
        self._num_started = 0

    def __call__(self, checkpoint: Path | str, **options: Any) -> Engine:
        wanted = EngineOptions(str(checkpoint), **options)
        engine = self._engines.get(wanted)
        if engine is not None and engine.is_alive:
            self._engines.move_to_end(wanted)
            return engine
        while len(self._engines) >= self._limit:
            self._engines.popitem(last=False)[1].close()
        self._num_started += 1
        engine = Engine(wanted, self._folder / f"engine-{self._num_started}.log")
        self._engines[wanted] = engine
        return engine

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()


def _fork_server() -> Any:
    """The context whose server has imported vLLM; its processes find what this one finds."""
    here = Path(__file__).parents[1]
    source = Path(__file__).parents[3] / "src"
    paths = [str(here), str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.preload"])
    return context
