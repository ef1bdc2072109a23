"""Messages between coordinator and workers, as they travel through Dynamo (msgpack maps).

Plain typed dictionaries: a prompt of 100,000 token ids must not be validated element by element on every hop.
`request` fields hold the parts of Dynamo's preprocessed request that an engine needs, untouched.
"""

from __future__ import annotations

import json
import re
from typing import Any, NotRequired, TypedDict

COMPONENT = "worker"
"""Dynamo component of all workers, whatever their role (a role can change at run time)."""

PREFILL_ENDPOINT = "prefill"
GENERATE_ENDPOINT = "generate"
KV_ENDPOINT = "kv"

COORDINATOR_COMPONENT = "coordinator"
COORDINATOR_ENDPOINT = "generate"

ENGINE_FIELDS = (
    "sampling_options",
    "stop_conditions",
    "output_options",
    "eos_token_ids",
    "routing",
    "extra_args",
    "model",
)
"""Keys of Dynamo's preprocessed request that are passed on to the engine."""


class TaskMessage(TypedDict):
    """A `PrefillTask` on the wire. `waited_s` replaces the arrival time: clocks differ between machines."""

    task_id: str
    session_id: str
    hist_tokens: int
    incr_tokens: int
    waited_s: float
    ttft_s: float
    itl_s: float
    session_missed: NotRequired[bool]


class PrefillRequest(TypedDict):
    """To a prefill worker: prefill `token_ids`, of which `source_worker_id` holds the history."""

    task: TaskMessage
    token_ids: list[int]
    source_worker_id: str | None
    request: dict[str, Any]


class GenerateRequest(TypedDict):
    """To a decode worker: run the round.

    With `source_worker_id` the increment's KV is at that prefill worker, `token_ids` ends with the first output token
    and the worker fetches the pages before it admits the round. Without it the prefill is local and queues here.
    `stop_conditions.max_tokens == 0` only takes the KV over, without decoding.
    """

    task: TaskMessage
    token_ids: list[int]
    source_worker_id: str | None
    request: dict[str, Any]


class RoundReport(TypedDict):
    """What a worker measured of its part of a round; travels in the last chunk under the key `ampd`.

    `slices`: calls of the engine that the prefill was cut into; left out if it ran whole. `decode_batch`,
    `decode_context_tokens`: the rounds that still decode on this worker.
    """

    held_tokens: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    kv_read_tokens: int
    kv_read_bytes: int
    kv_read_s: float
    kv_read_error: NotRequired[str]
    slices: NotRequired[int]
    decode_batch: NotRequired[int]
    decode_context_tokens: NotRequired[int]


class KvRequest(TypedDict):
    """To a worker's KV endpoint. `op`: `lease`, `unlease`, `match`, `release_session`."""

    op: str
    keys: NotRequired[list[bytes]]
    lease_id: NotRequired[str]
    session_id: NotRequired[str]
    ttl_s: NotRequired[float]


class KvReply(TypedDict):
    """Answer of a worker's KV endpoint.

    `pages`: for `lease`, the positions of the longest prefix of `keys` that is held (its length is the answer of
    `match` in `matched`). `descriptor`: what a transport needs to read those pages. `released_tokens`: answer of
    `release_session`.
    """

    pages: NotRequired[list[int]]
    matched: NotRequired[int]
    lease_id: NotRequired[str]
    descriptor: NotRequired[bytes]
    released_tokens: NotRequired[int]
    error: NotRequired[str]


_ERROR = re.compile(r"ampd-error (\d{3}): (.*)", re.DOTALL)
_ENVELOPE = re.compile(r"\{.*\}", re.DOTALL)


def error_text(status: int, message: str) -> str:
    """What a worker puts in the exception that it raises: Dynamo carries the text to the caller, not the class."""
    return f"ampd-error {status}: {message}"


def parse_error(text: str) -> tuple[int, str] | None:
    """The HTTP status and the message in the text of a failed call; None if no worker of ours wrote it."""
    found = _ERROR.search(_unwrapped(text))
    return (int(found[1]), found[2].strip()) if found else None


def _unwrapped(text: str) -> str:
    """Dynamo hands an HttpError on as `Backend<Kind>: {"message": ..., "code": ...}`; anything else stays as it is."""
    envelope = _ENVELOPE.search(text)
    try:
        fields = json.loads(envelope[0]) if envelope else None
    except ValueError:
        return text
    return str(fields["message"]) if isinstance(fields, dict) and "message" in fields else text
