"""From Dynamo's preprocessed request to SGLang's parameters, and back: the mapping of Dynamo's own SGLang worker."""

from __future__ import annotations

import json
from typing import Any

from dynamo.common.backend.logprobs import build_sglang_logprob_kwargs, extract_from_sglang_meta
from dynamo.common.utils.engine_response import normalize_finish_reason
from dynamo.common.utils.guided_json import reject_nonprogressing_guided_json_ref_cycles
from dynamo.common.utils.structural_tag import serialize_structural_tag
from dynamo.llm import HttpError

from ampd.sampling_limits import known_tokens
from workers.engines.base import EngineError, EngineOutput, EngineRequest, KvLoadError

TOO_AMBIGUOUS = "the grammar of the output fits a text in too many ways; make it simpler"
"""Why a grammar was given up in the middle of the output: `workers.engines.bounded_grammars`."""

MOST_GUIDE_CHARS = {"json_schema": 131_072, "structural_tag": 131_072, "regex": 16_384, "ebnf": 16_384}
"""Longest guide of each kind. SGLang compiles it before the first token, and the engine must not seem to hang.

The schemas of an agent's tools come in one guide, so these may be longer.
"""

_LOAD_FAILED = "External KV cache load failed"
"""SGLang's message for a request whose load from the store failed."""

_SAMPLING_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
)


def sampling_params(
    request: EngineRequest, vocabulary_size: int | None = None, *, is_deterministic: bool = True
) -> dict[str, Any]:
    """SGLang's `sampling_params` of one choice.

    Stop tokens that the vocabulary lacks are left out: SGLang ends with `min_new_tokens` and one of them.

    Args:
        is_deterministic: whether SGLang samples by the seeds of requests.

    Raises:
        EngineError: 400 for a guide that SGLang cannot use or that is too long, for a seed that SGLang would ignore, or
            for `min_p` where it samples by seeds.
    """
    options = _sampling_options(request.request.get("sampling_options") or {}, is_deterministic=is_deterministic)
    stop = request.request.get("stop_conditions") or {}
    guide = _guide(options.get("guided_decoding") or {})
    stop_token_ids = set(stop.get("stop_token_ids_hidden") or []) | set(stop.get("stop_token_ids") or [])
    params = {
        **{name: options.get(name) for name in _SAMPLING_FIELDS},
        "sampling_seed": options.get("seed"),
        # A grammar says when the output ends. Then only a stop token is left, which `min_new_tokens` would forbid, and
        # behind which `ignore_eos` would add tokens that the grammar does not allow.
        "ignore_eos": None if guide else stop.get("ignore_eos"),
        "min_new_tokens": None if guide else _min_tokens(request, stop),
        "stop_token_ids": known_tokens(stop_token_ids, vocabulary_size) or None,
        **guide,
    }
    given = {name: value for name, value in params.items() if value is not None}
    # None is passed on: it means until EOS or the end of the context. Without the key, SGLang's limit is 128.
    return {**given, "max_new_tokens": request.max_new_tokens}


def _sampling_options(options: dict[str, Any], *, is_deterministic: bool) -> dict[str, Any]:
    """The options that SGLang can follow."""
    if options.get("temperature") == 0 or options.get("top_k") == 1:
        # The most likely token: a seed and `min_p` change nothing, but SGLang would end as below.
        return {**options, "min_p": None}
    if options.get("seed") is not None and not is_deterministic:
        raise EngineError(
            "SGLang ignores the seed of a request; leave it out, take temperature 0, or start the workers with "
            "--engine-args '{\"enable_deterministic_inference\": true}'",
            400,
        )
    if options.get("min_p") and is_deterministic:
        # An assertion in its scheduler fails, which ends the engine.
        raise EngineError(
            "SGLang cannot sample with min_p where it follows seeds; leave min_p out, or start the workers without "
            "enable_deterministic_inference",
            400,
        )
    return options


