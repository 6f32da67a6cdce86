"""Cursors of pages: a place in the order of facts that says nothing to whoever holds it.

A cursor holds the sequence number of the last fact of its page, so it stays right whatever is added
or deleted, that fact included. Sequence numbers count the facts of everybody, and how many others
store is nobody's business: the number is hidden, and sealed, with a key of the data folder
(in the manner of SIV, RFC 5297, with BLAKE2b: the seal is the nonce).
"""

from __future__ import annotations

import hashlib

from inferscale.catalog.sql import Connection
from inferscale.errors import InvalidInput

_HALF = 8
"""Bytes of the seal, and of the number."""
_SHOWN_CHARS = 60


def read_key(connection: Connection) -> bytes:
    found = connection.execute("SELECT value FROM meta WHERE name = 'cursor_key'").fetchone()
    return bytes.fromhex(found[0])


def cursor_at(key: bytes, seq: int) -> str:
    """The cursor of the place behind fact `seq`; always the same text."""
    number = seq.to_bytes(_HALF, "big")
    seal = _hash(key, number, b"seal")
    return (seal + _xor(number, _hash(key, seal, b"pad"))).hex()


def seq_at(key: bytes, cursor: str) -> int:
    """The number in a cursor. Raises InvalidInput for anything that is no cursor of this data folder."""
    try:
        sealed = bytes.fromhex(cursor)
    except (TypeError, ValueError):
        sealed = b""
    if len(sealed) == 2 * _HALF:
        seal, hidden = sealed[:_HALF], sealed[_HALF:]
        seq = int.from_bytes(_xor(hidden, _hash(key, seal, b"pad")), "big")
        if cursor_at(key, seq) == cursor:
            return seq
    shown = repr(cursor)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
    raise InvalidInput(
        f"after is {shown}, which is no cursor of this memory; give the next_cursor of a page, "
        "unchanged, or leave it out to begin with the first."
    )


def _hash(key: bytes, content: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, person=purpose, digest_size=_HALF).digest()


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
