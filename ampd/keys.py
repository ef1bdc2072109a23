"""Names: keys of KV pages, names of sessions, and tenants."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

KEY_BYTES = 32

PAGE_TOKENS = 16
"""Tokens per page of KV, where no other size is set."""
TOKEN_BYTES = 4
"""Of a packed token id."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as native 32-bit words."""
    return array("I", token_ids).tobytes()


def page_keys(token_ids: Sequence[int], page_size: int, known: Sequence[bytes] = (), *, tenant: str) -> list[bytes]:
    """Name every full page of a context by the chained SHA-256 of its tokens.

    The chain is that of SGLang's storage hashes (`get_storage_hash_str`, with the tenant as cache salt), so that a
    worker can name an engine's pages by itself: hash(parent hash + tokens as little-endian 32-bit words). A longer
    context begins with the same keys, and its first pages need not be hashed again.

    Args:
        token_ids: the context. A last page that is not full has no key.
        page_size: tokens per page.
        known: keys that were computed before, of a prefix of the context or of a context that begins with it.
        tenant: see `tenant_of`; equal tokens of two tenants have no key in common.

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


# -- The tenant of a request, and the names of sessions: what a session is called in the shared state and in logs

MAX_TENANT_CHARS = 256


def tenant_of(request: Mapping[str, Any]) -> str:
    """The tenant of Dynamo's preprocessed request, or of the parts of it that an engine gets.

    Raises:
        ValueError: what names the tenant is not text, or is too long.
    """
    tenant = (request.get("routing") or {}).get("cache_salt") or ""
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
        names = "x-tenant-id or nvext.cache_salt"
        raise ValueError(f"the tenant ({names}) must be text of at most {MAX_TENANT_CHARS} characters")
    return tenant


# -- The name of a session inside of a graph: a hash of its tenant and of the id that the client gave it
#
# Views, Redis, KV stores and messages between processes have this name only. So sessions of two tenants never meet, a
# name has always the same length, and a client cannot put anything of its own into it.

_SESSION_KEY_BYTES = 16
_KEY = re.compile(rf"[0-9a-f]{{{2 * _SESSION_KEY_BYTES}}}")


def session_key(tenant: str, session_id: str) -> str:
    """The name of a tenant's session, as 32 hexadecimal digits.

    Args:
        tenant: see `tenant_of`.
        session_id: any text, lone surrogates included.
    """
    parts = [text.encode("utf-8", "surrogatepass") for text in (tenant, session_id)]
    digest = sha256(len(parts[0]).to_bytes(8, "little"))
    for part in parts:
        digest.update(part)
    return digest.digest()[:_SESSION_KEY_BYTES].hex()


_ROOT_DIGITS = 16


def branch_key(root: str) -> str:
    """A fresh name of a branch of a session. Its first half is that of the session's name."""
    return root[:_ROOT_DIGITS] + uuid4().hex[:_ROOT_DIGITS]


def is_branch_of(key: str, root: str) -> bool:
    """Whether a name is that of a session or of one of its branches."""
    return key[:_ROOT_DIGITS] == root[:_ROOT_DIGITS]


def is_session_key(text: str) -> bool:
    """Whether a text has the form of a session's name. A client's own id may have it too, such as a UUID as hex."""
    return _KEY.fullmatch(text) is not None


SESSION_HEADER = "x-dynamo-session-id"
MAX_SESSION_ID_CHARS = 256
"""Dynamo's frontends refuse longer ones with 400 if there are several coordinators."""

_ENCODED = "UTF-8''"
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def ascii_name(session_id: str) -> str:
    """A client's id of a session as the value of a header, because Dynamo takes only ASCII from headers (RFC 8187)."""
    if session_id.isascii() and session_id.isprintable():
        return session_id
    return _ENCODED + quote(session_id, _PLAIN, errors="replace")


def from_ascii_name(value: str) -> str:
    """The client's id of a session, from what `ascii_name` has made of it."""
    return unquote(value[len(_ENCODED) :]) if value.startswith(_ENCODED) else value


def tenant_key(tenant: str) -> str:
    """The name of a tenant in Redis, as 32 hexadecimal digits."""
    return session_key(tenant, "")
