"""Injection that overlaps the forward pass: later layers are written while earlier ones are computed.

vLLM calls `wait_for_layer_load` before the attention of every layer (kv_transfer_utils.py,
`maybe_transfer_kv_layer`), so only the first layers have to be there when the pass begins. Those calls do
not happen in every way of running a model (a full CUDA graph replays without them), so overlapping is
used only in a mode in which they were seen before, and a pass that did not make them is a failed injection.
Pays off for many tokens only: the second launch and its events take the host about 40 µs.
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
    """Decides how a step is injected, and waits at the right layer.

    layer_names: as vLLM names them, in model order. A step is `begin`, any number of `reached`, `end`.
    """

    def __init__(self, mover: FusedMover, layer_names: list[str]) -> None:
        self._mover = mover
        self._boundary = layer_names[mover.first_layers] if mover.first_layers else None
        self._trusted: set[Hashable] = set()
        self._mode: Hashable | None = None
        self._wait: Callable[[], None] | None = None
        self._was_reached = False
        self._may_overlap = self._boundary is not None

    def begin(self, moves: Moves, mode: Hashable | None) -> None:
        """Inject a step. mode: how the forward pass will run; None where it is not known."""
        self._mode, self._was_reached = mode, False
        if self._may_overlap and mode in self._trusted and moves.num_tokens >= LEAST_TOKENS:
            self._wait = self._mover.inject_in_two(moves)
        else:
            self._mover.inject(moves)

    def reached(self, layer_name: str) -> None:
        """The attention of a layer is about to run."""
        if layer_name != self._boundary:
            return
        self._was_reached = True
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def settle(self) -> None:
        """Wait now: something else is about to write to the slab."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def end(self) -> bool:
        """The forward pass was launched; False where it may have read KV that was not there yet."""
        mode, self._mode = self._mode, None
        if self._wait is not None:
            self._wait()
            self._wait, self._may_overlap = None, False
            logger.error("A forward pass did not wait for its layers; injection does not overlap it any more")
            return False
        if mode is not None and self._was_reached:
            self._trusted.add(mode)
        return True
