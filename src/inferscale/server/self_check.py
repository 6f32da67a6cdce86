"""The self-check (`inferscale.self_check`) through the server's engine client, before memory is served."""

from __future__ import annotations

import asyncio
import logging

from inferscale.encoder import Encoder
from inferscale.memory import Memory
from inferscale.self_check import Verdict, passed_over
from inferscale.self_check.starting import at_start
from inferscale.self_check.subject import conditions_of, subject_of
from inferscale.self_check.trials import TEXT
from inferscale.server.engine import EngineSide, Front

logger = logging.getLogger(__name__)


async def check_engine(front: Front, engine: EngineSide, encoder: Encoder, memory: Memory) -> Verdict:
    """The verdict, logged. A check that fails itself is no reason not to serve."""
    try:
        verdict = await _checked(front, engine, encoder, memory)
    except Exception as error:  # whatever it is, chats degrade to text by themselves
        logger.exception("The self-check failed")
        verdict = passed_over(f"it failed ({type(error).__name__})")
    logger.log(logging.WARNING if verdict.is_refusal else logging.INFO, "%s", verdict)
    return verdict


async def _checked(front: Front, engine: EngineSide, encoder: Encoder, memory: Memory) -> Verdict:
    checking = at_start(
        front.connector.self_check,
        subject_of(front.vllm_config, engine.model, encoder.prompts.data_ids(TEXT)),
        memory.data_dir,
        conditions_of(front.vllm_config, front.connector, engine.model),
    )
    try:
        probes = next(checking)
        while True:
            try:
                seen = await asyncio.gather(*(engine.probe(probe) for probe in probes))
            except Exception as error:  # noqa: BLE001 — the check knows whether it has refused before
                probes = checking.throw(error)
            else:
                probes = checking.send(seen)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
