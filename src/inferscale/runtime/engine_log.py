"""Our log beside vLLM's: in the processes of a server, whose log nobody else sets up."""

from __future__ import annotations

import logging


def share_engine_log() -> None:
    """Write our log where vLLM writes its own, at the same level. Nothing where somebody has set it up."""
    ours, theirs = logging.getLogger("inferscale"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)
