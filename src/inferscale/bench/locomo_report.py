"""Tables of `inferscale bench locomo`, in Markdown and as one HTML page with plots. Every number is a row."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.bench.harness import Row
from inferscale.bench.questions import CATEGORIES
from inferscale.errors import InvalidInput

_COLOURS = ("#4c72b0", "#55a868", "#8172b3", "#c44e52", "#937860", "#da8bc3")
_FIXED = {"text": "#222222", "none": "#aaaaaa"}
_METRICS = {
    "f1": "F1",
    "bleu1": "BLEU-1",
    "exact_match": "exact match",
    "judged_strict": "judged, strict",
    "judged_generous": "judged, generous",
    "adversarial_accuracy": "category 5",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; }
th { background: #f3f3f3; }
img { max-width: 100%; }
code { background: #f3f3f3; overflow-wrap: anywhere; }
"""


class Table(NamedTuple):
    """head: names of the columns."""

    title: str
    head: list[str]
    lines: list[list[str]]

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def html(self) -> str:
        def cells(tag: str, line: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) + "</tr>"

        body = "".join(cells("td", line) for line in self.lines)
        return f"<h2>{html.escape(self.title)}</h2>\n<table>{cells('th', self.head)}{body}</table>\n"


class _Way(NamedTuple):
    """k, mode, and the policy, or how the facts of mode text are arranged."""

    k: int
    mode: str
    name: str

    @property
    def shown(self) -> str:
        return f"{self.mode} {self.name}".strip()


_Cells = dict[_Way, dict[str, Row]]


def locomo_table(rows: Sequence[Row]) -> str:
    """One run in Markdown: scores and their differences to text, then F1 by category."""
    cells = _cells(rows)
    parts = [table.markdown() for table in _tables(rows, cells)]
    return "\n\n".join([*parts, _source(cells)])


