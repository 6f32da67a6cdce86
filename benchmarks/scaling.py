#!/usr/bin/env python3
"""What many users need: KV in each tier, GPUs, bandwidth, and cost beside text prefill.

    python benchmarks/scaling.py                        the tables of docs/scaling.md
    python benchmarks/scaling.py --users 50000 --requests-per-session 12 --host-gib 1000
    python benchmarks/scaling.py --write                write them into docs/scaling.md

Arithmetic on two kinds of numbers: those measured, each with the row in benchmarks/results that it is read
from, and assumptions about the users, each of which is an option. Nothing is run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inferscale.bench.harness import Row, read_rows
from inferscale.capacity import GIB, FactSize, fact_size, size_text, token_bytes_of
from inferscale.capacity import plan as kv_plan

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOC = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- benchmarks/scaling.py: begin -->\n", "<!-- benchmarks/scaling.py: end -->\n"
DAY_S, HOUR_S = 86_400, 3600
MODEL = "Llama-3.1-8B"
"""Whose shape was measured."""
POOLS = ("bfloat16", "int8")
"""How the pool and the tiers below it keep KV. The rates are those of bfloat16 for both."""


@dataclass(frozen=True)
class Assumed:
    """About the users, and prices. Nothing of it is measured."""

    users: int = 1_000_000
    facts: int = 100
    tokens_per_fact: int = 30
    sessions_per_day: float = 2.0
    requests_per_session: float = 10.0
    session_minutes: float = 10.0
    new_facts_per_session: float = 2.0
    peak: float = 3.0
    busy_share: float = 0.7
    encoded_when_cold: int = 60
    pool_gib: float = 60.0
    host_gib: float = 250.0
    gpu_dollars_per_hour: float = 3.0


class Measured(NamedTuple):
    """value: the row's median. where: file and run."""

    value: float
    where: str


@dataclass(frozen=True)
class Rows:
    """One GPU (NVIDIA H200) with the shape of Llama-3.1-8B; the catalog on two CPU cores."""

    text_per_s: Measured
    inject_per_s: Measured
    none_per_s: Measured
    encoded_facts_per_s: Measured
    ttft_pool_ms: Measured
    ttft_host_ms: Measured
    ttft_text_ms: Measured
    catalog_bytes: Measured
    index_mib: Measured
    start_s: Measured
    search_ms: Measured
    top_k: int
    catalog_facts: int


def read_measured(folder: Path = RESULTS) -> Rows:
    """Raises SystemExit where a row is missing."""

    def find(file: str, run: str, metric: str, mode: str | None = None, of: str | None = None) -> Row:
        for row in read_rows(folder / file):
            fits = row["run"] == run and row["metric"] == metric and row["mode"] == mode
            if fits and (of is None or row["config"].get("of") == of):
                return row
        raise SystemExit(f"{folder / file} has no row of {metric} ({mode or of}) of the run {run}.")

    def value(file: str, run: str, metric: str, mode: str | None = None, of: str | None = None) -> Measured:
        return Measured(float(find(file, run, metric, mode, of)["p50"]), f"`{file}` {run}")

    load, tiers, scale = "20261129T193602-41ed25", "20261130T032922-a43e31", "20261130T005407-0ea9b3"
    throughput = find("h200/throughput.jsonl", load, "requests_per_s", "inject")
    return Rows(
        text_per_s=value("h200/throughput.jsonl", load, "requests_per_s", "text"),
        inject_per_s=value("h200/throughput.jsonl", load, "requests_per_s", "inject"),
        none_per_s=value("h200/throughput.jsonl", load, "requests_per_s", "none"),
        encoded_facts_per_s=value("h200/encode.jsonl", "20261129T193732-24e1e8", "encode_rate", "encode"),
        ttft_pool_ms=value("h200/tiers.jsonl", tiers, "ttft", "pool"),
        ttft_host_ms=value("h200/tiers.jsonl", tiers, "ttft", "host"),
        ttft_text_ms=value("h200/tiers.jsonl", tiers, "ttft", "text"),
        catalog_bytes=value("scale.jsonl", scale, "catalog_size"),
        index_mib=value("scale.jsonl", scale, "memory", of="the index"),
        start_s=value("scale.jsonl", scale, "start_time"),
        search_ms=value("scale.jsonl", scale, "search_time", of="one user"),
        top_k=int(throughput["k"]),
        catalog_facts=int(find("scale.jsonl", scale, "catalog_size")["config"]["facts"]),
    )


