"""Calls to workers that hang are given up; all others go on."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ampd.state.view import ClusterView
from ampd.types import Role
from router.guard import StreamGuard
from router.round_errors import WorkerLostError
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import HANGS, FakeContext, Replica, cluster, worker
from tests.virtual_time import run_virtually
from tests.waiting import until


async def test_a_take_over_by_a_worker_that_hangs_is_given_up() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        guard = StreamGuard(replica.view, silent_s=0.0)
        replica.services = replace(replica.services, access=replace(replica.services.access, guard=guard))
        replica.workers.fail["generate", "d1"] = HANGS
        async for _ in replica.chunks(stop_conditions={"max_tokens": 1}):
            pass
        await until(lambda: "d1" in replica.workers.asked("generate"))
        await go(replica.view, replica.store)
        await until(lambda: guard.check() or all(task.done() for task in replica.tasks))  # type: ignore[func-returns-value]


async def go(view: ClusterView, store: MemoryStore) -> None:
    """The worker `d1` leaves, and answers no question of the lease probe after that."""
    await store.remove_worker("d1")
    await until(lambda: not view.knows("d1"), poll_s=0.001)
    view.drop_overdue("d1")


LEASE_S = 10.0
VIEW_LEASE_S = 3600.0
Scenario = Callable[[StreamGuard, MemoryStore], Awaitable[None]]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Runs a scenario with a guard whose view shows the worker `d1`; both follow the loop's virtual clock."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            clock = asyncio.get_running_loop().time
            store = MemoryStore(MemoryState(clock))
            await store.publish_worker(worker("d1"), VIEW_LEASE_S)
            async with ClusterView(store, lease_s=VIEW_LEASE_S, clock=clock) as view:
                guard = StreamGuard(view, LEASE_S, clock=clock)
                guard.start()
                await scenario(guard, store)
                await guard.stop()

        run_virtually(main(), monkeypatch)

    return run


async def silent_call(guard: StreamGuard, context: FakeContext) -> None:
    with guard.watch("d1", context):
        await asyncio.Event().wait()


def test_a_silent_call_is_given_up_once_its_worker_has_gone(guarded: Callable[[Scenario], None]) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        context, clock = FakeContext(), asyncio.get_running_loop().time
        call = asyncio.create_task(silent_call(guard, context))
        await asyncio.sleep(100 * LEASE_S)
        assert not call.done(), "a long prefill of a live worker is silent, too"
        await store.remove_worker("d1")
        await asyncio.sleep(100 * LEASE_S)
        assert not call.done(), "a worker that has left finishes its rounds"
        await go(guard._view, store)
        gone_s = clock()
        with pytest.raises(WorkerLostError, match="lease has run out") as lost:
            await call
        assert lost.value.has_died
        assert context.is_stopped()
        assert clock() - gone_s < 1.0

    guarded(scenario)


async def slow_to_end(guard: StreamGuard) -> None:
    """A call whose task needs time to react to its end."""
    with guard.watch("d1", FakeContext()):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(LEASE_S)


def test_a_call_is_given_up_once(guarded: Callable[[Scenario], None]) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        call = asyncio.create_task(slow_to_end(guard))
        await asyncio.sleep(2 * LEASE_S)
        await go(guard._view, store)
        with pytest.raises(WorkerLostError, match="lease has run out"):
            await call

    guarded(scenario)


def test_a_worker_that_misses_a_probe_while_the_state_is_lost_has_not_died(
    guarded: Callable[[Scenario], None],
) -> None:
    """It may only be busy: its lease is over because nothing can renew it."""

    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        call = asyncio.create_task(silent_call(guard, FakeContext()))
        store._state.lose()
        await asyncio.sleep(2 * VIEW_LEASE_S)
        assert not call.done()
        guard._view.drop_overdue("d1")
        with pytest.raises(WorkerLostError, match="lease has run out") as lost:
            await call
        assert not lost.value.has_died

    guarded(scenario)


def test_a_call_that_stays_silent_after_its_client_has_gone_is_given_up(guarded: Callable[[Scenario], None]) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:  # noqa: ARG001
        context = FakeContext()
        call = asyncio.create_task(silent_call(guard, context))
        await asyncio.sleep(100 * LEASE_S)
        assert not call.done()
        context.stop_generating()
        with pytest.raises(WorkerLostError, match="its client has gone") as lost:
            await call
        assert not lost.value.has_died

    guarded(scenario)


@pytest.mark.parametrize(("endpoint", "name"), [("prefill", "p1"), ("generate", "d1")])
async def test_a_round_ends_after_its_client_even_if_the_stream_of_its_worker_never_does(
    endpoint: str, name: str
) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        guard = StreamGuard(replica.view, silent_s=0.0)
        replica.services = replace(replica.services, access=replace(replica.services.access, guard=guard))
        replica.workers.fail[endpoint, name] = HANGS
        context = FakeContext()

        async def serve() -> None:
            async for _ in replica.chunks(context=context):
                pass

        round_ = asyncio.create_task(serve())
        await until(lambda: name in replica.workers.asked(endpoint))
        guard.check()
        assert not round_.done()
        context.stop_generating()
        for stream in guard._streams:
            stream.context.stop_generating()
        await until(lambda: guard.check() or round_.done())  # type: ignore[func-returns-value]
        await round_
        assert replica.view.worker(name) is not None, "it is not to blame"


def test_a_refused_call_breaks_off_no_other_call_at_its_worker(guarded: Callable[[Scenario], None]) -> None:
    """A call that failed makes its worker suspect, and a long prefill is silent."""

    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:  # noqa: ARG001
        calls = [asyncio.create_task(silent_call(guard, FakeContext())) for _ in range(20)]
        await asyncio.sleep(100 * LEASE_S)
        guard._view.suspect("d1", 3600.0)
        await asyncio.sleep(100 * LEASE_S)
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    guarded(scenario)


def test_a_call_that_shows_signs_of_life_goes_on_without_its_worker(guarded: Callable[[Scenario], None]) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        await go(guard._view, store)
        with guard.watch("d1", FakeContext()) as stream:
            for _ in range(20):
                await asyncio.sleep(0.9 * LEASE_S)
                stream.answered()

    guarded(scenario)


def test_a_new_call_has_a_whole_lease(guarded: Callable[[Scenario], None]) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        await go(guard._view, store)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLostError):
            await silent_call(guard, FakeContext())
        assert asyncio.get_running_loop().time() - began_s >= LEASE_S

    guarded(scenario)


@pytest.mark.parametrize("is_given_up_too", [False, True])
def test_a_cancelled_call_is_cancelled_and_not_lost(guarded: Callable[[Scenario], None], is_given_up_too: bool) -> None:
    async def scenario(guard: StreamGuard, store: MemoryStore) -> None:
        call = asyncio.create_task(silent_call(guard, FakeContext()))
        await asyncio.sleep(2 * LEASE_S)
        if is_given_up_too:  # in the same turn of the loop
            await go(guard._view, store)
            guard.check()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    guarded(scenario)
