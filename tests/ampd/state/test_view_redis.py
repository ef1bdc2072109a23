"""The local view on a real Redis that goes, hangs and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import SessionLimits, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import CoordinatorView, Slo
from tests.ampd.state.view_queues import queued
from tests.waiting import PATIENCE_S

_HEARTBEAT = CoordinatorView("c1", Slo(1.0, 0.1))


async def _is_published(store: StateStore) -> bool:
    with suppress(StateUnavailableError):
        await store.publish_coordinator(_HEARTBEAT, 60)
        return True
    return False


class TestRedisLoss:
    @pytest.fixture
    def server(self) -> Iterator[EmbeddedRedis]:
        with EmbeddedRedis() as server:
            yield server

    async def test_a_real_redis_goes_and_comes_back_on_its_socket(
        self, server: EmbeddedRedis, make: Any, waiting: Any
    ) -> None:
        worker = await open_store(server.url, "n", timeout_s=PATIENCE_S)
        coordinator = await open_store(server.url, "n", timeout_s=PATIENCE_S)
        await worker.publish_worker(make.view("d1"), 60)
        async with ClusterView(coordinator, lease_s=60) as view:
            binding = (await coordinator.route(make.write(), SessionLimits(60))).binding
            server.stop()
            await waiting.until(lambda: not view.connected)
            with pytest.raises(StateUnavailableError) as caught:
                await coordinator.route(make.write(epoch=1, task_id="t2"), SessionLimits(60))
            assert len(str(caught.value).splitlines()) == 1
            assert [seen.worker_id for seen in view.decode()] == ["d1"]

            server.start()
            await waiting.until(lambda: view.connected)
            assert [seen.worker_id for seen in view.decode()] == ["d1"]
            # the restarted server is empty: scripts, bindings and workers come back with the next writes
            outcome = await coordinator.route(make.write(epoch=binding.epoch, task_id="t3"), SessionLimits(60))
            assert outcome.accepted
            assert outcome.binding == binding
            await worker.publish_worker(make.view("d1", decode_batch=5), 60)
            await waiting.until(lambda: view.decode()[0].decode_batch == 5)
            assert queued(view, "d1")[-1] == "t3"
            assert view.counters.losses == 1
        await worker.close()
        await coordinator.close()

    async def test_a_server_that_hangs_counts_as_lost(self, server: EmbeddedRedis, make: Any, waiting: Any) -> None:
        store, worker = StateStore(server.url, "n", timeout_s=0.2), StateStore(server.url, "n", timeout_s=PATIENCE_S)
        await worker.publish_worker(make.view("d1"), 60)
        assert server.pid is not None
        view = ClusterView(store, lease_s=60)

        async def has_started() -> bool:
            with suppress(StateUnavailableError):  # on a busy machine every server may seem to hang
                await view.start()
                return True
            return False

        await waiting.until(has_started)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await waiting.until(lambda: not view.connected)
            assert len(view.decode()) == 1
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await waiting.until(lambda: view.connected)
        await view.stop()
        for each in (store, worker):
            await each.close()

    async def test_a_server_that_answers_reads_and_no_heartbeat_counts_as_lost(
        self, server: EmbeddedRedis, make: Any, waiting: Any
    ) -> None:
        """Queues are not worked off in the copy then, and would keep new sessions out."""
        store, worker = StateStore(server.url, "n", timeout_s=0.5), StateStore(server.url, "n", timeout_s=PATIENCE_S)
        await worker.publish_worker(make.view("d1", queue=(make.task(),)), 60)
        view = ClusterView(store, lease_s=60)
        await view.start()
        assert queued(view, "d1") == ["t1"]
        await store._connection.command("CLIENT", "PAUSE", "600000", "WRITE")
        with pytest.raises(StateUnavailableError):
            await store.publish_coordinator(_HEARTBEAT, 60)
        assert await store.binding("s1") is None  # reads are answered
        await waiting.until(lambda: not view.connected)
        assert queued(view, "d1") == []
        with pytest.raises(StateUnavailableError, match="answers no writes"):
            await store.watch().start()
        await store._connection.command("CLIENT", "UNPAUSE")
        await waiting.until(partial(_is_published, store))
        await waiting.until(lambda: view.connected)
        await view.stop()
        for each in (store, worker):
            await each.close()

    @pytest.mark.slow
    async def test_an_idle_connection_is_not_a_lost_one(self, server: EmbeddedRedis, waiting: Any) -> None:
        store = await open_store(server.url, "n", timeout_s=1.5)
        async with ClusterView(store, lease_s=60) as view:
            for _ in range(2):  # signs of life although nothing is published
                await waiting.until(lambda: view.age_s() > 1.4)
                await waiting.until(lambda: view.age_s() < 1.0)
            assert view.connected
        assert view.counters.losses == 0
        await store.close()
