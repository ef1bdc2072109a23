"""The vocabulary of a model: a token id outside of it ends an engine, so requests with one are refused before."""

from __future__ import annotations

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


def unknown_token(token_ids: Collection[int], request: Mapping[str, Any], size: int) -> str | None:
    """The first token id of a request that is not in [0, `size`), as one line for the client; None if all are.

    The model's own end-of-sequence tokens may lie outside, because the client cannot change them: see `known_tokens`.

    Args:
        token_ids: the prompt.
        request: the request in Dynamo's terms (`stop_conditions`, `sampling_options`, `eos_token_ids`).
    """
    stops = request.get("stop_conditions") or {}
    parts: list[tuple[str, Collection[int]]] = [("the prompt", token_ids)]
    parts += [(name, set(stops.get(name) or ()) - set(request.get("eos_token_ids") or ())) for name in STOP_FIELDS]
    bias = (request.get("sampling_options") or {}).get("logit_bias") or {}
    try:
        parts.append(("logit_bias", [int(token_id) for token_id in bias]))
    except ValueError:
        return "logit_bias must map token ids to numbers"
    for where, ids in parts:
        if ids and (min(ids) < 0 or max(ids) >= size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
            return f"token id {wrong} in {where} is not in this model's vocabulary of {size} tokens (0 to {size - 1})"
    return None


def known_tokens(token_ids: Collection[int], size: int | None) -> list[int]:
    """Those of `token_ids` that the vocabulary has, sorted. No other token can be sampled."""
    return sorted(token_id for token_id in token_ids if token_id >= 0 and (size is None or token_id < size))
