"""Keys of KV pages: a page is named by all the tokens up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

KEY_BYTES = 32


def page_keys(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Name every full page of a context by the chained SHA-256 of its tokens.

    The chain is the one of SGLang's storage hashes (`get_storage_hash_str` without extra key), so that a worker knows
    the names of an engine's pages without asking it: hash(parent hash + tokens as little-endian 32-bit words).

    Args:
        token_ids: the context; a last page that is not full has no key.
        page_size: tokens a page.

    Returns:
        One 32-byte key a page.
    """
    words = memoryview(array("I", token_ids)).cast("B")
    step = page_size * 4
    keys: list[bytes] = []
    parent = b""
    for start in range(0, len(token_ids) // page_size * step, step):
        digest = sha256(parent)
        digest.update(words[start : start + step])
        parent = digest.digest()
        keys.append(parent)
    return keys
