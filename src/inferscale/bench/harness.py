"""Rows of benchmark results: one JSON object a line, append-only, the same keys for every benchmark.

Keys: `run`, `bench`, `metric`, `unit`, `mode`, `k`, `model`, `hardware`, `engine`, `commit`, `config`,
`n`, `p50`, `p90`, `p99`; ratios also have `ci95`, a 95 % interval of the median. `commit` is that of the
checkout, or what the environment variable INFERSCALE_COMMIT says.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from inferscale.errors import InvalidInput

Row = dict[str, Any]
Say = Callable[[str], None]
N = TypeVar("N", int, float)

KEYS = (
    "run", "bench", "metric", "unit", "mode", "k", "model", "hardware", "engine", "commit", "config", "n",
    "p50", "p90", "p99",
)  # fmt: skip
_RESAMPLES = 2000
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


@dataclass
class BenchRun:
    """One run: what its rows share, and where they are appended.

    config: settings of the whole run; may grow before the first row. commit: at its start.
    """

    bench: str
    model: str
    out: Path | None
    config: dict[str, Any] = field(default_factory=dict)
    commit: str = field(default_factory=lambda: commit())
    id: str = field(default_factory=lambda: f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}")
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        metric: str,
        unit: str,
        values: Sequence[float],
        *,
        mode: str | None = None,
        k: int | None = None,
        ci95: tuple[float, float] | None = None,
        config: dict[str, Any] | None = None,
        bench: str | None = None,
    ) -> Row:
        """Append one row for `values`; `config` is added to that of the run.

        bench: where the run measures something of another benchmark on its way.
        """
        p50, p90, p99 = (float(np.percentile(values, q)) for q in (50, 90, 99))
        row: Row = {
            "run": self.id,
            "bench": bench or self.bench,
            "metric": metric,
            "unit": unit,
            "mode": mode,
            "k": k,
            "model": self.model,
            "hardware": hardware(),
            "engine": engine(),
            "commit": self.commit,
            "config": {**self.config, **(config or {})},
            "n": len(values),
            "p50": round(p50, 4),
            "p90": round(p90, 4),
            "p99": round(p99, 4),
        }
        if ci95 is not None:
            row["ci95"] = [round(bound, 4) for bound in ci95]
        self.rows.append(row)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def add_ratio(
        self,
        metric: str,
        name: str,
        over: Sequence[float],
        under: Sequence[float],
        *,
        k: int | None = None,
        config: dict[str, Any] | None = None,
    ) -> Row:
        """Paired ratio over/under, such as text/inject: the median and its 95 % bootstrap interval."""
        ratios = np.asarray(over) / np.asarray(under)
        ci95 = median_interval(ratios)
        return self.add(f"{metric}_ratio", "x", ratios.tolist(), mode=name, k=k, ci95=ci95, config=config)


def middle(values: Sequence[N]) -> N:
    """The median that was measured: of an even number of values the upper one of the two in the middle."""
    return sorted(values)[len(values) // 2]


def median_interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; deterministic."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[picks], axis=1)
    return float(np.percentile(medians, 2.5)), float(np.percentile(medians, 97.5))


def read_rows(path: Path) -> list[Row]:
    """All rows of a results file, oldest first. Raises InvalidInput for a damaged one."""
    rows: list[Row] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read as rows of results: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"Line {number} of {path} is damaged: {error}. Remove it.") from error
        missing = [key for key in KEYS if key not in row] if isinstance(row, dict) else list(KEYS)
        if missing:
            raise InvalidInput(
                f"Line {number} of {path} is no row of results: it lacks {', '.join(missing)}. Remove it."
            )
        rows.append(row)
    return rows


def command() -> str:
    """The command line of this process, ready to be repeated."""
    name = Path(sys.argv[0]).name
    return shlex.join(["inferscale" if name == "__main__.py" else name, *sys.argv[1:]])


def environment() -> dict[str, str]:
    """Those settings in the environment that change what an engine does and how fast."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def hardware() -> str:
    """The accelerator's name, or the CPU's with the number of usable cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def engine() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "none"


def commit() -> str:
    """The checkout's commit, with `+` where a tracked file differs from it; `unknown` outside a checkout.

    Results do not count: a run changes them itself. Where the benchmark runs on a copy without git's
    history, set INFERSCALE_COMMIT to the commit that was copied (`git describe --always --dirty=+`): it is
    recorded as it is.
    """
    given = os.environ.get("INFERSCALE_COMMIT", "").strip()
    if given:
        return given
    results = ":(top,exclude)benchmarks/results"
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # not merely inside somebody's checkout
        name = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", results)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
