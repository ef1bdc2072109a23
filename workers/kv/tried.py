"""Page sizes and degrees with which real engines have run the KV store. Others need `--allow-untested`."""

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
