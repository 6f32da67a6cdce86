"""Rows of `inferscale bench fidelity` from scored answers, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inferscale.bench import paired
from inferscale.bench.harness import BenchRun, Row
from inferscale.bench.paired import Estimate
from inferscale.bench.policies import USUAL, Policy
from inferscale.errors import InvalidInput
from inferscale.server_config import ServerConfig

if TYPE_CHECKING:
    from inferscale.bench.fidelity import Arm, ArmResult, FidelityResults


class FidelityRows:
    """Appends the rows of a run. k: facts in every prompt; pool_dtype: of the engine's pool."""

    def __init__(self, run: BenchRun, results: FidelityResults, k: int, pool_dtype: str) -> None:
        self._run = run
        self._results = results
        self._k = k
        self._pool_dtype = pool_dtype
        self._none = next(result for arm, result in results.arms.items() if arm.mode == "none")

    def add_all(self) -> list[Row]:
        first = len(self._run.rows)
        for arm, result in self._results.arms.items():
            self._add_arm(arm, result)
        return self._run.rows[first:]

    def _add_arm(self, arm: Arm, result: ArmResult) -> None:
        config: dict[str, Any] = {"tail": str(arm.tail)}
        if arm.policy is not None:
            config["policy"] = str(arm.policy)
            config["default"] = self._is_default(arm.policy)
        config |= compared_with(arm)
        nlls = [score.nll for score in result.scores]
        self._add("nll", "nats/token", paired.mean(nlls), arm, config, self._by_category(nlls))
        if result.ttfts_ms:
            self._run.add("ttft", "ms", result.ttfts_ms, mode=arm.mode, k=self._k, config=config)
        if arm.mode == "text":
            self._add_value("prompt_tokens", "tokens", _mean(result.prompt_tokens), arm, config)
            return
        text = self._results.arms[arm.reference]
        kls = [score.kl for score in result.scores]
        missing = _mean([mass for score in result.scores for mass in score.missing])
        told = {**self._by_category(kls), "missing_probability": round(missing, 8)}
        self._add("kl", "nats/token", paired.mean(kls), arm, config, told)
        same = [score.agreement(ref) for score, ref in zip(result.scores, text.scores, strict=True)]
        self._add("top1_agreement", "share", paired.mean(same), arm, config)
        references = [score.nll for score in text.scores]
        differences = [nll - reference for nll, reference in zip(nlls, references, strict=True)]
        difference = paired.mean_difference(nlls, references)
        self._add("delta_nll", "nats/token", difference, arm, config, self._by_category(differences))
        if arm.mode == "inject":
            self._add_injected(arm, result, nlls, references, config)

    def _add_injected(
        self,
        arm: Arm,
        result: ArmResult,
        nlls: Sequence[float],
        references: Sequence[float],
        config: Mapping[str, Any],
    ) -> None:
        nothing = [score.nll for score in self._none.scores]
        self._add_share("recovered", paired.recovered_share(nothing, references, nlls), arm, config)
        prefilled = sum(result.prefilled_tokens) / sum(result.prompt_tokens)
        self._add_value("prefilled_tokens", "tokens", _mean(result.prefilled_tokens), arm, config)
        self._add_value("prefilled_share", "share", prefilled, arm, config)
        computed, stored = (sum(cost[place] for cost in result.costs) for place in range(2))
        self._add_value("tokens_per_stored_token", "tokens", computed / max(stored, 1), arm, config)

    def _add_share(self, metric: str, share: Estimate, arm: Arm, config: Mapping[str, Any]) -> None:
        if not math.isnan(share.value):
            self._add(metric, "share", share, arm, config)

    def _add(
        self,
        metric: str,
        unit: str,
        estimate: Estimate,
        arm: Arm,
        config: Mapping[str, Any],
        told: Mapping[str, Any] | None = None,
    ) -> None:
        self._run.add(
            metric,
            unit,
            [estimate.value],
            mode=arm.mode,
            k=self._k,
            ci95=estimate.ci95,
            config={**config, **(told or {})},
        )

    def _add_value(self, metric: str, unit: str, value: float, arm: Arm, config: Mapping[str, Any]) -> None:
        self._run.add(metric, unit, [value], mode=arm.mode, k=self._k, config=dict(config))

    def _by_category(self, values: Sequence[float]) -> dict[str, Any]:
        categories = np.array([question.category for _, question in self._results.questions])
        found = np.asarray(values)
        means = {
            str(category): round(float(found[categories == category].mean()), 4)
            for category in sorted(set(categories.tolist()))
        }
        return {"by_category": means}

    def _is_default(self, policy: Policy) -> bool:
        """Whether this is what memory does where nothing is set."""
        return policy == Policy.default() and self._k == ServerConfig().top_k and self._pool_dtype == "auto"


def compared_with(arm: Arm) -> dict[str, str]:
    """What rows say of the arrangement of the facts; nothing where it is the usual one."""
    if arm.reference.arrangement == USUAL:
        return {}
    if arm.mode == "text":
        return {"arrangement": str(arm.arrangement)}
    return {"compared_with": arm.reference.name}


def fidelity_table(rows: Sequence[Row]) -> str:
    """A Markdown table of one run: a line for each mode and policy."""
    arms: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        config = row["config"]
        name = config.get("policy") or config.get("arrangement", "")
        arms.setdefault((str(row["mode"]), name), {})[row["metric"]] = row
    shown = [(name, cells) for name, cells in arms.items() if "nll" in cells]
    if not shown:
        raise InvalidInput("the run has no scored answers; it was cut off, so run it again.")
    names = (
        "mode",
        "",
        "NLL",
        "ΔNLL",
        "KL",
        "recovered",
        "top-1",
        "prefilled",
        "encode cost",
        "TTFT p50",
    )
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for (mode, name), cells in shown:
        share = cells.get("prefilled_share")
        values = [
            mode,
            name + (" (default)" if cells["nll"]["config"].get("default") else ""),
            f"{cells['nll']['p50']:.3f}",
            _with_interval(cells.get("delta_nll"), "+.3f"),
            _with_interval(cells.get("kl"), ".3f"),
            _with_interval(cells.get("recovered"), ".1%"),
            f"{cells['top1_agreement']['p50']:.1%}" if "top1_agreement" in cells else "",
            f"{share['p50']:.1%}" if share else "",
            f"{cells['tokens_per_stored_token']['p50']:.2f}" if "tokens_per_stored_token" in cells else "",
            f"{cells['ttft']['p50']:.1f} ms" if "ttft" in cells else "",
        ]
        lines.append("| " + " | ".join(values) + " |")
    first = shown[0][1]["nll"]
    config = first["config"]
    lines += [
        "",
        f"Means over {config['questions']} questions of conversations {config['conversations']} with their "
        f"95 % bootstrap intervals, k={first['k']}; NLL and KL in nats for each token of the gold answer.",
        f"{first['model']}, {first['engine']}, {first['hardware']}, commit {first['commit']}, "
        f"run {first['run']}.",
    ]
    return "\n".join(lines)


def _with_interval(row: Row | None, form: str) -> str:
    if row is None:
        return ""
    low, high = row["ci95"]
    return f"{row['p50']:{form}} ({low:{form}} to {high:{form}})"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
