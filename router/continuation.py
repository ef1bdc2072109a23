"""Rounds that Dynamo's frontend continues here, because another coordinator died: how they are known.

The frontend (`--migration-limit`) sends the request again with the tokens that had come out at the end of the prompt,
and `max_tokens` reduced. It marks such a request only for tracing: a chunk's `worker_trace_link` comes back as the
request's `migration_link`. Each first chunk therefore carries a link. The span id has 32 bits of the fingerprint of the
weights (`router.fingerprints.mark_of`) and the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

LINK = "worker_trace_link"
_RETURNED_LINK = "migration_link"
_MARK_SHIFT, _MOST = 32, 1 << 64


@dataclass(frozen=True, slots=True)
class Continued:
    """What another coordinator did of a round.

    Attributes:
        tokens: at the end of the prompt, which are its output.
        fingerprint_mark: of the weights that the output came from; 0: they are not known.
    """

    tokens: int
    fingerprint_mark: int


def link(trace_id: str | None, prompt_tokens: int, fingerprint_mark: int = 0) -> dict[str, str]:
    """What a round's first chunk carries. `prompt_tokens`: of the client's own prompt."""
    return {"trace_id": trace_id or uuid4().hex, "span_id": f"{fingerprint_mark:08x}{prompt_tokens:08x}"}


def continued(request: Mapping[str, Any]) -> Continued | None:
    """What another coordinator did of a round; None: the request is new.

    Raises:
        ValueError, TypeError, KeyError: the link is not one that a coordinator made.
    """
    returned = request.get(_RETURNED_LINK)
    if returned is None:
        return None
    span = int(returned["span_id"], 16)
    if not 0 <= span < _MOST:
        raise ValueError(f"{_RETURNED_LINK} has a span id of more than 64 bits")
    mark, prompt_tokens = divmod(span, 1 << _MARK_SHIFT)
    tokens = len(request["token_ids"]) - prompt_tokens
    if tokens < 0:
        raise ValueError(f"{_RETURNED_LINK} names a longer prompt")
    return Continued(tokens, mark)
