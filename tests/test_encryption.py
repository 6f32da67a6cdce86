"""An encryption key: where it is taken from, what is refused, and that nothing shows it."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest

from inferscale.encryption import (
    KEY_VARIABLE,
    EncryptionKey,
    check_installed,
    find_key,
    read_key,
    read_key_file,
)
from inferscale.errors import InvalidConfig

SECRET = bytes(range(224, 256))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "text",
    [
        SECRET.hex(),
        SECRET.hex().upper() + "\n",
        base64.b64encode(SECRET).decode(),
        "  " + base64.urlsafe_b64encode(SECRET).decode() + "\r\n",
    ],
)
def test_a_key_is_read_in_every_form(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EncryptionKey(SECRET).derived("x")
    from_file = find_key(key_file(tmp_path, text))
    monkeypatch.setenv(KEY_VARIABLE, text)
    from_variable = find_key()
    assert from_file is not None
    assert from_variable is not None
    assert from_file.derived("x") == from_variable.derived("x") == wanted


def test_without_a_key_there_is_none() -> None:
    assert find_key() is None


@pytest.mark.parametrize("text", ["", "hunter2", SECRET.hex()[:-1], SECRET.hex() + "00", "é" * 32])
def test_what_is_no_key_is_refused_and_not_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, text)
    with pytest.raises(
        InvalidConfig, match=f"{KEY_VARIABLE} holds no encryption key; allowed are 32"
    ) as refused:
        find_key()
    assert not text or text not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, SECRET.hex(), mode)
    with pytest.raises(InvalidConfig, match=f"has mode {mode:04o}.*chmod 600"):
        read_key_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        find_key(tmp_path / "none")


def test_two_keys_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET.hex())
    with pytest.raises(InvalidConfig, match="leave one of them out"):
        find_key(key_file(tmp_path, SECRET.hex()))


def test_a_key_for_each_purpose() -> None:
    key = read_key(SECRET.hex(), "here")
    derived = {key.derived("a"), key.derived("b"), EncryptionKey(bytes(32)).derived("a"), SECRET}
    assert {len(secret) for secret in derived} == {32}
    assert len(derived) == 4


def test_a_key_does_not_show_itself() -> None:
    key = EncryptionKey(SECRET)
    for shown in (repr(key), str(key), f"{key}"):
        assert shown == "EncryptionKey(…)"
    with pytest.raises(TypeError, match="not leave"):
        pickle.dumps(key)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    monkeypatch.setattr("inferscale.encryption.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"sqlcipher3 and cryptography is not.*inferscale\[encryption\]"):
        check_installed()


def test_keys_have_32_bytes() -> None:
    with pytest.raises(InvalidConfig, match="has 16 bytes"):
        EncryptionKey(bytes(16))
