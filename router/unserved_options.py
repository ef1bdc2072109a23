"""Options of a request that no engine here follows. A refusal with a reason is better than an answer without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAMPLING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "ask for `n` choices and take the best one"),
    "length_penalty": ((0, 1), "leave it out; it belongs to beam search"),
    "use_beam_search": ((False,), "leave it out; sampling with `n` above 1 gives several answers"),
    "logit_bias": (({},), "leave it out"),
}
"""Sampling option -> the values at which it does nothing, and the advice for the others."""

_PASSED_ON: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "allowed_token_ids": ((), "use a grammar (`response_format`)"),
    "bad_words_token_ids": (([],), "leave it out, or use a grammar (`response_format`)"),
    "logprob_token_ids": (([],), "leave it out; `top_logprobs` gives the most likely tokens"),
    "detokenize": ((True,), "leave it out; answers are text"),
}
"""The same for the options that Dynamo does not read, but leaves to the engine."""

_OUTPUTS = {
    "prompt_logprobs": "leave out `echo` and `prompt_logprobs`; Dynamo puts neither the prompt nor its "
    "log-probabilities into the answer"
}
_STOPS = {"max_thinking_tokens": "leave it out, or bound the whole output with `max_tokens`"}


def unserved_option(request: Mapping[str, Any]) -> str | None:
    """Why the request cannot be served as it asks, as one line for the client; None: it can.

    Args:
        request: Dynamo's preprocessed request.
    """
    sampling, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    passed_on = (request.get("extra_args") or {}).get("sampling_options") or {}
    for options, known in ((sampling, _SAMPLING), (passed_on, _PASSED_ON)):
        for name, (neutral, advice) in known.items():
            value = options.get(name)
            # As many candidates as choices: none is dropped.
            same = name == "best_of" and value == options.get("n")
            if value is not None and value not in neutral and not same:
                return f"the option {name} is not supported; {advice}"
    outputs = request.get("output_options") or {}
    for options, advices in ((stops, _STOPS), (outputs, _OUTPUTS)):
        for name, advice in advices.items():
            if options.get(name) is not None:
                return f"the option {name} is not supported; {advice}"
    return None
