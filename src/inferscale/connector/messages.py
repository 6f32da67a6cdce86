"""What the scheduler side and the workers say to each other. Pure data: numpy and the standard library.

In production the two sides are different processes, so everything here is pickled once a step;
that is why orders are bytes and flat arrays, and not objects per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inferscale.pool.moves import GroupMoves, Int32Array
from inferscale.pool.tiers import TierAnswers, TierOrders


@dataclass
class StepOrders:
    """What the workers do in one step, in this order: inject, zero, load, (forward pass,) capture,
    average, save.

    step: number that the workers report back; 0 when nothing is captured. averaging: second captures, of what
    their rows then hold the mean. failed_blocks: blocks
    that were promised and cannot be written; the workers report them as load errors.
    """

    step: int = 0
    injection: GroupMoves = ()
    capture: GroupMoves = ()
    averaging: GroupMoves = ()
    zero_pages: Int32Array | None = None
    failed_blocks: list[int] = field(default_factory=list)
    tiers: TierOrders | None = None


@dataclass
class StepReport:
    """Which steps the workers have carried out, and which of those had a failed capture.

    tiers: what was done below the pool since the last report, in whichever step it was ordered.
    """

    done: set[int] = field(default_factory=set)
    failed_captures: set[int] = field(default_factory=set)
    tiers: TierAnswers = field(default_factory=TierAnswers)

    def merge(self, other: StepReport) -> StepReport:
        """One report for all tensor-parallel ranks; a capture that failed anywhere has failed."""
        return StepReport(
            self.done | other.done,
            self.failed_captures | other.failed_captures,
            self.tiers.merge(other.tiers),
        )
