"""The first worker is called while the shared state takes a placement, and nothing of its answer is used before."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ampd.session_key import session_key
from ampd.state.store import StateRefusedError, StateSlowError
from ampd.types import Role
from router.round_errors import RoundRefusedError, WorkerLostError
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import HANGS, FakeContext, Replica, cluster, queues, worker
from tests.waiting import until

EXPECTED = [64, 65, 66, 67, 68]


class HeldWrite:
    """A replica whose writes of rounds wait. `error`: what they then raise."""

    def __init__(self, replica: Replica) -> None:
        self.may_go = asyncio.Event()
        self.error: Exception | None = None
        self._write = replica.store.route
        replica.store.route = self._held  # type: ignore[method-assign]

    async def _held(self, *args: Any) -> Any:
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        return await self._write(*args)


class Contexts:
    """The contexts of a replica's calls for tokens, in order."""

    def __init__(self, replica: Replica) -> None:
        self.all: list[Any] = []
        for endpoint in ("prefill", "generate"):
            setattr(replica.workers, endpoint, self._noted(getattr(replica.workers, endpoint)))

    def _noted(self, call: Any) -> Any:
        async def noted(worker_id: str, request: Any, context: Any) -> AsyncIterator[Any]:
            self.all.append(context)
            chunks: AsyncIterator[Any] = await call(worker_id, request, context)
            return chunks

        return noted


async def reading(replica: Replica, context: FakeContext | None = None) -> tuple[asyncio.Task[None], list[Any]]:
    """A round of the session `s` that is read in the background, and its chunks so far."""
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in replica.chunks("s", context):
            chunks.append(chunk)

    return asyncio.create_task(read()), chunks


def asked(replica: Replica) -> list[tuple[str, str]]:
    return [(endpoint, worker_id) for endpoint, worker_id, _ in replica.workers.calls]


async def moved(state: MemoryState, worker_id: str) -> None:
    """Another replica moves the session `s`."""
    store = MemoryStore(state)
    binding = await store.binding(session_key("", "s"))
    assert binding is not None
    assert (await store.rebind(binding, worker_id, 60.0)).accepted


@pytest.mark.parametrize(("routing", "endpoint"), [("always-local", "generate"), ("always-remote", "prefill")])
async def test_the_worker_is_called_before_the_shared_state_answers(routing: str, endpoint: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        await replica.round("s")
        replica.workers.calls.clear()
        write = HeldWrite(replica)
        task, chunks = await reading(replica)
        await until(lambda: replica.workers.calls)
        assert [name for name, _ in asked(replica)] == [endpoint]
        for _ in range(20):
            await asyncio.sleep(0)
        assert chunks == [], "the placement does not hold yet"
        write.may_go.set()
        await task
        assert [token for chunk in chunks for token in chunk["token_ids"]] == EXPECTED
        assert len(replica.workers.asked(endpoint)) == 1, "the call that had begun is the round's"
    assert await queues(state) == {}


async def test_a_new_session_waits_for_the_shared_state() -> None:
    """It may be one too many, or bound elsewhere by another replica."""
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        write = HeldWrite(replica)
        task, _ = await reading(replica)
        for _ in range(20):
            await asyncio.sleep(0)
        assert asked(replica) == []
        write.may_go.set()
        await task
        assert asked(replica) == [("generate", "d1")]


async def test_a_session_that_was_moved_is_answered_by_its_owner_only() -> None:
    state = await cluster(worker("d1"), worker("d2"))
    async with Replica(state, "always-local") as replica:
        await replica.round("s")
        (_, before, _) = replica.workers.calls[0]
        after = "d2" if before == "d1" else "d1"
        replica.workers.calls.clear()
        contexts = Contexts(replica)
        write = HeldWrite(replica)
        task, chunks = await reading(replica)
        await until(lambda: replica.workers.calls)
        await moved(state, after)
        write.may_go.set()
        await task
        assert asked(replica) == [("generate", before), ("generate", after)]
        assert [context.is_stopped() for context in contexts.all] == [True, False]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == EXPECTED
        assert chunks[-1]["engine_data"]["ampd"]["decode_worker"] == after
        assert chunks[-1]["engine_data"]["ampd"]["retries"] == 0
    assert await queues(state) == {}


async def test_the_error_of_a_call_for_nothing_is_no_error_of_the_round() -> None:
    state = await cluster(worker("d1"), worker("d2"))
    async with Replica(state, "always-local") as replica:
        await replica.round("s")
        (_, before, _) = replica.workers.calls[0]
        replica.workers.fail["generate", before] = WorkerLostError(before, "unreachable")
        write = HeldWrite(replica)
        task, chunks = await reading(replica)
        await until(lambda: len(replica.workers.calls) == 2)
        await moved(state, "d2" if before == "d1" else "d1")
        write.may_go.set()
        await task
        assert [token for chunk in chunks for token in chunk["token_ids"]] == EXPECTED
        assert chunks[-1]["engine_data"]["ampd"]["retries"] == 0


async def test_a_worker_that_is_lost_before_the_answer_loses_the_round_as_ever() -> None:
    state = await cluster(worker("d1"), worker("d2"))
    async with Replica(state, "always-local") as replica:
        await replica.round("s")
        (_, before, _) = replica.workers.calls[0]
        replica.workers.fail["generate", before] = WorkerLostError(before, "unreachable")
        write = HeldWrite(replica)
        task, chunks = await reading(replica)
        await until(lambda: len(replica.workers.calls) == 2)
        write.may_go.set()
        await task
        assert [token for chunk in chunks for token in chunk["token_ids"]] == EXPECTED
        assert chunks[-1]["engine_data"]["ampd"]["retries"] == 1


@pytest.mark.parametrize("error", [StateSlowError("slow"), StateRefusedError("full")])
async def test_without_the_shared_state_the_call_goes_on(error: Exception) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round("s")
        replica.workers.calls.clear()
        write = HeldWrite(replica)
        write.error = error
        write.may_go.set()
        assert (await replica.round("s"))[0] == EXPECTED
        assert asked(replica) == [("generate", "d1")]


@pytest.mark.parametrize("ends", ["the client leaves", "the round is refused"])
async def test_a_call_for_a_round_that_ends_meanwhile_is_stopped(ends: str) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        await replica.round("s")
        replica.workers.fail["generate", "d1"] = HANGS
        contexts = Contexts(replica)
        write = HeldWrite(replica)
        task, chunks = await reading(replica)
        await until(lambda: contexts.all)
        if ends == "the client leaves":
            task.cancel()
            await asyncio.wait({task})
            await until(lambda: contexts.all[0].is_stopped())
            write.may_go.set()
        else:
            write.error = RoundRefusedError(503, "no")
            write.may_go.set()
            with pytest.raises(RoundRefusedError):
                await task
        assert [context.is_stopped() for context in contexts.all] == [True]
        assert chunks == []
        while replica.tasks:
            await replica.tasks.pop()
    assert await queues(state) == {}
