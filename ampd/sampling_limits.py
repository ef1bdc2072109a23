"""Limits of sampling options: an engine ends when they leave no token that can be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampd.vocabulary import STOP_FIELDS

LEAST_REPETITION_PENALTY = 0.01
"""An engine divides logits by the penalty, and a smaller one makes them infinite. Useful values are near 1."""

_MOST = 2.0**127
"""Engines have numbers of 32 bits."""

MOST_FORBIDDEN_STOPS = 64
"""Most stop tokens of a request that also sets `min_tokens`, which forbids them: some other token must remain."""


_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def beyond_sampling(request: Mapping[str, Any]) -> str | None:
    """Why no engine can sample as the request asks, as one line for the client; None: it can.

    Args:
        request: the request in Dynamo's terms (`sampling_options`, `stop_conditions`, `eos_token_ids`).
    """
    options = request.get("sampling_options") or {}
    for name in _NUMBERS:
        if (value := options.get(name)) is not None and not _is_number(value):
            return f"{name} must be a number (given: {value!r:.32})"
    penalty = options.get("repetition_penalty")
    if penalty is not None and penalty < LEAST_REPETITION_PENALTY:
        return f"repetition_penalty must be at least {LEAST_REPETITION_PENALTY:g} (given: {penalty!r:.32})"
    stops = request.get("stop_conditions") or {}
    if not stops.get("min_tokens"):
        return None
    forbidden = set().union(*(stops.get(name) or () for name in STOP_FIELDS)) - set(request.get("eos_token_ids") or ())
    if len(forbidden) > MOST_FORBIDDEN_STOPS:
        return f"with min_tokens, at most {MOST_FORBIDDEN_STOPS} stop_token_ids are allowed (given: {len(forbidden)})"
    return None


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float of an engine can hold."""
    return type(value) in (int, float) and abs(value) <= _MOST
