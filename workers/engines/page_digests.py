"""SGLang's digests of token pages, with hashlib: for machines that cannot compile its C++ extension.

Source: `sglang/srt/mem_cache/cpp_utils/hash_binding.cpp` of SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np

_WIDE_PAGE = b"\xff"
"""Begins a page that has a token id beyond 32 bits."""


def get_hash(
    raw_tokens: array[int],
    logical_len: int,
    unit_width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int | None = None,
) -> str | list[str]:
    """Chained SHA-256 digests, equal to those of the extension.

    Args:
        raw_tokens: token ids of 4 or 8 bytes; may be longer than needed.
        logical_len: units to hash. A unit is `unit_width` tokens, or a token and its successor with `is_bigram`.
        prior_digest: digest of what precedes the tokens (32 bytes).
        page_size: units per page.

    Returns:
        The hexadecimal digest of each page, or one digest of all units without `page_size`.

    Raises:
        IndexError: a token id is negative.
    """
    words: Any = np.asarray(raw_tokens)
    units = (
        np.stack((words[:logical_len], words[1 : logical_len + 1]), axis=-1)
        if is_bigram and logical_len
        else words[: logical_len * unit_width].reshape(logical_len, unit_width)
    )
    if units.dtype.kind == "i" and (units < 0).any():
        raise IndexError("token id must be a non-negative int64")
    if page_size is None:
        return _digest(units, prior_digest).hex()
    digests = []
    for start in range(0, logical_len, page_size):
        prior_digest = _digest(units[start : start + page_size], prior_digest)
        digests.append(prior_digest.hex())
    return digests


def _digest(units: Any, prior_digest: bytes | None) -> bytes:
    is_wide = units.itemsize == 8 and (units > np.iinfo(np.uint32).max).any()
    page = _WIDE_PAGE + units.astype("<u8").tobytes() if is_wide else units.astype("<u4").tobytes()
    return hashlib.sha256((prior_digest or b"") + page).digest()
