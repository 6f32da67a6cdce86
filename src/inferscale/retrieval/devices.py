"""On which torch device an embedder and a search index compute, and what happens where a GPU fails them.

Knows nothing of what is computed. torch is loaded on first use.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from inferscale.config import AUTO
from inferscale.errors import EngineError, InvalidConfig

if TYPE_CHECKING:
    import torch

MIN_FREE_BYTES = 2**30
"""A GPU with less free memory than this is not taken by `auto`: an engine fills it."""

_SETTING = "embedder_device"
_log = logging.getLogger(__name__)

_A = TypeVar("_A")


class DeviceChoice:
    """The device of one embedder and its index, chosen on first use. Safe from several threads.

    name: a torch device, which is then used or refused; or `auto`, a GPU where there is one with room
    and else the CPU. `auto` also changes to the CPU, for good, once something fails on the GPU. Why it
    is the CPU although there is a GPU is logged once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._device: torch.device | None = None

    def get(self) -> torch.device:
        """Raises InvalidConfig where this machine has no such device."""
        with self._lock:
            if self._device is None:
                self._device = _free_gpu() or _device("cpu") if self.name == AUTO else _device(self.name)
            return self._device

    def run(self, what: str, work: Callable[[torch.device], _A]) -> _A:
        """What `work` returns for the device; for the CPU where `auto` had chosen a GPU that fails.

        `work` may be called twice and has to follow the device it is given. what: stands in messages.
        Raises EngineError where a device that was named fails.
        """
        device = self.get()
        try:
            return work(device)
        except RuntimeError as error:
            if device.type == "cpu" or not _is_of_a_gpu(error):
                raise
            reason = _first_line(error)
            if self.name != AUTO:
                raise EngineError(
                    f"{_SETTING} is {self.name!r}, but {what} failed there ({reason}). Free memory on that "
                    "device, which other processes may hold, or set it to 'cpu' or 'auto'."
                ) from error
        # Here the error and all that its frames held on the device are gone.
        self._use_cpu(device, f"{what} failed on {device} ({reason})")
        result = work(self.get())
        _give_back_memory()
        return result

    def _use_cpu(self, failed: torch.device, reason: str) -> None:
        with self._lock:
            if self._device == failed:
                self._device = _device("cpu")
                _say(reason)


def as_choice(device: str | DeviceChoice) -> DeviceChoice:
    return device if isinstance(device, DeviceChoice) else DeviceChoice(device)


def _free_gpu() -> torch.device | None:
    """The current GPU; None where there is none that has memory left."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        free_bytes = int(torch.cuda.mem_get_info()[0])
        device = torch.empty(0, device="cuda").device
    except (RuntimeError, AssertionError) as error:
        _say(f"the GPU cannot be used ({_first_line(error)})")
        return None
    if free_bytes < MIN_FREE_BYTES:
        _say(f"the GPU has only {free_bytes / 2**20:.0f} MiB of free memory")
        return None
    return device


def _give_back_memory() -> None:
    """torch keeps what was freed on a GPU, where others need it more."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def _device(name: str) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidConfig(
            f"{_SETTING} is {name!r}, which torch cannot use here ({_first_line(error)}). "
            "Allowed are 'cpu', 'auto' and the accelerators of this machine, such as 'cuda' or 'cuda:0'."
        ) from error


def _is_of_a_gpu(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "cuda" in text or "cublas" in text or "out of memory" in text


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _say(reason: str) -> None:
    _log.warning("%s is 'auto' and %s: embedder and search index use the CPU.", _SETTING, reason)
