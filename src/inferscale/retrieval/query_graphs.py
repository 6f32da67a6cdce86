"""CUDA graphs for embedding one text at a time: one launch instead of about a hundred.

A short text keeps a GPU busy for a fraction of the time that launching its kernels takes. Each
length of `LENGTHS` is captured once, all in one private memory pool; a text is padded to the next of
them. What a graph computes does not depend on the padding: it masks by the number of tokens, which it
reads from its input. Products are captured in full float32 (`precision`), whatever the process allows
then or later. Knows nothing of texts and tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.retrieval.bert import Network, pooled
from inferscale.retrieval.precision import exact_products

if TYPE_CHECKING:
    import torch

LENGTHS = (16, 32, 64, 128, 256)
"""Numbers of tokens that are captured, padding included."""
_WARM_UPS = 3


def padded_length(num_tokens: int, lengths: Sequence[int]) -> int | None:
    """The smallest of the rising `lengths` that holds so many tokens; None where none does."""
    return next((length for length in lengths if num_tokens <= length), None)


def fill(buffer: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Write one text into `buffer`, on the host, int64 [1 + length]: its number of tokens, its ids, zeros."""
    numbers = buffer.numpy()  # shares its memory, and takes a list sooner than torch does
    num_tokens = len(token_ids)
    numbers[0] = num_tokens
    numbers[1 : 1 + num_tokens] = token_ids
    numbers[1 + num_tokens :] = 0


def embed_padded(network: Network, buffer: torch.Tensor) -> torch.Tensor:
    """The unit vector of the text in `buffer` (see `fill`): int64 [1 + length] → float32 [dim].

    Reads no value on the host, so that it can be captured.
    """
    import torch

    ids = buffer[1:].unsqueeze(0)
    mask = (torch.arange(ids.shape[1], device=buffer.device) < buffer[0]).unsqueeze(0)
    return pooled(network(ids, mask), mask)[0]


class _Captured(NamedTuple):
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    buffer: torch.Tensor
    vector: torch.Tensor


class QueryGraphs:
    """Graphs of `network` for texts of up to `max_tokens` tokens. One call at a time.

    To be made in inference mode. Has a stream of its own, and captures in a way that leaves the CUDA
    calls of other threads alone.
    """

    def __init__(self, network: Network, device: torch.device, dim: int, max_tokens: int) -> None:
        import torch

        longest = padded_length(max_tokens, LENGTHS) or LENGTHS[-1]
        self._lengths = [length for length in LENGTHS if length < longest] + [min(longest, max_tokens)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream(device))  # it loaded the weights
        # The longest first: the others then find their memory in the pool.
        with exact_products(device):
            self._graphs = {
                length: self._capture(network, device, length, pool) for length in reversed(self._lengths)
            }
        self._given = {
            length: torch.zeros(1 + length, dtype=torch.int64, pin_memory=True) for length in self._lengths
        }
        self._result = torch.zeros(dim, dtype=torch.float32, pin_memory=True)

    def _capture(self, network: Network, device: torch.device, length: int, pool: Any) -> _Captured:
        import torch

        with torch.cuda.stream(self._stream):
            buffer = torch.zeros(1 + length, dtype=torch.int64, device=device)
            for _ in range(_WARM_UPS):
                embed_padded(network, buffer)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            vector = embed_padded(network, buffer)
        return _Captured(graph, buffer, vector)

    def embed(self, token_ids: Sequence[int]) -> NDArray[np.float32] | None:
        """The unit vector [dim] of one text; None where it has more tokens than any graph holds."""
        import torch

        length = padded_length(len(token_ids), self._lengths)
        if length is None:
            return None
        captured, given = self._graphs[length], self._given[length]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            fill(given, token_ids)
            captured.buffer.copy_(given, non_blocking=True)
            captured.graph.replay()
            self._result.copy_(captured.vector, non_blocking=True)
        self._stream.synchronize()
        vector: NDArray[np.float32] = self._result.numpy().copy()
        return vector
