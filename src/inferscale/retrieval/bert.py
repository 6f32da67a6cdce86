"""The forward pass of a BERT encoder (Devlin et al. 2019) in plain torch calls, for sentence embedders.

The same numbers as transformers' `BertModel` (to 1e-5) at less than half of the time that a short
text takes there: queries, keys and values in one product, no mask where nothing is padded, and on a
CPU weights in the layout that oneDNN multiplies fastest. No step depends on values, so the pass can be
captured as a CUDA graph. Knows nothing of texts and tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Network = Callable[["torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]
"""ids int64 [n, tokens] and mask bool [n, tokens] (None: no padding) → states float32 [n, tokens, dim]."""

_Linear = Callable[["torch.Tensor"], "torch.Tensor"]


class _Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


class _Layer(NamedTuple):
    """qkv: [..., dim] → [..., 3·dim]; up: with its GELU."""

    qkv: _Linear
    out: _Linear
    attention_norm: _Norm
    up: _Linear
    down: _Linear
    norm: _Norm


def network_of(model: Any) -> Network:
    """The fastest network for a loaded transformers encoder in float32, on the device it is on."""
    config = model.config
    is_plain_bert = (
        type(model).__name__ == "BertModel"
        and config.hidden_act == "gelu"
        and getattr(config, "position_embedding_type", None) in (None, "absolute")
        and not config.is_decoder
    )
    return BertEncoder(model) if is_plain_bert else _TransformersEncoder(model)


class _TransformersEncoder:
    """Any other encoder of transformers, called as it is."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        import torch

        attention_mask = torch.ones_like(ids) if mask is None else mask.long()
        states: torch.Tensor = self._model(input_ids=ids, attention_mask=attention_mask).last_hidden_state
        return states


class BertEncoder:
    """A `Network` with the weights of a transformers `BertModel`, which it shares on a GPU."""

    def __init__(self, model: Any) -> None:
        import torch

        embeddings = model.embeddings
        self._num_heads = int(model.config.num_attention_heads)
        self._words = embeddings.word_embeddings.weight.detach()
        self._positions = (
            embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
        ).detach()
        self._norm = _norm(embeddings.LayerNorm)
        self._layers = []
        for layer in model.encoder.layer:
            attention = layer.attention.self
            projections = (attention.query, attention.key, attention.value)
            self._layers.append(
                _Layer(
                    _linear(
                        torch.cat([one.weight for one in projections]),
                        torch.cat([one.bias for one in projections]),
                    ),
                    _linear(layer.attention.output.dense.weight, layer.attention.output.dense.bias),
                    _norm(layer.attention.output.LayerNorm),
                    _linear(layer.intermediate.dense.weight, layer.intermediate.dense.bias, gelu=True),
                    _linear(layer.output.dense.weight, layer.output.dense.bias),
                    _norm(layer.output.LayerNorm),
                )
            )

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        import torch.nn.functional as functional

        num_texts, num_tokens = ids.shape
        states = functional.embedding(ids, self._words) + self._positions[:num_tokens]
        states = _normed(states, self._norm)
        dim = states.shape[-1]
        heads = (num_texts, num_tokens, 3, self._num_heads, dim // self._num_heads)
        allowed = None if mask is None else mask[:, None, None, :]
        for layer in self._layers:
            query, key, value = layer.qkv(states).view(heads).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
            mixed = mixed.transpose(1, 2).reshape(num_texts, num_tokens, dim)
            states = _normed(states + layer.out(mixed), layer.attention_norm)
            states = _normed(states + layer.down(layer.up(states)), layer.norm)
        return states


def _linear(weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> _Linear:
    """`x @ weight.T + bias`, and GELU behind it: weight [out, in], bias [out]."""
    import torch
    import torch.nn.functional as functional

    weight, bias = weight.detach(), bias.detach()
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # What torch.compile uses for CPUs. Of the products of a short text it makes half the time.
        ops: Any = torch.ops.mkldnn
        attribute = "gelu" if gelu else "none"
        try:
            packed = ops._reorder_linear_weight(weight.contiguous(), _PACKED_TOKENS)
            ops._linear_pointwise(weight[:1], packed, bias, attribute, [], "none")
        except (AttributeError, RuntimeError):
            pass  # another torch or another CPU
        else:
            return lambda x: ops._linear_pointwise(x, packed, bias, attribute, [], "none")
    if gelu:
        return lambda x: functional.gelu(functional.linear(x, weight, bias))
    return lambda x: functional.linear(x, weight, bias)


_PACKED_TOKENS = 16
"""Weights are laid out for products with so many rows, a question's length; others work as well."""


def _norm(layer: Any) -> _Norm:
    return _Norm(layer.weight.detach(), layer.bias.detach(), float(layer.eps))


def _normed(states: torch.Tensor, norm: _Norm) -> torch.Tensor:
    import torch.nn.functional as functional

    return functional.layer_norm(states, states.shape[-1:], norm.weight, norm.bias, norm.eps)


def pooled(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of the unmasked states, L2-normalised: [n, tokens, dim] and bool [n, tokens] → [n, dim]."""
    import torch.nn.functional as functional

    if mask is None:
        return functional.normalize(states.mean(dim=1), dim=-1)
    weights = mask.unsqueeze(-1).to(states.dtype)
    mean = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
    return functional.normalize(mean, dim=-1)
