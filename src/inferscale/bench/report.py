"""Tables from rows of results; every number shown is a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from inferscale.bench.fidelity_rows import fidelity_table
from inferscale.bench.harness import Row
from inferscale.bench.locomo_report import locomo_table
from inferscale.bench.modes import MODES, RATE_RATIOS, STEADY_LOOP, TTFT_RATIOS, Ratio
from inferscale.errors import InvalidInput


def ttft_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one run: median TTFT by k and mode, and the paired ratios.

    A k that was cut off is left out, and a ratio that the run has not (older ones have fewer); raises
    InvalidInput where no k was finished.
    """
    cells = {(row["k"], row["metric"], row["mode"]): row for row in rows if row["bench"] == "ttft"}
    names = _measured(TTFT_RATIOS, {name for _, metric, name in cells if metric == "ttft_ratio"})
    columns = [("ttft", mode) for mode in MODES] + [("ttft_ratio", name) for name in names]
    ks = sorted(k for k in {k for k, _, _ in cells} if all((k, *column) in cells for column in columns))
    if not ks:
        raise InvalidInput("the run has no k with all four modes; it was cut off, so run it again.")
    lines = _head("k", "prompt tokens", *MODES, *names)
    for k in ks:
        times = [f"{cells[k, 'ttft', mode]['p50']:.1f} ms" for mode in MODES]
        ratios = [_ratio(cells[k, "ttft_ratio", name]) for name in names]
        tokens = cells[k, "ttft", "inject"]["config"]["prompt_tokens"]
        lines.append(_line(k, tokens, *times, *ratios))
    first = next(row for row in rows if row["bench"] == "ttft")
    lines += [
        "",
        f"Medians of {first['n']} questions, four modes in turn; ratios are paired, with the 95 % interval "
        f"of their median. Recomputed in inject: {first['config'].get('tail', 0)}.",
        _source(first),
    ]
    for row in rows:
        if row["metric"] == "tokens_per_stored_token":
            config = row["config"]
            what = f"{config['turns']} turns" if "turns" in config else f"{config['facts']} facts"
            lines.append(
                f"Encoding {what} with {config['policy']} computed {row['p50']:.2f} tokens per stored token."
            )
    return "\n".join(lines)


def throughput_table(rows: Sequence[Row]) -> str:
    """One run: rates, TTFT and time per output token by mode, and the paired ratios of rates."""
    cells = {(row["metric"], row["mode"]): row for row in rows if row["bench"] == "throughput"}
    modes = [mode for mode in MODES if ("requests_per_s", mode) in cells]
    if not modes:
        raise InvalidInput("the run has no finished mode; it was cut off, so run it again.")
    lines = _head(
        "mode", "requests/s", "output tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "prefilled"
    )
    for mode in modes:
        ttft, tpot = cells["ttft", mode], cells.get(("tpot", mode))
        per_token = [f"{tpot[q]:.2f} ms" if tpot else "" for q in ("p50", "p99")]
        lines.append(
            _line(
                mode,
                _rate(cells["requests_per_s", mode]),
                _rate(cells["output_tokens_per_s", mode]),
                f"{ttft['p50']:.1f} ms",
                f"{ttft['p99']:.1f} ms",
                *per_token,
                ttft["config"]["prefilled_tokens"],
            )
        )
    names = _measured(RATE_RATIOS, {name for metric, name in cells if metric == "requests_per_s_ratio"})
    ratios = [f"{name} {_ratio(cells['requests_per_s_ratio', name])}" for name in names]
    first = cells["requests_per_s", modes[0]]
    config = first["config"]
    load = " in steady load" if config.get("loop") == STEADY_LOOP else ", not in steady load"
    return "\n".join(
        [
            *lines,
            "",
            f"{config['users']} users at once, {config['users'] * config['rounds']} requests{load}, "
            f"k={first['k']}, {config['output_tokens']} output tokens, {first['n']} repeats of all modes in "
            f"turn. Requests/s: {', '.join(ratios)}. Recomputed in inject: {config.get('tail', 0)}.",
            _source(first),
        ]
    )


