"""A round that its decode worker answers: what the worker tells the round's coordinator, and the client's chunks.

The coordinator places the round and sends it to the decode worker. The worker makes the client's chunks, and tells the
coordinator over a connection of its own what became of the round. Such a message is a signed frame of msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from ampd.call_signatures import SIGNATURE, Signer, Verifier
from ampd.handler_stream import Chunk
from ampd.types import Count, Seconds, Text
from ampd.wire import ENGINE_DIED, OVERLOADED, RoundReport, fields_of

LINK = "worker_trace_link"
"""The key of a first chunk that comes back with a round which the frontend sends again, see `router.request`."""

UNAVAILABLE = 503
RUNNING_S = 5.0
"""Seconds between two lists of the rounds that a worker has for a coordinator."""

_ENDPOINT = "told"
_LENGTH_BYTES = 4
_MOST_BYTES = 64 << 20
"""Of one message: an output of 16 million tokens."""


# -- the client's chunks

_CLASSES = {
    400: ("InvalidRequest", "request.invalid"),
    OVERLOADED: ("RateLimited", "request.rate_limited"),
    UNAVAILABLE: ("Unavailable", "backend.unavailable"),
}
_INTERNAL = ("Internal", "runtime.unclassified")
"""Classes and reasons of errors, as Dynamo's frontend knows them (`lib/runtime/src/error.rs`)."""
_AGAIN = ("Unavailable", "backend.worker_unavailable")
"""After it the frontend sends the request again, with the tokens that have come out (`--migration-limit`)."""


def error_chunk(status: int, message: str, *, again: bool = False) -> Chunk:
    """The chunk that ends a round with this HTTP status: an error event of Dynamo's, whose message the client gets.

    The frontend gives an exception's message to nobody, and after some classes of errors it takes the coordinator for
    lost. A class has the statuses that the frontend makes of it, and a reason must be of its class.

    Args:
        again: the frontend may send the request again, because a worker was lost.
    """
    error_class, reason = _AGAIN if again else _CLASSES.get(status, _INTERNAL)
    public = {"type": "message", "message": message}
    error = {"class": error_class, "reason": reason, "message": message, "public": public}
    return {"_dynamo_annotated": True, "event": "error", "comment": [message], "error": error}


def merged_usage(
    usage: Mapping[str, Any] | None, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None
) -> dict[str, Any]:
    """The usage that the client sees: its own prompt, and the output of all parts of the round.

    Args:
        usage: the last engine's counts; its other fields are kept.
        cached_tokens: prompt tokens that were not computed in this round; None: the engine's own count stays.
    """
    merged = dict(usage or {})
    merged["prompt_tokens"] = prompt_tokens
    merged["completion_tokens"] = completion_tokens
    merged["total_tokens"] = prompt_tokens + completion_tokens
    if cached_tokens is not None:
        details = dict(merged.get("prompt_tokens_details") or {})
        details["cached_tokens"] = min(cached_tokens, prompt_tokens)
        merged["prompt_tokens_details"] = details
    return merged


def goes_on_elsewhere(status: int, *, has_output: bool) -> bool:
    """Whether a round that failed at a worker with this status has a chance at another one.

    A refusal because of load counts if the client has some of the output, because the client would lose that.
    """
    return status in (UNAVAILABLE, ENGINE_DIED) or (status == OVERLOADED and has_output)


# -- the measurements of a round


@dataclass(slots=True)
class Measures:
    """What workers measured of a round, as the decision record names it.

    Attributes:
        cached_tokens: prompt tokens that the prefill did not compute.
        hit_tokens: where their KV was when it began: `device`, `store`, `peer`; `recomputed`: tokens of the history
            whose KV was in none of them, those included that had been evicted before.
        kv_read_tokens_history: KV that the prefilling worker read from the owner of the session;
            `kv_read_tokens_increment`: the other way. Tries that failed count too.
        kv_reload_s: time of copies from KV stores to devices, of both workers, as far as their engines measure it.
    """

    queued_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    kv_read_tokens_history: int = 0
    kv_read_bytes_history: int = 0
    kv_read_s_history: float = 0.0
    kv_read_tokens_increment: int = 0
    kv_read_bytes_increment: int = 0
    kv_read_s_increment: float = 0.0
    kv_reload_s: float = 0.0

    def prefilled(self, report: RoundReport) -> None:
        """The report of the worker that ran the prefill."""
        self.queued_s, self.prefill_s = report["queued_s"], report["prefill_s"]
        self.cached_tokens, self.hit_tokens = report["cached_tokens"], report.get("hit_tokens", {})
        self.kv_read_tokens_history += report["kv_read_tokens"]
        self.kv_read_bytes_history += report["kv_read_bytes"]
        self.kv_read_s_history += report["kv_read_s"]
        self.kv_reload_s += report.get("reload_s", 0.0)

    def read_increment(self, report: RoundReport) -> None:
        """The report of the decode worker about a round that was prefilled elsewhere."""
        self.kv_read_tokens_increment += report["kv_read_tokens"]
        self.kv_read_bytes_increment += report["kv_read_bytes"]
        self.kv_read_s_increment += report["kv_read_s"]
        self.kv_reload_s += report.get("reload_s", 0.0)

    def as_dict(self) -> dict[str, Any]:
        return fields_of(self)


