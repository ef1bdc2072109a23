"""What a coordinator learns from reports, and whom it tells that a session has ended."""

import asyncio

import pytest

from ampd.keys import session_key
from ampd.types import Role
from router.round_errors import RoundRefusedError
from tests.router.replica_lab import Replica, cluster, queues, worker


async def test_a_round_s_end_tells_who_still_decodes() -> None:
    busy = worker("d1", decode_batch=2, decode_context_tokens=900)
    async with Replica(await cluster(busy, worker("p1", Role.PREFILL))) as replica:
        await replica.round()
        assert replica.view.decode() == (busy,)  # a worker that does not say
        replica.workers.batch = {"decode_batch": 1, "decode_context_tokens": 400}
        await replica.round()
        (view,) = replica.view.decode()
        assert (view.decode_batch, view.decode_context_tokens) == (1, 400)


async def test_the_last_round_releases_the_session_where_it_is_held() -> None:
    state = await cluster(
        worker("d1"), worker("d2", kv_used_tokens=9), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL)
    )
    async with Replica(state) as replica:
        await replica.round()
        await replica.store.publish_worker(worker("p2", Role.PREFILL, held_tokens={session_key("", "s"): 16}), 60.0)
        await asyncio.sleep(0)
        used = {"d1", "p2", *replica.workers.asked("prefill")}
        await replica.round(agent_context={"session_id": "s", "session_final": True})
        assert set(replica.workers.asked("kv release_session")) == used | set(replica.workers.asked("prefill"))
        assert await replica.store.binding(session_key("", "s")) is None
        assert replica.services.sessions.find(session_key("", "s")).binding is None


async def test_another_tenant_with_the_same_id_neither_ends_nor_steers_a_session() -> None:
    bob = {"cache_salt": "bob"}
    async with Replica(await cluster(worker("d1"), worker("d2", kv_used_tokens=9)), "always-local") as replica:
        await replica.round("s")
        alice_s, bob_s = session_key("", "s"), session_key("bob", "s")
        await replica.store.publish_worker(worker("d1", held_tokens={alice_s: 64}), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round("s", routing=bob)
        assert (record["session_id"], record["session_key"]) == ("s", bob_s)
        assert not record["rewritten"], "he sees nothing of her context"
        assert record["hist_tokens"] == 0
        await replica.round(agent_context={"session_id": "s", "session_final": True}, routing=bob)
        released = [request["session_id"] for name, _, request in replica.workers.calls if name == "kv release_session"]
        assert set(released) == {bob_s}
        assert await replica.store.binding(alice_s) is not None
        assert replica.services.sessions.find(alice_s).binding is not None


async def test_a_session_beyond_the_limit_gets_429() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local", max_sessions=2) as replica:
        for name in ("a", "b", "a"):
            await replica.round(name)
        with pytest.raises(RoundRefusedError, match="this graph has 2 live sessions") as refusal:
            await replica.round("c")
        assert refusal.value.status == 429
        assert await queues(state) == {}
        await replica.round(agent_context={"session_id": "b", "session_final": True})
        await replica.round("c")
