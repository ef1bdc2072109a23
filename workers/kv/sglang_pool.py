"""SGLang's KV pool as pages of bytes."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

from workers.kv.layout import PoolLayout


def pool_layout(pool: Any, page_size: int, fingerprint: str) -> PoolLayout:
    """Describe a pool to readers.

    Args:
        fingerprint: of the model and the settings that fill the pool; see `workers.kv.sglang_fingerprint`.

    Raises:
        ValueError: the pool is not plain multi-head or grouped-query K and V, token by token.
    """
    buffers = _buffers(pool)
    views = page_views(pool, page_size)
    first = buffers[0]
    # The pool's own type tells the two kinds of fp8 apart; both are stored as bytes.
    shape = f"{pool.dtype}x{tuple(first.shape[1:])}x{tuple(buffers[1].shape[1:])}"
    return PoolLayout(
        fingerprint=sha256(f"{fingerprint}/{shape}".encode()).hexdigest()[:16],
        page_size=page_size,
        pages=min(view.shape[0] for view in views),
        page_bytes=tuple(view.shape[1] for view in views),
        addresses=tuple(int(buffer.data_ptr()) for buffer in buffers),
        memory="VRAM" if first.is_cuda else "DRAM",
        device_id=first.device.index or 0 if first.is_cuda else 0,
    )


def pool_regions(pool: Any) -> list[tuple[int, int]]:
    """The allocations behind a pool, each once: K and V of a layer may share one."""
    storages = (buffer.untyped_storage() for buffer in _buffers(pool))
    return list(dict.fromkeys((int(storage.data_ptr()), int(storage.nbytes())) for storage in storages))


def page_views(pool: Any, page_size: int) -> list[Any]:
    """One tensor of bytes per buffer, shape [pages, bytes per page]. The tensors alias the pool."""
    views = []
    for buffer in _buffers(pool):
        slots = buffer.shape[0] // page_size * page_size
        rows = buffer[:slots].view(torch.uint8).reshape(slots // page_size, -1)
        if rows.data_ptr() != buffer.data_ptr():
            raise ValueError("the KV pool's buffers are not contiguous by token")
        views.append(rows)
    return views


def _buffers(pool: Any) -> list[Any]:
    """K and V of every layer in turn."""
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    plain = getattr(pool, "kv_cache_layout", "nhd") == "nhd" and getattr(pool, "k_scale_buffer", None) is None
    if not keys or not values or len(keys) != len(values) or not plain:
        raise ValueError(f"KV exchange needs a plain MHA/GQA pool, not {type(pool).__name__}")
    return [buffer for pair in zip(keys, values, strict=True) for buffer in pair]
