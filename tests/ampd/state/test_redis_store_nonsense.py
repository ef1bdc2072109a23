"""Malformed records in Redis: the one that wrote them is left out with one line, everything else goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from ampd.state import codec
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import Binding, RoleAssigned, RouteWrite, SessionLimits, StateUnavailableError, WorkerUpdated
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, Role, Slo, WorkerView
from tests.waiting import PATIENCE_S

from .sound_view import sound_view


@pytest.fixture
async def client(redis_server: EmbeddedRedis) -> AsyncIterator[Any]:
    async with Redis.from_url(redis_server.url) as opened:
        yield opened


async def test_a_nonsensical_worker_is_left_out_with_one_line(
    redis_server: EmbeddedRedis, client: Any, caplog: pytest.LogCaptureFixture, waiting: Any
) -> None:
    caplog.set_level(logging.WARNING)
    codec.warn_once.cache_clear()
    store = await open_store(redis_server.url, "nonsense", timeout_s=PATIENCE_S)
    event = json.loads(codec.encode_event(WorkerUpdated(sound_view(), 5.0), 2.0))
    event[1]["kv_used_tokens"] = -1e9
    async with ClusterView(store, lease_s=60) as view:
        for _ in range(50):
            await client.publish("ampd:{nonsense}:events", json.dumps(event, separators=(",", ":")))
        await store.publish_worker(WorkerView("w2", Role.DECODE), 60)
        await waiting.until(view.decode)
        assert [worker.worker_id for worker in view.decode()] == ["w2"]
        assert view.counters.losses == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "'w1'" in lines[0]
    assert "Expected `int`, got `float` - at `$[1].kv_used_tokens`" in lines[0]
    await store.close()


async def test_malformed_values_at_a_reconnect(redis_server: EmbeddedRedis, client: Any, waiting: Any) -> None:
    prefix = "ampd:{malformed}:"
    store = await open_store(redis_server.url, "malformed", timeout_s=PATIENCE_S)
    await store.publish_worker(WorkerView("w1", Role.DECODE), 60)
    await store.publish_worker(WorkerView("w2", Role.DECODE), 60)
    await client.set(prefix + "worker:w2", "n/a")
    await client.hset(prefix + "queue:w1", mapping={"t1": "n/a", b"\xff": "1 ", "t2": "1 {}"})
    async with ClusterView(store, lease_s=60) as view:
        await waiting.until(view.decode)
        await client.set(prefix + "session:s1", "no epoch")
        assert await store.binding("s1") is None
        await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await waiting.until(lambda: view.counters.losses and view.connected)
        assert [worker.worker_id for worker in view.decode()] == ["w1"]
        await store.publish_worker(WorkerView("w3", Role.DECODE), 60)
        await waiting.until(lambda: view.worker("w3") is not None)
    await store.close()


async def test_a_value_of_another_type_stops_nothing_for_ever(
    redis_server: EmbeddedRedis, client: Any, waiting: Any
) -> None:
    store = await open_store(redis_server.url, "types", timeout_s=PATIENCE_S)
    await store.publish_worker(WorkerView("w1", Role.DECODE), 60)
    async with ClusterView(store, lease_s=60) as view:
        await client.set("ampd:{types}:workers", "n/a")
        await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        with pytest.raises(StateUnavailableError):
            await store.snapshot()
        await waiting.until(lambda: view.counters.losses)
        await client.delete("ampd:{types}:workers")
        await store.publish_worker(WorkerView("w2", Role.DECODE), 60)
        await waiting.until(lambda: view.worker("w2") is not None)
    await store.close()


async def test_sessions_from_before_the_clock_went_back_take_no_room(redis_server: EmbeddedRedis, client: Any) -> None:
    store = await open_store(redis_server.url, "clock", timeout_s=PATIENCE_S)
    limits = SessionLimits(60.0, per_graph=1, per_tenant=1)
    task = PrefillTask("t", "s", 0, 1, 0.0, Slo(1.0, 0.1))
    await store.route(RouteWrite("old", "d1", 0, "d1", replace(task, session_id="old")), limits)
    for key in await client.keys("ampd:{clock}:live*"):
        await client.zincrby(key, 3_600_000, "old")  # the clock goes back by an hour
    assert (await store.route(RouteWrite("new", "d1", 0, "d1", replace(task, session_id="new")), limits)).accepted
    await store.close()


async def test_answers_that_no_script_gives_are_a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a proxy, or from a server that is none."""
    store = StateStore("redis://localhost:1", "n")
    task = PrefillTask("t", "s", 1, 0, 0.0, Slo(1.0, 0.1))
    calls = (
        lambda: store.route(RouteWrite("s", "d1", 0, "d1", task), SessionLimits(60.0)),
        lambda: store.rebind(Binding("s", "d1", 1), "d2", 60.0),
        lambda: store.binding("s"),
        lambda: store.end_session("s"),
        lambda: store.lead("c", 5.0),
        lambda: store.assign_role("c", RoleAssigned("d1", Role.PREFILL, "", "x"), 5.0),
        lambda: store.overview(),
    )
    answers: Sequence[object] = (
        [], [b"x"], [True, "a"], {}, [1, -1, b"d1"], [[b"1"], 2, b"d1"], 7, [b"12", [b"view"], 3]
    )  # fmt: skip
    for answer in answers:

        async def answered(*_: object, answer: object = answer) -> object:
            return answer

        monkeypatch.setattr(store._connection, "script", answered)
        monkeypatch.setattr(store._connection, "command", answered)
        for call in calls:
            with pytest.raises(StateUnavailableError):
                await call()
