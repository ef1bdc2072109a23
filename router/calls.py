"""How the coordinator calls workers: over Dynamo's request plane, each call with a context of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, cast

from dynamo.runtime import Context

from ampd.call_signatures import Signer, call_worker
from ampd.errors import one_line_of
from ampd.handler_stream import Chunk
from ampd.telemetry.tracing import TracedContext, context_for_call
from ampd.wire import (
    COMPONENT,
    ENGINE_DIED,
    GENERATE_ENDPOINT,
    KV_ENDPOINT,
    KvReply,
    KvRequest,
    engine_start,
    parse_error,
)
from router.frames import Frame, WorkerFrames
from router.round_errors import WorkerLostError, WorkerRefusedError
from router.settings import ACKNOWLEDGED_S

_CALLER = "coordinator"


class CallContext(TracedContext, Protocol):
    """The part of Dynamo's `Context` that the coordinator uses."""

    def is_stopped(self) -> bool: ...
    def stop_generating(self) -> None: ...
    def async_killed_or_stopped(self) -> asyncio.Future[bool]: ...


class WorkerCalls:
    """The workers of a graph, by worker id. All methods may raise `WorkerLostError`.

    Args:
        clients: by endpoint.
        signer: of the calls.
    """

    def __init__(self, clients: Mapping[str, Any], signer: Signer) -> None:
        self._clients = clients
        self._signer = signer
        self._frames = WorkerFrames(clients[GENERATE_ENDPOINT], signer)

    @classmethod
    async def connect(cls, runtime: Any, namespace: str, signer: Signer) -> WorkerCalls:
        """Clients of the endpoints of a namespace's workers."""
        names = (GENERATE_ENDPOINT, KV_ENDPOINT)
        return cls({name: await runtime.endpoint(f"{namespace}.{COMPONENT}.{name}").client() for name in names}, signer)

    async def generate(self, worker_id: str, request: Mapping[str, Any], context: CallContext) -> AsyncIterator[Chunk]:
        """Start a round on a decode worker."""
        return await self._start(GENERATE_ENDPOINT, worker_id, request, context)

    async def hand_on(self, frame: Frame, worker_id: str, request: Mapping[str, Any]) -> None:
        """Let a decode worker answer a frontend's request; returns when it has taken it."""
        await self._frames.send(frame, worker_id, request, ACKNOWLEDGED_S)

    async def kv(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Ask a worker about its KV."""
        context = context_for_call(_CALLER) or Context()
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    async for reply in await self._start(KV_ENDPOINT, worker_id, request, context):
                        return _sound(worker_id, reply)
                except asyncio.CancelledError:  # also when the time is over
                    context.stop_generating()  # otherwise the worker goes on with an answer that nobody reads
                    raise
        except TimeoutError:
            raise WorkerLostError(worker_id, f"no answer about KV within {timeout_s:g} s") from None
        except Exception as error:
            raise worker_error(worker_id, error) from None
        raise WorkerLostError(worker_id, "empty answer about KV")

    async def _start(
        self, endpoint: str, worker_id: str, request: Mapping[str, Any], context: CallContext
    ) -> AsyncIterator[Chunk]:
        try:
            return await call_worker(self._clients[endpoint], self._signer, endpoint, worker_id, request, context)
        except Exception as error:
            raise worker_error(worker_id, error) from None


def _sound(worker_id: str, reply: Any) -> KvReply:
    """A worker's answer about its KV.

    Raises:
        WorkerRefusedError: the worker reports an error, or the answer is none.
    """
    if not isinstance(reply, Mapping) or "error" in reply:
        raise WorkerRefusedError(worker_id, 502, f"worker {worker_id}: no answer about KV: {reply!r:.200}")
    return cast(KvReply, reply)


def worker_error(worker_id: str, error: Exception) -> WorkerLostError | WorkerRefusedError:
    """Classify a failed call: the worker refused with an HTTP status, or it is lost.

    A worker's exception loses its class on the way, so its status travels in the text (`ampd-error <status>: ...`).
    """
    if isinstance(error, (WorkerLostError, WorkerRefusedError)):
        return error
    if refusal := parse_error(str(error)):
        status, message = refusal
        if status == ENGINE_DIED:
            return WorkerLostError(worker_id, message, has_died=True, start=engine_start(message))
        return WorkerRefusedError(worker_id, status, message)
    return WorkerLostError(worker_id, one_line_of(error))
