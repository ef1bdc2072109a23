"""The largest body of a request that a frontend takes: what the longest context can need, and not more.

A frontend turns a body into tokens before it knows their number. 10 MB of text took it 27 s and 1.4 GB.
"""

from __future__ import annotations

import os

from ampd.errors import UserError

VARIABLE = "DYN_HTTP_BODY_LIMIT_MB"

_BYTES_PER_TOKEN = 16
"""More than text needs (about 4), a token id in JSON (up to 7), or a character as two JSON escapes (12)."""
_MIN_MB = 4
_UNKNOWN_CONTEXT_MB = 45
"""Dynamo's own limit."""


def body_limit_mb(context_tokens: int | None) -> int:
    """In MB; the variable wins if the user has set it. `context_tokens` None: the model does not name its context.

    Raises:
        UserError: the variable is no number of MB.
    """
    if chosen := os.environ.get(VARIABLE):
        if not (chosen.isascii() and chosen.isdigit() and len(chosen) < 7 and int(chosen)):
            raise UserError(f"ampd serve: {VARIABLE}={chosen[:30]}: give the largest body in MB, as a whole number")
        return int(chosen)
    if context_tokens is None:
        return _UNKNOWN_CONTEXT_MB
    return max(_MIN_MB, -(-context_tokens * _BYTES_PER_TOKEN // 2**20))
