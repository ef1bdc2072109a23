"""The store's memory as a GPU needs it: pinned, so that copies run beside the computation."""

from __future__ import annotations

from contextlib import suppress

import torch


def pin(store: torch.Tensor) -> list[str]:
    """Pin the store's memory for copies from and to the GPU. Returns a warning if the driver refuses it."""
    result = int(torch.cuda.cudart().cudaHostRegister(store.data_ptr(), store.numel(), 0))
    if not result:
        return []
    _forget_error()
    return [
        f"its memory was not pinned for the GPU (cudaHostRegister: error {result}), so that copies between store and "
        "device are slower and hold up the engine; raise the limit of locked memory (ulimit -l, or LimitMEMLOCK of the "
        "container runtime), or make the store smaller (--kv-store-gib)"
    ]


def _forget_error() -> None:
    """Let a call of torch report the error that the driver still has. Otherwise the engine's next kernel fails with it.

    torch does not expose `cudaGetLastError`. It calls it after each kernel that it starts.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
