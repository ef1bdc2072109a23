"""A coordinator's frames, a worker and a frontend's client in one process with Dynamo: prints what each call came to.

A request with "direct" is handed on. `python -m tests.harness.frames_process`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvloop
from dynamo.runtime import Context, dynamo_worker

from ampd.call_signatures import Signer, Verifier
from router.frames import Frame, FrameServer, WorkerFrames

_KEYS = (b"0123456789abcdef",)


class Lab:
    """The parts, each at its endpoint."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._worker = runtime.endpoint("lab.worker.generate")
        self._coordinator = runtime.endpoint("lab.coordinator.generate")
        self._stopped = asyncio.Event()
        self._worker_frames: Any = None
        self._client: Any = None
        self.server = FrameServer(self._take)

    async def start(self) -> None:
        workers = await self._serve(self._worker, self._work)
        self._worker_frames = WorkerFrames(workers, Signer(_KEYS, "coordinator-1"))
        await self.server.start(self._runtime, "lab")
        self._client = await self._serve(self._coordinator, self._pipe)

    async def call(self, **request: Any) -> dict[str, Any]:
        """The only answer to a request, and whether it has the request's id."""
        context = Context(metadata={"from": "frontend"})
        stream = await self._client.direct(request, self._coordinator.connection_id(), annotated=False, context=context)
        (answer,) = [answer async for answer in stream]
        return {**answer, "has_id": answer["id"] == context.id()}

    async def leave(self) -> None:
        """A client that leaves in the middle of the answer; returns when the worker has learned it."""
        context = Context()
        number = self._coordinator.connection_id()
        stream = await self._client.direct({"direct": True, "endless": True}, number, annotated=False, context=context)
        async for _ in stream:
            context.stop_generating()
        await self._stopped.wait()

    async def _serve(self, endpoint: Any, handler: Any) -> Any:
        self._serving = asyncio.ensure_future(endpoint.serve_endpoint(handler))
        client = await endpoint.client()
        await client.wait_for_instances()
        return client

    async def _take(self, frame: Frame, taken: Callable[[], None]) -> bool:
        request = frame.request()
        if not request.get("direct"):
            return False
        frame.metadata["session"] = "s"
        worker_id = f"{self._worker.connection_id():x}"
        await self._worker_frames.send(frame, worker_id, {**request, "keys": [b"k"], "decided": True}, timeout_s=60)
        taken()
        return True

    async def _work(self, request: Any, context: Any) -> AsyncIterator[Any]:
        metadata = dict(context.metadata.items())
        verifier = Verifier(_KEYS, f"{self._worker.connection_id():x}")
        fault = verifier.refusal(metadata, "generate", request)
        has_keys = request.pop("keys") == [b"k"]
        del metadata["ampd-signature"]
        answer = {"at": "worker", "request": request, "keys": has_keys, "fault": fault}
        yield {**answer, "id": context.id(), "metadata": metadata}
        if request.get("endless"):
            await context.async_killed_or_stopped()
            self._stopped.set()

    async def _pipe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield {"at": "pipe", "request": request, "id": context.id(), "metadata": dict(context.metadata.items())}


async def _run(runtime: Any) -> list[Any]:
    lab = Lab(runtime)
    await lab.start()
    results: list[Any] = [lab.server.off_reason]
    results += [await lab.call(direct=True), await lab.call(direct=False)]
    if not lab.server.off_reason:
        await lab.leave()
    lab.server.stop()
    return [*results, await lab.call(direct=True)]


@dynamo_worker()  # type: ignore[untyped-decorator]
async def main(runtime: Any) -> None:
    """Print the results as JSON."""
    print(json.dumps(await _run(runtime)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
