"""Our log goes where vLLM's goes, unless somebody has said where."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from inferscale.runtime.engine_log import share_engine_log


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    both = logging.getLogger("inferscale"), logging.getLogger("vllm")
    before = [(logger.level, list(logger.handlers)) for logger in both]
    for logger in both:
        logger.handlers.clear()
    yield both
    for logger, (level, handlers) in zip(both, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_the_engines_handlers_and_level_are_taken(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    for _ in range(2):
        share_engine_log()
        assert (ours.handlers, ours.level) == ([handler], logging.INFO)


def test_what_was_set_up_stays(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    mine = logging.NullHandler()
    ours.addHandler(mine)
    theirs.addHandler(logging.NullHandler())
    share_engine_log()
    assert ours.handlers == [mine]
