"""What a coordinator learns from reports, and whom it tells that a session has ended."""

import asyncio

from ampd.types import Role
from tests.router.replica_lab import Replica, cluster, worker


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
        await replica.store.publish_worker(worker("p2", Role.PREFILL, held_tokens={"s": 16}), 60.0)
        await asyncio.sleep(0)
        used = {"d1", "p2", *replica.workers.asked("prefill")}
        await replica.round(agent_context={"session_id": "s", "session_final": True})
        assert set(replica.workers.asked("kv release_session")) == used | set(replica.workers.asked("prefill"))
        assert await replica.store.binding("s") is None
        assert replica.services.sessions.binding("s") is None
