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


# Layers that differ, and modules of other kinds -------------------------------------------------


class LongRotary(torch.nn.Module):
    """As vLLM's longrope: a table of the short factors, then one of the long."""

    def __init__(self, inv_short: torch.Tensor, inv_long: torch.Tensor, original: int, is_long: bool) -> None:
        super().__init__()
        tables = []
        for inv_freq, num in ((inv_short, original), (inv_long, 64)):
            angles = torch.outer(torch.arange(num, dtype=torch.float32), inv_freq)
            tables.append(1.2 * torch.cat((angles.cos(), angles.sin()), dim=-1))
        self.long_short_cos_sin_cache = torch.cat(tables)
        self.original_max_position_embeddings = original
        self.use_long_rope = is_long


@pytest.mark.parametrize("is_long", [True, False])
def test_longrope_has_the_table_that_the_engine_uses(is_long: bool) -> None:
    plain = 1.0 / (1e4 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD))
    short, long = torch.tensor([1.0, 1.1, 1.2, 1.3]), torch.tensor([2.0, 3.0, 4.0, 5.0])
    original = 32 if is_long else 64  # the engine's longest context is 64
    params = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    config = rotary_config(1e4, rope_scaling=params, original_max_position_embeddings=original)
    right = FakeAttention(LongRotary(plain / short, plain / long, original, is_long))
    rotary = model_rotary(config, model_of(right))
    torch.testing.assert_close(rotary.inv_freq.float(), plain / (long if is_long else short))
    wrong = FakeAttention(LongRotary(plain / short, plain / long, original, not is_long))
    with pytest.raises(NotRelocatable, match="differs from the frequencies"):
        model_rotary(config, model_of(wrong))


def test_layers_without_rotary_embedding_need_no_module() -> None:
    blocks = [FakeAttention(FakeRotary(1e4)), FakeAttention(None)]
    rotary = model_rotary(rotary_config(1e4, no_rope_layers=[1, 0]), model_of(*blocks))
    assert rotary.inv_freq[0].all()
    assert not rotary.inv_freq[1].any()
    with pytest.raises(NotRelocatable, match="layer 1 has no rotary embedding in vLLM"):
        model_rotary(rotary_config(1e4), model_of(*blocks))


def test_each_layer_agrees_with_the_module_beside_it() -> None:
    types = ["sliding_attention", "full_attention"]
    params = {kind: {"rope_theta": theta} for kind, theta in zip(types, (1e4, 1e6), strict=True)}
    config = rotary_config(None, layer_types=types, rope_parameters=params)
    blocks = [FakeAttention(FakeRotary(1e4)), FakeAttention(FakeRotary(1e6))]
    rotary = model_rotary(config, model_of(*blocks))
    assert [float(row[1]) for row in rotary.inv_freq] == pytest.approx([1e4**-0.25, 1e6**-0.25])
    with pytest.raises(NotRelocatable, match="differs from the frequencies"):
        model_rotary(config, model_of(*blocks[::-1]))
    only_second = [LayerCache("model.layers.1.attn", blocks[1].attn, torch.zeros(1), 1, HEAD)]
    assert float(model_rotary(config, only_second).inv_freq[1]) == pytest.approx(1e6**-0.25)


class HuggingFaceRotary(torch.nn.Module):
    """As transformers' modules: frequencies, and one module for the whole model."""

    def __init__(self, theta: float, rope_type: str = "default") -> None:
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD))
        self.register_buffer("inv_freq", inv_freq)
        self.rope_type = rope_type

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(position_ids[0].float(), self.inv_freq)[None]
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Found by its name in the module of `HuggingFaceRotary`, as transformers has it; interleaved."""
    cos, sin = (part[..., : HEAD // 2].repeat_interleave(2, -1)[:, None] for part in (cos, sin))
    turned = torch.stack((-k[..., 1::2], k[..., 0::2]), dim=-1).flatten(-2)
    return q, k * cos + turned * sin


class HuggingFaceModel(torch.nn.Module):
    def __init__(self, rotary: torch.nn.Module, blocks: list[FakeAttention]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)
        self.rotary_emb = rotary


def test_the_module_of_a_whole_model_in_the_transformers_backend() -> None:
    blocks = [FakeAttention(None), FakeAttention(None)]
    model = HuggingFaceModel(HuggingFaceRotary(1e4), blocks)
    rotary = model_rotary(rotary_config(1e4), model_of(*blocks))
    assert rotary.interleaved, "told by the model's own function"
    assert float(rotary.inv_freq[1]) == pytest.approx(1e4**-0.25)
    with pytest.raises(NotRelocatable, match="frequencies differ"):
        model_rotary(rotary_config(1e6), model_of(*blocks))
    model.rotary_emb.rope_type = "longrope"
    with pytest.raises(NotRelocatable, match="with the length of a sequence"):
        model_rotary(rotary_config(1e4), model_of(*blocks))


def test_latent_attention_that_keeps_whole_keys_is_refused() -> None:
    config, block = rotary_config(1e4, kv_lora_rank=512, qk_rope_head_dim=64), FakeAttention(FakeRotary(1e4))
    with pytest.raises(NotRelocatable, match="keeps whole keys"):
        model_rotary(config, model_of(block))
