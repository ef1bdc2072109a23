"""Output chunks of workers as chunks of one round: where the round ends, and which token counts the client gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ampd.handler_stream import Chunk
from ampd.wire import OVERLOADED, REPORT_KEY

_CLASSES = {
    400: ("InvalidRequest", "request.invalid"),
    OVERLOADED: ("RateLimited", "request.rate_limited"),
    503: ("Unavailable", "backend.unavailable"),
}
_INTERNAL = ("Internal", "runtime.unclassified")
"""Classes and reasons of errors, as Dynamo's frontend knows them (`lib/runtime/src/error.rs`)."""


def ends_at_prefill(
    chunk: Mapping[str, Any],
    stop_token_ids: Collection[int],
    max_tokens: int | None,
    min_tokens: int,
    prompt_tokens: int,
    context_limit: int,
) -> str | None:
    """The finish reason if the round is over with the first token, sampled on a prefill worker; else None.

    The prefill worker was asked for a single token, so its own `length` does not end the round.

    Args:
        chunk: the prefill worker's chunk with the first token.
        stop_token_ids: tokens that end the output.
        max_tokens, min_tokens: most and least tokens that are still to come out, the first one included.
        context_limit: longest context of the decode worker; 0 if unknown.
    """
    reason = chunk.get("finish_reason")
    if reason not in (None, "length"):
        return str(reason)
    if min_tokens <= 0 and any(token in stop_token_ids for token in chunk.get("token_ids") or ()):
        return "stop"
    if max_tokens is not None and max_tokens <= 1:
        return "length"
    if context_limit and prompt_tokens + 1 >= context_limit:
        return "length"
    return None


def error_chunk(status: int, message: str) -> Chunk:
    """The chunk that ends a round with this HTTP status: an error event of Dynamo's, whose message the client gets.

    The frontend gives an exception's message to nobody, and after some classes of errors it takes the coordinator for
    lost. A class has the statuses that the frontend makes of it, and a reason must be of its class.
    """
    error_class, reason = _CLASSES.get(status, _INTERNAL)
    public = {"type": "message", "message": message}
    error = {"class": error_class, "reason": reason, "message": message, "public": public}
    return {"_dynamo_annotated": True, "event": "error", "comment": [message], "error": error}


def first_chunk(chunk: Chunk) -> Chunk:
    """A prefill worker's chunk as the first of the round: without the end that only the prefill has."""
    dropped = ("finish_reason", "stop_reason", "completion_usage", REPORT_KEY)
    return {name: value for name, value in chunk.items() if name not in dropped}


def merged_usage(
    usage: Mapping[str, Any] | None, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
) -> dict[str, Any]:
    """The usage that the client sees: its own prompt, and the output of all parts of the round.

    Args:
        usage: the last worker's counts; its other fields are kept.
        cached_tokens: prompt tokens that were not computed in this round; None: the worker's own count stays.
    """
    merged = dict(usage or {})
    merged["prompt_tokens"] = prompt_tokens
    merged["completion_tokens"] = completion_tokens
    merged["total_tokens"] = prompt_tokens + completion_tokens
    if cached_tokens is not None:
        details = dict(merged.get("prompt_tokens_details") or {})
        details["cached_tokens"] = min(cached_tokens, prompt_tokens)
        merged["prompt_tokens_details"] = details
    return merged
