"""What a worker sends to SGLang and gets from it: parameters of requests that coordinators let through, and outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.fuzz.messages import LIMITS, REQUEST, VOCABULARY
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Target
from router.request import parse_round
from router.round_errors import RoundRefusedError
from workers.engines.base import EngineError, EngineRequest, KvLoadError
from workers.engines.sglang_request import MOST_GUIDE_CHARS, logprob_arguments, output_of, sampling_params

_PART: dict[str, Any] = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 6}, "prompt_tokens": 40, "completion_tokens": 2,
        "cached_tokens": 16, "cached_tokens_details": {"host": 16, "device": 0}, "output_token_logprobs": None,
    },
}  # fmt: skip
_ABORTED: dict[str, Any] = {
    "output_ids": [],
    "meta_info": {"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 503}},
}
_MALFORMED = (EngineError, KvLoadError, LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What a worker's handler turns into an answer: `workers.component.Worker._guarded`."""

_GUIDES: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, {"regex": "[a-z]+"},
    {"choice": ["yes", "no"]}, {"grammar": 'root ::= "x"'}, {"structural_tag": {"type": "structural_tag"}},
)  # fmt: skip


def targets() -> Iterator[Target]:
    """Both directions."""
    yield Target("request to SGLang", _request, _parameters, (RoundRefusedError, *_MALFORMED))
    yield Target("part of SGLang", lambda rng: changed(rng, rng.choice((_PART, _ABORTED))), _read_part, _MALFORMED)


def _request(rng: random.Random) -> dict[str, Any]:
    guided = rng.choice((None, *_GUIDES))
    options = {**REQUEST["sampling_options"], "guided_decoding": guided}
    return changed(rng, {**REQUEST, "sampling_options": options}, 3)  # type: ignore[no-any-return]


def _parameters(given: dict[str, Any]) -> None:
    """What a coordinator lets through has parameters that SGLang can follow, or is refused with a status."""
    wanted = parse_round(given, LIMITS, VOCABULARY)
    request = EngineRequest("rid", "s", list(wanted.token_ids), wanted.max_tokens, dict(given))
    parameters = sampling_params(request, VOCABULARY)
    assert all(0 <= token_id < VOCABULARY for token_id in parameters.get("stop_token_ids", ()))
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = parameters.get(name, 0.0)
        assert isinstance(value, int | float)
        assert math.isfinite(value)
    least, most = parameters.get("min_new_tokens", 0), parameters["max_new_tokens"]
    assert type(least) is int
    assert most is None or least <= most
    assert all(len(parameters.get(name, "")) <= chars for name, chars in MOST_GUIDE_CHARS.items())
    assert isinstance(logprob_arguments(request), Mapping)


def _read_part(part: Any) -> None:
    output = output_of(part, EngineRequest("rid", "s", list(range(40)), 5), 0)
    if output is not None:
        for count in (output.prompt_tokens, output.completion_tokens, output.cached_tokens, output.reloaded_tokens):
            assert type(count) is int
