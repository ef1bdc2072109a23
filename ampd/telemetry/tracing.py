"""The ids of the current round. Every log line, call and answer of a round carries them.

Dynamo's contexts transport the ids between processes: the trace id by themselves (only with `DYN_LOGGING_JSONL=1`), the
others as metadata. Within a process they are in a context variable, which tasks inherit.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self
from uuid import uuid4

REQUEST_ID = "ampd-request-id"
SESSION_ID = "ampd-session-id"
CALLER = "ampd-caller"
TRACE_ID, X_REQUEST_ID = "ampd-trace-id", "ampd-x-request-id"
"""Keys of the metadata that travels with calls."""


class TracedContext(Protocol):
    """The part of Dynamo's `Context` that carries ids."""

    def id(self) -> str: ...
    def detached(self, id: str) -> Self: ...
    def trace_headers(self) -> dict[str, str] | None: ...
    @property
    def trace_id(self) -> str | None: ...
    @property
    def metadata(self) -> MutableMapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """The ids of one round, under Dynamo's names.

    Attributes:
        request_id: Dynamo's id of the client's request; the answer's id ends with it.
        trace_id: from the client's `traceparent`, or made by the frontend; None: Dynamo transports no traces here.
        x_request_id: the client's header of that name; None: the client sent none.
        session_id: None before the request has been read.
        caller: the worker that made this call; None: the round's coordinator made it.
        context: Dynamo's context of the call that is being served; calls on its behalf descend from it.
    """

    request_id: str
    trace_id: str | None = None
    x_request_id: str | None = None
    session_id: str | None = None
    caller: str | None = None
    context: Any = field(default=None, repr=False, compare=False)

    def fields(self) -> dict[str, str]:
        """The ids that are known, as fields of a log line."""
        named = {
            "trace_id": self.trace_id,
            "request_id": self.request_id,
            "x_request_id": self.x_request_id,
            "session_id": self.session_id,
        }
        return {name: value for name, value in named.items() if value is not None}

    def enter(self) -> None:
        """Make this the current round of the running task."""
        _CURRENT.set(self)

    def of_session(self, session_id: str) -> Trace:
        """Add the session's id to the current round and to the calls that it makes."""
        self.context.metadata[SESSION_ID] = session_id
        named = replace(self, session_id=session_id)
        named.enter()
        return named

    def quoted(self, message: str) -> str:
        """An error message with the ids that find its round in the logs."""
        ids = {name: value for name, value in self.fields().items() if name != "session_id"}
        return f"{message} ({', '.join(f'{name} {value}' for name, value in ids.items())})"


_CURRENT: ContextVar[Trace | None] = ContextVar("ampd_trace", default=None)


def current() -> Trace | None:
    """The round that the running task works for; None: none in particular."""
    return _CURRENT.get()


def begin(context: TracedContext) -> Trace:
    """Start the trace of a client's request, and send its id with every call that is made for it."""
    context.metadata[REQUEST_ID] = context.id()
    # A request that is handed on has no context of Dynamo's whose calls would carry these two.
    own = {TRACE_ID: context.trace_id, X_REQUEST_ID: (context.trace_headers() or {}).get("x-request-id")}
    for key, value in {SESSION_ID: None, CALLER: None, **own}.items():
        if value is not None:
            context.metadata[key] = value
        # Not `pop`: without a value of its own for the default, Dynamo's raises KeyError.
        elif key in context.metadata:
            del context.metadata[key]
    return proceed(context)


def proceed(context: TracedContext) -> Trace:
    """Continue the trace of the round that another component makes this call for."""
    metadata = context.metadata
    trace = Trace(
        request_id=metadata.get(REQUEST_ID) or context.id(),
        trace_id=metadata.get(TRACE_ID) or context.trace_id,
        x_request_id=metadata.get(X_REQUEST_ID) or (context.trace_headers() or {}).get("x-request-id"),
        session_id=metadata.get(SESSION_ID),
        caller=metadata.get(CALLER),
        context=context,
    )
    trace.enter()
    return trace


def context_for_call(caller: str) -> Any | None:
    """A Dynamo context for a call on behalf of the current round, with a separate end; None without a round."""
    trace = _CURRENT.get()
    if trace is None or trace.context is None:
        return None
    context = trace.context.detached(uuid4().hex)
    context.metadata[CALLER] = caller
    return context
