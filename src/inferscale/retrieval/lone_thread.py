"""Small work of torch on a CPU, done by one thread that asks no other for help.

torch spreads even a question's few products over all cores. Where other processes compute, its threads
then wait for one that has no core, and ten milliseconds become hundreds; where none does, there is
little to gain at this size. How many threads torch uses is each thread's own setting, so the work goes
to a thread that is kept for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

_Result = TypeVar("_Result")


def alone(purpose: str, work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises; run by the thread of this purpose, or here where torch uses one only."""
    import torch

    return work() if torch.get_num_threads() == 1 else _thread(purpose).submit(work).result()


@lru_cache(maxsize=16)
def _thread(purpose: str) -> ThreadPoolExecutor:
    import torch

    num_threads = torch.get_num_threads()
    name = f"inferscale-{purpose}"
    thread = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(1,))
    thread.submit(torch.get_num_threads).result()
    torch.set_num_threads(num_threads)  # new threads begin with what was set last, here or there
    return thread


# A forked process has none of these threads: what was handed to one would wait for ever.
os.register_at_fork(after_in_child=_thread.cache_clear)
