"""Products of float32 matrices on a GPU in float32, whatever a process allows.

A process may allow TF32 (`torch.set_float32_matmul_precision("high")` and others), which rounds the
factors to 10 bits: vectors of one text would then differ by about 1e-3 with the setting, and so would
scores. torch has this setting for the whole process only. It is read when a product is queued or
captured, so it is changed for that moment and only where TF32 is allowed; what another thread multiplies
just then is exact as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_num_inside = 0
_restore: Callable[[], None] | None = None


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """What is queued on `device` or captured inside uses no TF32. Does nothing on other devices than CUDA.

    May be nested and entered by several threads: the first changes the setting and the last restores
    it, unless somebody has allowed TF32 anew meanwhile.
    """
    global _num_inside, _restore
    if device.type != "cuda":
        yield
        return
    with _lock:
        _num_inside += 1
        if _allows_tf32():
            restore = _refuse_tf32()
            _restore = _restore or restore
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _restore is not None:
                if not _allows_tf32():
                    _restore()
                _restore = None


def _matmul() -> Any:
    import torch

    return torch.backends.cuda.matmul


def _allows_tf32() -> bool:
    try:
        return bool(_matmul().fp32_precision == "tf32")
    except AttributeError:  # torch 2.8
        return bool(_matmul().allow_tf32)


def _refuse_tf32() -> Callable[[], None]:
    """Change the setting and return what restores it.

    By the name that allowed TF32: since torch 2.9 reading the older name raises where only the newer one
    was set, and after a mixture of both, which would hit other threads.
    """
    import torch

    matmul = _matmul()
    try:
        matmul.allow_tf32  # noqa: B018
    except RuntimeError:
        matmul.fp32_precision = "ieee"
        return lambda: setattr(matmul, "fp32_precision", "tf32")
    try:
        is_medium = torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:
        is_medium = False
    matmul.allow_tf32 = False
    if is_medium:  # allow_tf32 would make it "high"
        return lambda: torch.set_float32_matmul_precision("medium")
    return lambda: setattr(matmul, "allow_tf32", True)
