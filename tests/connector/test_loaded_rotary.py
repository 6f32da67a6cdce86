"""The rotary embedding of the loaded model: found around its layers, checked against the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferscale.connector.layout import LayerCache
from inferscale.connector.loaded_rotary import model_rotary
from inferscale.errors import NotRelocatable

HEAD = 8


class FakeRotary(torch.nn.Module):
    """As vLLM's modules: a table of cos then sin for each position."""

    def __init__(self, theta: float, *, is_neox_style: bool = True, head_size: int = HEAD) -> None:
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
        angles = torch.outer(torch.arange(64, dtype=torch.float32), inv_freq)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.is_neox_style = is_neox_style
        self.head_size = head_size


class FakeAttention(torch.nn.Module):
    """A layer as models build it: the attention that vLLM hands out, the rotary module beside it."""

    def __init__(self, rotary: torch.nn.Module | None) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        if rotary is not None:
            self.rotary_emb = rotary


def model_of(*blocks: FakeAttention) -> list[LayerCache]:
    return [LayerCache(f"layers.{i}", block.attn, torch.zeros(1), 1, HEAD) for i, block in enumerate(blocks)]


def rotary_config(theta: float | None, **more: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: {"model_type": "llama", "rope_theta": theta, **more})
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, max_model_len=64))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[Any, torch.nn.Module]:
    """What vLLM has built in this process, in the order of building."""
    from vllm.model_executor.layers import rotary_embedding

    modules: dict[Any, torch.nn.Module] = {}
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", modules)
    return modules


def test_the_rotary_module_of_another_model_in_this_process_does_not_count(
    built: dict[Any, torch.nn.Module],
) -> None:
    for theta, own in ((1e4, "first"), (1e6, "second")):
        built[own] = FakeRotary(theta)
        blocks = [FakeAttention(built[own]) for _ in range(2)]
        rotary = model_rotary(rotary_config(theta), model_of(*blocks))
        assert float(rotary.inv_freq[1]) == pytest.approx(theta**-0.25)


def test_every_rotary_module_of_the_model_itself_must_agree(built: dict[Any, torch.nn.Module]) -> None:
    """Such as one for sliding-window layers and one for the others."""
    built.update(a=FakeRotary(1e4), b=FakeRotary(1e6))
    blocks = [FakeAttention(built["a"]), FakeAttention(built["b"])]
    for theta in (1e4, 1e6):
        with pytest.raises(NotRelocatable, match="differs from the frequencies"):
            model_rotary(rotary_config(theta), model_of(*blocks))


def test_another_models_matching_module_does_not_excuse_this_models(
    built: dict[Any, torch.nn.Module],
) -> None:
    built.update(other=FakeRotary(1e4), own=FakeRotary(1e6))
    block = FakeAttention(built["own"])
    with pytest.raises(NotRelocatable, match="differs from the frequencies"):
        model_rotary(rotary_config(1e4), model_of(block))


def test_rotary_modules_elsewhere_in_the_model(built: dict[Any, torch.nn.Module]) -> None:
    """One of the process's must agree; those that do not may belong to other models."""
    block = FakeAttention(None)
    with pytest.raises(NotRelocatable, match="no rotary embedding with head size 8"):
        model_rotary(rotary_config(1e4), model_of(block))
    built["head of another size"] = FakeRotary(1e4, head_size=16)
    with pytest.raises(NotRelocatable, match="no rotary embedding with head size 8"):
        model_rotary(rotary_config(1e4), model_of(block))
    built["other"] = FakeRotary(1e6)
    with pytest.raises(NotRelocatable, match="differs from the frequencies"):
        model_rotary(rotary_config(1e4), model_of(block))
    built["own"] = FakeRotary(1e4)
    model_rotary(rotary_config(1e4), model_of(block))
    model_rotary(rotary_config(1e6), model_of(block))


def test_the_pairing_style_is_that_of_the_module(built: dict[Any, torch.nn.Module]) -> None:
    block = FakeAttention(FakeRotary(1e4, is_neox_style=False))
    assert model_rotary(rotary_config(1e4), model_of(block)).interleaved
    elsewhere = FakeAttention(None)
    built["a"] = FakeRotary(1e4)
    assert not model_rotary(rotary_config(1e4), model_of(elsewhere)).interleaved
    built["b"] = FakeRotary(1e4, is_neox_style=False)
    with pytest.raises(NotRelocatable, match="both pairing styles"):
        model_rotary(rotary_config(1e4), model_of(elsewhere))