def write_report(rows: Sequence[Row], path: Path) -> None:
    """One run as an HTML page that needs no other file. Without matplotlib it has no plots."""
    cells = _cells(rows)
    first = _first(cells)
    config = first["config"]
    has_plots = find_spec("matplotlib") is not None
    plots = [_plot_by_k(cells), _plot_by_category(cells)] if has_plots else []
    parts = [
        "<!doctype html>\n<html lang=en><meta charset=utf-8>",
        f"<title>LoCoMo: {html.escape(first['model'])}</title><style>{_STYLE}</style>",
        f"<h1>LoCoMo: {html.escape(first['model'])}</h1>\n<p>{html.escape(_source(cells))}</p>",
        *(
            f'<p><img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
            for alt, png in plots
            if png
        ),
        *(table.html() for table in _tables(rows, cells)),
        f"<h2>Command</h2>\n<p><code>{html.escape(str(config.get('command', 'unknown')))}</code></p>",
        "</html>\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def _cells(rows: Sequence[Row]) -> _Cells:
    cells: _Cells = {}
    for row in rows:
        if row["bench"] != "locomo" or row["mode"] is None:
            continue
        config = row["config"]
        name = config.get("policy", config.get("arrangement", ""))
        cells.setdefault(_Way(row["k"], row["mode"], name), {})[row["metric"]] = row
    if not any("cut_answers" in found for found in cells.values()):
        raise InvalidInput("the run has no scored answers; it was cut off, so run it again.")
    return cells


def _first(cells: _Cells) -> Row:
    return next(row for found in cells.values() for row in found.values())


def _tables(rows: Sequence[Row], cells: _Cells) -> list[Table]:
    found = [_scores(cells), _differences(cells)]
    for metric in ("f1", "judged_strict", "judged_generous"):
        found += [_categories(cells, metric), _categories(cells, f"delta_{metric}")]
    found += [_costs(cells), _recall(rows)]
    return [table for table in found if table.lines]


def _scores(cells: _Cells) -> Table:
    metrics = [name for name in _METRICS if any(name in found for found in cells.values())]
    lines = [
        [str(way.k), way.shown + _mark(found), *(_points(found.get(name)) for name in metrics)]
        for way, found in cells.items()
    ]
    return Table("Scores", ["k", "mode", *(_METRICS[name] for name in metrics)], lines)


def _differences(cells: _Cells) -> Table:
    """Of injection to text with the same facts in the same places."""
    lines = []
    for way, found in cells.items():
        for metric, name in _METRICS.items():
            row = found.get(f"delta_{metric}")
            if row is not None:
                lines.append(_difference(way, found, row, f"{name}, inject − text"))
    head = ["k", "mode", "what", "points", "by conversation", "only inject right", "only text right", "p"]
    return Table("Injected beside text", head, lines)


def _difference(way: _Way, found: dict[str, Row], row: Row, name: str) -> list[str]:
    config = row["config"]
    clustered = config.get("ci95_by_conversation")
    counts = config.get("mcnemar")
    return [
        str(way.k),
        way.shown + _mark(found),
        name,
        _points(row, "+.2f"),
        _interval(clustered, "+.2f") if clustered else "",
        *(
            [str(counts["only_inject"]), str(counts["only_text"]), f"{counts['p_value']:.3g}"]
            if counts
            else [""] * 3
        ),
    ]


def _categories(cells: _Cells, metric: str) -> Table:
    form = "+.1f" if metric.startswith("delta_") else ".1f"
    base = _METRICS[metric.removeprefix("delta_")]
    name = f"{base}, inject − text" if metric.startswith("delta_") else base
    lines = []
    for way, found in cells.items():
        row = found.get(metric)
        if row is not None:
            means = row["config"]["by_category"]
            shown = [
                f"{100 * means[str(number)]:{form}}" if str(number) in means else "" for number in CATEGORIES
            ]
            lines.append([str(way.k), way.shown, *shown])
    heads = [f"{number} {kind}" for number, kind in CATEGORIES.items()]
    return Table(f"{name} by category", ["k", f"mode: {name}", *heads], lines)


def _costs(cells: _Cells) -> Table:
    metrics = {
        "same_answers": ("same answer as text", ".1%"),
        "cut_answers": ("cut off", ".1%"),
        "prompt_tokens": ("prompt tokens", ",.0f"),
        "prefilled_share": ("prefilled", ".1%"),
        "tokens_per_stored_token": ("encode cost", ".2f"),
    }
    lines = [
        [
            str(way.k),
            way.shown,
            *(f"{found[name]['p50']:{form}}" if name in found else "" for name, (_, form) in metrics.items()),
        ]
        for way, found in cells.items()
        if "cut_answers" in found
    ]
    return Table("Cost", ["k", "mode", *(title for title, _ in metrics.values())], lines)


def _recall(rows: Sequence[Row]) -> Table:
    found = [row for row in rows if row["bench"] == "locomo" and row["metric"] == "recall"]
    lines = []
    for row in found:
        means = row["config"]["by_category"]
        shown = [f"{100 * means[str(number)]:.1f}" if str(number) in means else "" for number in CATEGORIES]
        lines.append([str(row["k"]), _points(row), *shown, str(row["config"]["recall_questions"])])
    heads = [f"{number} {kind}" for number, kind in CATEGORIES.items()]
    return Table("Recall of the evidence", ["k", "recall", *heads, "questions"], lines)


def _plot_by_k(cells: _Cells) -> tuple[str, bytes]:
    """F1 over k, one line a mode, with the interval of each point."""
    alt = "F1 over the number of facts"
    scored = {way: found["f1"] for way, found in cells.items() if "f1" in found}
    if not scored:
        return alt, b""
    figure, axes = _axes()
    ks = sorted({way.k for way in scored if way.mode != "none"})
    for place, (name, colour) in enumerate(_colours(cells).items()):
        points = sorted((way.k, row["p50"], *row["ci95"]) for way, row in scored.items() if way.shown == name)
        if name == "none":
            axes.axhline(100 * points[0][1], color=colour, linestyle="--", label=name)
            continue
        xs, values, lows, highs = zip(*points, strict=True)
        down = [100 * (value - low) for value, low in zip(values, lows, strict=True)]
        up = [100 * (high - value) for value, high in zip(values, highs, strict=True)]
        shift = 0.006 * ks[-1] * place  # or the intervals of all modes lie upon each other
        axes.errorbar(
            [x + shift for x in xs],
            [100 * value for value in values],
            yerr=[down, up],
            marker="o",
            capsize=3,
            color=colour,
            label=name,
        )
    axes.set_xticks(ks)
    axes.set_xlabel("facts in the prompt (k)")
    axes.set_ylabel("token F1 × 100")
    axes.legend()
    return alt, _png(figure)


def _plot_by_category(cells: _Cells) -> tuple[str, bytes]:
    """F1 of each category at the largest k, one bar a mode."""
    alt = "F1 by category"
    largest = max(way.k for way in cells)
    scored = {
        way.shown: found["f1"]["config"]["by_category"]
        for way, found in cells.items()
        if "f1" in found and way.k in (largest, 0)
    }
    if not scored:
        return alt, b""
    figure, axes = _axes()
    numbers = sorted({number for means in scored.values() for number in means})
    width = 0.8 / len(scored)
    for place, (name, means) in enumerate(scored.items()):
        xs = [index + (place - (len(scored) - 1) / 2) * width for index in range(len(numbers))]
        values = [100 * means.get(number, 0.0) for number in numbers]
        axes.bar(xs, values, width, color=_colours(cells)[name], label=name)
    axes.set_xticks(range(len(numbers)), [CATEGORIES[int(number)] for number in numbers])
    axes.set_ylabel(f"token F1 × 100, k={largest}")
    axes.legend()
    return alt, _png(figure)


def _colours(cells: _Cells) -> dict[str, str]:
    """What is shown → its colour."""
    names = list(dict.fromkeys(way.shown for way in cells))
    others = [name for name in names if name not in _FIXED]
    free = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(others)}
    return {name: _FIXED.get(name) or free[name] for name in names}


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=130)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    written = io.BytesIO()
    figure.savefig(written, format="png")
    plt.close(figure)
    return written.getvalue()


def _mark(found: dict[str, Row]) -> str:
    return " (default)" if any(row["config"].get("default") for row in found.values()) else ""


def _points(row: Row | None, form: str = ".1f") -> str:
    """Hundredths of a share, with the interval."""
    if row is None:
        return ""
    return f"{100 * row['p50']:{form}} {_interval(row['ci95'], form)}"


def _interval(bounds: Sequence[float], form: str) -> str:
    low, high = bounds
    return f"({100 * low:{form}} to {100 * high:{form}})"


def _source(cells: _Cells) -> str:
    first = _first(cells)
    config = first["config"]
    facts = "turns" if config["facts"] == "turns" else "facts extracted of the turns"
    judge = next(
        (
            row["config"]["judge"]
            for found in cells.values()
            for row in found.values()
            if "judge" in row["config"]
        ),
        None,
    )
    numbers = (
        f"{config['questions']} questions of categories 1 to 4 and {config['adversarial_questions']} of "
        f"category 5 about conversations {config['conversations']}; memory holds {facts}."
    )
    forms = (
        "Scores in hundredths, with their 95 % bootstrap intervals over questions; `by conversation` draws "
        "conversations instead. p: McNemar's test."
    )
    machine = f"{first['model']}, {first['engine']}, {first['hardware']}, commit {first['commit']}, run"
    judged = f" Judge: {judge}." if judge else ""
    return f"{numbers} {forms}{judged} {machine} {first['run']}."
