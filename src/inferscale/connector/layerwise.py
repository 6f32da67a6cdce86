"""Injection that overlaps the forward pass: later layers are written while earlier ones are computed.

vLLM calls `wait_for_layer_load` before the attention of every layer (kv_transfer_utils.py,
`maybe_transfer_kv_layer`), so only the first layers have to be there when the pass begins. Those calls do
not happen in every way of running a model (a full CUDA graph replays without them), so overlapping is
used only in a mode in which they were seen before, and a pass that did not make them is a failed injection.
For many tokens only: the second launch and its events take the host some time. From how many on it pays is
an estimate so far (docs/performance.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from inferscale.kernels.fused import FusedMover
from inferscale.pool.moves import Moves

logger = logging.getLogger(__name__)

LEAST_TOKENS = 3072
"""Tokens of a step from which its injection overlaps the forward pass."""


class LayerwiseInjection:
    """Decides how a step is injected, and waits before the first layer that needs it.

    layer_names: as vLLM names them, in the order of the kernels' tables. A step is `begin`, any number of
    `reached`, `end`. No order of execution is relied on: whichever layer outside of the first part asks
    first makes the pass wait.
    """

    def __init__(self, mover: FusedMover, layer_names: list[str]) -> None:
        self._mover = mover
        self._all = frozenset(layer_names)
        self._first = frozenset(layer_names[: mover.first_layers])
        self._trusted: set[Hashable] = set()
        self._mode: Hashable | None = None
        self._asked: set[str] | None = None
        self._wait: Callable[[], None] | None = None
        self._may_overlap = bool(self._first)

    def begin(self, moves: Moves, mode: Hashable | None) -> None:
        """Inject a step. mode: how the forward pass will run; None where it is not known."""
        self.settle()  # of a pass that raised
        self._mode, self._asked = mode, None
        if self._may_overlap and mode in self._trusted:
            if moves.num_tokens >= LEAST_TOKENS:
                self._wait = self._mover.inject_in_two(moves)
                return
        elif self._may_overlap and mode is not None:
            self._asked = set()
        self._mover.inject(moves)

    def reached(self, layer_name: str) -> None:
        """The attention of a layer is about to run."""
        if self._asked is not None:
            self._asked.add(layer_name)
        elif self._wait is not None and layer_name not in self._first:
            self.settle()

    def settle(self) -> None:
        """Make the current stream wait for all that is being injected."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def end(self) -> bool:
        """The forward pass was launched; False where it may have read KV that was not there yet."""
        asked, self._asked = self._asked, None
        if self._wait is not None:
            self.settle()
            self._may_overlap = False
            logger.error("A forward pass did not wait for its layers; injection does not overlap it any more")
            return False
        if asked is not None and asked >= self._all:  # every layer asks, so none is read unasked
            self._trusted.add(self._mode)
        return True
