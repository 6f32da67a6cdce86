"""Where a key is rotated from and to: rotary frequencies and the relocation of keys.

A rotary embedding turns the pair of key elements j at position p by the angle p * inv_freq[j].
Turning it further by (new - old) * inv_freq[j] gives the key of the new position, so keys can be
kept free of their serving position and moved when they are injected. That holds for every variant
whose frequencies depend neither on the position nor on the length of the sequence
(`rotary_config` says which those are). Layers may differ; one without rotary embedding has the
frequencies 0 and its keys stay as they are.

YaRN's magnitude (mscale, attention_factor) multiplies cos and sin by one constant: a cached key is
m * R(p) k. Rotations are linear, R(d) (m * R(p) k) = m * R(p + d) k, so the constant stays in the
key and plays no role in moving it.

This module knows neither vLLM nor a paged cache, nor any model's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from inferscale.errors import NotRelocatable

SUPPORTED = (
    "plain rotary, linear scaling, llama3 scaling, YaRN and longrope, each with full or partial rotary, "
    "half-split or interleaved, the same in all layers, by layer, or absent from some of them"
)


class CosSin(NamedTuple):
    """cos and sin of rotary angles, float32, without any magnitude: each [n, rotary_dim / 2], or
    [layers, n, rotary_dim / 2] where layers differ."""

    cos: Tensor
    sin: Tensor

    def of_layer(self, index: int) -> CosSin:
        """Of one layer, [n, rotary_dim / 2] each."""
        return self if self.cos.ndim == 2 else CosSin(self.cos[index], self.sin[index])


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one model.

    inv_freq: float64 [rotary_dim / 2], radians per position, or [layers, rotary_dim / 2] where layers differ,
    in the order of their caches; the values are those of the engine's float32. A layer without rotary
    embedding has a row of zeros. head_dim, rotary_dim: elements of a key head, and how many of them (the
    first ones) are rotated. interleaved: pairs are (0,1), (2,3), …; otherwise (0, rotary_dim/2), (1, …), ….
    """

    inv_freq: Tensor
    head_dim: int
    rotary_dim: int
    interleaved: bool

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise NotRelocatable(
                f"{self.rotary_dim} of {self.head_dim} elements of a key head would be rotated; it must be "
                "an even number from 2 to the size of the head."
            )
        assert self.inv_freq.ndim in (1, 2)
        assert self.inv_freq.shape[-1] == self.rotary_dim // 2

    @property
    def is_by_layer(self) -> bool:
        """Whether layers differ."""
        return self.inv_freq.ndim == 2

    def of_layers(self, start: int, end: int) -> Rotary:
        """That of some layers; of all where they do not differ."""
        if not self.is_by_layer:
            return self
        inv_freq = self.inv_freq[start:end]
        is_same = bool((inv_freq == inv_freq[0]).all())
        return replace(self, inv_freq=inv_freq[0] if is_same else inv_freq)

    def of_layer(self, index: int) -> Rotary:
        """That of one layer."""
        return replace(self, inv_freq=self.inv_freq[index]) if self.is_by_layer else self

    def cos_sin(self, positions: Tensor) -> CosSin:
        """cos and sin of the angles at `positions`, any integer tensor [n]; negative is allowed.

        The angle is formed in float64, so that it is exact to float32 at any position.
        """
        inv_freq = self.inv_freq.to(positions.device).unsqueeze(-2)
        angles = positions.to(torch.float64).unsqueeze(-1) * inv_freq
        return CosSin(angles.cos().to(torch.float32), angles.sin().to(torch.float32))

    def check_against_cache(self, cache: Tensor, *, is_neox_style: bool | None = None) -> None:
        """Check the frequencies, and the style where given, against the engine's own.

        cache: `cos_sin_cache` of the engine's rotary module, float [max_pos, rotary_dim], rows of
        cos then sin, all multiplied by one constant (YaRN's magnitude). is_neox_style: that
        module's attribute; a cache does not show which elements form a pair. Of one layer, where
        layers differ.

        The deviation in angle allowed at a position covers the rounding of the cache's dtype and
        of float32 frequencies and angles, which grows with the angle. Raises NotRelocatable.
        """
        if is_neox_style is not None and is_neox_style == self.interleaved:
            raise NotRelocatable(
                f"the engine pairs key elements {_style(not is_neox_style)}, but this rotary embedding was "
                f"read as {_style(self.interleaved)}; build it with interleaved={not is_neox_style}."
            )
        if cache.shape[1:] != (self.rotary_dim,) or not cache.numel() or not cache.is_floating_point():
            raise NotRelocatable(
                f"the engine's cos/sin cache is {cache.dtype} {list(cache.shape)}; expected is a "
                f"floating-point cache [positions, {self.rotary_dim}]. Supported are {SUPPORTED}."
            )
        positions = _spread(cache.shape[0]).to(cache.device)
        cos, sin = cache[positions].to(torch.float64).chunk(2, dim=-1)
        magnitude = torch.hypot(cos, sin)
        angles = torch.outer(positions.to(torch.float64), self.inv_freq.to(cache.device))
        eps = torch.finfo(cache.dtype).eps
        typical = magnitude.median()
        if not bool(typical > 0) or bool(((magnitude - typical).abs() > 4 * eps * typical).any()):
            raise NotRelocatable(
                "the entries of the engine's cos/sin cache do not share one magnitude, so they are no plain "
                f"rotation. Supported are {SUPPORTED}."
            )
        across = (cos * angles.sin() - sin * angles.cos()).abs() / magnitude
        along = (cos * angles.cos() + sin * angles.sin()) / magnitude
        excess = across - (2 * eps + 2**-21 * angles)
        excess = torch.where(along > 0, excess, 1.0)
        if bool((excess > 0).any()):
            row, pair = divmod(int(excess.argmax()), self.rotary_dim // 2)
            raise NotRelocatable(
                "the engine's cos/sin cache differs from the frequencies of the model's configuration, most "
                f"of all at position {int(positions[row])}, pair {pair}. This rotary variant is unknown. "
                f"Supported are {SUPPORTED}."
            )

    def check_against_frequencies(self, inv_freq: Tensor) -> None:
        """The same where the engine keeps frequencies, float [rotary_dim / 2], instead of a cache."""
        if inv_freq.shape != self.inv_freq.shape:
            raise NotRelocatable(
                f"the engine rotates {2 * len(inv_freq)} elements of a key head, and by the model's "
                f"configuration it would be {self.rotary_dim}. Supported are {SUPPORTED}."
            )
        found = inv_freq.to(device="cpu", dtype=torch.float64)
        if not torch.allclose(found, self.inv_freq, rtol=2**-20, atol=0):
            raise NotRelocatable(
                "the engine's rotary frequencies differ from those of the model's configuration. This rotary "
                f"variant is unknown. Supported are {SUPPORTED}."
            )


def delta_cos_sin(deltas: Tensor, rotary: Rotary) -> CosSin:
    """cos and sin for moving keys by `deltas`, integers [n].

    The tokens of a segment stand together and share one delta, so each run is computed once. Deltas on the
    CPU avoid a synchronization with the GPU.
    """
    distinct, inverse = torch.unique_consecutive(deltas, return_inverse=True)
    cos, sin = rotary.cos_sin(distinct)
    return CosSin(cos[..., inverse, :], sin[..., inverse, :])


def relocate(keys: Tensor, deltas: Tensor, rotary: Rotary) -> Tensor:
    """Move keys to other positions; a new tensor, `keys` is left alone.

    keys: [..., n, heads, head_dim], any floating dtype; [layers, n, heads, head_dim] where layers differ.
    deltas: integers [n], new position minus old position, shared by all leading dimensions.

    The rotation runs in float32 and is rounded once to the dtype of `keys`. Rows with delta 0 and
    the elements behind `rotary_dim` keep their bits.
    """
    assert deltas.shape == keys.shape[-3:-2], (deltas.shape, keys.shape)
    cos, sin = delta_cos_sin(deltas, rotary)
    moved = rotate(keys, cos.to(keys.device), sin.to(keys.device), rotary)
    return torch.where((deltas == 0).to(keys.device)[:, None, None], keys, moved)


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys [..., n, heads, head_dim] by the angles of cos and sin, as of `CosSin`.

    In float32, rounded once to the dtype of `keys`. No branch depends on values: it compiles.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = keys[..., : rotary.rotary_dim].to(torch.float32)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        result = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((result.to(keys.dtype), keys[..., rotary.rotary_dim :]), dim=-1)


def _spread(num_positions: int) -> Tensor:
    """Positions 0 … num_positions - 1 to look at: the first ones, geometric steps, even steps."""
    last = max(num_positions - 1, 0)
    some = set(range(min(num_positions, 17))) | {last}
    some |= {round(last * i / 64) for i in range(64)}
    some |= {min(last, round(2 ** (i / 2))) for i in range(8, 2 * last.bit_length())}
    return torch.tensor(sorted(some), dtype=torch.int64)


def _style(interleaved: bool) -> str:
    return "interleaved" if interleaved else "half-split"
