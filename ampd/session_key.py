"""The tenant of a request, and the names of sessions: what a session is called in the shared state and in logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

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

KEY_BYTES = 16
_KEY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


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
    return digest.digest()[:KEY_BYTES].hex()


def is_session_key(text: str) -> bool:
    """Whether a text has the form of a session's name. A client's own id may have it too, such as a UUID as hex."""
    return _KEY.fullmatch(text) is not None


def tenant_key(tenant: str) -> str:
    """The name of a tenant in Redis, as 32 hexadecimal digits."""
    return session_key(tenant, "")
