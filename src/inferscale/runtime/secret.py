"""The secret that signs plans: one file in the runtime folder, readable by its owner only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from inferscale.errors import EngineError

SECRET_NAME = "secret"
SECRET_BYTES = 32


def open_runtime_dir(path: str) -> Path:
    """Create the folder for its owner only; EngineError if it belongs to, or is open to, others."""
    folder = Path(path)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    above = folder.parent.stat()
    if above.st_uid not in (0, os.getuid()) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise EngineError(
            f"The folder {folder.parent} belongs to, or is open to, other users (owner {above.st_uid}, mode "
            f"{stat.S_IMODE(above.st_mode):o}), who could exchange the runtime folder in it; set runtime_dir "
            "to a place of your own."
        )
    info = folder.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise EngineError(
            f"The runtime folder {folder} is a symbolic link; set runtime_dir to the folder itself."
        )
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise EngineError(
            f"The runtime folder {folder} is not private to this user (owner {info.st_uid}, mode "
            f"{stat.S_IMODE(info.st_mode):o}); remove it, or set runtime_dir to another folder."
        )
    return folder


def load_secret(folder: Path) -> bytes:
    """The secret of this folder, made by whoever comes first; 32 bytes."""
    path = folder / SECRET_NAME
    draft = folder / f"{SECRET_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    if not path.exists():
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        try:
            os.link(draft, path)  # fails if another process was faster; then its secret counts
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise EngineError(
            f"{path} is damaged ({len(secret)} bytes, expected {SECRET_BYTES}); remove it and start again."
        )
    return secret
