"""Resources of a pod of one replica, by its GPUs and the size of the model's KV."""

from __future__ import annotations

from math import ceil
from typing import Any

GPU = "nvidia.com/gpu"

_GIB = 1 << 30
_SHARED_MEMORY_GIB_PER_GPU = 4
"""For NCCL between the GPUs of a replica."""
_CPUS_PER_GPU = 2
_HOST_GIB_PER_GPU = 8
"""For SGLang's process of a GPU."""
_STAGING_TOKENS = 65_536
"""The workers' default of `--staging-tokens`: KV between its read and its load is in host memory."""
_USUAL_KV_BYTES_PER_TOKEN = 262_144
"""If the performance model does not know it: the value of a 32B model, as in the base."""
_LIMIT_OVER_REQUEST = 2
"""Room for the weights while they are loaded."""


def shared_memory(tp: int) -> str:
    """Size of `/dev/shm`."""
    return f"{tp * _SHARED_MEMORY_GIB_PER_GPU}Gi"


def resources(tp: int, kv_bytes_per_token: int | None) -> dict[str, Any]:
    """Requests and limits of a worker's container. Shared and staging memory count as memory of the pod."""
    staging_gib = ceil(_STAGING_TOKENS * (kv_bytes_per_token or _USUAL_KV_BYTES_PER_TOKEN) / _GIB)
    memory_gib = tp * (_HOST_GIB_PER_GPU + _SHARED_MEMORY_GIB_PER_GPU) + staging_gib
    gpus = {GPU: str(tp)}
    return {
        "requests": {"cpu": str(tp * _CPUS_PER_GPU), "memory": f"{memory_gib}Gi", **gpus},
        "limits": {"memory": f"{_LIMIT_OVER_REQUEST * memory_gib}Gi", **gpus},
    }
