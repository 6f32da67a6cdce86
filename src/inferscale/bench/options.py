"""What benchmarks measure by default. Light to import: the command line shows these in its help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TtftOptions:
    """What is measured. ks: numbers of facts; num_questions: measured questions for each k and mode;
    tail: best facts that are recomputed."""

    ks: tuple[int, ...] = (0, 5, 20, 50, 100)
    num_questions: int = 10
    tail: int = 0
