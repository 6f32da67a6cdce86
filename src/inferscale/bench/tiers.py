"""`inferscale bench tiers`: time to first token where the facts' KV comes from below the pool.

Two users ask in turn, and the pool holds the facts of one of them: each has pushed out the other's, so all of
them are loaded again. Three modes in turn for each question:

    text    the prompt is prefilled
    host or disk    the facts, at least half of them, are loaded from this tier into the pool, and injected
    pool    the same question again: the facts are in the pool by now

vLLM's prefix cache is emptied before each. Measured at the engine, as in `ttft`.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from inferscale.bench.arms import TokenCounts, check_fits, checked_counts, request_of, summarize
from inferscale.bench.encode import Encoding, encode_users, num_missing
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.harness import BenchRun, Say, middle
from inferscale.bench.options import TiersOptions
from inferscale.bench.source import Need, Source, encoding_for
from inferscale.bench.workload import Asked
from inferscale.config import ConnectorConfig
from inferscale.errors import EngineError
from inferscale.plan import Order
from inferscale.windows import WindowPolicy

USERS = (0, 1)
_WARM_UPS = 2
_STEP_TOKENS = 1024
"""Most tokens of a step, unless given: what one captures must fit into the small pool."""
_SLACK = 1.02
_LEAST_LOADED = 0.5
"""Of the facts of a question: a few may find room beside those of the other user."""
_WAIT_S = 60.0


def tier_spec(
    spec: EngineSpec, source: Source, need: Need, tier: str, token_bytes: int, folder: str
) -> EngineSpec:
    """An engine whose pool holds what one prompt injects, above a tier that holds everything.

    token_bytes: of a row of the pool.
    """
    page = ConnectorConfig().page_size_tokens
    lengths = list(source.segments(need))
    rooms = [math.ceil(num / page) * page for num in lengths]
    head, facts = rooms[0], rooms[1:]
    each = len(facts) // need.num_users
    one_user = head + max(sum(facts[user * each : (user + 1) * each]) for user in range(need.num_users))
    everything = 2 * sum(lengths) * token_bytes + 2**26
    return replace(
        spec,
        pool_size_bytes=int(one_user * _SLACK) * token_bytes,
        max_num_batched_tokens=spec.max_num_batched_tokens or _STEP_TOKENS,
        host_size_bytes=everything if tier == "host" else 0,
        disk_size_bytes=everything if tier == "disk" else 0,
        disk_dir=folder,
    )


def measure_tiers(
    engine: BenchEngine,
    source: Source,
    need: Need,
    policy: WindowPolicy,
    options: TiersOptions,
    run: BenchRun,
    say: Say,
) -> None:
    """Append rows `ttft` of each mode, their ratios, and `load_ms` of the tier.

    Raises EngineError for a question whose facts did not come from where its mode says.
    """
    encoding = encoding_for(engine, source, need, policy)
    for user in USERS:
        encode_users(engine, encoding, [user], in_flight=1)
        engine.offline.order(Order("stats"))  # a step in which the last captures are reported
    _wait_for_saves(engine, encoding)
    modes = ("text", options.tier, "pool")
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    counts: dict[str, list[TokenCounts]] = {mode: [] for mode in modes}
    loads: list[float] = []
    num_loaded: list[int] = []
    for number in range(options.num_questions + _WARM_UPS):
        for user in USERS:
            asked = encoding.workload.ask(user, number, options.k)
            check_fits(asked, 1, engine.offline.max_model_len)
            for mode in modes:
                before = engine.offline.residency.stats()
                ttft_ms, one = _ask(engine, encoding, asked, mode)
                after = engine.offline.residency.stats()
                hits = after[f"{options.tier}_hits"] - before[f"{options.tier}_hits"]
                if hits < _LEAST_LOADED * len(asked.facts) if mode == options.tier else hits:
                    raise EngineError(
                        f"Of {len(asked.facts)} facts {hits} came from the tier {options.tier} in mode "
                        f"{mode}; no row is written. The pool must hold the facts of one user and not of two."
                    )
                if number < _WARM_UPS:
                    continue
                times[mode].append(ttft_ms)
                counts[mode].append(one)
                if mode == options.tier:
                    num_loaded.append(hits)
                    loads.append((after[f"{mode}_load_ms"] - before[f"{mode}_load_ms"]) / hits)
    stats = engine.offline.residency.stats()
    run.config["tier_stats"] = {name: stats[name] for name in stats if name.startswith(options.tier)}
    for mode in modes:
        run.add("ttft", "ms", times[mode], mode=mode, k=options.k, config=summarize(counts[mode]))
    for over, under in ((options.tier, "pool"), ("text", options.tier)):
        run.add_ratio("ttft", f"{over}/{under}", times[over], times[under], k=options.k)
    config = {"loaded_segments": middle(num_loaded), "what": "order of a load to its answer, of one segment"}
    run.add("load", "ms", loads, mode=options.tier, k=options.k, config=config)
    say(", ".join(f"{mode} {middle(values):.1f} ms" for mode, values in times.items()))


def _ask(engine: BenchEngine, encoding: Encoding, asked: Asked, mode: str) -> tuple[float, TokenCounts]:
    engine.reset_prefix_cache()
    as_mode = "text" if mode == "text" else "inject"
    request = request_of(as_mode, asked, encoding)
    (generation,) = engine.offline.generate([request])
    counts = checked_counts(as_mode, asked, request, generation, engine.block_size)
    return generation.ttft_s * 1e3, counts


def _wait_for_saves(engine: BenchEngine, encoding: Encoding) -> None:
    keys = [key for user in USERS for key in encoding.keys(user).values()]
    give_up_s = time.monotonic() + _WAIT_S
    while missing := num_missing(engine, keys):
        if time.monotonic() > give_up_s:
            raise EngineError(f"{missing} of {len(keys)} segments are in no tier after {_WAIT_S:.0f} s.")
        engine.offline.order(Order("stats"))  # reports come with steps
        time.sleep(0.05)
