"""Whether a round can be split, with the first token from a prefill worker and the others from a decode worker.

The split must not change the output. A request with an option that is not listed here stays on one engine, so that a
new option of Dynamo is safe before it is understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEMORYLESS = frozenset({"temperature", "top_p", "top_k", "min_p", "include_stop_str_in_output"})
"""Sampling options that look at one position's logits only (or are applied by the frontend)."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (0, 1),
    "use_beam_search": (False,),
}
"""Options that couple positions, with the values at which they do nothing."""

_STOPS = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "stop_token_ids_visible",
        "stop_token_ids_hidden",
        "ignore_eos",
    }
)
"""Stop conditions that can be checked token by token (the limits shrink by the tokens that exist), or that the frontend
checks over the whole stream."""

_OUTPUTS = frozenset({"logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"})
"""Output options that concern one token at a time."""

_ROUTING = frozenset(
    {"priority", "priority_jump", "strict_priority", "expected_output_tokens", "routing_constraints", "dp_rank"}
)
"""Routing hints that do not change the output."""

_EXTRA_ARGS = frozenset({"nvext"})


def local_only_reason(request: Mapping[str, Any]) -> str | None:
    """Why a round must be prefilled on its decode worker, or None if it may be split.

    Args:
        request: Dynamo's preprocessed request.

    Returns:
        The name of the option that cannot be carried, in Dynamo's spelling (`n`, `guided_decoding`, `seed`, ...).
    """
    sampling = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    return (
        _sampling_reason(sampling)
        or _stops_reason(stops)
        or _unknown(request.get("output_options"), _OUTPUTS)
        or _unknown(request.get("routing"), _ROUTING)
        or _unknown(request.get("extra_args"), _EXTRA_ARGS)
    )


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    """Whether the most likely token is taken at every position, so that a seed changes nothing."""
    return sampling.get("temperature") == 0 or sampling.get("top_k") == 1


def _sampling_reason(sampling: Mapping[str, Any]) -> str | None:
    for name, value in sampling.items():
        if value is None or name in _MEMORYLESS or value in _NEUTRAL.get(name, ()):
            continue
        if name == "seed" and is_greedy(sampling):
            continue
        return name
    return None


def _stops_reason(stops: Mapping[str, Any]) -> str | None:
    for name, value in stops.items():
        if name == "max_tokens" and value == 0:
            return name  # a prefill worker would sample a token that was not asked for
        if value is None or name in _STOPS:
            continue
        return name
    return None


def _unknown(options: Mapping[str, Any] | None, known: frozenset[str]) -> str | None:
    return next((name for name, value in (options or {}).items() if value is not None and name not in known), None)
