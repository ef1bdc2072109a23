"""What a coordinator gets from workers about their KV."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

from ampd.call_signatures import Signer
from ampd.wire import GENERATE_ENDPOINT, KV_ENDPOINT
from benchmarks.fuzz.mutations import changed
from benchmarks.fuzz.target import Target
from router.calls import WorkerCalls
from router.round_errors import WorkerLostError, WorkerRefusedError
from router.worker_access import WorkerAccess

_KEYS = [b"k" * 32, b"l" * 32, b"m" * 32]
_ANSWERS: tuple[Any, ...] = ({"matched": 2}, {"released_tokens": 96}, {"error": "gone"})
_TIMEOUT_S = 5.0


def targets() -> list[Target]:
    """The coordinator's questions about KV."""
    return [Target("KV answer at a coordinator", _answer, _ask, (WorkerLostError, WorkerRefusedError))]


def _answer(rng: random.Random) -> Any:
    return changed(rng, rng.choice(_ANSWERS))


def _ask(answer: Any) -> None:
    asyncio.run(
        _ask_both(WorkerCalls(dict.fromkeys((GENERATE_ENDPOINT, KV_ENDPOINT), _Endpoint(answer)), Signer((), "c")))
    )


async def _ask_both(calls: WorkerCalls) -> None:
    nothing = cast(Any, None)  # what is no part of a question
    access = WorkerAccess(nothing, nothing, calls, _TIMEOUT_S)
    assert 0 <= await access.matched_pages("1", _KEYS) <= len(_KEYS)
    await calls.kv("1", {"op": "release_session", "session_id": "s"}, _TIMEOUT_S)


class _Endpoint:
    """Dynamo's client of a worker that gives this answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def direct(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        async def answers() -> AsyncIterator[Any]:
            yield self._answer

        return answers()
