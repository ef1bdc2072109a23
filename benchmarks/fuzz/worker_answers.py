"""What a coordinator gets from workers during a round: the chunks of a prefill and of a decode."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

from ampd.types import Role
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Target
from router.round_errors import RoundRefusedError
from tests.router.replica_lab import PROMPT, Replica, cluster, worker

_TOKENS = 3
_LEASE_S = 60.0
_ZEROS = dict.fromkeys(("held_tokens", "cached_tokens", "kv_read_tokens", "kv_read_bytes"), 0)
_REPORT: dict[str, Any] = {**_ZEROS, **dict.fromkeys(("queued_s", "prefill_s", "kv_read_s"), 0.0)}
_PREFILL: tuple[dict[str, Any], ...] = ({"token_ids": [len(PROMPT)], "index": 0, "log_probs": [-0.5], "ampd": _REPORT},)
_DECODE: tuple[dict[str, Any], ...] = (
    {"token_ids": [len(PROMPT) + 1], "index": 0},
    {
        "token_ids": [len(PROMPT) + 2], "index": 0, "finish_reason": "length", "ampd": _REPORT,
        "completion_usage": {"prompt_tokens": len(PROMPT) + 1, "completion_tokens": _TOKENS - 1, "total_tokens": 99,
                             "prompt_tokens_details": {"cached_tokens": 16}},
    },
)  # fmt: skip


class FuzzedCoordinator:
    """A coordinator with two scripted workers of each role, and the event loop that it runs on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Stop it."""
        self._loop.close()

    def targets(self) -> Iterator[Target]:
        """The reader of chunks."""
        yield Target("answer of a worker", _chunks, self._serve, (RoundRefusedError,))

    def _serve(self, chunks: tuple[list[Any], list[Any]]) -> None:
        self._loop.run_until_complete(_served(*chunks))


async def _served(prefill: list[Any], decode: list[Any]) -> None:
    """The client gets token ids in chunks that can be sent, or the refusal; the next round is served in full."""
    views = [worker(name, Role.PREFILL) for name in ("p1", "p2")] + [worker(name) for name in ("d1", "d2")]
    replica = Replica(await cluster(*views))
    honest = replica.workers._stream

    async def lie(worker_id: str, request: Any, *_: Any) -> AsyncIterator[Any]:
        await replica.store.finish_tasks(worker_id, [request["task"]["task_id"]])
        for chunk in prefill if worker_id.startswith("p") else decode:
            yield chunk

    async with replica:
        replica.workers._stream = lie  # type: ignore[method-assign, assignment]
        try:
            async for chunk in replica.chunks("s", stop_conditions={"max_tokens": _TOKENS}):
                assert all(type(token_id) is int and token_id >= 0 for token_id in chunk.get("token_ids") or ())
                assert chunk.get("index") in (0, None)
                assert isinstance(chunk.get("completion_usage"), dict | None)
                json.dumps(chunk.get("completion_usage"))
                json.dumps((chunk.get("engine_data") or {}).get("ampd"), allow_nan=False)
        finally:
            replica.workers._stream = honest  # type: ignore[method-assign]
            await asyncio.gather(*replica.tasks)
            replica.tasks.clear()
            for view in await replica.store.snapshot():
                assert not view.queue
            for view in await replica.store.snapshot():
                await replica.store.publish_worker(view, _LEASE_S)  # by which it is no more suspect
            tokens, _ = await replica.round("other")
            assert tokens == [len(PROMPT) + number for number in range(5)]


def _chunks(rng: random.Random) -> tuple[list[Any], list[Any]]:
    prefill, decode = deepcopy(list(_PREFILL)), deepcopy(list(_DECODE))  # the coordinator adds to them
    part = rng.choice((prefill, decode))
    at = rng.randrange(len(part))
    kind = rng.random()
    if kind < 0.1:
        del part[at]
    elif kind < 0.15:
        part.insert(at, deepcopy(part[at]))
    else:
        part[at] = changed(rng, part[at], 2)
    return prefill, decode