class Way(NamedTuple):
    """One way to answer. gpu_s: of one session, all its requests and what has to be encoded for it. kv_bytes:
    that a session needs in memory while it lasts."""

    name: str
    gpu_s: float
    kv_bytes: int


class Load(NamedTuple):
    sessions_per_s: float
    requests_per_s: float
    talking: int
    """Users in a session at the peak."""


def load_of(assumed: Assumed) -> Load:
    """At the peak."""
    sessions = assumed.users * assumed.sessions_per_day / DAY_S * assumed.peak
    talking = min(assumed.users, math.ceil(sessions * assumed.session_minutes * 60))
    return Load(sessions, sessions * assumed.requests_per_session, talking)


def ways_of(assumed: Assumed, rows: Rows) -> list[Way]:
    """From text; with KV that was kept since the last session; and with KV that is nowhere when a session
    begins: its first request is answered from text, and what it missed is encoded."""
    text, inject = 1 / rows.text_per_s.value, 1 / rows.inject_per_s.value
    count, encoding = assumed.requests_per_session, 1 / rows.encoded_facts_per_s.value
    new = assumed.new_facts_per_session * encoding
    kept = count * inject + new
    nowhere = text + (count - 1) * inject + new + assumed.encoded_when_cold * encoding
    ways = [Way("text", count * text, 0)]
    for dtype in POOLS:
        size = fact_of(assumed, dtype).host * min(assumed.facts, rows.top_k)
        ways += [Way(f"{dtype}, KV kept", kept, size), Way(f"{dtype}, KV nowhere", nowhere, size)]
    return ways


def fact_of(assumed: Assumed, dtype: str) -> FactSize:
    return fact_size(token_bytes_of(MODEL, dtype), assumed.tokens_per_fact)


def computed_users(way: Way, assumed: Assumed) -> float:
    """Users in a session that one GPU has the time for."""
    return assumed.session_minutes * 60 / way.gpu_s * assumed.busy_share


def held_users(way: Way, assumed: Assumed) -> float:
    """Those whose KV fits into the host memory beside one GPU, which has a copy of what its pool holds."""
    return max(assumed.host_gib, assumed.pool_gib) * GIB / way.kv_bytes if way.kv_bytes else math.inf


def gpus_of(way: Way, assumed: Assumed) -> int:
    """At the peak."""
    return math.ceil(load_of(assumed).talking / min(computed_users(way, assumed), held_users(way, assumed)))


def cost_of(way: Way, assumed: Assumed) -> float:
    """Dollars of 1,000 requests, with the GPUs of the peak all day."""
    thousands = load_of(assumed).requests_per_s / assumed.peak * HOUR_S / 1000
    return gpus_of(way, assumed) * assumed.gpu_dollars_per_hour / thousands


def tables(assumed: Assumed, rows: Rows) -> Iterator[str]:
    yield from _measured_table(rows)
    yield from _load_table(assumed)
    yield from _kv_table(assumed, rows)
    yield from _gpu_table(assumed, rows)
    yield from _catalog_table(assumed, rows)


