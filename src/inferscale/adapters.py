"""What tells one LoRA adapter from another, so that KV computed under one is never taken for another's.

Front end and connector ask for it independently and must get the same answer. Knows nothing of vLLM but what
its requests say of an adapter: a name, a number that is never given twice, and a folder or a hub's name.
"""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CONFIG = "adapter_config.json"
_PIECES, _PIECE_BYTES = 128, 65536
"""Of weights that are larger than this, so many pieces are read, evenly over the file."""


def model_with_adapter(model: str, name: str, number: int, path: str) -> str | None:
    """What plans and keys of requests with this adapter name as their model; None where its files are not on
    this machine, or cannot be read. model: fingerprint of the model below.

    Read once for each number: vLLM loads an adapter under a new name or folder as another one. What it
    reloads in place is not to be asked for here.
    """
    try:
        content = _content(name, number, path)
    except OSError as error:  # vLLM read them before: a chat goes on, with its facts as text
        logger.warning("The files of the LoRA adapter %s cannot be read: %s", name, error)
        content = None
    return None if content is None else f"{model}+lora {content}"


@lru_cache(maxsize=4096)
def _content(name: str, number: int, path: str) -> str | None:
    folder = _folder(path)
    weights = next((folder / known for known in _WEIGHTS if (folder / known).is_file()), None)
    if weights is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    config = folder / _CONFIG
    digest.update(config.read_bytes() if config.is_file() else b"")
    size = weights.stat().st_size
    digest.update(f"\0{weights.name}\0{size}\0".encode())
    whole = size <= _PIECES * _PIECE_BYTES
    with weights.open("rb") as file:
        for piece in range(1 if whole else _PIECES):
            file.seek(piece * (size - _PIECE_BYTES) // (_PIECES - 1) if piece else 0)
            digest.update(file.read() if whole else file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _folder(path: str) -> Path:
    """Where vLLM reads the adapter from: a folder, or what the hub's cache has under that name."""
    folder = Path(path).expanduser()
    if folder.exists() or folder.is_absolute():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no name of a repository
        return folder
