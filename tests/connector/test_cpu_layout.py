"""The probe on the CPU backend's real cache update, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn

from inferscale.connector.layout import LayerCache, check_layout, flat_storage, probe_layout, write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "block"), [(3, 64, 32), (1, 128, 16), (2, 32, 128)])
def test_the_real_cpu_update_is_understood(dtype: torch.dtype, heads: int, dim: int, block: int) -> None:
    impl = SimpleNamespace(attn_type=AttentionType.DECODER, kv_cache_dtype="auto")
    impl.do_kv_cache_update = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update.__get__(impl)
    isa = cpu_attn._get_attn_isa(dtype, block, dim)
    fake = SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    cache = torch.randn(6, heads, block, 2 * dim).to(dtype)
    before = cache.clone()
    layer = LayerCache("layers.0", fake, cache, heads, dim)
    layout = probe_layout(layer, 6)
    check_layout(layer, layout)
    assert torch.equal(cache, before)
    slots = torch.arange(block // 2, 5 * block, 3)
    keys, values = (torch.randn(len(slots), heads, dim).to(dtype) for _ in range(2))
    write_kv(layer, keys, values, slots)
    found = flat_storage(cache)[layout.element_index(slots)].view(-1, 2, heads, dim)
    assert torch.equal(found[:, 0], keys)
    assert torch.equal(found[:, 1], values)
