"""Chunks of workers, checked before a client gets them or a session's context grows by them.

Each token passes here, so a chunk with nothing but tokens costs one pass over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.round_errors import WorkerLostError

_MOST_TOKEN_ID = (1 << 32) - 1
"""Contexts have 32 bits per token."""

_ALWAYS = 2
"""The fields that every chunk has: the tokens, and the choice that they belong to."""


def check_chunk(worker_id: str, chunk: Any, choices: int) -> None:
    """Refuse a chunk that no engine makes.

    Args:
        choices: of the round.

    Raises:
        WorkerLostError: the round must go on at another worker.
    """
    wrong = _wrong(chunk, choices) if type(chunk) is dict else "it is no object"
    if wrong:
        raise WorkerLostError(worker_id, f"its answer is malformed ({wrong})")


def _wrong(chunk: Mapping[str, Any], choices: int) -> str:
    """The field that is wrong; empty: none."""
    token_ids = chunk.get("token_ids")
    if token_ids is not None and not _are_tokens(token_ids):
        return "token_ids"
    index = chunk.get("index")
    if index is not None and not (type(index) is int and 0 <= index < choices):
        return "index"
    return "" if len(chunk) <= _ALWAYS else _wrong_end(chunk)


def _are_tokens(token_ids: Any) -> bool:
    if type(token_ids) is not list:
        return False
    return all(type(token_id) is int and 0 <= token_id <= _MOST_TOKEN_ID for token_id in token_ids)


def _wrong_end(chunk: Mapping[str, Any]) -> str:
    """The wrong one of the fields that only some chunks have."""
    for name in ("log_probs", "top_logprobs"):
        if not isinstance(chunk.get(name), list | None):
            return name
    if not isinstance(chunk.get("finish_reason"), str | None):
        return "finish_reason"
    reason = chunk.get("stop_reason")
    if isinstance(reason, bool) or not isinstance(reason, str | int | None):
        return "stop_reason"
    if not isinstance(chunk.get("engine_data"), Mapping | None):
        return "engine_data"
    return "" if _is_usage(chunk.get("completion_usage")) else "completion_usage"


def _is_usage(usage: Any) -> bool:
    """Whether it has counts only, and one level of them in its details."""
    if usage is None:
        return True
    if not isinstance(usage, Mapping):
        return False
    for name, value in usage.items():
        counts = value.values() if isinstance(value, Mapping) and str(name).endswith("_details") else (value,)
        if not all(count is None or (type(count) is int and 0 <= count <= _MOST_TOKEN_ID) for count in counts):
            return False
    return True
