"""The rotary embedding of the model that this process has loaded, checked against the engine's own.

The frequencies come from the model's configuration (`rotary_config`); the engine's modules must agree with
them. vLLM hands a connector its attention layers, but not the model, so the modules are found upwards from
these: the nearest module around a layer that has rotary modules for children. vLLM's own models keep one
beside each attention layer, those of its Transformers backend one for the whole model. Where a model keeps
them elsewhere, one of those that vLLM built in this process must agree
(vllm/model_executor/layers/rotary_embedding/__init__.py, `_ROPE_DICT`); others there may belong to other
models.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inferscale.connector.layout import LayerCache
from inferscale.errors import NotRelocatable
from inferscale.rope import Rotary
from inferscale.rotary_config import rotary_from_config

logger = logging.getLogger(__name__)

_CHANGING = ("dynamic", "longrope")
"""Variants whose frequencies transformers' own modules change with the length of a sequence."""


class _Frequencies(NamedTuple):
    """What one of the engine's rotary modules turns keys by.

    table: cos, then sin, for each position, of vLLM's modules. inv_freq: of transformers' modules. is_neox:
    pairs are half-split; None where that cannot be seen.
    """

    table: torch.Tensor | None
    inv_freq: torch.Tensor | None
    is_neox: bool | None

    def check(self, rotary: Rotary) -> None:
        """Raise NotRelocatable unless they are those of `rotary`, which is that of one layer."""
        if self.table is not None:
            rotary.check_against_cache(self.table, is_neox_style=self.is_neox)
        elif self.inv_freq is not None:
            rotary.check_against_frequencies(self.inv_freq)


def model_rotary(vllm_config: Any, layers: Sequence[LayerCache]) -> Rotary:
    """The model's rotary embedding, checked against the engine's own modules. Raises NotRelocatable."""
    model = vllm_config.model_config
    config = model.hf_text_config.to_dict()
    latent = config.get("kv_lora_rank")
    if latent and 2 * layers[0].head_dim != int(latent) + int(config.get("qk_rope_head_dim") or 0):
        raise NotRelocatable(
            "this model has latent attention, but its cache keeps whole keys and values, whose rotated part "
            "InferScale does not know. Start vLLM without the connector."
        )
    reader = _Reader(
        config,
        layers[0].head_dim,
        [layer_number(layer.name, index) for index, layer in enumerate(layers)],
        int(model.max_model_len),
    )
    around = [list(found) for found in _rotaries_around([layer.layer for layer in layers])]
    if any(around):
        return reader.checked_by_layer(around)
    return reader.checked_by_process(_rotaries_of_process(reader.rotary_size))


def layer_number(name: str, default: int) -> int:
    """Of an attention layer in its model: the first number in its name (model.layers.3.self_attn.attn)."""
    found = re.search(r"(?<![^.])\d+(?![^.])", name)
    return int(found[0]) if found else default


