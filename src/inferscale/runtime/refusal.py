"""Why the connector refused to start, handed to the front end through the runtime folder.

vLLM hides an error of its engine process behind a general one; the file carries ours across.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferscale import errors
from inferscale.errors import InferScaleError

logger = logging.getLogger(__name__)

REFUSAL_NAME = "refusal.json"


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Write an InferScaleError of the block to `folder/refusal.json`, and let it pass."""
    try:
        yield
    except InferScaleError as error:
        try:
            text = json.dumps({"error": type(error).__name__, "message": str(error)})
            (folder / REFUSAL_NAME).write_text(text, encoding="utf-8")
        except OSError:
            logger.exception("The reason could not be written to %s", folder)
        raise


def read_refusal(folder: Path) -> InferScaleError | None:
    """The error that was recorded, as one of its own class; None where there is none."""
    try:
        stored = json.loads((folder / REFUSAL_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = getattr(errors, str(stored.get("error")), None)
    if not isinstance(kind, type) or not issubclass(kind, InferScaleError):
        kind = InferScaleError
    return kind(str(stored.get("message")))


def forget_refusal(folder: Path) -> None:
    """Remove what an earlier start left."""
    (folder / REFUSAL_NAME).unlink(missing_ok=True)
