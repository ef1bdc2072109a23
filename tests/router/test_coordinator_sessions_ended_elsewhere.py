"""Sessions that end at one replica while another one remembers them."""

from __future__ import annotations

import pytest

from ampd.keys import session_key
from ampd.settings import parse_settings
from ampd.state.store import Binding, SessionEnded, TaskDone
from router.coordinator import Coordinator
from router.policies import CoordinatorPolicies
from router.round_errors import RoundRefusedError
from router.settings import CoordinatorSettings
from tests.memory_store import MemoryStore
from tests.router.replica_lab import Replica, cluster, worker
from tests.waiting import until

NAMES = [f"s{number}" for number in range(5)]


async def end(name: str, first: Replica, other: Replica) -> None:
    """End a session at one replica, and wait until the other has heard what came then."""
    heard = other.view.counters.events
    await first.services.end_session(session_key("", name), "", set())
    await first.store.announce(TaskDone("marker", "t"))
    await until(lambda: other.view.counters.events == heard + 2)


async def test_sessions_that_ended_elsewhere_count_as_new_ones() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, max_sessions=1) as first, Replica(state, max_sessions=1) as other:
        for name in NAMES:
            await first.round(name)
            await other.round(name)
            await end(name, first, other)
        await other.round(NAMES[0])
        for name in NAMES[1:]:
            with pytest.raises(RoundRefusedError, match="this graph has 1 live sessions"):
                await other.round(name)


async def test_a_session_that_begins_again_keeps_its_owner() -> None:
    """Its former life had moved, so that its epoch was higher."""
    state = await cluster(worker("d0"), worker("d1", kv_used_tokens=5000))
    async with Replica(state, "always-local") as first, Replica(state, "always-local") as other:
        first.workers.fail["generate", "d0"] = ConnectionError("gone")
        moved = (await first.round())[1]
        seen = (await other.round())[1]
        assert (seen["decode_worker"], seen["epoch"]) == (moved["decode_worker"], moved["epoch"]) == ("d1", 2)
        await end("s", first, other)
        first.workers.fail.clear()
        await first.store.publish_worker(worker("d0"), 60.0)
        await until(lambda: first.view.worker("d0"))
        again = (await first.round())[1]
        seen = (await other.round())[1]
        assert (seen["decode_worker"], seen["epoch"]) == (again["decode_worker"], again["epoch"]) == ("d0", 1)


async def test_a_coordinator_forgets_a_session_that_ended() -> None:
    settings = parse_settings(CoordinatorSettings, ["--model=m", "--perf=tiny-cpu"], "python -m router")
    coordinator = Coordinator(settings, None, MemoryStore(), CoordinatorPolicies.of(settings))  # type: ignore[arg-type]
    memory = coordinator._services.sessions
    memory.remember(Binding("s", "d0", 1), b"")
    coordinator.view.apply(SessionEnded("s"))
    assert memory.find("s").binding is None
