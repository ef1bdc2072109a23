"""Calls to the KV endpoint of other workers, through Dynamo."""

from __future__ import annotations

import asyncio
from typing import cast

from dynamo.runtime import Client, Context

from ampd.call_signatures import Signer, call_worker
from ampd.errors import one_line_of
from ampd.telemetry import tracing
from ampd.wire import KV_ENDPOINT, KvReply, KvRequest


class DynamoPeers:
    """The KV endpoints of the graph's workers.

    Args:
        client: a client of the workers' KV endpoint.
        worker_id: of this worker, for the logs of the other workers.
        signer: of the calls.
    """

    def __init__(self, client: Client, worker_id: str, signer: Signer) -> None:
        self._client = client
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
