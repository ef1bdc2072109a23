"""Keys of KV pages: all the tokens up to a page's end name it, and the tenant that they belong to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

KEY_BYTES = 32

PAGE_TOKENS = 16
"""Tokens per page of KV, where no other size is set."""
TOKEN_BYTES = 4
"""Of a packed token id."""


def page_keys(token_ids: Sequence[int], page_size: int, known: Sequence[bytes] = (), *, tenant: str) -> list[bytes]:
    """Name every full page of a context by the chained SHA-256 of its tokens.

    The chain is that of SGLang's storage hashes (`get_storage_hash_str`, with the tenant as cache salt), so that a
    worker can name an engine's pages by itself: hash(parent hash + tokens as little-endian 32-bit words). A longer
    context begins with the same keys, and its first pages need not be hashed again.

    Args:
        token_ids: the context. A last page that is not full has no key.
        page_size: tokens per page.
        known: keys that were computed before, of a prefix of the context or of a context that begins with it.
        tenant: see `ampd.session_key`; equal tokens of two tenants have no key in common.

    Returns:
        One 32-byte key per page.
    """
    keys = list(known[: len(token_ids) // page_size])
    parent = keys[-1] if keys else _seed(tenant)
    words = memoryview(array("I", token_ids[len(keys) * page_size :])).cast("B")
    step = page_size * TOKEN_BYTES
    for start in range(0, len(words) // step * step, step):
        digest = sha256(parent)
        digest.update(words[start : start + step])
        parent = digest.digest()
        keys.append(parent)
    return keys


def _seed(tenant: str) -> bytes:
    """Where a tenant's chains begin: SGLang's `storage_namespace_seed` of a cache salt without an extra key."""
    if not tenant:
        return b""
    salt = tenant.encode()
    return sha256(b"sglang-cache-namespace-v1\x00\x01" + len(salt).to_bytes(8, "little") + salt).digest()