def logprob_arguments(request: EngineRequest) -> dict[str, Any]:
    """SGLang's arguments for log-probabilities."""
    arguments: dict[str, Any] = build_sglang_logprob_kwargs(request.request.get("output_options") or {})
    return arguments


def output_of(part: dict[str, Any], request: EngineRequest, index: int) -> EngineOutput | None:
    """One part of SGLang's stream; None for one that brings nothing.

    Raises:
        EngineError: SGLang ended the request with an error of its own.
        KvLoadError: its load from the store failed.
    """
    meta = part["meta_info"]
    finish = meta.get("finish_reason")
    token_ids = part.get("output_ids") or []
    if not token_ids and not finish:
        return None
    options = request.request.get("output_options") or {}
    # Each part is an increment, log-probabilities included.
    log_probs, top_logprobs = extract_from_sglang_meta(
        meta, return_tokens_as_token_ids=bool(options.get("return_tokens_as_token_ids"))
    )
    output = EngineOutput(list(token_ids), index=index, log_probs=log_probs, top_logprobs=top_logprobs)
    if finish:
        if finish.get("type") == "abort" and finish.get("message") == _LOAD_FAILED:
            raise KvLoadError
        if finish.get("type") == "abort" and TOO_AMBIGUOUS in str(finish.get("message")):
            raise EngineError(TOO_AMBIGUOUS, 400)
        if finish.get("type") == "abort" and finish.get("status_code"):
            raise EngineError(str(finish.get("message")), int(finish["status_code"]))
        output.finish_reason = normalize_finish_reason(finish["type"])
        output.stop_reason = _stop_reason(finish.get("matched"), request)
        output.prompt_tokens = int(meta.get("prompt_tokens") or 0)
        output.completion_tokens = int(meta.get("completion_tokens") or 0)
        output.cached_tokens = int(meta.get("cached_tokens") or 0)
        # SGLang counts what comes through a cache linker as host memory.
        output.reloaded_tokens = int((meta.get("cached_tokens_details") or {}).get("host") or 0)
    return output


def _min_tokens(request: EngineRequest, stop: dict[str, Any]) -> int | None:
    wanted = stop.get("min_tokens")
    if wanted is None or request.max_new_tokens is None:
        return wanted
    return min(int(wanted), request.max_new_tokens)


def _guide(guided: dict[str, Any]) -> dict[str, Any]:
    """Dynamo's guided decoding as one of SGLang's constraints, unless it is too long."""
    guide = _constraint(guided)
    for kind, text in guide.items():
        if len(text) > (most := MOST_GUIDE_CHARS[kind]):
            raise EngineError(
                f"the guide of the output ({kind}) has {len(text)} characters, at most {most} are allowed; shorten it",
                400,
            )
    return guide


def _constraint(guided: dict[str, Any]) -> dict[str, Any]:
    if (schema := guided.get("json")) is not None:
        try:
            reject_nonprogressing_guided_json_ref_cycles(schema)
        except HttpError as error:
            raise EngineError(str(error), 400) from None
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if (tag := guided.get("structural_tag")) is not None:
        return {"structural_tag": serialize_structural_tag(tag)}
    if (regex := guided.get("regex")) is not None:
        return {"regex": regex}
    if (options := guided.get("choice")) is not None:
        # EBNF has no surrogates, so that characters beyond the BMP stay as they are.
        return {"ebnf": "root ::= " + " | ".join(json.dumps(str(option), ensure_ascii=False) for option in options)}
    if (grammar := guided.get("grammar")) is not None:
        return {"ebnf": grammar}
    return {}


def _stop_reason(matched: Any, request: EngineRequest) -> str | int | None:
    """What ended the output, if the user asked for it: a string, or one of the user's own stop tokens."""
    if isinstance(matched, str):
        return matched
    stop = request.request.get("stop_conditions") or {}
    if isinstance(matched, int) and not isinstance(matched, bool) and matched in (stop.get("stop_token_ids") or []):
        return matched
    return None
