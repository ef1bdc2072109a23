"""Why a prefill must run on its decode worker, without a question to the routing policy.

A round is split when a prefill worker gives the first token and the decode worker the others. The split must not change
the output. A request with an option that is not listed here stays on one engine, so that a new option of Dynamo is safe
before it is understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFILL_WORKER_REFUSED = "prefill-worker-refused"
"""Reason of a local route: the prefill worker cannot take the prompt, so the decode worker computes it."""

PREFILL_WORKER_LOST = "prefill-worker-lost"
"""Reason of a local route: the prefill worker was lost before the first token."""

RESUMED = "resumed"
"""Reason of a local route: the round goes on after its decode worker was lost, from the KV of its prefill worker."""

NO_PERFORMANCE_MODEL = "no-performance-model"
"""Reason of a local route: the policy needs times that the performance model does not have."""

_MEMORYLESS = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output"})
"""Sampling options that look at one position only (or are applied by the frontend).

An engine that follows seeds samples by the seed and the token's position in the context, which a split keeps.
"""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (0, 1),
    "use_beam_search": (False,),
}
"""Options that couple positions, with the values at which they do nothing.

The decode worker cannot count the first token for a penalty, and each of several choices has a first token of its own.
"""

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
    {
        "cache_salt",
        "dp_rank",
        "expected_output_tokens",
        "priority",
        "priority_jump",
        "routing_constraints",
        "strict_priority",
    }
)
"""Routing hints that do not change the output. The salt names the tenant, whose KV both workers find by its keys."""

_EXTRA_ARGS = frozenset({"nvext"})


def local_only(failure: str | None, option: str | None) -> str | None:
    """Why the next prefill of a round must run on its decode worker; None: the routing policy decides.

    Args:
        failure: the reason that follows from the failure of a worker, if one failed.
        option: the request's option that forbids a split, if one does.
    """
    if failure is None and option is not None:
        return f"cannot-carry-{option.replace('_', '-')}"
    return failure


def uncarried_option(request: Mapping[str, Any]) -> str | None:
    """The option of a request that forbids a split; None if the round may be split.

    Args:
        request: Dynamo's preprocessed request.

    Returns:
        The name of the option that cannot be carried, in Dynamo's spelling (`n`, `guided_decoding`, ...).
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


def _sampling_reason(sampling: Mapping[str, Any]) -> str | None:
    for name, value in sampling.items():
        if value is None or name in _MEMORYLESS or value in _NEUTRAL.get(name, ()):
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
