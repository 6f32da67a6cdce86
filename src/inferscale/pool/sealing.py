"""Segments on disk, encrypted: AES-256-GCM with a key of its own for each, and names that tell nothing.

A segment's key is a hash of its tokens: as a file's name it would tell who guesses a text whether it is
there. On disk the name is that key as one encrypted block of AES: whoever has the encryption key can read the
names of a folder back, for others they are random. Knows nothing of files.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from inferscale.encryption import INSTALL, EncryptionKey
from inferscale.errors import InvalidConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
TAG_BYTES = 16
_NAME = re.compile(r"[0-9a-f]{32}")


class Sealing:
    """Seals and opens segments with keys derived of one. Safe from several threads.

    Raises InvalidConfig where the package `cryptography` is not installed.
    """

    def __init__(self, key: EncryptionKey) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise InvalidConfig(
                f"an encryption key is given, but the package cryptography is not installed. {INSTALL}"
            ) from error
        self._aead, self._invalid = AESGCM, InvalidTag
        self._content = key.derived("kv-content")
        self._names = Cipher(algorithms.AES(key.derived("kv-names")), modes.ECB())
        self.id = key.derived("kv-format").hex()[:32]
        """Tells files of this key from those of another."""

    def name_of(self, key: str) -> str:
        """The name under which the segment `key` (32 hex digits) stands on disk."""
        if _NAME.fullmatch(key) is None:
            raise ValueError(f"{key!r} is not a key of a segment: 32 hex digits")
        cipher = self._names.encryptor()
        return (cipher.update(bytes.fromhex(key)) + cipher.finalize()).hex()

    def key_of(self, name: str) -> str | None:
        """The segment that a name stands for; None for what is no name."""
        if _NAME.fullmatch(name) is None:
            return None
        cipher = self._names.decryptor()
        return (cipher.update(bytes.fromhex(name)) + cipher.finalize()).hex()

    def seal(self, key: str, rows: memoryview, about: bytes) -> tuple[bytes, bytes]:
        """A random nonce, and the encrypted rows, then their tag. about: authenticated with them."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce, self._cipher(key).encrypt(nonce, rows, about)

    def open(self, key: str, nonce: bytes, sealed: bytearray, about: bytes) -> bytearray | None:
        """The rows; None where they, their key or `about` are not what was sealed."""
        try:
            return bytearray(self._cipher(key).decrypt(nonce, sealed, about))
        except self._invalid:
            return None

    def _cipher(self, key: str) -> AESGCM:
        """With a key for this segment alone: nonces of different ones may be the same."""
        return self._aead(hashlib.blake2b(key.encode(), key=self._content, digest_size=32).digest())
