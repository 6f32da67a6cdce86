"""Plots from rows of results, as PNG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferscale.bench.harness import Row
from inferscale.bench.locomo_report import write_report
from inferscale.bench.modes import MODES
from inferscale.bench.report import latest_runs
from inferscale.errors import InferScaleError

_COLOURS = dict(zip(MODES, ("#c44e52", "#8c8c8c", "#4c72b0", "#55a868"), strict=True))


def check_plotting() -> None:
    """Raise InferScaleError unless plots can be drawn: better before measuring than after."""
    if find_spec("matplotlib") is None:
        raise InferScaleError(
            "Plots need matplotlib, which is not installed. Run `make setup`, or "
            "`pip install inferscale[bench]`."
        )


def plot_runs(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots of the last run of each benchmark, model and hardware that has one, of `locomo` its HTML page;
    returns their paths."""
    drawn = []
    for (bench, model, hardware), run in latest_runs(rows).items():
        draw = {"ttft": plot_ttft, "throughput": plot_throughput, "locomo": write_report}.get(bench)
        if draw is None:
            continue
        name = re.sub(r"[^a-z0-9.]+", "-", f"{bench} {model} {hardware}".lower()).strip("-")
        path = folder / f"{name}.{'html' if draw is write_report else 'png'}"
        draw(run, path)
        drawn.append(path)
    return drawn


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """TTFT over k, one line a mode, shaded from the median to the 90th percentile."""
    measured = [row for row in rows if row["bench"] == "ttft" and row["metric"] == "ttft"]
    figure, axes = _axes(measured[0])
    for mode, colour in _COLOURS.items():
        points = sorted((row["k"], row["p50"], row["p90"]) for row in measured if row["mode"] == mode)
        ks, p50, p90 = zip(*points, strict=True)
        axes.plot(ks, p50, marker="o", color=colour, label=mode)
        axes.fill_between(ks, p50, p90, color=colour, alpha=0.15)
    axes.set_yscale("log")
    axes.set_xlabel("facts in the prompt (k)")
    axes.set_ylabel("time to first token, ms (log scale)")
    axes.legend()
    _save(figure, path)


def plot_throughput(rows: Sequence[Row], path: Path) -> None:
    """Requests a second, one bar a mode."""
    rates = {row["mode"]: row for row in rows if row["metric"] == "requests_per_s"}
    first = next(iter(rates.values()))
    figure, axes = _axes(first)
    modes = [mode for mode in _COLOURS if mode in rates]
    values = [rates[mode]["p50"] for mode in modes]
    bars = axes.bar(modes, values, color=[_COLOURS[mode] for mode in modes])
    axes.bar_label(bars, fmt="%.1f")
    config = first["config"]
    axes.set_ylabel("requests a second")
    axes.set_xlabel(
        f"{config['users']} users at once, k={first['k']}, {config['output_tokens']} output tokens"
    )
    _save(figure, path)


def _axes(row: Row) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    axes.set_title(f"{row['model']}, {row['engine']}\n{row['hardware']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
