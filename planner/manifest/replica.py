"""Resources of a pod of one replica, by its GPUs."""

from __future__ import annotations

from math import ceil
from typing import Any

GPU = "nvidia.com/gpu"

_SHARED_MEMORY_GIB_PER_GPU = 4
"""For NCCL between the GPUs of a replica."""
_CPUS_PER_GPU = 2
_HOST_GIB_PER_GPU = 8
"""For SGLang's process of a GPU."""
STORE_GIB_PER_GPU = 64.0
"""For the KV of sessions: about the KV memory of a GPU of 141 GB with a 32B model."""
_LIMIT_OVER_REQUEST = 2
"""Room for the weights while they are loaded."""


def shared_memory(tp: int) -> str:
    """Size of `/dev/shm`."""
    return f"{tp * _SHARED_MEMORY_GIB_PER_GPU}Gi"


def store_gib(tp: int, gib_per_gpu: float = STORE_GIB_PER_GPU) -> str:
    """Size of the KV store. It is no part of `/dev/shm`."""
    return f"{tp * gib_per_gpu:g}"


def resources(tp: int, store_gib_per_gpu: float = STORE_GIB_PER_GPU) -> dict[str, Any]:
    """Requests and limits of a worker's container. Shared memory and the KV store count as memory of the pod."""
    memory_gib = tp * (_HOST_GIB_PER_GPU + _SHARED_MEMORY_GIB_PER_GPU) + ceil(tp * store_gib_per_gpu)
    gpus = {GPU: str(tp)}
    return {
        "requests": {"cpu": str(tp * _CPUS_PER_GPU), "memory": f"{memory_gib}Gi", **gpus},
        "limits": {"memory": f"{_LIMIT_OVER_REQUEST * memory_gib}Gi", **gpus},
    }
