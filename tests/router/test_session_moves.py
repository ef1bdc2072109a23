"""Sessions that move to another owner before a round: the history's source, the release, races and failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ampd.keys import session_key
from ampd.state.store import RouteOutcome, StateUnavailableError
from ampd.types import Moves, Role
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import HANGS, PROMPT, Replica, cluster, queues, worker
from tests.waiting import until

KEY = session_key("", "s")
EXPECTED = [64, 65, 66, 67, 68]


async def turned(replica: Replica, *others: str) -> None:
    """A session was bound to d1, which holds its KV and is a prefill worker by now."""
    assert (await replica.round())[1]["decode_worker"] == "d1"
    await publish(replica.store, *others)


async def publish(store: MemoryStore, *others: str) -> None:
    await store.publish_worker(worker("d1", Role.PREFILL, held_tokens={KEY: len(PROMPT)}), 60.0)
    for other in others:
        await store.publish_worker(worker(other), 60.0)
    await asyncio.sleep(0)


async def two() -> MemoryState:
    return await cluster(worker("d1"), worker("d2", kv_used_tokens=1))


@asynccontextmanager
async def moved() -> AsyncIterator[tuple[Replica, Replica]]:
    """A replica that knows the session at d1, and another one that has moved it to d2 since then."""
    state = await two()
    async with (
        Replica(state, "always-local", moves="any") as late,
        Replica(state, "always-local", moves="any") as mover,
    ):
        await turned(late)
        assert (await mover.round())[1]["move_reason"] == "role"
        yield late, mover


async def test_a_session_leaves_a_prefill_worker_and_reads_its_history_from_there() -> None:
    state = await two()
    async with Replica(state, "always-local", moves="any") as replica:
        await turned(replica)
        replica.workers.calls.clear()
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["decode_worker"], record["epoch"], record["move_reason"]) == ("d2", 2, "role")
        endpoint, name, request = replica.workers.calls[0]
        assert (endpoint, name, request["source"]) == ("generate", "d2", ("d1", 1, ""))
        assert "is_prefilled" not in request
        assert request["task"]["hist_tokens"] == record["hist_tokens"] == len(PROMPT) - 1
        assert replica.workers.asked("kv release_session") == ["d1"]
        assert replica.services.placer.moves_made == {"role": 1}
        assert replica.counts["moved"] == 0, "its worker was not lost"
        assert KEY not in replica.view.worker("d1").held_tokens
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"], record["move_reason"]) == ("d2", 2, "")
        assert not await queues(state)


async def test_the_old_owner_keeps_what_it_prefills_with() -> None:
    async with Replica(await two(), "always-remote", moves="any") as replica:
        await turned(replica)
        replica.workers.calls.clear()
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["decode_worker"], record["prefill_worker"]) == ("d2", "d1")
        (_, _, prefill), (_, _, decode) = replica.workers.calls
        assert prefill["source"] is None, "it does not read from itself"
        assert (decode["source"], decode["is_prefilled"]) == (("d1", 1, ""), True)
        assert not replica.workers.asked("kv release_session")


@pytest.mark.parametrize(("moves", "owner"), [("never", "d1"), ("needed", "d2"), ("any", "d2")])
async def test_whose_sessions_leave_a_prefill_worker(moves: Moves, owner: str) -> None:
    async with Replica(await two(), "always-local", moves=moves) as replica:
        await turned(replica)
        assert (await replica.round())[1]["decode_worker"] == owner


@pytest.mark.parametrize(("moves", "owner"), [("never", "d1"), ("needed", "d2"), ("any", "d2")])
async def test_whose_sessions_leave_a_full_memory(moves: Moves, owner: str) -> None:
    full = worker("d1", held_tokens={KEY: len(PROMPT)}, kv_used_tokens=10_000)
    async with Replica(await two(), "always-local", moves=moves) as replica:
        assert (await replica.round())[1]["decode_worker"] == "d1"
        await replica.store.publish_worker(full, 60.0)
        await replica.store.publish_worker(worker("d2"), 60.0)
        await asyncio.sleep(0)
        assert (await replica.round())[1]["decode_worker"] == owner


async def test_announcements_move_nothing() -> None:
    async with Replica(await two(), "always-local", moves="any") as replica:
        await turned(replica)
        async for _ in replica.chunks(annotations=["announce"]):
            pass
        assert replica.workers.asked("generate")[-1] == "d1"


async def test_a_session_does_not_move_twice_in_a_row() -> None:
    async with Replica(await two(), "always-local", moves="any") as replica:
        await turned(replica)
        assert (await replica.round())[1]["decode_worker"] == "d2"
        await replica.store.publish_worker(worker("d2", Role.PREFILL, held_tokens={KEY: 64}), 60.0)
        await replica.store.publish_worker(worker("d1"), 60.0)
        await asyncio.sleep(0)
        assert (await replica.round())[1]["decode_worker"] == "d2"


async def test_a_replica_that_moves_a_session_with_its_first_round_of_it_does_not_move_it_again_at_once() -> None:
    async with moved() as (_, other):
        await other.store.publish_worker(worker("d1"), 60.0)
        await other.store.publish_worker(worker("d2", Role.PREFILL, held_tokens={KEY: len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        _, record = await other.round()
        assert (record["decode_worker"], record["move_reason"]) == ("d2", "")


async def test_a_round_that_loses_its_new_owner_reads_the_history_at_the_next_one() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("d3", kv_used_tokens=2))
    async with Replica(state, "always-local", moves="any") as replica:
        await turned(replica)
        replica.workers.calls.clear()
        replica.workers.fail["generate", "d2"] = ConnectionError("gone")
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["decode_worker"], record["epoch"], record["retries"]) == ("d3", 3, 1)
        assert [request["source"] for _, name, request in replica.workers.calls if name == "d3"] == [("d1", 1, "")]
        assert replica.workers.asked("kv release_session") == ["d1"]


async def test_a_round_that_loses_its_new_owner_reads_nothing_from_an_old_owner_with_other_weights() -> None:
    others = [worker("d2", kv_used_tokens=1, fingerprint="x"), worker("d3", kv_used_tokens=2, fingerprint="y")]
    async with Replica(await cluster(worker("d1", fingerprint="x"), *others), "always-local", moves="any") as replica:
        assert (await replica.round())[1]["decode_worker"] == "d1"
        old = worker("d1", Role.PREFILL, held_tokens={KEY: len(PROMPT)}, fingerprint="x")
        await replica.store.publish_worker(old, 60.0)
        await asyncio.sleep(0)
        replica.workers.fail["generate", "d2"] = ConnectionError("gone")
        _, record = await replica.round()
        assert (record["decode_worker"], record["move_reason"], record["retries"]) == ("d3", "role", 1)
        *_, (_, _, request) = [call for call in replica.workers.calls if call[:2] == ("generate", "d3")]
        assert request["source"] is None
        assert record["hist_tokens"] == 0
        assert replica.workers.asked("kv release_session") == ["d1"]


async def test_a_prefill_that_fails_after_a_move_is_computed_at_the_new_owner_with_the_old_history() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p", Role.PREFILL))
    async with Replica(state, "always-local", moves="any") as replica:
        await turned(replica)
    async with Replica(state, "always-remote", moves="any") as replica:
        replica.workers.fail |= {("prefill", name): ConnectionError("gone") for name in ("p", "d1")}
        await publish(replica.store)
        _, record = await replica.round()
        failed = record["prefill_worker"]
        assert failed is None
        assert record["reason"] == "prefill-worker-lost"
        assert (record["decode_worker"], record["move_reason"]) == ("d2", "role")


async def test_the_loser_of_a_race_of_moves_follows_the_winner() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("d3", kv_used_tokens=2))
    async with Replica(state, "always-local", moves="any") as replica:
        await turned(replica)
        before = replica.services.sessions.find(KEY).binding
        assert before is not None
        assert (await replica.store.rebind(before, "d3", 60.0)).accepted
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"]) == ("d3", 2)
        assert not replica.services.placer.moves_made.total()


async def test_a_replica_that_missed_a_move_makes_none_and_knows_the_new_history() -> None:
    async with moved() as (late, _):
        await publish(late.store)
        await late.store.publish_worker(worker("d1", Role.PREFILL), 60.0)
        await late.store.publish_worker(worker("d2", held_tokens={KEY: len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        assert late.services.sessions.find(KEY).binding.worker_id == "d1"
        _, record = await late.round()
        assert (record["decode_worker"], record["epoch"], record["move_reason"]) == ("d2", 2, "")
        assert record["hist_tokens"] == len(PROMPT) - 1
        assert not late.services.placer.moves_made.total()


async def test_a_replica_that_missed_a_move_does_not_move_the_session_back() -> None:
    """The first replica has moved the session for its old owner's role. Since then the new owner has that role."""
    async with moved() as (late, _):
        await late.store.publish_worker(worker("d1"), 60.0)
        await late.store.publish_worker(worker("d2", Role.PREFILL, held_tokens={KEY: len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        for _ in range(2):
            _, record = await late.round()
            assert (record["decode_worker"], record["move_reason"]) == ("d2", "")


async def test_a_replica_that_missed_a_move_reads_what_the_new_owner_lacks_from_the_old_one() -> None:
    """The round that moved the session was not completed, so that the old owner still has the history.

    It takes a round at once. Its write is refused, and then the replica knows of the move.
    """
    async with moved() as (late, _):
        await late.store.publish_worker(worker("d1", held_tokens={KEY: len(PROMPT)}), 60.0)
        await late.store.publish_worker(worker("d2"), 60.0)
        await asyncio.sleep(0)
        late.workers.calls.clear()
        _, record = await late.round()
        assert (record["decode_worker"], record["epoch"]) == ("d1", 1)
        await until(lambda: late.services.sessions.find(KEY).binding.worker_id == "d2")
        await late.store.publish_worker(worker("d1", held_tokens={KEY: len(PROMPT)}), 60.0)
        await asyncio.sleep(0)
        _, record = await late.round()
        assert (record["decode_worker"], record["epoch"], record["move_reason"]) == ("d2", 2, "")
        request = [request for name, _, request in late.workers.calls if name == "generate"][-1]
        assert request["source"] == ("d1", 1, "")
        assert record["hist_tokens"] == len(PROMPT) - 1
        assert late.workers.asked("kv release_session") == ["d1"]


async def test_a_history_that_a_move_has_not_brought_comes_with_the_next_round() -> None:
    """The client of the round that moved the session has left before the new owner began it."""
    async with Replica(await two(), "always-local", moves="any") as replica:
        await turned(replica)
        replica.workers.calls.clear()
        replica.workers.fail["generate", "d2"] = HANGS
        left = asyncio.create_task(replica.frontend().serve(lambda _: None))
        await until(lambda: replica.workers.asked("generate") == ["d2"])
        left.cancel()
        await asyncio.wait({left})
        await replica.services.ends.in_progress.drained()
        await asyncio.gather(*replica.tasks)
        assert not replica.workers.asked("kv release_session")
        replica.workers.fail.clear()
        for history in ("d1", None):
            replica.workers.calls.clear()
            _, record = await replica.round()
            assert (record["decode_worker"], record["epoch"], record["move_reason"]) == ("d2", 2, "")
            [request] = [request for name, _, request in replica.workers.calls if name == "generate"]
            assert request["source"] == (history and (history, 1, ""))
            assert replica.workers.asked("kv release_session") == ([history] if history else [])


async def test_a_session_stays_if_the_store_is_lost_at_its_move(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Replica(await two(), "always-local", moves="any") as replica:
        await turned(replica)

        async def lost(*_: object) -> RouteOutcome:
            raise StateUnavailableError("gone")

        monkeypatch.setattr(replica.store, "rebind", lost)
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["decode_worker"], record["move_reason"]) == ("d1", "")
