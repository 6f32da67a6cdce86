"""The key that a data folder is encrypted with: where it comes from, and the keys derived of it.

    INFERSCALE_ENCRYPTION_KEY   or a file that only its owner can read: 32 bytes as hex or Base64
        └─ derived("catalog"), derived("kv-…")       one for each purpose, by keyed BLAKE2

Knows nothing of what is encrypted: `catalog/drivers` and `pool/sealing` do that. No message, log or `repr`
holds a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from inferscale.errors import InvalidConfig

KEY_VARIABLE = "INFERSCALE_ENCRYPTION_KEY"
KEY_BYTES = 32
_MAX_FILE_BYTES = 4096
_HOW = (
    f"allowed are {KEY_BYTES} bytes as hex ({2 * KEY_BYTES} digits) or Base64; "
    f"`openssl rand -hex {KEY_BYTES}` makes one"
)
WAYS = f"{KEY_VARIABLE} or --encryption-key-file, in Python encryption_key_file"
"""To give a key."""
INSTALL = "Install it with: pip install 'inferscale[encryption]'"


class EncryptionKey:
    """32 secret bytes, used for nothing but to derive others."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise InvalidConfig(f"the encryption key has {len(secret)} bytes; {_HOW}.")
        self._secret = secret

    def __repr__(self) -> str:
        return "EncryptionKey(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an encryption key does not leave its process")

    def derived(self, purpose: str) -> bytes:
        """32 bytes for one purpose. None of them tells the key or another's."""
        return hashlib.blake2b(
            purpose.encode(), key=self._secret, digest_size=KEY_BYTES, person=b"inferscale"
        ).digest()


def check_installed() -> None:
    """Raises InvalidConfig where a package that encrypts is missing."""
    missing = [name for name in ("sqlcipher3", "cryptography") if find_spec(name) is None]
    if missing:
        raise InvalidConfig(
            f"an encryption key is given, but {' and '.join(missing)} is not installed. {INSTALL}"
        )


def find_key(key_file: str | Path | None = None) -> EncryptionKey | None:
    """The key in the file, or else in the environment; None where there is neither: nothing is encrypted.

    Raises InvalidConfig where it is no key, the file can be read by others, or both are given.
    """
    given = os.environ.get(KEY_VARIABLE)
    if key_file is None:
        return None if given is None else read_key(given, f"the environment variable {KEY_VARIABLE}")
    if given is not None:
        raise InvalidConfig(
            f"an encryption key file ({key_file}) and the environment variable {KEY_VARIABLE} are given; "
            "leave one of them out."
        )
    return read_key_file(Path(key_file))


def read_key_file(path: Path) -> EncryptionKey:
    """Raises InvalidConfig."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidConfig(
            f"the encryption key file {path} cannot be read: {error.strerror}. Name a file with the key."
        ) from error
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        raise InvalidConfig(
            f"the encryption key file {path} has mode {stat.S_IMODE(about.st_mode):04o}; allowed is a file "
            f"that only its owner can use. Run: chmod 600 {path}"
        )
    return read_key(content.decode("latin-1"), f"the encryption key file {path}")


def read_key(text: str, where: str) -> EncryptionKey:
    """where: what holds the text, for the message. Raises InvalidConfig, which does not show the text."""
    text = text.strip()
    if re.fullmatch(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        return EncryptionKey(bytes.fromhex(text))
    try:
        secret = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise InvalidConfig(f"{where} holds no encryption key; {_HOW}.")
    return EncryptionKey(secret)
