"""Settings: sizes, bounds, unknown names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale.config import (
    ConnectorConfig,
    EncodingConfig,
    MemoryConfig,
    default_data_dir,
    default_runtime_dir,
)
from inferscale.config_checks import from_mapping, parse_size
from inferscale.errors import InvalidConfig
from inferscale.server_config import ServerConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (536870912, 536870912),
        ("536870912", 536870912),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        (" 2 GB ", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.5 kb", 500),
        ("7B", 7),
        ("1KiB", 1024),
    ],
)
def test_sizes(given: int | str, expected: int) -> None:
    assert parse_size(given, "size") == expected


@pytest.mark.parametrize(
    "given",
    ["", "GB", "1 G", "1TB", "-1GB", "1e9", "1,5GB", "nan", "1.GB", "0x10", True, None, 1.5, 1e9, 1.5j, [1]],
)
def test_sizes_that_are_refused_name_the_setting_and_what_is_allowed(given: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"pool_size_bytes is .* allowed are"):
        parse_size(given, "pool_size_bytes")


def test_the_pool_size_may_be_left_to_the_start() -> None:
    for config in (ConnectorConfig(), ConnectorConfig(pool_size_bytes="auto")):
        assert config.is_auto_size
        assert (config.pool_size_bytes, config.size_bytes) == ("auto", 2**30)
    assert not ConnectorConfig(pool_size_bytes=2**30).is_auto_size


def test_the_pool_size_is_parsed_once_and_must_be_above_zero() -> None:
    assert ConnectorConfig(pool_size_bytes="64MiB").size_bytes == 64 * 2**20
    for size in (0, -1, "0", "0GB", "0.1B"):
        with pytest.raises(InvalidConfig, match="pool_size_bytes"):
            ConnectorConfig(pool_size_bytes=size)


@pytest.mark.parametrize("pages", [0, -1, 1025])
def test_page_size_bounds(pages: int) -> None:
    with pytest.raises(InvalidConfig, match="1 to 1024"):
        ConnectorConfig(page_size_tokens=pages)


@pytest.mark.parametrize("given", ["16", 16.0, True, None, [16]])
def test_a_page_size_that_is_no_whole_number_is_refused(given: Any) -> None:
    with pytest.raises(
        InvalidConfig, match=r"page_size_tokens is .* whole numbers, 1 to 1024, without quotes"
    ):
        ConnectorConfig(page_size_tokens=given)


@pytest.mark.parametrize("given", ["false", "true", 0, 1, None])
def test_a_switch_that_is_no_boolean_is_refused(given: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"compile_injection is .* true and false without quotes"):
        ConnectorConfig(compile_injection=given)


@pytest.mark.parametrize("given", ["", 5, True, ["/x"], Path("/x")])
def test_a_runtime_dir_that_is_no_path_in_a_string_is_refused(given: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"runtime_dir is .* Leave it out"):
        ConnectorConfig(runtime_dir=given)


def test_page_size_bounds_are_inclusive() -> None:
    assert ConnectorConfig(page_size_tokens=1).page_size_tokens == 1
    assert ConnectorConfig(page_size_tokens=1024).page_size_tokens == 1024


def test_encoding_bounds() -> None:
    assert EncodingConfig(window=0, stride=1) == EncodingConfig(0, 1)
    with pytest.raises(InvalidConfig, match="window is -1"):
        EncodingConfig(window=-1)
    with pytest.raises(InvalidConfig, match="stride is 0"):
        EncodingConfig(stride=0)
    wrong: Any
    for wrong in ("20", 2.5, True, None):
        with pytest.raises(InvalidConfig, match=r"window is .* whole numbers, 0 or more"):
            EncodingConfig(window=wrong)
        with pytest.raises(InvalidConfig, match=r"stride is .* whole numbers, 1 or more"):
            EncodingConfig(stride=wrong)
        with pytest.raises(InvalidConfig, match=r"mixed is .* whole numbers, 4 to 512.* 0 turns"):
            EncodingConfig(mixed=wrong)
    for size in (-1, 3, 513):
        with pytest.raises(InvalidConfig, match=rf"mixed is {size}; allowed are 4 to 512\. 0 turns"):
            EncodingConfig(mixed=size)
        with pytest.raises(InvalidConfig, match=rf"server\.mixed is {size}"):
            ServerConfig(mixed=size)
    assert [EncodingConfig(mixed=size).mixed for size in (0, 4, 512)] == [0, 4, 512]
    assert ServerConfig(mixed=8).encoding == EncodingConfig(20, 20, 8)


def test_neighbours_are_1_to_64() -> None:
    for wrong in (0, 65):
        with pytest.raises(InvalidConfig, match=rf"neighbours is {wrong}; allowed are 1 to 64\."):
            EncodingConfig(neighbours=wrong)
        with pytest.raises(InvalidConfig, match=rf"server\.neighbours is {wrong}"):
            ServerConfig(neighbours=wrong)
    assert ServerConfig(neighbours=3).encoding == EncodingConfig(20, 20, 60, 3)


def test_unknown_settings_are_named_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig) as caught:
        from_mapping(
            ConnectorConfig, {"pool_size": 1, "page_size_tokens": 8, "zzz": 0}, "kv_connector_extra_config"
        )
    message = str(caught.value)
    assert "kv_connector_extra_config has unknown settings pool_size, zzz" in message
    assert "pool_size_bytes" in message


def test_known_settings_become_the_dataclass() -> None:
    settings = {"pool_size_bytes": "1MiB", "compile_injection": False}
    config = from_mapping(ConnectorConfig, settings, "here")
    assert (config.size_bytes, config.compile_injection, config.page_size_tokens) == (2**20, False, 4)


def test_configs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ConnectorConfig().page_size_tokens = 3  # type: ignore[misc]


def test_the_default_runtime_dir_is_short_and_differs_per_engine() -> None:
    folders = {default_runtime_dir(f"engine-{i}" * 20) for i in range(50)}
    assert len(folders) == 50
    assert all(len(folder) + len("/residency.sock") < 107 for folder in folders)
    assert default_runtime_dir("a") == default_runtime_dir("a")


def test_the_data_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    monkeypatch.delenv("INFERSCALE_HOME", raising=False)
    assert default_data_dir() == Path("/x/inferscale")
    monkeypatch.setenv("INFERSCALE_HOME", "/y")
    assert default_data_dir() == Path("/y")
    assert MemoryConfig().data_dir == Path("/y")


def test_a_size_that_no_machine_has_is_refused() -> None:
    for size in ("9" * 400, "2000000000 GiB"):
        with pytest.raises(InvalidConfig, match="up to 1 EiB"):
            parse_size(size, "pool_size_bytes")
    assert parse_size("9007199254740993", "pool_size_bytes") == 2**53 + 1, "exactly"


@pytest.mark.parametrize("setting", ["auto", "always", "never"])
def test_self_check_has_three_settings(setting: Any) -> None:
    assert ConnectorConfig(self_check=setting).self_check == setting
    with pytest.raises(InvalidConfig, match="self_check is 'yes'; allowed are auto, always, never"):
        ConnectorConfig(self_check="yes")  # type: ignore[arg-type]
