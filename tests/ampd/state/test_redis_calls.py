"""Many commands at a time: their answers, and what is lost with a connection."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import RouteWrite, SessionLimits, StateSlowError, StateUnavailableError
from ampd.types import PrefillTask, Slo
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.tcp_redis import TcpRedis
from tests.waiting import PATIENCE_S, until

LIMITS = SessionLimits(60.0)


@pytest.fixture(scope="module")
def redis() -> Iterator[TcpRedis]:
    with TcpRedis() as redis:
        yield redis


@pytest.fixture
async def proxy(redis: TcpRedis) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis.port) as proxy:
        yield proxy


def far(proxy: TcpProxy, timeout_s: float = PATIENCE_S) -> StateStore:
    return StateStore(f"redis://127.0.0.1:{proxy.port}/0", "far", timeout_s=timeout_s)


def write(number: int) -> RouteWrite:
    task = PrefillTask(f"t{number}", f"s{number}", 100, 20, 0.0, Slo(1.0, 0.05))
    return RouteWrite(task.session_id, "d1", 0, "d1", task)


async def test_answers_belong_to_their_calls_whoever_is_cancelled(redis: TcpRedis) -> None:
    store = await open_store(redis.tcp_url, "answers", timeout_s=PATIENCE_S)
    for number in range(100):
        await store.route(write(number), LIMITS)
    calls = [asyncio.create_task(store.binding(f"s{number}")) for number in range(100)]
    for turn, call in enumerate(calls[::3]):
        if turn % 2:
            await asyncio.sleep(0)
        call.cancel()
    await asyncio.wait(calls)
    for number, call in enumerate(calls):
        if not call.cancelled():
            bound = call.result()
            assert bound is not None
            assert bound.session_id == f"s{number}"
    await store.close()


@pytest.mark.long
async def test_a_call_without_an_answer_is_slow_while_others_are_answered(proxy: TcpProxy) -> None:
    """The way to Redis becomes longer than a call may take, but the answers to earlier calls still arrive."""
    store = far(proxy, timeout_s=1.0)
    errors: list[type[BaseException]] = []

    async def ask() -> None:
        try:
            await store.ping()
        except StateUnavailableError as error:
            errors.append(type(error))

    calls: set[asyncio.Task[None]] = set()
    while StateSlowError not in errors:
        for delay_s in (0.0, 0.35, 0.7):
            proxy.delay_s = delay_s
            for _ in range(60):
                calls.add(asyncio.create_task(ask()))
                await asyncio.sleep(0.02)
    await asyncio.wait(calls)
    await store.close()


async def test_a_silent_redis_is_lost_and_asked_again(proxy: TcpProxy) -> None:
    store = far(proxy, timeout_s=0.2)
    await until_answered(store)
    proxy.delay_s = PATIENCE_S
    calls = [asyncio.create_task(store.ping()) for _ in range(3)]
    await asyncio.wait(calls)
    for call in calls:
        error = call.exception()
        assert isinstance(error, StateUnavailableError)
        assert not isinstance(error, StateSlowError)
    proxy.delay_s = 0.0
    await until_answered(store)
    await store.close()


async def until_answered(store: StateStore) -> None:
    """Ask until it answers, because a busy machine may be slower than its timeout."""
    while True:
        try:
            await store.ping()
            return
        except StateUnavailableError:
            await asyncio.sleep(0)


async def test_a_connection_that_the_server_closed_is_no_error(redis: TcpRedis) -> None:
    store = await open_store(redis.tcp_url, "closed", timeout_s=PATIENCE_S)
    other = await open_store(redis.url, "closed", timeout_s=PATIENCE_S)
    assert isinstance(other, StateStore)
    for _ in range(5):
        await store.route(write(1), LIMITS)
        await other._connection.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert (await asyncio.gather(*(store.binding("s1") for _ in range(10))))[9] is not None
    await store.close()
    await other.close()


async def test_a_write_whose_answer_is_lost_is_repeated(proxy: TcpProxy, redis: TcpRedis) -> None:
    store, near = far(proxy), await open_store(redis.tcp_url, "far", timeout_s=PATIENCE_S)
    await store.route(write(1), LIMITS)  # the server knows the script from now on
    proxy.may_answer.clear()
    writing = asyncio.create_task(store.route(write(0), LIMITS))

    async def is_written() -> bool:
        return await near.binding("s0") is not None

    await until(is_written)
    for client in list(proxy._clients):
        client.transport.abort()
    proxy.may_answer.set()
    assert (await writing).accepted
    await store.close()
    await near.close()
