"""The requests that a coordinator sends to workers for one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampd.wire import GenerateRequest, PrefillRequest, encode_task
from router.placement import Placement
from router.request import RoundRequest


def prefill_request(
    request: RoundRequest, emitted: Sequence[int], placement: Placement, now_s: float, *, kept_tokens: int
) -> PrefillRequest:
    """Ask a prefill worker for the first token.

    Args:
        emitted: output tokens that exist already, now part of the prompt.
        kept_tokens: of the prompt, in the context of its session before.
    """
    source = placement.plan.source
    message: PrefillRequest = {
        "task": encode_task(placement.plan.task, now_s),
        "token_ids": [*request.token_ids, *emitted],
        "source_worker_id": source.worker_id if source else None,
        "kept_tokens": kept_tokens,
        "request": engine_request(request, len(emitted)),
    }
    if source is not None:
        message["source_tp"] = source.parallelism.tp
    return message


def generate_request(
    request: RoundRequest,
    emitted: Sequence[int],
    placement: Placement,
    source: str | None,
    now_s: float,
    *,
    kept_tokens: int,
    source_tp: int | None = None,
) -> GenerateRequest:
    """Ask a decode worker for the rest of the round.

    Args:
        source: the worker that has the KV; None: prefill it there.
        kept_tokens: of the prompt, in the context of its session before.
        source_tp: its tensor parallelism, if it is known.
    """
    message: GenerateRequest = {
        "task": encode_task(placement.plan.task, now_s),
        "token_ids": [*request.token_ids, *emitted],
        "source_worker_id": source,
        "kept_tokens": kept_tokens,
        "request": engine_request(request, len(emitted)),
    }
    if source_tp is not None:
        message["source_tp"] = source_tp
    if request.ends_session:
        message["ends_session"] = True
    if source is None and (holder := placement.plan.source) is not None:
        message["history_worker_id"] = holder.worker_id
        message["history_tp"] = holder.parallelism.tp
    return message


def take_over_request(message: GenerateRequest) -> GenerateRequest:
    """Let a decode worker only take over the KV of a round that has ended, for the session's next round."""
    stops = {**(message["request"].get("stop_conditions") or {}), "max_tokens": 0}
    return {**message, "request": {**message["request"], "stop_conditions": stops}}


def engine_request(request: RoundRequest, emitted_tokens: int) -> dict[str, Any]:
    """The engine's part of a round that has `emitted_tokens` output tokens already."""
    return continued_request(request.engine_request, emitted_tokens) if emitted_tokens else request.engine_request


def continued_request(engine_request: Mapping[str, Any], emitted_tokens: int) -> dict[str, Any]:
    """The engine's part of a request whose first `emitted_tokens` output tokens are part of the prompt now.

    Only for requests that may be split (`ampd.serving.local_only.uncarried_option` is None).
    """
    continued = dict(engine_request)
    stops = dict(continued.get("stop_conditions") or {})
    if stops.get("max_tokens") is not None:
        stops["max_tokens"] = max(0, stops["max_tokens"] - emitted_tokens)
    if stops.get("min_tokens"):
        stops["min_tokens"] = max(0, stops["min_tokens"] - emitted_tokens)
    continued["stop_conditions"] = stops
    return continued
