"""`inferscale bench decode`: what a connector costs while nothing is injected, and decoding behind memory.

Two comparisons of the time per output token (TPOT):

    stock · connector    the same short prompts in vLLM without any connector, and with ours and no plan
    hit · inject         long prompts whose facts came from vLLM's prefix cache, and from the pool: the same
                         tokens are attended to, so times should be equal

An engine gives back its memory only with its process, so each runs in one of its own:
`python -m inferscale.bench.decode TASK.json` measures and writes TASK.json.out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inferscale.bench.arms import checked_counts, prime_of, request_of
from inferscale.bench.encode import encode_users
from inferscale.bench.engine import EngineSpec, describe
from inferscale.bench.harness import BenchRun, Row, Say, command
from inferscale.bench.load import SAMPLING, Served, Server, StockEngine, drive
from inferscale.bench.options import DecodeOptions, RandomTokens
from inferscale.bench.source import Need, RandomSource, encoding_for
from inferscale.errors import EngineError
from inferscale.offline import GenerationRequest
from inferscale.windows import WindowPolicy

_PROMPT_TOKENS = 32
_TIMEOUT_S = 1800
_LOG_CHARS = 2000


class DecodeTask(NamedTuple):
    """What one process measures. engine: `stock` or `connector`."""

    engine: str
    spec: EngineSpec
    options: DecodeOptions
    tokens: RandomTokens
    policy: WindowPolicy

    def to_json(self) -> str:
        parts = {"options": asdict(self.options), "tokens": asdict(self.tokens)}
        policy = [self.policy.window, self.policy.stride, self.policy.mixed, self.policy.neighbours]
        return json.dumps(
            {"engine": self.engine, "spec": self.spec.to_json(), **parts, "policy": policy}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> DecodeTask:
        data = json.loads(text)
        options = {**data["options"], "batches": tuple(data["options"]["batches"])}
        return cls(
            data["engine"],
            EngineSpec.from_json(data["spec"]),
            DecodeOptions(**options),
            RandomTokens(**data["tokens"]),
            WindowPolicy(*data["policy"]),
        )


def measure_decode(task: DecodeTask, run: BenchRun, say: Say) -> list[Row]:
    """Start both engines in turn, `alternations` times; append rows and return them.

    Raises EngineError where an engine cannot be started or a request did not run as it should.
    """
    options = task.options
    series: dict[tuple[str, int], list[float]] = {}
    settings: dict[str, Any] = {}
    for _ in range(options.alternations):
        for engine in ("connector", "stock"):  # in this order: the stock engine gets the other's share
            say(f"Starting the engine ({engine}) in a process of its own …")
            measured = _in_child(task._replace(engine=engine))
            settings.setdefault(engine, measured["settings"])
            share = measured["settings"]["gpu_memory_utilization"]
            task = task._replace(spec=replace(task.spec, gpu_memory_utilization=share))
            for mode, batch, values in measured["series"]:
                series.setdefault((mode, batch), []).extend(values)
                say(f"  {mode}, {batch} at once: {np.median(values):.2f} ms a token")
    run.config |= {
        **settings["connector"],
        "command": command(),
        "baseline": f"mode stock of the same command: vLLM without a connector, {settings['stock']}",
        "output_tokens": options.output_tokens,
        "alternations": options.alternations,
        "repeats": options.repeats,
    }
    for (mode, batch), values in series.items():
        k = options.k if mode in ("hit", "inject") else None
        run.add("tpot", "ms", values, mode=mode, k=k, config={"batch": batch})
    for over, under in (("connector", "stock"), ("inject", "hit")):
        for batch in options.batches:
            pair = [series[mode, batch] for mode in (over, under)]
            run.add_ratio("tpot", f"{over}/{under}", *pair, config={"batch": batch})
    return run.rows


def _in_child(task: DecodeTask) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_text(task.to_json(), encoding="utf-8")
        log = Path(folder) / "log"
        status = _run_group([sys.executable, "-m", "inferscale.bench.decode", str(path)], log)
        said = log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
        if status is None:
            raise EngineError(
                f"The process of the {task.engine} engine was not done after {_TIMEOUT_S} s and was ended; "
                f"lower --output-tokens, --repeats or --batches. It said: {said}"
            )
        answer = path.with_suffix(".json.out")
        if status or not answer.is_file():
            raise EngineError(f"The process of the {task.engine} engine ended with {status}: {said}")
        measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return measured


def _run_group(command: Sequence[str], log: Path) -> int | None:
    """Run a command, all that it says in `log`; its exit status, None where it was not done in time.

    It has a session of its own, and all of that is ended with it: an engine's process that outlives the
    one that started it would keep the GPU. `log` is a file, since such a process would keep a pipe open.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_task(task: DecodeTask) -> dict[str, Any]:
    """Measure in this process: `settings` of the engine, and `series` of [mode, batch, TPOT in ms]."""
    return _run_stock(task) if task.engine == "stock" else _run_connector(task)


def _run_stock(task: DecodeTask) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(model=task.spec.model, **task.spec.arguments())
    config = llm.llm_engine.vllm_config
    vocab_size = int(config.model_config.get_vocab_size())
    series = _short_series(StockEngine(llm), "stock", vocab_size, task)
    return {"settings": describe(config, task.spec), "series": series}


def _run_connector(task: DecodeTask) -> dict[str, Any]:
    source = RandomSource(task.tokens)
    options = task.options
    need = Need(options.k, output_tokens=options.output_tokens)
    with task.spec.open() as engine:
        series = _short_series(engine.offline, "connector", engine.vocab_size, task)
        encoding = encoding_for(engine, source, need, task.policy)
        encode_users(engine, encoding, [0])
        for batch in options.batches:
            asked = [encoding.workload.ask(0, number, options.k) for number in range(batch)]
            values: dict[str, list[float]] = {"hit": [], "inject": []}
            for repeat in range(options.repeats + 1):  # the first warms up
                for mode in ("hit", "inject"):
                    engine.reset_prefix_cache()
                    if mode == "hit":
                        drive(engine.offline, [iter([prime_of(one)]) for one in asked])
                    requests = [request_of(mode, one, encoding, options.output_tokens) for one in asked]
                    served = _at_once(engine.offline, requests)
                    for question, one in zip(asked, served, strict=True):
                        checked_counts(mode, question, one.request, one.generation, engine.block_size)
                    if repeat:
                        values[mode].append(_median_tpot(served))
            series += [[mode, batch, ones] for mode, ones in values.items()]
        return {"settings": engine.describe(), "series": series}


def _short_series(server: Server, mode: str, vocab_size: int, task: DecodeTask) -> list[list[Any]]:
    series = []
    generator = np.random.default_rng(task.tokens.seed)
    for batch in task.options.batches:
        values = []
        for repeat in range(task.options.repeats + 1):
            requests = [
                GenerationRequest(
                    generator.integers(10, vocab_size, size=_PROMPT_TOKENS).tolist(),
                    task.options.output_tokens,
                    sampling=SAMPLING,
                )
                for _ in range(batch)
            ]
            served = _at_once(server, requests)
            if repeat:
                values.append(_median_tpot(served))
        series.append([mode, batch, values])
    return series


def _at_once(server: Server, requests: Sequence[GenerationRequest]) -> list[Served]:
    return [one for lane in drive(server, [iter([request]) for request in requests]) for one in lane]


def _median_tpot(served: Sequence[Served]) -> float:
    return float(np.median([one.tpot_ms for one in served if one.tpot_ms is not None]))


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0])
    measured = run_task(DecodeTask.from_json(path.read_text(encoding="utf-8")))
    path.with_suffix(".json.out").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