class _Reader:
    """Rotary embeddings by configuration, beside the engine's. layers: their numbers in the model."""

    def __init__(
        self, config: Mapping[str, Any], head_dim: int, layers: Sequence[int], max_tokens: int
    ) -> None:
        self._config = config
        self._head_dim = head_dim
        self._layers = layers
        self._max_tokens = max_tokens

    @property
    def rotary_size(self) -> int:
        """Of the heads that the engine's modules are built for."""
        return int(self._config.get("qk_rope_head_dim") or self._head_dim)

    def read(self, is_neox: bool | None) -> Rotary:
        return rotary_from_config(
            self._config,
            self._head_dim,
            interleaved=None if is_neox is None else not is_neox,
            layers=self._layers,
            max_tokens=self._max_tokens,
        )

    def checked_by_layer(self, around: Sequence[Sequence[torch.nn.Module]]) -> Rotary:
        """Every layer that is rotated has modules around it; all of them must agree."""
        rotary = self.read(None)
        styles: set[bool | None] = set()
        for index, (number, modules) in enumerate(zip(self._layers, around, strict=True)):
            of_layer = rotary.of_layer(index)
            if not bool(of_layer.inv_freq.any()):
                continue
            if not modules:
                raise NotRelocatable(
                    f"layer {number} has no rotary embedding in vLLM, but one by the model's configuration. "
                    "Start vLLM without the connector."
                )
            for module in modules:
                found = self._frequencies_of(module, number)
                if found.is_neox is not None and found.is_neox == of_layer.interleaved:
                    rotary = self.read(found.is_neox)
                    of_layer = rotary.of_layer(index)
                found.check(of_layer)
                styles.add(found.is_neox)
        if {True, False} <= styles:
            raise NotRelocatable(
                "the model's layers pair key elements in both styles, half-split and interleaved; InferScale "
                "needs one. Start vLLM without the connector."
            )
        return rotary

    def checked_by_process(self, modules: Sequence[torch.nn.Module]) -> Rotary:
        """One of these must agree with each layer."""
        refusal: NotRelocatable | None = None
        agreeing: list[Rotary] = []
        for style in sorted({bool(getattr(module, "is_neox_style", True)) for module in modules}):
            rotary = self.read(style)
            same = [module for module in modules if bool(getattr(module, "is_neox_style", True)) == style]
            try:
                for index, number in enumerate(self._layers):
                    self._one_agrees(rotary.of_layer(index), number, same)
                agreeing.append(rotary)
            except NotRelocatable as error:
                refusal = error
        if len(agreeing) > 1:
            raise NotRelocatable(
                "this process holds rotary embeddings of these frequencies in both pairing styles, and which "
                "one is this model's cannot be seen. Start the model in a process of its own."
            )
        if agreeing:
            return agreeing[0]
        self.read(None)  # names the variant where it knows it
        raise refusal or NotRelocatable(
            f"vLLM built no rotary embedding with head size {self.rotary_size} for this model, so its keys "
            "cannot be checked. Start vLLM without the connector."
        )

    def _one_agrees(self, rotary: Rotary, number: int, modules: Sequence[torch.nn.Module]) -> None:
        if not bool(rotary.inv_freq.any()):
            return
        refusal: NotRelocatable | None = None
        for module in modules:
            try:
                self._frequencies_of(module, number).check(rotary)
                return
            except NotRelocatable as error:
                refusal = error  # of the module built last, if several were: most likely this model's
        assert refusal is not None
        raise refusal

    def _frequencies_of(self, module: Any, number: int) -> _Frequencies:
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, torch.Tensor):
            return _Frequencies(table, None, bool(module.is_neox_style))
        both = getattr(module, "long_short_cos_sin_cache", None)
        if isinstance(both, torch.Tensor):  # longrope, half-split only: the tables of both lengths
            start = int(module.original_max_position_embeddings)
            return _Frequencies(both[start:] if module.use_long_rope else both[:start], None, True)
        return self._frequencies_of_transformers(module, number)

    def _frequencies_of_transformers(self, module: Any, number: int) -> _Frequencies:
        types = self._config.get("layer_types")
        layer_type = types[number] if isinstance(types, Sequence) and number < len(types) else ""
        inv_freq = getattr(module, f"{layer_type}_inv_freq", None)
        by_type = isinstance(inv_freq, torch.Tensor)
        kind = getattr(module, "rope_type", "default")
        kind = kind.get(layer_type) if isinstance(kind, Mapping) else kind
        if kind in _CHANGING:
            raise NotRelocatable(
                f"this model has {kind} rotary embeddings, whose frequencies vLLM's Transformers backend "
                "changes with the length of a sequence; its keys cannot be moved to another position. Start "
                "vLLM without the connector."
            )
        style = _style_of_transformers(module, layer_type if by_type else None)
        return _Frequencies(None, inv_freq if by_type else module.inv_freq, style)


def _style_of_transformers(module: Any, layer_type: str | None) -> bool | None:
    """Whether pairs are half-split, by turning one element with the model's own function."""
    apply = getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None)
    if apply is None:
        return None
    pairs = len(getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"))
    device = next(module.buffers()).device
    key = torch.zeros((1, 1, 1, 2 * pairs), device=device)
    key[..., 0] = 1
    try:
        with torch.inference_mode():
            position = torch.ones((1, 1), dtype=torch.int64, device=device)
            cos, sin = module(key, position) if layer_type is None else module(key, position, layer_type)
            _, turned = apply(key, key, cos, sin)
    except Exception as error:  # noqa: BLE001 — any model's code; its type says the style then
        logger.info(
            "The pairing style of %s is taken from the model's type: %s", type(module).__name__, error
        )
        return None
    partner = turned.flatten()[1:].nonzero().flatten().tolist()
    return {(0,): False, (pairs - 1,): True}.get(tuple(partner)) if pairs > 1 else None


def _rotaries_around(layers: Sequence[object]) -> Iterator[Sequence[torch.nn.Module]]:
    """For each layer the rotary modules of the nearest module around it that has any."""
    parents: dict[int, list[torch.nn.Module]] = {}
    for candidate in gc.get_objects():
        children = getattr(candidate, "_modules", None) if _is_module(candidate) else None
        if isinstance(children, dict):  # not so in compiled modules
            for child in children.values():
                parents.setdefault(id(child), []).append(candidate)
    for layer in layers:
        yield _nearest(layer, parents)


def _nearest(layer: object, parents: Mapping[int, Sequence[torch.nn.Module]]) -> list[torch.nn.Module]:
    level: list[Any] = [layer]
    seen = {id(layer)}
    while level:
        around = [parent for module in level for parent in parents.get(id(module), ())]
        level = [parent for parent in {id(p): p for p in around}.values() if id(parent) not in seen]
        seen.update(id(parent) for parent in level)
        children = [child for parent in level for child in parent._modules.values() if child is not None]
        found = {id(child): child for child in children if _is_rotary(child)}
        if found:
            return list(found.values())
    return []


def _is_module(candidate: object) -> bool:
    """By its class: objects can pretend to be of another, and do something when they are asked."""
    return issubclass(type(candidate), torch.nn.Module)


def _rotaries_of_process(head_size: int) -> list[torch.nn.Module]:
    from vllm.model_executor.layers import rotary_embedding

    known = getattr(rotary_embedding, "_ROPE_DICT", {})
    return [module for module in known.values() if getattr(module, "head_size", None) == head_size]


def _is_rotary(module: torch.nn.Module) -> bool:
    names = (*("cos_sin_cache", "long_short_cos_sin_cache", "inv_freq"), "full_attention_inv_freq")
    return any(isinstance(getattr(module, name, None), torch.Tensor) for name in names)
