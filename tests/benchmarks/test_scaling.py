"""The benchmark of the shared state by the size of a graph."""

import time

import pytest
from redis.asyncio import Redis

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore
from ampd.types import Role
from benchmarks.scaling import LEASE_S, NAMESPACE, FollowingCopy, applied_us, bind, measure, row, synthetic_workers


def test_the_workers_hold_all_sessions_in_equal_parts() -> None:
    views = synthetic_workers(8, [f"s{number}" for number in range(60)])
    held = [len(view.held_tokens) for view in views if view.role is Role.DECODE]
    assert (len(views), held) == (8, [10] * 6)
    assert len({session for view in views for session in view.held_tokens}) == 60


async def test_every_figure_of_a_size_is_measured() -> None:
    with EmbeddedRedis() as server:
        figures = await measure(server.url, 4, await bind(server.url, 30), calls=10)
    assert (figures["workers"], figures["sessions"]) == (4, 30)
    assert figures["view_bytes"] > 10 * len("32 hexadecimal digits of a session")
    for name in ("ping", "route", "publish"):
        assert figures[name]["redis_us"] >= 0
        assert figures[name]["caller_us"] > 0
    assert figures["applied_us"] > 0
    assert figures["snapshot_ms"] > 0
    assert len(row(figures).split(" | ")) == 11


async def test_what_is_applied_is_applied_by_a_copy_that_follows_redis() -> None:
    with EmbeddedRedis() as server:
        store = StateStore(server.url, NAMESPACE, timeout_s=9.0)
        copy = FollowingCopy(store)
        await copy.start()
        applied = copy.after(2)
        for view in synthetic_workers(2, ["s1"]):
            assert not applied.is_set()
            await store.publish_worker(view, LEASE_S)
        await applied.wait()
        assert copy.connected
        assert [view.held_tokens for view in copy.decode()] == [{"s1": 20_000}]
        assert all(getattr(view.queue, "times", None) for view in copy.workers()), "as a performance model adds it up"
        await copy.stop()
        await store.close()


async def test_publications_wait_for_a_copy_that_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowingCopy, "prefill", lambda _: time.sleep(0.002))
    with EmbeddedRedis() as server:
        async with Redis.from_url(server.url) as probe:
            await probe.config_set("client-output-buffer-limit", "pubsub 300kb 0 0")
        views = synthetic_workers(2, [f"s{number}" for number in range(800)])
        assert await applied_us(server.url, views[1:], calls=100) > 0
