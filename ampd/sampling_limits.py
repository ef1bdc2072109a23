"""Requests that would end an engine: token ids outside of the vocabulary, and options that leave no token to choose."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from typing import Any

STOP_FIELDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
"""Fields of the stop conditions that hold token ids."""


def vocabulary_tokens(config: Mapping[str, Any]) -> int | None:
    """The rows of the embedding, by a model's config.json; None if it does not name them.

    The tokenizer's own size does not count, because many models have more rows than their tokenizer has tokens.
    """
    size = (config.get("text_config") or config).get("vocab_size")
    return int(size) if size else None


def unknown_token(prompt: bytes | array[int], request: Mapping[str, Any], size: int) -> str | None:
    """The first token id of a request that is not in [0, `size`), as one line for the client; None if all are.

    The model's own end-of-sequence tokens may lie outside, because the client cannot change them: see `known_tokens`.

    Args:
        prompt: its token ids as native 32-bit words.
        request: the request in Dynamo's terms (`stop_conditions`, `sampling_options`, `eos_token_ids`).
    """
    import numpy as np  # A worker starts without it.

    words = np.frombuffer(prompt, np.uint32)
    if len(words) and words.max() >= size:
        return _unknown("the prompt", words[words >= size][0], size)
    stops = request.get("stop_conditions") or {}
    parts = [(name, set(stops.get(name) or ()) - set(request.get("eos_token_ids") or ())) for name in STOP_FIELDS]
    bias = (request.get("sampling_options") or {}).get("logit_bias") or {}
    try:
        parts.append(("logit_bias", {int(token_id) for token_id in bias}))
    except ValueError:
        return "logit_bias must map token ids to numbers"
    for where, ids in parts:
        if ids and (min(ids) < 0 or max(ids) >= size):
            return _unknown(where, next(token_id for token_id in ids if not 0 <= token_id < size), size)
    return None


def _unknown(where: str, token_id: int, size: int) -> str:
    return f"token id {token_id} in {where} is not in this model's vocabulary of {size} tokens (0 to {size - 1})"


def known_tokens(token_ids: Collection[int], size: int | None) -> list[int]:
    """Those of `token_ids` that the vocabulary has, sorted. No other token can be sampled."""
    return sorted(token_id for token_id in token_ids if token_id >= 0 and (size is None or token_id < size))


# -- Limits of sampling options: an engine ends when they leave no token that can be chosen

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
