"""Messages between coordinator and workers, which Dynamo sends as msgpack maps.

They are plain typed dictionaries, because validating each of 100,000 token ids on every hop would take too long. The
fields called `request` hold the unchanged parts of Dynamo's preprocessed request that an engine needs.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NotRequired, TypeAlias, TypedDict

import msgspec

from ampd.types import Count, PrefillTask, Seconds, Text

COMPONENT = "worker"
"""Dynamo component of the workers of all roles, because a role can change at run time."""

PREFILL_ENDPOINT = "prefill"
GENERATE_ENDPOINT = "generate"
KV_ENDPOINT = "kv"

SESSIONS_ROUTE = "sessions"
"""Operations on sessions at the system port of a coordinator: `/engine/sessions/list`, `show` and `end`."""

MAX_CHOICES = 128
"""Most choices of one round (`n`), as in Dynamo's frontend. A larger number would fill an engine's memory."""

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


TaskMessage: TypeAlias = dict[str, Any]
"""A `PrefillTask` on the wire: its fields by name; `arrival_s` counts from when it was sent, as clocks differ."""


def encode_task(task: PrefillTask, now_s: float) -> TaskMessage:
    """A task as sent at `now_s`, on the clock of its `arrival_s`."""
    message: TaskMessage = msgspec.to_builtins(task.shifted(-now_s))
    return message


def decode_task(message: TaskMessage, sent_s: float) -> PrefillTask:
    """A task that was sent at `sent_s` on the reader's clock.

    Raises:
        ValueError: a field is missing or malformed; the message names it.
    """
    return msgspec.convert(message, PrefillTask).shifted(sent_s)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; their values are not copied."""
    return {name: getattr(value, name) for name in value.__match_args__}


Source: TypeAlias = tuple[str, int | None, str]
"""A worker that holds KV of a round, its tensor parallelism (None: not known), and its host. The last two predict the
time of a read."""


class PrefillRequest(TypedDict):
    """To a prefill worker: prefill the prompt.

    Attributes:
        prompt: token ids as native 32-bit words.
        source: it holds the KV of the history.
        kept_tokens: of the prompt, in the context of its session before, whether or not its KV still exists; left out:
            it is not known.
    """

    task: TaskMessage
    prompt: bytes
    source: Source | None
    kept_tokens: NotRequired[int]
    request: dict[str, Any]


class RoundStart(TypedDict):
    """What a decode worker needs to answer the client of a round, and to tell the round's coordinator its end.

    Attributes:
        request_id: of the client's request.
        tell: where the coordinator listens, as `host:port`.
        age_s: since the request's arrival at the coordinator.
        link: for the first chunk.
        prompt_tokens: of the client's own prompt; `continued_tokens`: output behind it, which came out before.
        record: the decision record so far; None: the client does not want it.
        prefill: the worker that is asked for the first token; left out: there is none.
        tells_begin: whether the coordinator needs to be told of the first token.
    """

    request_id: str
    tell: str
    age_s: float
    link: dict[str, str]
    prompt_tokens: int
    continued_tokens: int
    record: dict[str, Any] | None
    prefill: NotRequired[Source]
    tells_begin: NotRequired[bool]


class GenerateRequest(PrefillRequest):
    """To a decode worker: run the round.

    `stop_conditions.max_tokens == 0` only takes over the KV, without decoding.

    Attributes:
        is_prefilled: `source` holds the KV of the whole prompt, whose last token it has sampled. This worker reads it
            and decodes. Otherwise the round queues here, and its source is left out if this worker is it.
        ends_session: the session has no further round: this worker releases its KV when the round ends.
        start: how the client is answered; left out: the caller gets the engine's own chunks and the report.
    """

    is_prefilled: NotRequired[bool]
    ends_session: NotRequired[bool]
    start: NotRequired[RoundStart]


REPORT_KEY = "ampd"
"""The key of a worker's `RoundReport` in its last chunk, and of the decision record in a chunk's `engine_data`."""


class RoundReport(TypedDict):
    """Measurements of a worker's part of a round; they travel in the last chunk under `REPORT_KEY`.

    Attributes:
        held_tokens: of the session's context, on this worker. A prefill for another worker does not wait until the
            engine has stored it; what is added later is published.
        cached_tokens: prompt tokens that were not computed.
        hit_tokens: where their KV was: `device`, `store` (of this worker), `peer` (read for this round). `recomputed`
            are tokens of the history whose KV was in none of them, those included that had been evicted before.
        reload_s: time of the copies from the store to the device; left out if nothing was copied.
        decode_batch, decode_context_tokens: the rounds that still decode on this worker.
    """

    held_tokens: Count
    cached_tokens: Count
    queued_s: Seconds
    prefill_s: Seconds
    kv_read_tokens: Count
    kv_read_bytes: Count
    kv_read_s: Seconds
    kv_read_error: NotRequired[Text]
    hit_tokens: NotRequired[dict[str, Count]]
    reload_s: NotRequired[Seconds]
    decode_batch: NotRequired[Count]
    decode_context_tokens: NotRequired[Count]


