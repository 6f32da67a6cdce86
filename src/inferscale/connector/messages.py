"""What the scheduler side and the workers say to each other. Pure data: numpy and the standard library.

In production the two sides are different processes, so everything here is pickled once a step;
that is why orders are a few flat arrays and not objects per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class Injection(NamedTuple):
    """Pool rows to be written into the paged cache before the forward pass; all requests of a step.

    rows: int32 [n], slab rows. slots: int32 [n], slots of the paged cache (block · block size +
    offset). deltas: int32 [n], serving position minus capture position of each token.
    """

    rows: IntArray
    slots: IntArray
    deltas: IntArray


class CaptureOrder(NamedTuple):
    """Slots to be copied into pool rows after the forward pass; all spans of a step.

    slots, rows: int32 [n].
    """

    slots: IntArray
    rows: IntArray


@dataclass
class StepOrders:
    """What the workers do in one step, in this order: inject, zero, (forward pass,) capture.

    step: number that the workers report back; 0 when nothing is captured. failed_blocks: blocks
    that were promised and cannot be written; the workers report them as load errors.
    """

    step: int = 0
    injection: Injection | None = None
    capture: CaptureOrder | None = None
    zero_pages: IntArray | None = None
    failed_blocks: list[int] = field(default_factory=list)


@dataclass
class StepReport:
    """Which steps the workers have carried out, and which of those had a failed capture."""

    done: set[int] = field(default_factory=set)
    failed_captures: set[int] = field(default_factory=set)

    def merge(self, other: StepReport) -> StepReport:
        """One report for all tensor-parallel ranks; a capture that failed anywhere has failed."""
        return StepReport(
            self.done | other.done,
            self.failed_captures | other.failed_captures,
        )