def encode_table(rows: Sequence[Row]) -> str:
    """One run: how fast facts were encoded, and what computing the same passes took."""
    cells = {(row["metric"], row["mode"]): row for row in rows if row["bench"] == "encode"}
    lines = _head("", "stored tokens/s", "facts/s", "computed tokens/s")
    metrics = ("stored_tokens_per_s", "encode_rate", "computed_tokens_per_s")
    for mode in ("encode", "compute only"):
        found = [cells.get((metric, mode)) for metric in metrics]
        if any(found):
            lines.append(_line(mode, *(_rate(row) if row else "" for row in found)))
    cost = next((row for row in rows if row["metric"] == "tokens_per_stored_token"), None)
    if len(lines) == 2 or cost is None:
        raise InvalidInput("the run was cut off, so run it again.")
    config = cost["config"]
    what = f"{config['turns']} turns" if "turns" in config else f"{config['facts']} facts"
    told = f"{what}, {config['policy']}: {cost['p50']:.2f} tokens computed per stored token."
    return "\n".join([*lines, "", told, _source(cost)])


def plain_table(rows: Sequence[Row]) -> str:
    """Any rows as they are; what differs between their configs stands beside them."""
    shown = [
        name
        for name in dict.fromkeys(name for row in rows for name in row["config"])
        if len({repr(row["config"].get(name)) for row in rows}) > 1
    ]
    lines = _head("metric", "mode", "k", *shown, "n", "p50", "p90", "p99", "unit")
    for row in rows:
        config = [row["config"].get(name, "") for name in shown]
        ends = [row["mode"] or "", "" if row["k"] is None else row["k"]]
        p50 = _ratio(row) if "ci95" in row and row["unit"] == "x" else f"{row['p50']:.4g}{_interval(row)}"
        numbers = [row["n"], p50, f"{row['p90']:.4g}", f"{row['p99']:.4g}", row["unit"]]
        lines.append(_line(row["metric"], *ends, *config, *numbers))
    return "\n".join([*lines, "", _source(rows[0])])


_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "ttft": ttft_table,
    "throughput": throughput_table,
    "encode": encode_table,
    "fidelity": fidelity_table,
    "locomo": locomo_table,
}


def table(rows: Sequence[Row]) -> str:
    """One run, in the form of its benchmark (that of its last row)."""
    return _TABLES.get(rows[-1]["bench"], plain_table)(rows)


def latest_runs(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(bench, model, hardware) → the rows of its last run; for `ttft` with what else that run measured."""
    last: dict[tuple[str, str, str], str] = {}
    for row in rows:  # a run's id begins with its time
        key = (row["bench"], row["model"], row["hardware"])
        last[key] = max(last.get(key, ""), row["run"])
    return {
        key: [row for row in rows if row["run"] == run and (row["bench"] == key[0] or key[0] == "ttft")]
        for key, run in sorted(last.items())
    }


def report(rows: Sequence[Row]) -> str:
    """Markdown: a table for the last run of each benchmark, model and hardware."""
    parts = []
    for (bench, model, hardware), run in latest_runs(rows).items():
        try:
            shown = _TABLES.get(bench, plain_table)(run)
        except InvalidInput as error:
            shown = f"Run {run[0]['run']}: {error}"
        parts.append(f"## {bench}: {model} on {hardware}\n\n{shown}\n")
    return "\n".join(parts)


def _measured(ratios: Sequence[Ratio], names: Collection[str | None]) -> list[str]:
    return [str(ratio) for ratio in ratios if str(ratio) in names]


def _head(*names: str) -> list[str]:
    return [_line(*names), _line(*["---"] * len(names))]


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _rate(row: Row) -> str:
    return f"{row['p50']:,.0f}" if row["p50"] >= 1000 else f"{row['p50']:.1f}"


def _ratio(row: Row) -> str:
    low, high = row["ci95"]
    return f"{row['p50']:.2f}× ({low:.2f} to {high:.2f})"


def _interval(row: Row) -> str:
    return f" ({row['ci95'][0]:.4g} to {row['ci95'][1]:.4g})" if "ci95" in row else ""


def _source(row: Row) -> str:
    return f"{row['model']}, {row['engine']}, {row['hardware']}, commit {row['commit']}, run {row['run']}."
