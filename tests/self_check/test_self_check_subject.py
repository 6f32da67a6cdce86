"""What is checked and what a verdict depends on, read from the engine's configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.config import ConnectorConfig
from inferscale.self_check.remembered import key_of
from inferscale.self_check.subject import conditions_of


def config_with(**changes: Any) -> Any:
    """The attributes of vLLM's configuration that are read, flat names for all of them."""
    told = {
        "dtype": "torch.bfloat16",
        "enforce_eager": False,
        "cache_dtype": "auto",
        "block_size": 16,
        "device_type": "cuda",
        "backend": None,
        "tensor_parallel_size": 1,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=told["dtype"], enforce_eager=told["enforce_eager"]),
        cache_config=SimpleNamespace(cache_dtype=told["cache_dtype"], block_size=told["block_size"]),
        device_config=SimpleNamespace(device_type=told["device_type"]),
        attention_config=SimpleNamespace(backend=told["backend"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=told["tensor_parallel_size"]),
    )


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    platform = SimpleNamespace(get_device_name=lambda: "NVIDIA H200")
    stand_ins = {
        "vllm": SimpleNamespace(__version__="0.32.0"),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "torch": SimpleNamespace(__version__="2.9.0+cu130"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)  # type: ignore[arg-type]
    return platform


def conditions(model: str = "m", pool_dtype: Any = "auto", **changes: Any) -> dict[str, Any]:
    return conditions_of(config_with(**changes), ConnectorConfig(pool_dtype=pool_dtype), model)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"pool_dtype": "int8"},
        {"dtype": "torch.float16"},
        {"enforce_eager": True},
        {"cache_dtype": "fp8"},
        {"block_size": 32},
        {"device_type": "cpu"},
        {"backend": SimpleNamespace(name="TRITON_ATTN")},
        {"tensor_parallel_size": 2},
    ],
)
def test_whatever_differs_is_another_verdict(change: dict[str, Any]) -> None:
    assert key_of(conditions()) == key_of(conditions())
    assert key_of(conditions(**change)) != key_of(conditions())


def test_versions_and_the_gpus_name_are_told(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = conditions()
    assert (told["vllm"], told["torch"], told["device_name"]) == ("0.32.0", "2.9.0+cu130", "NVIDIA H200")
    assert told["attention_backend"] == "auto"
    platform.get_device_name = lambda: "NVIDIA A100"
    assert key_of(conditions()) != key_of(told)
    before = key_of(conditions())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.9.1"))  # type: ignore[arg-type]
    assert key_of(conditions()) != before


def test_a_driver_that_does_not_tell_keeps_nobody_from_checking(platform: SimpleNamespace) -> None:
    def silent() -> str:
        raise RuntimeError("NVML is not there")

    platform.get_device_name = silent
    assert conditions()["device_name"] == ""


def test_the_name_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "processor\t: 0\nmodel name\t: Xeon 8480\n\nprocessor\t: 1\nmodel name\t: Xeon 8480\n"
    monkeypatch.setattr(Path, "read_text", lambda path: listed)
    assert conditions(device_type="cpu")["device_name"] == "Xeon 8480"


def test_a_configuration_that_lacks_what_is_newer_is_read() -> None:
    config = config_with(device_type="cpu")
    del config.attention_config, config.cache_config.block_size, config.model_config.enforce_eager
    told = conditions_of(config, ConnectorConfig(), "m")
    assert (told["attention_backend"], told["block_size"], told["enforce_eager"]) == ("auto", 0, False)
