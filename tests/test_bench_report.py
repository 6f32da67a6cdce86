"""Tables and plots made from rows, the newest run of each benchmark, model and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale.bench import plots
from inferscale.bench.harness import BenchRun, Row, read_rows
from inferscale.bench.modes import MODES, STEADY_LOOP
from inferscale.bench.plots import plot_runs, plot_ttft
from inferscale.bench.report import (
    encode_table,
    latest_runs,
    plain_table,
    report,
    throughput_table,
    ttft_table,
)
from inferscale.errors import InferScaleError, InvalidInput

STORED = Path(__file__).parent.parent / "benchmarks" / "results" / "ttft.jsonl"


def ttft_run(run_id: str = "20300101T000000-a", model: str = "m", ms: float = 10.0) -> list[Row]:
    run = BenchRun("ttft", model, None, {"tail": "5,10%"}, id=run_id, commit="abc")
    run.add(
        "tokens_per_stored_token", "tokens", [2.16], bench="encode", config={"facts": 24, "policy": "alone"}
    )
    for k in (0, 50):
        for mode in MODES:
            value = ms * (1 + k) if mode == "text" else ms
            run.add("ttft", "ms", [value] * 4, mode=mode, k=k, config={"prompt_tokens": 40 + k})
        for name in ("text/inject", "inject/hit"):
            run.add_ratio("ttft", name, [ms * (1 + k)] * 4, [ms] * 4, k=k)
    return run.rows


def throughput_run(loop: str | None = STEADY_LOOP) -> list[Row]:
    config = {"users": 8, "rounds": 2, "output_tokens": 50, "prefilled_tokens": 32}
    config |= {} if loop is None else {"loop": loop}
    run = BenchRun("throughput", "m", None, config, id="20300101T000000-b", commit="abc")
    for mode in MODES:
        run.add("requests_per_s", "requests/s", [10.0, 12.0], mode=mode, k=50)
        run.add("output_tokens_per_s", "tokens/s", [1500.0], mode=mode, k=50)
        run.add("ttft", "ms", [5.0, 9.0], mode=mode, k=50)
        run.add("tpot", "ms", [1.25], mode=mode, k=50)
    run.add_ratio("requests_per_s", "inject/text", [6.0, 6.0], [1.0, 1.0], k=50)
    return run.rows


def test_ttft_table() -> None:
    table = ttft_table(ttft_run())
    assert "| 50 | 90 | 510.0 ms | 10.0 ms | 10.0 ms | 10.0 ms | 51.00× (51.00 to 51.00) |" in table
    assert "Encoding 24 facts with alone computed 2.16 tokens per stored token" in table
    assert "Recomputed in inject: 5,10%." in table


def test_a_run_that_was_cut_off_shows_what_it_finished() -> None:
    rows = ttft_run()
    cut_off = [row for row in rows if (row["k"], row["mode"]) != (50, "none")]
    assert [line[:4] for line in ttft_table(cut_off).splitlines()[2:4]] == ["| 0 ", ""]
    with pytest.raises(InvalidInput, match="was cut off"):
        ttft_table([row for row in rows if row["mode"] != "none"])
    assert "was cut off" in report([row for row in rows if row["mode"] != "none"])


def test_throughput_table() -> None:
    table = throughput_table(throughput_run())
    assert "| inject | 11.0 | 1,500 | 7.0 ms | 9.0 ms | 1.25 ms | 1.25 ms | 32 |" in table
    assert "8 users at once, 16 requests in steady load, k=50" in table
    assert "inject/text 6.00× (6.00 to 6.00). Recomputed in inject: 0." in table
    with pytest.raises(InvalidInput, match="cut off"):
        throughput_table([])


@pytest.mark.parametrize("loop", [None, "closed: a user's next request is sent when its last one is done"])
def test_an_older_run_was_not_in_steady_load(loop: str | None) -> None:
    assert "8 users at once, 16 requests, not in steady load, k=50" in throughput_table(throughput_run(loop))


def test_a_ratio_that_older_runs_have_not_is_left_out() -> None:
    rows = ttft_run()
    assert "| text/inject | inject/hit |" in ttft_table(rows)
    without = [row for row in rows if row["mode"] != "inject/hit"]
    table = ttft_table(without)
    assert "| none | text/inject |\n" in table
    assert "| 50 | 90 | 510.0 ms |" in table


def test_encode_table_with_and_without_the_baseline() -> None:
    run = BenchRun("encode", "m", None, {"facts": 30, "policy": "sliding(4,4)"})
    for mode in ("encode", "compute only"):
        run.add("computed_tokens_per_s", "tokens/s", [2000.0], mode=mode)
    run.add("stored_tokens_per_s", "tokens/s", [1000.0], mode="encode")
    run.add("encode_rate", "facts/s", [33.25], mode="encode")
    with pytest.raises(InvalidInput, match="cut off"):
        encode_table(run.rows)
    run.add("tokens_per_stored_token", "tokens", [2.0])
    table = encode_table(run.rows)
    assert "| encode | 1,000 | 33.2 | 2,000 |" in table
    assert "| compute only |  |  | 2,000 |" in table
    assert "30 facts, sliding(4,4): 2.00 tokens computed per stored token." in table


def test_a_plain_table_shows_what_differs() -> None:
    run = BenchRun("decode", "m", None, {"same": 1})
    run.add("tpot", "ms", [2.0], mode="stock", config={"batch": 1})
    run.add("minus", "ms", [3.0], mode="stock", ci95=(2.5, 3.5), config={"batch": 64})
    table = plain_table(run.rows)
    assert table.splitlines()[0] == "| metric | mode | k | batch | n | p50 | p90 | p99 | unit |"
    assert "| minus | stock |  | 64 | 1 | 3 (2.5 to 3.5) | 3 | 3 | ms |" in table


def test_the_newest_run_of_each_model_is_shown_whatever_the_order() -> None:
    newest, oldest = ttft_run("20300102T000000-a"), ttft_run("20300101T000000-z", ms=99.0)
    other = ttft_run("20290101T000000-a", model="other")
    runs = latest_runs([*newest, *oldest, *other])
    assert sorted((bench, model) for bench, model, _ in runs) == [
        ("encode", "m"), ("encode", "other"), ("ttft", "m"), ("ttft", "other"),
    ]  # fmt: skip
    assert all(
        row["run"] == "20300102T000000-a"
        for (_, model, _), run in runs.items()
        if model == "m"
        for row in run
    )
    text = report([*newest, *oldest, *other])
    assert "## ttft: m on" in text
    assert "99.0 ms" not in text


def test_stored_results_still_make_tables(tmp_path: Path) -> None:
    rows = read_rows(STORED)
    assert "## ttft: SmolLM2-135M-Instruct on" in report(rows)
    assert plot_runs(rows, tmp_path)


def test_plots(tmp_path: Path) -> None:
    drawn = plot_runs([*ttft_run(), *throughput_run()], tmp_path / "plots")
    assert len(drawn) == 2
    plot_ttft(ttft_run(), tmp_path / "more" / "ttft.png")
    for path in [*drawn, tmp_path / "more" / "ttft.png"]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    plots.check_plotting()
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(InferScaleError, match=r"make setup.*inferscale\[bench\]"):
        plots.check_plotting()


def test_nothing_measured_is_an_empty_report() -> None:
    rows: list[dict[str, Any]] = []
    assert report(rows) == ""
