"""Settings of an engine that depend on the hardware: its share of the memory (`budget`), its block size.

Knows vLLM's platform and the driver (NVML), nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferscale.budget import DeviceMemory, plan_budget
from inferscale.config import ConnectorConfig
from inferscale.errors import InvalidConfig
from inferscale.model_size import model_size

logger = logging.getLogger(__name__)

GPU_BLOCK_SIZE = 64
"""Tokens of a block of vLLM's paged cache on a GPU, where the caller names none. vLLM's own default of 16
makes it hash four times as many blocks of each prompt, on the way to the first token (docs/performance.md);
a multiple of 64 suits every attention backend."""


def within_budget(
    model: str, connector: ConnectorConfig, arguments: Mapping[str, Any], reserve_bytes: int | None
) -> tuple[ConnectorConfig, dict[str, Any]]:
    """Settings with the pool's size as a number and, on a GPU, vLLM's share and block size.

    Raises PoolTooLarge, and InvalidConfig for a share that is none.
    """
    share = arguments.get("gpu_memory_utilization")
    if share is not None and (
        isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1
    ):
        raise InvalidConfig(f"gpu_memory_utilization is {share!r}; allowed are numbers above 0, up to 1.")
    gpus = find_gpus(int(arguments.get("tensor_parallel_size") or 1))
    if not gpus:
        return replace(connector, pool_size_bytes=connector.size_bytes), dict(arguments)
    budget = plan_budget(
        gpus,
        model_size(model, arguments),
        pool_bytes=None if connector.is_auto_size else connector.size_bytes,
        gpu_memory_utilization=arguments.get("gpu_memory_utilization"),
        cache_bytes=arguments.get("kv_cache_memory_bytes"),
        reserve_bytes=reserve_bytes,
        default_pool_bytes=connector.size_bytes,
    )
    logger.info(
        "Pool of %.2f GiB; gpu_memory_utilization is %.4f",
        budget.pool_bytes / 2**30,
        budget.gpu_memory_utilization,
    )
    settings = {
        **arguments,
        "gpu_memory_utilization": budget.gpu_memory_utilization,
        "block_size": arguments.get("block_size") or GPU_BLOCK_SIZE,
    }
    return replace(connector, pool_size_bytes=budget.pool_bytes), settings


def find_gpus(num_workers: int) -> list[DeviceMemory]:
    """Memory of the GPUs that vLLM's workers will use, [] where there is none.

    Asked of the driver, as vLLM does it (vllm/platforms/cuda.py): torch would open a CUDA context in
    this process, which costs about half a GiB of what is measured. Where the driver does not tell
    (MIG, ROCm), torch is asked.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.utils.import_utils import import_pynvml
    except ImportError:
        return []  # starting says what is missing
    if not current_platform.is_cuda_alike():
        return []
    gpus = []
    try:
        nvml = import_pynvml()
        nvml.nvmlInit()
        for worker in range(num_workers):
            physical = current_platform.device_id_to_physical_device_id(worker)
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(physical))
            gpus.append(DeviceMemory(f"cuda:{worker}", int(memory.total), int(memory.free)))
        nvml.nvmlShutdown()
    except Exception as error:  # noqa: BLE001 — NVML's errors have no base that exists without a driver
        import torch

        logger.info("NVML does not tell the GPUs' memory (%s); torch is asked", error)
        count = min(num_workers, torch.cuda.device_count())
        asked = [(worker, torch.cuda.mem_get_info(worker)) for worker in range(count)]
        gpus = [DeviceMemory(f"cuda:{worker}", total, free) for worker, (free, total) in asked]
    return gpus


def free_cpu_bytes() -> int:
    """Memory of the machine that is free now, within the container's limit."""
    import torch

    from inferscale.connector.compat import free_bytes

    return free_bytes(torch.device("cpu"))
