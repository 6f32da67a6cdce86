"""What is right for any architecture: Hugging Face transformers in float32, computed at the place itself.

A segment's keys are not moved here. The whole pass in which it was encoded is computed again with its
positions counted from another number, so that the model's own rotary embedding (or none) gives the segment
the positions that it has in the prompt. Nothing comes from InferScale, and no rotation is written out: the
reference holds for every way in which a model knows distances, and for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.protocol import FloatArray

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one layer, [1, heads, tokens, size] each."""


class Pass(NamedTuple):
    """What an encode request computes. ids: its prompt."""

    ids: tuple[int, ...]


class Placed(NamedTuple):
    """Tokens `[start, end)` of a pass, computed so that the first of them is at `position`."""

    of: Pass
    start: int
    end: int
    position: int


class ModelReference:
    """One checkpoint. max_tokens: the engine's longest context, which decides longrope's factors for all."""

    def __init__(self, checkpoint: Path, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        _fix_longrope(self._model, max_tokens)
        if self._model.config.model_type == "cohere2":
            self._model.config.sliding_window += 1  # vLLM's count of a window has the token itself besides

    @torch.inference_mode()
    def logits(
        self, parts: Sequence[tuple[int, ...] | Placed], num_steps: int, *, first_position: int = 0
    ) -> FloatArray:
        """Behind the last `num_steps` tokens; float32 [num_steps, vocabulary]. Parts are text, or placed.

        first_position: that the prompt's positions are counted from."""
        cache, logits = _new_cache(), []
        for part in parts:
            if isinstance(part, Placed):
                for index, (keys, values) in enumerate(self._kv(part)):
                    cache.update(keys, values, index)
            else:
                logits.append(self._run(cache, part, first_position + cache.get_seq_length()))
        last: FloatArray = torch.cat(logits)[-num_steps:].numpy().astype(np.float32)
        return last

    def _kv(self, placed: Placed) -> list[LayerKV]:
        cache = _new_cache()
        self._run(cache, placed.of.ids, placed.position - placed.start)
        part = slice(placed.start, placed.end)
        return [(layer.keys[:, :, part], layer.values[:, :, part]) for layer in cache.layers]

    def _run(self, cache: Any, ids: Sequence[int], first_position: int) -> Tensor:
        positions = torch.arange(first_position, first_position + len(ids)).unsqueeze(0)
        output = self._model(
            torch.tensor([list(ids)]), past_key_values=cache, position_ids=positions, use_cache=True
        )
        logits: Tensor = output.logits[0]
        return logits


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()  # no configuration: sliding layers keep everything too


def _fix_longrope(model: Any, max_tokens: int) -> None:
    """transformers takes the factors by the length of each sequence, vLLM those of its longest context."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
    if getattr(rotary, "rope_type", None) != "longrope":
        return
    inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](model.config, torch.device("cpu"), seq_len=max_tokens)
    rotary.inv_freq.copy_(inv_freq)
    rotary.original_inv_freq.copy_(inv_freq)