def _measured_table(rows: Rows) -> Iterator[str]:
    of = f"k = {rows.top_k}, 50 output tokens"
    shown = [
        (f"requests/s from text, {of}", ".1f", "", rows.text_per_s),
        (f"requests/s injected, {of}", ".1f", "", rows.inject_per_s),
        ("requests/s without memory", ".1f", "", rows.none_per_s),
        ("facts/s encoded", ".0f", "", rows.encoded_facts_per_s),
        ("TTFT from the pool", ".1f", " ms", rows.ttft_pool_ms),
        ("TTFT, 45 of 50 facts from host memory", ".1f", " ms", rows.ttft_host_ms),
        ("TTFT from text", ".1f", " ms", rows.ttft_text_ms),
    ]
    yield from _table(
        ("measured, one GPU (NVIDIA H200, shape of Llama-3.1-8B)", "", "row"),
        [(what, f"{found.value:{form}}{unit}", found.where) for what, form, unit, found in shown],
    )


def _load_table(assumed: Assumed) -> Iterator[str]:
    load = load_of(assumed)
    mean = load.requests_per_s / assumed.peak
    yield from _table(
        ("load", "mean", "at the peak"),
        [
            ("sessions/s", f"{load.sessions_per_s / assumed.peak:.1f}", f"{load.sessions_per_s:.1f}"),
            ("requests/s", f"{mean:.0f}", f"{load.requests_per_s:.0f}"),
            ("users in a session", f"{load.talking / assumed.peak:,.0f}", f"{load.talking:,}"),
        ],
    )


def _kv_table(assumed: Assumed, rows: Rows) -> Iterator[str]:
    load = load_of(assumed)
    asked = min(assumed.facts, rows.top_k)
    plans = [
        kv_plan(
            MODEL,
            assumed.users,
            assumed.facts,
            tokens_per_fact=assumed.tokens_per_fact,
            dtype=dtype,
            talking=load.talking,
        )
        for dtype in POOLS
    ]
    facts = [plan.fact for plan in plans]
    ways = {way.name: way for way in ways_of(assumed, rows)}
    gpus = [gpus_of(ways[f"{dtype}, KV kept"], assumed) for dtype in POOLS]
    in_pool = [assumed.pool_gib * GIB / fact.pool / asked for fact in facts]
    missing = [max(0.0, 1 - n * count / load.talking) for n, count in zip(gpus, in_pool, strict=True)]
    rates = [
        load.requests_per_s * share * asked * fact.host / n
        for share, fact, n in zip(missing, facts, gpus, strict=True)
    ]
    yield from _table(
        ("KV", *POOLS, "how"),
        [
            ("of a token", *_sizes(plan.token_bytes for plan in plans), "`inferscale kv plan`"),
            (
                "of a fact",
                *_sizes(fact.pool for fact in facts),
                f"{assumed.tokens_per_fact} tokens, whole pages",
            ),
            ("of a user", *_sizes(fact.host * assumed.facts for fact in facts), f"{assumed.facts} facts"),
            (
                "of all users, on disk",
                *_sizes(plan.tiers[2].size_bytes for plan in plans),
                f"{assumed.users:,} users",
            ),
            (
                "of the sessions at the peak",
                *_sizes(load.talking * asked * fact.host for fact in facts),
                f"{load.talking:,} users · {asked} facts",
            ),
            ("a GPU's pool", *(f"{count:,.0f} sessions" for count in in_pool), f"{assumed.pool_gib:g} GiB"),
            (
                "host memory beside a GPU",
                *(f"{assumed.host_gib * GIB / fact.host / asked:,.0f} sessions" for fact in facts),
                f"{assumed.host_gib:g} GiB",
            ),
            (
                "from host memory into each GPU",
                *(f"{size_text(round(rate))}/s" for rate in rates),
                f"requests at the peak of sessions that are not in the pools of {gpus[0]} and {gpus[1]} GPUs",
            ),
            (
                "the same, as fast as was measured",
                f"{size_text(round(_host_rate(rows)))}/s",
                "",
                "45 facts in TTFT from host memory − from the pool",
            ),
            (
                "from a shared tier into all machines",
                *(f"{size_text(round(load.sessions_per_s * asked * fact.host))}/s" for fact in facts),
                f"peak sessions/s · {asked} facts, where KV is kept",
            ),
        ],
    )


