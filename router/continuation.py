"""Rounds that Dynamo's frontend continues here, because another coordinator died: how they are known.

The frontend (`--migration-limit`) sends the request again with the tokens that had come out at the end of the prompt,
and `max_tokens` reduced. It marks such a request only for tracing: a chunk's `worker_trace_link` comes back as the
request's `migration_link`. Each first chunk therefore carries a link, whose span id is the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

LINK = "worker_trace_link"
_RETURNED_LINK = "migration_link"


def link(trace_id: str | None, prompt_tokens: int) -> dict[str, str]:
    """What a round's first chunk carries. `prompt_tokens`: of the client's own prompt."""
    return {"trace_id": trace_id or uuid4().hex, "span_id": f"{prompt_tokens:016x}"}


def continued_tokens(request: Mapping[str, Any]) -> int | None:
    """How many tokens at the end of the prompt are output of another coordinator; None: the request is new.

    Raises:
        ValueError, TypeError, KeyError: the link is not one that a coordinator made.
    """
    returned = request.get(_RETURNED_LINK)
    if returned is None:
        return None
    tokens = len(request["token_ids"]) - int(returned["span_id"], 16)
    if tokens < 0:
        raise ValueError(f"{_RETURNED_LINK} names a longer prompt")
    return tokens
