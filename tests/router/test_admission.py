"""Rounds that are refused because of load: with 429, a time to come back, and nothing entered anywhere."""

import asyncio
from typing import Never

import pytest

from ampd.keys import session_key
from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import queued_in_passes_s
from ampd.serving.admission import NEW_WAIT_SHARE
from ampd.state.store import StateRefusedError
from ampd.types import PrefillTask, Role, Slo
from ampd.wire import retry_after_s
from router.round_errors import RoundOverloadedError, RoundRefusedError, WorkerRefusedError
from tests.router.replica_lab import HANGS, SLO, Replica, cluster, queues, worker
from tests.waiting import until

LONG = tuple(PrefillTask(f"t{number}", f"other{number}", 0, 900, 0.0, Slo(2.0, 0.1)) for number in range(400))
WAIT_OF_LONG = queued_in_passes_s(worker("p1", queue=LONG), load_performance_model("tiny-cpu")) / SLO.ttft_s
"""In TTFT targets."""


async def test_a_new_session_is_refused_before_anything_of_it_is_entered() -> None:
    state = await cluster(worker("d1", queue=LONG), worker("p1", Role.PREFILL, queue=LONG))
    async with Replica(state, max_wait=8.0) as replica:
        with pytest.raises(RoundOverloadedError, match="of a new session") as refused:
            await replica.round()
        assert refused.value.status == 429
        assert (retry_after_s(str(refused.value)) or 0) >= 1
        assert replica.gate.decisions == {("new", "wait"): 1}
        assert not replica.workers.calls
        assert replica.services.sessions.find("s").binding is None
    assert {len(queue) for queue in (await queues(state)).values()} == {len(LONG)}


async def test_a_session_in_progress_goes_on_where_a_new_one_is_refused() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, max_rounds=100) as replica:
        replica.in_progress = 76
        with pytest.raises(RoundOverloadedError):
            await replica.round()
        replica.in_progress = 75
        await replica.round()
        replica.in_progress = 100
        await replica.round()  # this replica has served it
        replica.in_progress = 101
        with pytest.raises(RoundOverloadedError, match="of a session in progress"):
            await replica.round()
        decisions = {("new", "rounds"): 1, ("new", "admitted"): 1, ("running", "admitted"): 1, ("running", "rounds"): 1}
        assert replica.gate.decisions == decisions


async def test_a_session_that_another_replica_serves_is_in_progress_too() -> None:
    state = await cluster(worker("d1", held_tokens={session_key("", "s"): 64}))
    async with Replica(state, max_rounds=100) as replica:
        replica.in_progress = 90
        await replica.round()
        with pytest.raises(RoundOverloadedError):
            await replica.round("new")
        with pytest.raises(RoundOverloadedError):
            await replica.round(None)


async def refuse_write(*_: object) -> Never:
    raise StateRefusedError("its memory is full")


@pytest.mark.parametrize("is_refusing", [False, True])
@pytest.mark.parametrize(("routing", "endpoint", "name"), [("local", "generate", "d1"), ("remote", "prefill", "p1")])
async def test_without_the_store_a_replica_s_own_rounds_keep_others_out_until_they_are_over(
    routing: str, endpoint: str, name: str, is_refusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, f"always-{routing}", max_wait=0.2) as replica:
        if is_refusing:
            for write in ("route", "finish_tasks"):
                monkeypatch.setattr(replica.store, write, refuse_write)
        else:
            state.lose()
            await until(lambda: not replica.view.connected)
        replica.workers.fail[endpoint, name] = HANGS
        refused, waiting = await until_refused(replica, endpoint)
        assert "the predicted wait is" in str(refused)
        assert (retry_after_s(str(refused)) or 0) >= 1
        assert replica.view.worker(name).queue
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        await until(lambda: replica.view.worker(name).queue == ())
        del replica.workers.fail[endpoint, name]
        await replica.round("served")
        assert replica.view.worker(name).queue == ()
        state.restore()
        await until(lambda: replica.view.connected)
        assert {view.worker_id: view.queue for view in replica.view.workers()} == {"d1": (), "p1": ()}


async def until_refused(replica: Replica, endpoint: str) -> tuple[RoundOverloadedError, list[asyncio.Task[None]]]:
    """Begin rounds until one is refused; returns why, and those that are in progress."""
    waiting: list[asyncio.Task[None]] = []
    while True:
        began = asyncio.create_task(replica.frontend(f"s{len(waiting)}").serve(lambda _: None))
        await until(lambda: began.done() or len(replica.workers.asked(endpoint)) > len(waiting))  # noqa: B023
        if began.done():
            refused = began.exception()
            assert isinstance(refused, RoundOverloadedError)
            return refused, waiting
        waiting.append(began)
        assert len(waiting) < 100, "none is refused"


@pytest.mark.parametrize("targets", [{}, {"ttft_target": 10_000, "itl_target": 1000}])
async def test_loose_targets_of_its_own_let_no_new_session_in(targets: dict[str, int]) -> None:
    """Rounds of running sessions with the usual targets would wait behind it, and be refused."""
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL, queue=LONG))
    async with Replica(state, max_wait=WAIT_OF_LONG / NEW_WAIT_SHARE / 2) as replica:
        with pytest.raises(RoundOverloadedError, match="of a new session"):
            await replica.round(router=targets)


async def test_the_workers_that_the_policies_chose_count_and_no_others() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL, queue=LONG))
    async with Replica(state, routing="always-remote", max_wait=8.0) as replica:
        with pytest.raises(RoundOverloadedError):
            await replica.round()
    async with Replica(state, routing="always-local", max_wait=8.0) as replica:
        await replica.round()


async def test_a_round_that_was_admitted_is_not_refused_when_its_worker_is_lost() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    async with Replica(state, max_rounds=100) as replica:
        replica.workers.fail["generate", "d1"] = ConnectionError("gone")
        rounds = replica.chunks()
        await anext(rounds)
        replica.in_progress = 1000
        assert [chunk async for chunk in rounds]
        assert replica.gate.decisions == {("new", "admitted"): 1}


async def test_a_worker_that_refuses_because_of_load_ends_the_round_and_is_not_replaced_by_another() -> None:
    """The client has nothing of it. For streams that have begun see `test_long_streams.py`."""
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    for endpoint, name, routing in (("prefill", "p1", "always-remote"), ("generate", "d1", "always-local")):
        async with Replica(state, routing) as replica:
            replica.workers.fail = {(endpoint, name): WorkerRefusedError(name, 429, "full; retry after 2 s")}
            with pytest.raises(RoundRefusedError, match="retry after 2 s") as refused:
                await replica.round()
            assert refused.value.status == 429
            assert len(replica.workers.asked("generate")) == (endpoint == "generate")
    assert await queues(state) == {}