def _sizes(values: Iterable[int]) -> list[str]:
    return [size_text(value) for value in values]


def _host_rate(rows: Rows) -> float:
    """Of what was measured: facts of 30 tokens in bfloat16."""
    fact_bytes = fact_size(token_bytes_of(MODEL, "bfloat16"), 30).host
    return 45 * fact_bytes / ((rows.ttft_host_ms.value - rows.ttft_pool_ms.value) / 1000)


def _gpu_table(assumed: Assumed, rows: Rows) -> Iterator[str]:
    ways = ways_of(assumed, rows)
    base = cost_of(ways[0], assumed)
    yield from _table(
        (
            "way",
            "GPU seconds a session",
            "sessions a GPU has time for",
            "sessions it has room for",
            "GPUs at the peak",
            "1,000 requests",
            "of text",
        ),
        [
            (
                way.name,
                f"{way.gpu_s:.3f}",
                f"{computed_users(way, assumed):,.0f}",
                f"{held_users(way, assumed):,.0f}" if way.kv_bytes else "",
                f"{gpus_of(way, assumed)}",
                f"${cost_of(way, assumed):.3f}",
                f"{cost_of(way, assumed) / base:.2f}",
            )
            for way in ways
        ],
    )


def _catalog_table(assumed: Assumed, rows: Rows) -> Iterator[str]:
    facts = assumed.users * assumed.facts
    times = facts / rows.catalog_facts
    index = rows.index_mib.value * 2**20
    size, start = rows.catalog_bytes.value, rows.start_s.value
    search = f"{rows.search_ms.value:.1f} ms"
    yield from _table(
        ("catalog", f"measured, {rows.catalog_facts:,} facts", f"in proportion, {facts:,} facts", "row"),
        [
            ("on disk", size_text(round(size)), size_text(round(size * times)), rows.catalog_bytes.where),
            (
                "index of a server",
                size_text(round(index)),
                size_text(round(index * times)),
                rows.index_mib.where,
            ),
            ("start of a server", f"{start:.1f} s", f"{start * times / 60:.1f} min", rows.start_s.where),
            ("first search of a user", search, "not measured", rows.search_ms.where),
        ],
    )


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in body:
        yield f"| {' | '.join(row)} |"
    yield ""


def assumptions(assumed: Assumed) -> str:
    """As this command."""
    options = [
        f"--{name.replace('_', '-')} {value:g}" for name, value in vars(assumed).items() if name != "users"
    ]
    lines = [f"python benchmarks/scaling.py --users {assumed.users}"]
    lines += ["    " + " ".join(options[start : start + 4]) for start in range(0, len(options), 4)]
    return " \\\n".join(lines)


def rendered(assumed: Assumed, rows: Rows) -> str:
    return "\n".join([f"```sh\n{assumptions(assumed)}\n```\n", *tables(assumed, rows)])


def written(text: str, block: str) -> str:
    """The document with the block between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{DOC} has no marks for the tables.")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def parse(given: Sequence[str] | None = None) -> tuple[Assumed, bool]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in vars(Assumed()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            help=f"default: {value}",
        )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scaling.md")
    values = vars(parser.parse_args(given))
    write = values.pop("write")
    assumed = Assumed(**values)
    for name, value in vars(assumed).items():
        if not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; allowed are numbers above 0.")
    if assumed.busy_share > 1 or assumed.peak < 1 or assumed.requests_per_session < 1:
        parser.error("--busy-share is at most 1; --peak and --requests-per-session are at least 1.")
    return assumed, write


def main() -> int:
    assumed, write = parse()
    block = rendered(assumed, read_measured())
    if write:
        DOC.write_text(written(DOC.read_text(encoding="utf-8"), block), encoding="utf-8")
    else:
        print(block)
    return 0


if __name__ == "__main__":
    sys.exit(main())