# -- what a worker tells a round's coordinator


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A worker has begun a round: it has a connection to the round's frontend.

    Attributes:
        has_output: the first token has come out. Told where the coordinator does not hear it from the shared state.
    """

    request_id: Text
    has_output: bool = False


class PrefillFailed(msgspec.Struct, frozen=True, tag=True):
    """The prefill worker of a round failed, and the decode worker prefills.

    Attributes:
        reason: of the route that the round has now.
        status: with which the prefill worker refused; 0: it was lost.
        has_died, start, lives: as in `router.round_errors.WorkerLostError`.
    """

    request_id: Text
    worker_id: Text
    reason: Text
    message: Text
    status: int = 0
    has_died: bool = False
    start: int | None = None
    lives: bool = False


class RoundEnded(msgspec.Struct, frozen=True, tag=True):
    """How a round ended at its decode worker.

    Attributes:
        outcome: `complete`: by itself; `left`: by its client; `failed`: with `status` and `message`.
        goes_on: the frontend was told that it may send the failed round again.
        tokens: output of the first choice, as native 32-bit words.
        ttft_s: from the round's arrival at the coordinator to the first token; None: there was none.
        itl_s: mean gap of the first choice.
        prefill: the report of the prefill worker, if there was one; `decode`: of the decode worker.
    """

    request_id: Text
    outcome: Literal["complete", "left", "failed"]
    tokens: bytes = b""
    has_begun: bool = False
    ttft_s: Seconds | None = None
    itl_s: Seconds | None = None
    prefill: RoundReport | None = None
    decode: RoundReport | None = None
    status: Count = 0
    message: str = ""
    goes_on: bool = False
    start: int | None = None


class Running(msgspec.Struct, frozen=True, tag=True):
    """The rounds that a worker has for this coordinator; also the first message of a connection.

    Those that it does not name are over or never came.
    """

    worker_id: Text
    request_ids: list[str]


Told: TypeAlias = Begun | PrefillFailed | RoundEnded | Running

_encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_decode = msgspec.msgpack.Decoder(Told).decode


def encode_told(told: Told, signer: Signer, address: str) -> bytes:
    """A message as it travels to the coordinator at this address."""
    body, metadata = _encode(told), dict[str, str]()
    signer.sign(metadata, _ENDPOINT, address, {"body": body})
    frame = _encode((metadata.get(SIGNATURE, ""), body))
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


def cut_told(buffer: bytearray, verifier: Verifier) -> Iterator[Told]:
    """Take the complete messages out of a buffer.

    Raises:
        ValueError: no member of the graph sent it, or it is malformed.
    """
    while len(buffer) >= _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
        if end > _MOST_BYTES:
            raise ValueError("it is too long")
        if len(buffer) < end:
            return
        signature, body = _decode_frame(buffer[_LENGTH_BYTES:end])
        del buffer[:end]
        if fault := verifier.refusal({SIGNATURE: signature}, _ENDPOINT, {"body": body}):
            raise ValueError(f"its signature is {fault}")
        told: Told = _decode(body)
        if isinstance(told, RoundEnded):
            _check(told)
        yield told


def _check(ended: RoundEnded) -> None:
    for report in (ended.prefill, ended.decode):
        if report is not None and ("decode_batch" in report) != ("decode_context_tokens" in report):
            raise ValueError("decode_batch and decode_context_tokens belong together")
    if len(ended.tokens) % 4:
        raise ValueError("tokens are words of 32 bits")
