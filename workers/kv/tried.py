"""Page sizes, degrees and types of KV with which real engines have run the KV store. Others need `--allow-untested`."""

from __future__ import annotations

from collections.abc import Mapping

TRIED_PAGE_TOKENS = (16, 32, 64)

TRIED_DEGREES: Mapping[str, tuple[int, ...]] = {
    "MHATokenToKVPool": (1, 2, 4, 8),
    "MLATokenToKVPool": (1, 2, 4),
    "SWAKVPool": (1, 2, 4),
    "HybridLinearKVPool": (1, 2, 4),
}
"""By SGLang's class of the KV pool. `docs/models.md` lists the models and the pairs of degrees."""

_FLOATS = ("torch.float32", "torch.bfloat16")
TRIED_TYPES: Mapping[str, tuple[str, ...]] = {
    "MHATokenToKVPool": (*_FLOATS, "torch.float16", "torch.float8_e4m3fn"),
    "MLATokenToKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "SWAKVPool": (*_FLOATS, "torch.float8_e4m3fn"),
    "HybridLinearKVPool": _FLOATS,
}
"""The KV of a pool, also by its class."""

TRIED_STATE_TYPES: tuple[tuple[str, ...], tuple[str, ...]] = (("torch.float32",), _FLOATS)
"""Of the temporal part of a state, and of its convolution."""
