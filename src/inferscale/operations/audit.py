"""Whether anything of a scope is left: in the tables and the bytes of a data folder, and in a server.

An audit reads; it deletes nothing. What it looks at:

    tables      every row of the scope, of its facts, and of facts that do not exist any more
    free pages  of the catalog file, which have to be empty (SQLite's `secure_delete`)
    texts       those given, as bytes in every file of the data folder outside `kv/`, the log included
    kv          files of segments: those of the scope's keys, and those that no fact names
    server      how many facts it counts and how many of them are in its pool

Bytes are read past SQLite, so call it from a process that has no `Memory` open on the same folder.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from inferscale.catalog import CATALOG_FILE, CatalogTraces
from inferscale.catalog.opening import open_existing
from inferscale.encryption import EncryptionKey
from inferscale.facts import Scope
from inferscale.pool.sealing import Sealing

KV_FOLDER = "kv"
SHORTEST_TEXT_BYTES = 8
"""Shorter texts stand in any file by chance."""
_PIECE_BYTES = 64
"""A longer text is looked for in pieces: it may go on in another page of the file."""
_HEADER_BYTES = 100


class Finding(NamedTuple):
    """One place that was looked at. num_found: what is left there; None where it could not be looked at."""

    place: str
    what: str
    num_found: int | None
    note: str = ""


_SEALED_PAGES = Finding(
    CATALOG_FILE, "free pages", None, "the file is encrypted; SQLite overwrites them before it encrypts them"
)
_SERVER_FILES = Finding(
    "PostgreSQL",
    "files of the server",
    None,
    "deleted rows stay in them until VACUUM, and in its log and backups",
)


class Audit(NamedTuple):
    """All places, in the order in which they were looked at. is_known: whether anything was ever stored under
    the scope there. place: of the catalog."""

    findings: tuple[Finding, ...]
    is_known: bool = True
    place: str = ""

    @property
    def is_clean(self) -> bool:
        return not any(finding.num_found for finding in self.findings)


class Numbers(Protocol):
    """Of a scope, as the memory API's `stats` gives them."""

    @property
    def facts(self) -> int: ...

    @property
    def injectable(self) -> int | None: ...


def audit(
    data_dir: Path,
    scope: Scope,
    texts: Sequence[str] = (),
    server: Numbers | None = None,
    key: EncryptionKey | None = None,
    url: str | None = None,
) -> Audit:
    """Look for traces of a scope, which is not empty.

    texts: former texts of its facts. server: what a running server says of the scope. key: of an encrypted
    folder, whose free pages nobody can tell from others. url: of a catalog in PostgreSQL, whose files are not
    looked at. Raises InvalidInput where the folder holds no catalog.
    """
    catalog = CatalogTraces(open_existing(data_dir, key, url))
    try:
        findings = list(_tables(catalog, scope))
        is_known = catalog.is_known(scope)
        kv = _kv_files(data_dir / KV_FOLDER, key)
        of_scope, unnamed = catalog.keys(scope), catalog.unnamed(kv)
        said = [text for text in texts if catalog.is_said(text)]
    finally:
        catalog.close()
    if url is not None:
        findings.append(_SERVER_FILES)
    else:
        findings.append(_free_pages(data_dir / CATALOG_FILE) if key is None else _SEALED_PAGES)
    findings += _texts(data_dir, texts, said)
    if kv:
        findings.append(Finding(KV_FOLDER, "segments of the scope's facts", len(of_scope & kv.keys())))
        files = sum(kv[key] for key in unnamed)
        note = (
            "system texts and turns; of deleted facts only until a server starts or reads on" if files else ""
        )
        findings.append(Finding(KV_FOLDER, f"{files} files that no fact names", None if files else 0, note))
    if server is not None:
        findings.append(Finding("server", "facts", server.facts))
        note = "" if server.injectable is not None else "the server does not say"
        findings.append(Finding("server", "facts in its pool", server.injectable, note))
    return Audit(tuple(findings), is_known, catalog.place)


def _tables(catalog: CatalogTraces, scope: Scope) -> Iterator[Finding]:
    for table in catalog.tables(scope):
        yield Finding(f"table {table.table}", "rows of the scope", table.of_scope)
        if table.orphans:
            yield Finding(f"table {table.table}", "rows of facts that do not exist", table.orphans)


def _kv_files(folder: Path, key: EncryptionKey | None) -> dict[str, int]:
    """Key → number of files with its name (one a rank), which is encrypted where the folder is."""
    found: dict[str, int] = {}
    paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    sealing = Sealing(key) if key is not None and paths else None
    for path in paths:
        name = (sealing.key_of(path.name) if sealing is not None else None) or path.name
        found[name] = found.get(name, 0) + 1
    return found


def _free_pages(path: Path) -> Finding:
    """Free pages of an SQLite file hold numbers of other free pages, or nothing (fileformat2, 1.5)."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        size = int.from_bytes(header[16:18], "big")
        size = 65536 if size == 1 else size
        trunk, num_free = int.from_bytes(header[32:36], "big"), int.from_bytes(header[36:40], "big")
        num_read = num_filled = 0
        while trunk and num_read < num_free:
            file.seek((trunk - 1) * size)
            page = file.read(size)
            trunk, num_leaves = (int.from_bytes(page[i : i + 4], "big") for i in (0, 4))
            num_filled += any(page[8 + 4 * num_leaves :])
            for place in range(8, 8 + 4 * num_leaves, 4):
                file.seek((int.from_bytes(page[place : place + 4], "big") - 1) * size)
                num_filled += any(file.read(size))
            num_read += 1 + num_leaves
    return Finding(path.name, f"free pages that are not empty, of {num_free}", num_filled)


def _texts(data_dir: Path, texts: Sequence[str], said: Sequence[str]) -> Iterator[Finding]:
    """In the bytes of all files; those that somebody's facts say today cannot be told apart."""
    if not texts:
        yield Finding("files", "former texts", None, "none were given (--text, --texts)")
        return
    wanted = [text for text in texts if text not in said and len(text.encode()) >= SHORTEST_TEXT_BYTES]
    for path in sorted(data_dir.rglob("*")):
        if path.is_file() and KV_FOLDER not in path.relative_to(data_dir).parts:
            yield Finding(path.name, f"former texts, of {len(wanted)}", _num_in(path, wanted))
    if said:
        yield Finding("files", f"{len(said)} of the texts", None, "facts that are there say the same")
    if short := len(texts) - len(wanted) - len(said):
        yield Finding("files", f"{short} of the texts", None, f"shorter than {SHORTEST_TEXT_BYTES} bytes")


def _num_in(path: Path, texts: Sequence[str]) -> int:
    if not texts or path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return sum(any(content.find(piece) >= 0 for piece in _pieces(text)) for text in texts)


def _pieces(text: str) -> Iterator[bytes]:
    """What to look for: the text as stored and as JSON, whole where it is short, in pieces where not."""
    for shape in dict.fromkeys((text.encode(), json.dumps(text)[1:-1].encode())):
        for start in range(0, max(1, len(shape) - _PIECE_BYTES // 2), _PIECE_BYTES):
            piece = shape[start : start + _PIECE_BYTES]
            if len(piece) >= SHORTEST_TEXT_BYTES:
                yield piece
