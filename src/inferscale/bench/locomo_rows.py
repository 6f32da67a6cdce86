"""Rows of `inferscale bench locomo` from answers.

Questions of category 5 have no gold answer: they are in no row but those of `adversarial_accuracy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inferscale.bench import paired
from inferscale.bench.answer_scores import bleu1, exact_match, resists, scored_gold, token_f1
from inferscale.bench.fidelity_rows import compared_with
from inferscale.bench.harness import BenchRun
from inferscale.bench.judge import Judge, Judged, Progress
from inferscale.bench.paired import Estimate
from inferscale.bench.policies import Policy
from inferscale.bench.questions import ADVERSARIAL
from inferscale.server_config import ServerConfig

if TYPE_CHECKING:
    from inferscale.bench.fidelity import Arm
    from inferscale.bench.locomo import Asked, AskedResult, LocomoResults


class _Metric(NamedTuple):
    """Values, question by question. is_right: whether they are 0 or 1, as McNemar's test needs."""

    name: str
    values: Sequence[float]
    is_right: bool = False


class LocomoRows:
    """Appends the rows of a run, whose `config` already says what all of them share."""

    def __init__(self, run: BenchRun, results: LocomoResults) -> None:
        self._run = run
        self._results = results
        categories = [question.category for _, question in results.questions]
        self._golden = [place for place, category in enumerate(categories) if category != ADVERSARIAL]
        self._adversarial = [place for place, category in enumerate(categories) if category == ADVERSARIAL]

    def add_all(self) -> None:
        self._add_recall()
        metrics = {asked: self._metrics(asked) for asked in self._results.asked}
        for asked, result in self._results.asked.items():
            for metric in metrics[asked]:
                self._add_metric(asked, metric, metrics)
            self._add_costs(asked, result)

    def add_verdicts(self, style: str, verdicts: Mapping[Asked, Sequence[bool]]) -> None:
        """Verdicts on the questions with a gold answer, in their order."""
        metrics = {
            asked: (_Metric(f"judged_{style}", [float(one) for one in right], True),)
            for asked, right in verdicts.items()
        }
        for asked, (metric,) in metrics.items():
            self._add_metric(asked, metric, metrics)

    def judged(self, asked: Asked) -> list[Judged]:
        """What a judge reads of this way."""
        answers = self._results.asked[asked].answers
        return [
            Judged(question.text, question.answer, answers[place].text)
            for place in self._golden
            for question in (self._results.questions[place][1],)
        ]

    def _metrics(self, asked: Asked) -> tuple[_Metric, ...]:
        answers = self._results.asked[asked].answers
        pairs = [
            (answers[place].text, scored_gold(question.answer, question.category))
            for place in self._golden
            for question in (self._results.questions[place][1],)
        ]
        found: list[_Metric] = []
        if pairs:
            found = [
                _Metric("f1", [token_f1(*pair) for pair in pairs]),
                _Metric("bleu1", [bleu1(*pair) for pair in pairs]),
                _Metric("exact_match", [float(exact_match(*pair)) for pair in pairs], True),
            ]
        if self._adversarial:
            resisted = [
                float(resists(answers[place].text, self._results.questions[place][1].answer))
                for place in self._adversarial
            ]
            found.append(_Metric("adversarial_accuracy", resisted, True))
        return tuple(found)

    def _add_metric(self, asked: Asked, metric: _Metric, metrics: Mapping[Asked, Sequence[_Metric]]) -> None:
        told = self._told(asked)
        places = self._adversarial if metric.name == "adversarial_accuracy" else self._golden
        categories = {} if places is self._adversarial else self._by_category(metric.values, places)
        self._add(metric.name, paired.mean(metric.values), asked, {**told, **categories})
        if asked.arm.mode != "inject":
            return
        (reference,) = (of.values for of in metrics[asked.reference] if of.name == metric.name)
        differences = [value - other for value, other in zip(metric.values, reference, strict=True)]
        more = {} if places is self._adversarial else self._by_category(differences, places)
        if metric.is_right:
            more["mcnemar"] = _mcnemar(metric.values, reference)
        conversations = [self._results.questions[place][0] for place in places]
        if len(set(conversations)) > 1:
            clustered = paired.clustered_difference(metric.values, reference, conversations)
            more["ci95_by_conversation"] = [round(bound, 4) for bound in clustered.ci95]
        difference = paired.mean_difference(metric.values, reference)
        self._add(f"delta_{metric.name}", difference, asked, {**told, **more})

    def _add_costs(self, asked: Asked, result: AskedResult) -> None:
        told = self._told(asked)
        cut = [float(answer.is_cut) for answer in result.answers]
        self._add_value("cut_answers", "share", float(np.mean(cut)), asked, told)
        self._add_value("prompt_tokens", "tokens", float(np.mean(result.prompt_tokens)), asked, told)
        if asked.arm.mode != "inject":
            return
        text = self._results.asked[asked.reference]
        same = [a.text == b.text for a, b in zip(result.answers, text.answers, strict=True)]
        self._add_value("same_answers", "share", float(np.mean(same)), asked, told)
        prefilled = sum(result.prefilled_tokens)
        self._add_value("prefilled_tokens", "tokens", prefilled / len(result.prefilled_tokens), asked, told)
        self._add_value("prefilled_share", "share", prefilled / sum(result.prompt_tokens), asked, told)
        computed, stored = (sum(cost[place] for cost in result.costs) for place in range(2))
        self._add_value("tokens_per_stored_token", "tokens", computed / max(stored, 1), asked, told)

    def _add_recall(self) -> None:
        for k, recalls in self._results.recalls.items():
            places = [place for place in self._golden if recalls[place] is not None]
            values = [float(recalls[place] or 0.0) for place in places]
            if not values:
                continue
            told = {
                "recall_questions": len(values),
                "without_evidence": len(self._golden) - len(values),
                **self._by_category(values, places),
            }
            self._run.add(
                "recall",
                "share",
                [paired.mean(values).value],
                k=k,
                ci95=paired.mean(values).ci95,
                config=told,
            )

    def _told(self, asked: Asked) -> dict[str, Any]:
        config: dict[str, Any] = {"tail": str(asked.arm.tail)}
        if asked.arm.policy is not None:
            config["policy"] = str(asked.arm.policy)
            config["default"] = self._is_default(asked.arm, asked.k)
        if asked.arm.mode != "none":
            config |= compared_with(asked.arm)
        return config

    def _is_default(self, arm: Arm, k: int) -> bool:
        """Whether this is what memory does where nothing is set."""
        shared = self._run.config
        return (
            arm.policy == Policy.default()
            and k == ServerConfig().top_k
            and shared.get("pool_dtype", "auto") == "auto"
            and shared.get("facts", "turns") == "turns"
        )

    def _add(self, metric: str, estimate: Estimate, asked: Asked, config: Mapping[str, Any]) -> None:
        self._run.add(
            metric,
            "share",
            [estimate.value],
            mode=asked.arm.mode,
            k=asked.k,
            ci95=estimate.ci95,
            config=dict(config),
        )

    def _add_value(
        self, metric: str, unit: str, value: float, asked: Asked, config: Mapping[str, Any]
    ) -> None:
        self._run.add(metric, unit, [value], mode=asked.arm.mode, k=asked.k, config=dict(config))

    def _by_category(self, values: Sequence[float], places: Sequence[int]) -> dict[str, Any]:
        categories = np.array([self._results.questions[place][1].category for place in places])
        found = np.asarray(values, dtype=np.float64)
        means = {
            str(category): round(float(found[categories == category].mean()), 4)
            for category in sorted(set(categories.tolist()))
        }
        return {"by_category": means}


def add_judged(
    run: BenchRun, results: LocomoResults, judge: Judge, style: str, progress: Progress | None = None
) -> None:
    """Have all answers judged and append their rows, if there are questions with a gold answer. Raises
    ExtractionError where the judge gives no verdict."""
    rows = LocomoRows(run, results)
    judged = {asked: rows.judged(asked) for asked in results.asked}
    if not any(judged.values()):
        return
    found = judge.verdicts(style, [one for ones in judged.values() for one in ones], progress)
    run.config["judge"] = judge.options.model
    rows.add_verdicts(style, {asked: [found[one] for one in ones] for asked, ones in judged.items()})


def _mcnemar(values: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    found = paired.mcnemar([bool(value) for value in values], [bool(value) for value in reference])
    return {
        "only_inject": found.num_only_first,
        "only_text": found.num_only_second,
        "p_value": float(f"{found.p_value:.4g}"),
    }
