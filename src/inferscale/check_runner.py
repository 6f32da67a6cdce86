"""The self-check (`inferscale.self_check`) through the offline engine, before any fact is encoded."""

from __future__ import annotations

import logging
from pathlib import Path

from inferscale.offline import GenerationRequest, OfflineEngine
from inferscale.prompt import PromptBuilder
from inferscale.self_check import Probe, Seen, Verdict, passed_over
from inferscale.self_check.starting import at_start
from inferscale.self_check.subject import conditions_of, seen_of, subject_of
from inferscale.self_check.trials import TEXT

logger = logging.getLogger(__name__)


def check_engine(engine: OfflineEngine, prompts: PromptBuilder, folder: Path) -> Verdict:
    """The verdict, logged. folder: of the data. A check that fails itself is no reason not to start."""
    try:
        verdict = _checked(engine, prompts, folder)
    except Exception as error:  # whatever it is, chats degrade to text by themselves
        logger.exception("The self-check failed")
        verdict = passed_over(f"it failed ({type(error).__name__})")
    logger.log(logging.WARNING if verdict.is_refusal else logging.INFO, "%s", verdict)
    return verdict


def _checked(engine: OfflineEngine, prompts: PromptBuilder, folder: Path) -> Verdict:
    config = engine.llm.llm_engine.vllm_config
    checking = at_start(
        engine.connector.self_check,
        subject_of(config, engine.fingerprint, prompts.data_ids(TEXT)),
        folder,
        conditions_of(config, engine.connector, engine.fingerprint),
    )
    try:
        probes = next(checking)
        while True:
            try:
                seen = _seen(engine, probes)
            except Exception as error:  # noqa: BLE001 — the check knows whether it has refused before
                probes = checking.throw(error)
            else:
                probes = checking.send(seen)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def _seen(engine: OfflineEngine, probes: list[Probe]) -> list[Seen]:
    requests = [
        GenerationRequest(probe.token_ids, probe.max_tokens, probe.plan, sampling=probe.sampling)
        for probe in probes
    ]
    return [seen_of(result.logprobs, result.outcome) for result in engine.generate(requests)]
