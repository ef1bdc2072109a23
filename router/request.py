"""Dynamo's preprocessed request as a round: its session, its options, and the parts that an engine needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ampd.errors import one_line_of
from ampd.keys import (
    MAX_SESSION_ID_CHARS,
    SESSION_HEADER,
    TOKEN_BYTES,
    from_ascii_name,
    pack_tokens,
    session_key,
    tenant_of,
)
from ampd.sampling_limits import beyond_sampling, unknown_token
from ampd.serving.local_only import uncarried_option
from ampd.types import Slo
from ampd.wire import ENGINE_FIELDS, MAX_CHOICES
from router.round_errors import RoundRefusedError
from router.targets import TargetLimits

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


ANNOUNCEMENT = "announce"
"""The annotation of a request without output. Dynamo's frontend refuses `max_tokens: 0`, and passes annotations on."""
_NOT_TEXT = ("multi_modal_", "mm_", "prompt_embeds", "encoder_result")
"""How the names of fields and of `extra_args` begin that bring images, audio or embeddings. The keys of KV pages name
tokens only, so that two prompts with other images but equal tokens would have the same keys."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One round of a session, as a client asked for it.

    Attributes:
        session_id: the session's name inside of the graph, see `ampd.keys`; a fresh one for a round without.
        client_session_id: the client's own name of it; None: it has none, and ends with this round.
        tenant: see `ampd.keys`.
        is_final: whether the client said that this is the session's last round.
        prompt: token ids of the whole prompt as native 32-bit words. A list of them takes ten times the memory, and an
            overloaded coordinator holds thousands of prompts.
        max_tokens: most output tokens a choice; None: until the model or the context ends.
        choices: number of choices (`n`).
        wants_record: whether the client asked for `engine_data` (`nvext.extra_fields`).
        uncarried: the option that forbids a remote prefill, if one does.
        continued_tokens: output tokens at the end of the prompt, which came out before a process was lost.
        continued_mark: of the fingerprint of the weights that they came from; 0: it is not known.
        clamped_targets: the targets that the client set outside of the graph's limits; `slo` has the nearest limits.
        engine_request: the parts that an engine needs.
    """

    session_id: str
    client_session_id: str | None
    tenant: str
    is_final: bool
    prompt: bytes
    slo: Slo
    max_tokens: int | None
    choices: int
    wants_record: bool
    uncarried: str | None
    continued_tokens: int = 0
    continued_mark: int = 0
    clamped_targets: tuple[str, ...] = ()
    engine_request: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> Sequence[int]:
        """The whole prompt."""
        return memoryview(self.prompt).cast("I")

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def client_prompt_tokens(self) -> int:
        """Length of the client's own prompt."""
        return self.prompt_tokens - self.continued_tokens

    @property
    def has_output(self) -> bool:
        """Whether the client has some of the round's output."""
        return self.continued_tokens > 0

    @property
    def is_named(self) -> bool:
        """Whether the client named the session; otherwise it ends with this round."""
        return self.client_session_id is not None

    @property
    def is_announcement(self) -> bool:
        """Whether it asks for no output: the KV of its prompt is made ready for the session's next round."""
        return self.max_tokens == 0 and not self.ends_session

    @property
    def ends_session(self) -> bool:
        """Whether nothing of the session is needed after this round."""
        return self.is_final or not self.is_named


def parse_round(
    request: Mapping[str, Any], limits: TargetLimits, vocabulary_size: int | None = None, affinity: str | None = None
) -> RoundRequest:
    """Read Dynamo's preprocessed request.

    Args:
        limits: of the targets that a client may choose.
        vocabulary_size: token ids from here on are refused; None: it is not known.
        affinity: the session's id in `x-session-affinity`, which counts if no other header names a session.

    Raises:
        RoundRefusedError: 400 because this graph cannot serve the request.
    """
    try:
        return _parsed(_in_session(request, affinity), limits, vocabulary_size)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        # A field has another type than Dynamo's frontend gives it, so another process of the graph sent it.
        raise RoundRefusedError(400, f"the request is malformed: {one_line_of(error)}") from None


def _parsed(request: Mapping[str, Any], limits: TargetLimits, vocabulary_size: int | None) -> RoundRequest:
    if ANNOUNCEMENT in (request.get("annotations") or ()):
        request = _announced(request)
    for name, value in (*request.items(), *(request.get("extra_args") or {}).items()):
        if value and name.startswith(_NOT_TEXT):
            raise RoundRefusedError(400, f"this model is served for text only; the request carries {name}")
    token_ids = request.get("token_ids")
    if not token_ids:
        raise RoundRefusedError(400, "the prompt is empty")
    if isinstance(token_ids, (bytes, str)):
        raise RoundRefusedError(400, "the prompt must be a list of token ids")
    if reason := unserved_option(request) or beyond_sampling(request):
        raise RoundRefusedError(400, reason)
    prompt = _packed(token_ids)
    if vocabulary_size is not None and (reason := unknown_token(prompt, request, vocabulary_size)):
        raise RoundRefusedError(400, reason)
    if (request.get("routing") or {}).get("lora_name"):
        raise RoundRefusedError(400, "this model is served without LoRA adapters; the request names one")
    try:
        tenant = tenant_of(request)
    except ValueError as error:
        raise RoundRefusedError(400, str(error)) from None
    before = continued(request)
    if before is not None:
        request = _continued(request, before[0])
    agent = request.get("agent_context") or {}
    stops = request.get("stop_conditions") or {}
    named = _session_id(agent)
    _count(stops, "min_tokens")
    slo, clamped_targets = limits.of(request)
    return RoundRequest(
        session_id=f"single-{uuid4().hex}" if named is None else session_key(tenant, named),
        client_session_id=named,
        tenant=tenant,
        is_final=bool(agent.get("session_final")),
        prompt=prompt,
        slo=slo,
        max_tokens=_count(stops, "max_tokens"),
        choices=_choices(request.get("sampling_options") or {}),
        wants_record=_wants_record(request),
        uncarried=uncarried_option(request),
        continued_tokens=before[0] if before else 0,
        continued_mark=before[1] if before else 0,
        clamped_targets=clamped_targets,
        engine_request=_engine_request(request),
    )


