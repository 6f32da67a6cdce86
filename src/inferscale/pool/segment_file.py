"""The bytes of a segment in a file or an object: whole, of the key that its name says, or none.

    magic and version │ key │ tokens │ bytes of a token │ position of the first token │ checksum │ rows

With an encryption key (`pool/sealing`) the version is 2, the key, which is the file's name, and the rows are
encrypted, the checksum is the tag of AES-GCM, and a nonce stands behind it. The header is authenticated too.
Knows bytes only, neither torch nor where they lie.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import NamedTuple

from inferscale.pool.sealing import NONCE_BYTES, TAG_BYTES, Sealing

FORMAT_VERSION = 1
SEALED_VERSION = 2
_MAGIC = b"IFSKV"
_ABOUT = struct.Struct("<5sB32sIIi")
_CHECKSUM_BYTES = TAG_BYTES
_CHECKED_BYTES = _ABOUT.size + _CHECKSUM_BYTES


class Stored(NamedTuple):
    """A segment as it was saved. rows: bytes of all tokens; origin: position of its first token."""

    rows: bytearray
    origin: int


def format_name(model: str, token_bytes: int, num_ranks: int, sealing: Sealing | None = None) -> str:
    """Name of the folder for segments that fit together. model: its fingerprint, dtype included."""
    version = FORMAT_VERSION if sealing is None else f"{SEALED_VERSION} {sealing.id}"
    text = f"{version}\0{model}\0{token_bytes}\0{num_ranks}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SegmentFile:
    """How segments are packed. token_bytes: of a row. sealing: encrypts them, where they are to be."""

    def __init__(self, token_bytes: int, sealing: Sealing | None = None) -> None:
        self.token_bytes = token_bytes
        self.sealing = sealing
        self.header_bytes = _CHECKED_BYTES + (0 if sealing is None else NONCE_BYTES)

    def name_of(self, key: str) -> str:
        return key if self.sealing is None else self.sealing.name_of(key)

    def key_of(self, name: str) -> str | None:
        """None for what is no name."""
        return name if self.sealing is None else self.sealing.key_of(name)

    def size_of(self, num_tokens: int) -> int:
        return self.header_bytes + num_tokens * self.token_bytes

    def tokens_in(self, size_bytes: int) -> int | None:
        """Of a segment of this size; None where no segment has it."""
        num_tokens, rest = divmod(size_bytes - self.header_bytes, self.token_bytes)
        return num_tokens if num_tokens > 0 and not rest else None

    def packed(self, key: str, origin: int, rows: memoryview) -> tuple[bytes, memoryview]:
        """Header and content."""
        num_tokens = len(rows) // self.token_bytes
        about = self._about(self.name_of(key), num_tokens, origin)
        if self.sealing is None:
            return about + _checksum(key, num_tokens, origin, rows), rows
        nonce, sealed = self.sealing.seal(key, rows, about)
        content = memoryview(sealed)
        return about + sealed[-TAG_BYTES:] + nonce, content[:-TAG_BYTES]

    def unpacked(self, key: str, header: bytes, content: bytearray) -> Stored | None:
        """What a file holds; None where it is not what was packed under this key."""
        if len(header) < self.header_bytes:
            return None
        num_tokens = len(content) // self.token_bytes
        origin = int(_ABOUT.unpack_from(header)[5])
        about, checksum = header[: _ABOUT.size], header[_ABOUT.size : _CHECKED_BYTES]
        if about != self._about(self.name_of(key), num_tokens, origin):
            return None
        if self.sealing is None:
            is_right = checksum == _checksum(key, num_tokens, origin, memoryview(content))
            return Stored(content, origin) if is_right else None
        rows = self.sealing.open(key, header[_CHECKED_BYTES:], content + checksum, about)
        return None if rows is None else Stored(rows, origin)

    def _about(self, name: str, num_tokens: int, origin: int) -> bytes:
        version = FORMAT_VERSION if self.sealing is None else SEALED_VERSION
        stored_name = name.encode()[:32].ljust(32, b"\0")
        return _ABOUT.pack(_MAGIC, version, stored_name, num_tokens, self.token_bytes, origin)


def _checksum(key: str, num_tokens: int, origin: int, rows: memoryview) -> bytes:
    """Against damage, not forgery: CRC-32 of the rows, since a load waits for it."""
    text = f"{zlib.crc32(rows)}\0{key}\0{num_tokens}\0{origin}"
    return hashlib.blake2b(text.encode(), digest_size=_CHECKSUM_BYTES).digest()