class KvRequest(TypedDict):
    """To a worker's KV endpoint. `op`: `lease`, `unlease`, `match`, `release_session`.

    Attributes:
        expected: for `lease`, how many of `keys` the caller expects there. Without it all of them.
        reader: the calling worker.
    """

    op: str
    keys: NotRequired[list[bytes]]
    lease_id: NotRequired[str]
    session_id: NotRequired[str]
    ttl_s: NotRequired[float]
    expected: NotRequired[int]
    reader: NotRequired[str]


LeasedRecords = tuple[list[int], list[int]]
"""Of each record: the position of its key among the keys of the request, and its offset in the owner's store."""


class KvReply(TypedDict):
    """Answer of a worker's KV endpoint.

    Attributes:
        matched: for `match` and `lease`, the length in pages of the longest prefix of `keys` that the worker holds.
        records: for `lease`, by pool, the records that the lease protects.
        checksums: of each of `records`, if their owner makes checksums; None: none of this one.
        descriptor: data with which a transport can read the leased pages; left out if there are none.
        released_tokens: for `release_session`, the tokens whose KV was released.
        error: why the operation failed.
    """

    matched: NotRequired[int]
    records: NotRequired[dict[str, LeasedRecords]]
    checksums: NotRequired[dict[str, list[int | None]]]
    lease_id: NotRequired[str]
    descriptor: NotRequired[bytes]
    released_tokens: NotRequired[int]
    error: NotRequired[str]


METADATA_PREFIX, AFFINITY = "x-session-", "affinity"
"""Dynamo's frontend passes headers with this prefix on (`DYN_METADATA_HEADER`): `x-session-affinity` as `affinity`."""
ROUND, REPEAT = "round", "repeat"
"""Others of them: the status relay's name of a round, and that of the round whose output it asks for again."""

OVERLOADED = 429
"""The status of a round that is refused because of load. Clients of the OpenAI API wait after it and send again.

Dynamo's own 529 is not registered, and a 5xx counts as a failure of the server in proxies and alerts."""

_RETRY_AFTER = re.compile(r"retry after (\d+) s\b")


def with_retry_after(message: str, retry_after_s: float) -> str:
    """A message that names the seconds of `Retry-After`, because Dynamo's frontend sends no headers of a backend."""
    return f"{message}; retry after {max(1, math.ceil(retry_after_s))} s"


def retry_after_s(message: str) -> int | None:
    """The seconds in a message of `with_retry_after`; None: it names none."""
    found = _RETRY_AFTER.search(message)
    return int(found[1]) if found else None


_ERROR = re.compile(r"ampd-error (\d{3}): (.*)", re.DOTALL)
_ENVELOPE = re.compile(r"\{.*\}", re.DOTALL)


ENGINE_DIED = 502
"""The status of a call during which the worker's engine ended. Other failures of a call never have it."""


_ENGINE_START = re.compile(r"\(start (\d+) of the engine\)")


def with_engine_start(message: str, start: int) -> str:
    """A message about the death of an engine that names which start of the worker's engine died, from 1."""
    return f"{message} (start {start} of the engine)"


def engine_start(message: str) -> int | None:
    """The start in a message of `with_engine_start`; None: it names none."""
    found = _ENGINE_START.search(message)
    return int(found[1]) if found else None


def error_text(status: int, message: str) -> str:
    """The text of an exception that a worker raises: Dynamo passes on the text of an exception, but not its class."""
    return f"ampd-error {status}: {message}"


def parse_error(text: str) -> tuple[int, str] | None:
    """The HTTP status and the message in the text of a failed call; None if the text is not one of `error_text`."""
    found = _ERROR.search(_unwrapped(text))
    return (int(found[1]), found[2].strip()) if found else None


def _unwrapped(text: str) -> str:
    """The message of an HttpError, which Dynamo sends as `Backend<Kind>: {"message": ..., "code": ...}`, or `text`."""
    envelope = _ENVELOPE.search(text)
    try:
        fields = json.loads(envelope[0]) if envelope else None
    except (ValueError, RecursionError):
        return text
    return str(fields["message"]) if isinstance(fields, dict) and "message" in fields else text