def _engine_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The parts for an engine, as they came, with at least one top log-probability where any are asked for.

    Dynamo's frontend drops those of the chosen tokens from a chat's answer if no top ones come with them.
    """
    parts = {name: request[name] for name in ENGINE_FIELDS if request.get(name) is not None}
    outputs = parts.get("output_options") or {}
    if outputs.get("logprobs") == 0:
        parts["output_options"] = {**outputs, "logprobs": 1}
    return parts


def _continued(request: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """A request whose output has begun, as one for the rest of the output. Dynamo has reduced `max_tokens`."""
    if option := uncarried_option(request):
        raise RoundRefusedError(
            503,
            f"a process was lost after {tokens} tokens, and a request with {option} cannot be continued elsewhere; "
            "send it again",
        )
    stops = request.get("stop_conditions") or {}
    least = _count(stops, "min_tokens")
    return {**request, "stop_conditions": {**stops, "min_tokens": max(least - tokens, 0)}} if least else request


def _in_session(request: Mapping[str, Any], session_id: str | None) -> Mapping[str, Any]:
    """The request as one of this session, unless it names a session itself."""
    agent = request.get("agent_context") or {}
    if not session_id or agent.get("session_id"):
        return request
    return {**request, "agent_context": {**agent, "session_id": session_id}}


def _announced(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """An announcement as a request for no output."""
    if _session_id(request.get("agent_context") or {}) is None:
        raise RoundRefusedError(400, f"the annotation {ANNOUNCEMENT!r} needs a session id ({SESSION_HEADER})")
    stops = {**(request.get("stop_conditions") or {}), "max_tokens": 0, "min_tokens": None}
    return {**request, "stop_conditions": stops}


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        return pack_tokens(token_ids)
    except (OverflowError, TypeError):
        raise RoundRefusedError(400, "the prompt must be a list of token ids of 32 bits each") from None


def _choices(sampling: Mapping[str, Any]) -> int:
    choices = _count(sampling, "n") or 1
    if choices > MAX_CHOICES:
        raise RoundRefusedError(400, f"n must be at most {MAX_CHOICES}")
    return choices


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise RoundRefusedError(400, f"{name} must be a whole number of at least 0 (given: {str(value)[:64]!r})")
    return value


def _session_id(agent: Mapping[str, Any]) -> str | None:
    session_id = agent.get("session_id")
    if not session_id:
        return None
    if isinstance(session_id, str):
        session_id = from_ascii_name(session_id)
    if not isinstance(session_id, str) or len(session_id) > MAX_SESSION_ID_CHARS:
        raise RoundRefusedError(400, f"the session id must be text of at most {MAX_SESSION_ID_CHARS} characters")
    return session_id


def _wants_record(request: Mapping[str, Any]) -> bool:
    nvext = (request.get("extra_args") or {}).get("nvext") or {}
    return "engine_data" in (nvext.get("extra_fields") or ())


# -- requests that a frontend sends again

_RETURNED_LINK = "migration_link"
_MARK_SHIFT, _MOST = 32, 1 << 64


def link(trace_id: str | None, prompt_tokens: int, fingerprint_mark: int = 0) -> dict[str, str]:
    """What a round's first chunk carries. `prompt_tokens`: of the client's own prompt."""
    return {"trace_id": trace_id or uuid4().hex, "span_id": f"{fingerprint_mark:08x}{prompt_tokens:08x}"}


def continued(request: Mapping[str, Any]) -> tuple[int, int] | None:
    """What came out of a round before a process was lost; None: the request is new.

    The frontend (`--migration-limit`) sends the request again with the tokens that had come out at the end of the
    prompt, and `max_tokens` reduced. It marks such a request only for tracing: a chunk's `worker_trace_link` comes back
    as the request's `migration_link`. Each first chunk therefore carries a link. The span id has 32 bits of the
    fingerprint of the weights (`router.fingerprints.mark_of`) and the length of the prompt.

    Returns:
        The tokens at the end of the prompt that are its output, and the mark of the weights that they came from (0:
        they are not known).

    Raises:
        ValueError, TypeError, KeyError: the link is not one of `link`.
    """
    returned = request.get(_RETURNED_LINK)
    if returned is None:
        return None
    span = int(returned["span_id"], 16)
    if not 0 <= span < _MOST:
        raise ValueError(f"{_RETURNED_LINK} has a span id of more than 64 bits")
    mark, prompt_tokens = divmod(span, 1 << _MARK_SHIFT)
    tokens = len(request["token_ids"]) - prompt_tokens
    if tokens < 0:
        raise ValueError(f"{_RETURNED_LINK} names a longer prompt")
    return tokens, mark
