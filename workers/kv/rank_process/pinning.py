"""The store's memory as a GPU needs it: pinned, so that copies run beside the computation."""

from __future__ import annotations

import torch


def pin(store: torch.Tensor) -> list[str]:
    """Pin the store's memory for copies from and to the GPU. Returns a warning if the driver refuses it."""
    result = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), store.numel(), 0))
    if not result:
        return []
    return [
        f"its memory was not pinned for the GPU (cudaHostRegister: error {result}), so that copies between store and "
        "device are slower and hold up the engine; raise the limit of locked memory (ulimit -l, or LimitMEMLOCK of the "
        "container runtime), or make the store smaller (--kv-store-gib)"
    ]
