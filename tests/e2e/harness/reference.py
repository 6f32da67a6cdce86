"""What is right: Hugging Face transformers in float32, with keys relocated by a rotation of its own.

Nothing here comes from InferScale. The rotation is written out in float64 from the frequencies of
the transformers model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.protocol import FloatArray


class KV(NamedTuple):
    """keys, values: float32 [layers, num_kv_heads, n, head_dim]."""

    keys: Tensor
    values: Tensor

    def span(self, start: int, end: int) -> KV:
        return KV(self.keys[:, :, start:end], self.values[:, :, start:end])

    def mean(self, other: KV) -> KV:
        """Of each vector the direction of the mean, and the mean of both lengths."""
        return KV(*map(_halfway, self, other))

    def numpy(self) -> FloatArray:
        """As the harness reads pages: [layers, 2, n, num_kv_heads, head_dim]."""
        stacked: FloatArray = torch.stack((self.keys, self.values), dim=1).transpose(2, 3).numpy()
        return stacked


def _halfway(first: Tensor, second: Tensor) -> Tensor:
    length = (torch.linalg.vector_norm(first, dim=-1) + torch.linalg.vector_norm(second, dim=-1)) / 2
    return torch.nn.functional.normalize(first + second, dim=-1) * length[..., None]


class Text(NamedTuple):
    """Tokens that are prefilled."""

    ids: tuple[int, ...]


class Injected(NamedTuple):
    """Tokens whose KV was computed elsewhere, its first token at position `origin` there."""

    kv: KV
    origin: int


class Reference:
    """One model."""

    def __init__(self, checkpoint: Path | str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            str(checkpoint), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._inv_freq = self._model.model.rotary_emb.inv_freq.to(torch.float64)
        assert self._model.model.rotary_emb.attention_scaling == 1.0

    @torch.inference_mode()
    def encode(self, ids: Sequence[int]) -> KV:
        """KV of a prompt that starts at position 0."""
        return self._read(self._run(None, ids)[1])

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_steps: int = 1) -> FloatArray:
        """Logits behind the last `num_steps` tokens; float32 [num_steps, vocabulary]."""
        logits, _ = self._run(None, ids)
        return logits[-num_steps:].numpy()

    @torch.inference_mode()
    def logits_of(self, parts: Sequence[Text | Injected], num_steps: int = 1) -> FloatArray:
        """The same for a prompt in which some tokens' KV is put in place instead of computed."""
        cache = None
        at = 0
        logits = None
        for part in parts:
            if isinstance(part, Injected):
                moved = self.relocate(part.kv, at - part.origin)
                cache = self._append(cache, moved)
                at += moved.keys.shape[2]
                logits = None
            elif part.ids:
                new, cache = self._run(cache, part.ids)
                logits = new if logits is None else torch.cat((logits, new))
                at += len(part.ids)
        assert logits is not None, "the last part must be text"
        return logits[-num_steps:].numpy()

    def relocate(self, kv: KV, delta: int) -> KV:
        """Keys moved by `delta` positions; half-split pairs, in float64."""
        angles = delta * self._inv_freq
        first, second = kv.keys.to(torch.float64).chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        keys = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return KV(keys.to(torch.float32), kv.values)

    def _run(self, cache: object, ids: Sequence[int]) -> tuple[Tensor, object]:
        from transformers import DynamicCache

        if cache is None:
            cache = DynamicCache()  # no configuration: sliding layers keep everything too
        start = cache.get_seq_length()
        output = self._model(
            torch.tensor([list(ids)]),
            past_key_values=cache,
            position_ids=torch.arange(start, start + len(ids)).unsqueeze(0),
            use_cache=True,
        )
        return output.logits[0], cache

    @staticmethod
    def _append(cache: object, kv: KV) -> object:
        from transformers import DynamicCache

        if cache is None:
            cache = DynamicCache()
        for index in range(kv.keys.shape[0]):
            cache.update(kv.keys[index].unsqueeze(0), kv.values[index].unsqueeze(0), index)
        return cache

    @staticmethod
    def _read(cache: object) -> KV:
        layers = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        return KV(torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers]))


def largest_difference(a: FloatArray, b: FloatArray) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
