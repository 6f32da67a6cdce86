"""Tables and plots from rows of results; every number shown is a row."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from inferscale.bench.harness import Row
from inferscale.errors import InferScaleError, InvalidInput

_MODES = ("text", "hit", "inject", "none")
_RATIOS = ("text/inject", "inject/hit")
_COLOURS = {"text": "#c44e52", "hit": "#8c8c8c", "inject": "#4c72b0", "none": "#55a868"}


def ttft_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one run: median TTFT by k and mode, and the paired ratios.

    A k that was cut off is left out; raises InvalidInput where none was finished.
    """
    cells = {(row["k"], row["metric"], row["mode"]): row for row in rows if row["bench"] == "ttft"}
    columns = [("ttft", mode) for mode in _MODES] + [("ttft_ratio", name) for name in _RATIOS]
    ks = sorted(k for k in {k for k, _, _ in cells} if all((k, *column) in cells for column in columns))
    if not ks:
        raise InvalidInput("the run has no k with all four modes; it was cut off, so run it again.")
    lines = [
        "| k | prompt tokens | text | hit | inject | none | text/inject | inject/hit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for k in ks:
        times = [f"{cells[k, 'ttft', mode]['p50']:.1f} ms" for mode in _MODES]
        ratios = [_ratio(cells[k, "ttft_ratio", name]) for name in _RATIOS]
        tokens = cells[k, "ttft", "inject"]["config"]["prompt_tokens"]
        lines.append("| " + " | ".join([str(k), str(tokens), *times, *ratios]) + " |")
    return "\n".join([*lines, "", *_footer(rows)])


def _ratio(row: Row) -> str:
    low, high = row["ci95"]
    return f"{row['p50']:.2f}× ({low:.2f} to {high:.2f})"


def _footer(rows: Sequence[Row]) -> list[str]:
    first = next(row for row in rows if row["bench"] == "ttft")
    lines = [
        f"Medians of {first['n']} questions, four modes in turn; ratios are paired, with the 95 % interval "
        "of their median.",
        f"{first['model']}, {first['engine']}, {first['hardware']}, commit {first['commit']}, "
        f"run {first['run']}.",
    ]
    for row in rows:
        if row["metric"] == "tokens_per_stored_token":
            lines.append(
                f"Encoding {row['config']['turns']} turns with {row['config']['policy']} computed "
                f"{row['p50']:.2f} tokens per stored token."
            )
    return lines


def check_plotting() -> None:
    """Raise InferScaleError unless plots can be drawn: better before measuring than after."""
    if find_spec("matplotlib") is None:
        raise InferScaleError(
            "Plots need matplotlib, which is not installed. Run `make setup`, or "
            "`pip install inferscale[bench]`."
        )


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """TTFT over k as a PNG, one line a mode, shaded from the median to the 90th percentile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    for mode, colour in _COLOURS.items():
        points = sorted(
            (r["k"], r["p50"], r["p90"]) for r in rows if r["metric"] == "ttft" and r["mode"] == mode
        )
        ks, p50, p90 = zip(*points, strict=True)
        axes.plot(ks, p50, marker="o", color=colour, label=mode)
        axes.fill_between(ks, p50, p90, color=colour, alpha=0.15)
    first = next(row for row in rows if row["metric"] == "ttft")
    axes.set_yscale("log")
    axes.set_xlabel("facts in the prompt (k)")
    axes.set_ylabel("time to first token, ms (log scale)")
    axes.set_title(f"{first['model']}, {first['engine']}\n{first['hardware']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
