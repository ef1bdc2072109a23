"""Calls to other workers, through Dynamo: about KV, and for prefills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from dynamo.runtime import Client, Context

from ampd.call_signatures import Signer, call_worker
from ampd.errors import one_line_of
from ampd.handler_stream import Chunk
from ampd.telemetry import tracing
from ampd.wire import KV_ENDPOINT, PREFILL_ENDPOINT, KvReply, KvRequest, PrefillRequest

_ANSWERS_S = 2.0
"""A worker that does not answer a call about KV within this time counts as lost."""


class DynamoPeers:
    """The other workers of the graph.

    Args:
        client: a client of the workers' KV endpoint; `prefills`: of their prefill endpoint.
        worker_id: of this worker, for the logs of the other workers.
        signer: of the calls.
    """

    def __init__(self, client: Client, prefills: Client, worker_id: str, signer: Signer) -> None:
        self._client = client
        self._prefills = prefills
        self._worker_id = worker_id
        self._signer = signer

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """One call; raises `TimeoutError` or `ConnectionError`."""
        context = tracing.context_for_call(self._worker_id) or Context()
        request = {**request, "reader": self._worker_id}
        try:
            async with asyncio.timeout(timeout_s):
                replies = await call_worker(self._client, self._signer, KV_ENDPOINT, worker_id, request, context)
                async for reply in replies:
                    if isinstance(reply, dict):
                        return cast(KvReply, reply)
                    raise ConnectionError(f"its answer is no map but {type(reply).__name__}")
        except TimeoutError:
            context.stop_generating()
            raise TimeoutError(f"worker {worker_id} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        except Exception as error:
            raise ConnectionError(f"worker {worker_id} cannot be reached: {one_line_of(error)[:200]}") from None
        raise ConnectionError(f"worker {worker_id} gave no answer")

    async def lives(self, worker_id: str) -> bool:
        """Whether a worker answers."""
        try:
            await self.call(worker_id, {"op": "match", "keys": []}, _ANSWERS_S)
        except (TimeoutError, ConnectionError):
            return False
        return True

    async def prefill(self, worker_id: str, request: PrefillRequest, context: Any) -> AsyncIterator[Chunk]:
        """Ask for the first token of a round."""
        return await call_worker(self._prefills, self._signer, PREFILL_ENDPOINT, worker_id, request, context)
