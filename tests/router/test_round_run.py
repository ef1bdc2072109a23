"""Rounds against scripted workers in this process: conflicts, failures and what is left behind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ampd.page_keys import page_keys
from ampd.serving.placement import deterministic_choice
from ampd.types import Parallelism, Role
from ampd.wire import error_text
from router.calls import worker_error
from router.guard import StreamGuard
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from tests.memory_store import MemoryStore
from tests.router.replica_lab import HANGS, PROMPT, FakeContext, Replica, cluster, queues, worker

EXPECTED = [64, 65, 66, 67, 68]


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_a_round_gives_the_same_tokens_on_both_routes(routing: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert record["route"] == routing.removeprefix("always-")
        assert replica.store.round_trips.calls["route"] == 1
    assert await queues(state) == {}


async def test_the_loser_of_a_race_follows_the_winner() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica, Replica(state) as other:
        await replica.round("s")
        # The other replica would now choose d2, for d1 has more to do; it does not know of the session.
        await other.store.publish_worker(worker("d1", kv_used_tokens=5000), 60.0)
        await asyncio.sleep(0)
        _, record = await other.round("s")
        assert record["decode_worker"] == "d1"
        assert other.workers.asked("generate") == ["d1"]


async def test_a_session_stays_at_a_worker_that_becomes_a_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        await replica.round("s")
        await replica.store.publish_worker(worker("d1", Role.PREFILL), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round("s")
        # The only prefill worker is its own decode worker: that is not remote.
        assert (record["decode_worker"], record["epoch"], record["reason"]) == ("d1", 1, "no-prefill-worker")
        _, record = await replica.round("new")
        assert (record["decode_worker"], record["prefill_worker"]) == ("d2", "d1")


@pytest.mark.parametrize(
    ("targets", "missed"), [({}, False), ({"ttft_target": 1e-6}, True), ({"itl_target": 1e-6}, True)]
)
async def test_a_session_that_missed_a_target_is_known_for_it(targets: dict[str, float], missed: bool) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        await replica.round("s", router=targets)
        await replica.round("s")
        await replica.round("s")
        await replica.round("other")
        tasks = [request["task"] for _, _, request in replica.workers.calls if "task" in request]
        assert [task["session_missed"] for task in tasks] == [False, missed, missed, False]


async def test_a_dead_worker_s_session_moves_with_the_next_epoch() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        assert (await replica.round())[1]["decode_worker"] == "d1"
        await replica.store.remove_worker("d1")
        await asyncio.sleep(0)
        _, record = await replica.round()
        assert (record["decode_worker"], record["epoch"]) == ("d2", 2)
        assert (await replica.store.binding("s")).epoch == 2


async def test_a_decode_worker_lost_in_mid_stream_is_replaced_and_reads_from_the_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = 2
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["retries"], record["reason"], record["decode_worker"]) == (1, "resumed", "d2")
        again = [request for *call, request in replica.workers.calls if call == ["generate", "d2"]]
        assert again[0]["source_worker_id"] == "p1"
        assert again[0]["token_ids"] == PROMPT + EXPECTED[:3]
        assert again[0]["request"]["stop_conditions"]["max_tokens"] == 2
    assert await queues(state) == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WorkerLostError("p1", "gone"), "prefill-worker-lost"),
        (WorkerRefusedError("p1", 500, "no"), "prefill-worker-refused"),
    ],
)
async def test_a_prefill_that_fails_is_done_locally(error: Exception, reason: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail["prefill", "p1"] = error
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", reason)
        assert (replica.view.worker("p1") is None) == isinstance(error, WorkerLostError)
    assert await queues(state) == {}


async def test_what_cannot_be_continued_ends_with_503() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = 2
        with pytest.raises(RoundRefusedError, match="presence_penalty") as refusal:
            await replica.round(sampling_options={"presence_penalty": 1.0})
        assert refusal.value.status == 503


async def test_a_round_survives_no_more_workers_than_allowed() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state, retries=2) as replica:
        replica.workers.fail |= {("generate", name): WorkerLostError(name, "gone") for name in names}
        with pytest.raises(RoundRefusedError, match="3 workers failed") as refusal:
            await replica.round()
        assert refusal.value.status == 503
        assert len(set(replica.workers.asked("generate"))) == 3


async def test_a_request_that_ends_two_workers_is_not_given_to_a_third() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state) as replica:
        replica.workers.fail |= {("generate", name): 0 for name in names}
        for session in ("s", "again"):
            with pytest.raises(RoundRefusedError, match="2 workers died while they ran this request") as refusal:
                await replica.round(session)
            assert refusal.value.status == 500
        assert len(replica.workers.asked("generate")) == replica.services.deaths.count == 2


async def test_a_request_that_ended_a_worker_of_each_kind_is_given_up() -> None:
    state = await cluster(worker("d1"), worker("d2"), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail |= {
            (name, kind + n): 0 for name, kind in (("prefill", "p"), ("generate", "d")) for n in "12"
        }
        with pytest.raises(RoundRefusedError, match="2 workers died"):
            await replica.round()
        assert [len(replica.workers.asked(name)) for name in ("prefill", "generate")] == [1, 1]
    assert await queues(state) == {}


async def test_the_deaths_under_a_request_count_until_it_is_served() -> None:
    state = await cluster(worker("d1"), worker("d2"), worker("d3"))
    async with Replica(state, retries=0) as replica:
        replica.workers.fail |= {("generate", name): 0 for name in ("d1", "d2", "d3")}
        with pytest.raises(RoundRefusedError, match="1 workers failed this round"):
            await replica.round()
        assert len(replica.services.deaths) > 0
        replica.workers.fail.clear()
        assert (await replica.round())[0] == EXPECTED
        assert len(replica.services.deaths) == 0


async def test_an_engine_that_ended_under_a_round_counts_as_a_death() -> None:
    state = await cluster(worker("d1"), worker("d2"), worker("d3"))
    async with Replica(state) as replica:
        lost = RuntimeError(error_text(502, "SGLang has ended"))
        replica.workers.fail |= {("generate", name): worker_error(name, lost) for name in ("d1", "d2", "d3")}
        with pytest.raises(RoundRefusedError, match="2 workers died"):
            await replica.round()


async def test_workers_that_shut_down_under_a_round_did_not_die() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state) as replica:
        replica.workers.fail |= {("generate", name): 1 for name in names}

        async def end_each_worker() -> None:
            async for _ in replica.run().serve():
                await replica.store.remove_worker(replica.workers.asked("generate")[-1])
                await asyncio.sleep(0)

        with pytest.raises(RoundRefusedError, match="4 workers failed this round"):
            await end_each_worker()
        assert replica.services.deaths.count == 0


async def test_a_take_over_by_a_worker_that_hangs_is_given_up() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        guard = StreamGuard(replica.view, patience_s=0.0)
        replica.services = replace(replica.services, cluster=replace(replica.services.cluster, guard=guard))
        replica.workers.fail["generate", "d1"] = HANGS
        async for _ in replica.run(stop_conditions={"max_tokens": 1}).serve():
            pass
        while "d1" not in replica.workers.asked("generate"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await replica.store.remove_worker("d1")
        async with asyncio.timeout(5):
            while not all(task.done() for task in replica.tasks):
                guard.check()
                await asyncio.sleep(0.01)


async def test_a_refusal_is_the_client_s_with_its_status() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = WorkerRefusedError("d1", 400, "bad grammar")
        with pytest.raises(RoundRefusedError, match="bad grammar") as refusal:
            await replica.round()
        assert refusal.value.status == 400


async def test_no_decode_worker_is_503_and_a_long_prompt_400_with_both_numbers() -> None:
    async with Replica(await cluster(worker("p1", Role.PREFILL))) as replica:
        with pytest.raises(RoundRefusedError) as refusal:
            await replica.round()
        assert refusal.value.status == 503
    async with Replica(await cluster(worker("d1"))) as replica:
        with pytest.raises(RoundRefusedError, match=r"1000 tokens.*1000 tokens") as refusal:
            await replica.round(token_ids=[1] * 1000)
        assert refusal.value.status == 400


async def test_replicas_without_the_store_agree_on_new_sessions_and_tell_it_later() -> None:
    views = [worker(f"d{number}", kv_used_tokens=number) for number in range(5)]
    state = await cluster(*views)
    async with Replica(state) as replica, Replica(state) as other:
        before = (await replica.round("known"))[1]["decode_worker"]
        state.lose()
        assert (await replica.round("known"))[1]["decode_worker"] == before
        chosen = {}
        for name in ("a", "b", "c", "d", "e", "f"):
            chosen[name] = (await replica.round(name))[1]["decode_worker"]
            assert (await other.round(name))[1]["decode_worker"] == chosen[name]
            assert chosen[name] == deterministic_choice(name, views).worker_id
        assert len(set(chosen.values())) > 1
        state.restore(empty=True)
        for each in (replica, other):
            each.services.placer._store_retry_s = 0.0
        assert (await replica.round("a"))[1]["decode_worker"] == chosen["a"]
        assert (await other.store.binding("a")).worker_id == chosen["a"]


async def test_history_is_what_the_decode_worker_holds_of_the_prompt() -> None:
    state = await cluster(worker("d1", held_tokens={"s": 48}), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.matched_pages = 2
        _, record = await replica.round()
        # Another replica served the session before: the worker is asked, by the names of the prompt's pages.
        assert [request["keys"] for name, _, request in replica.workers.calls if name == "kv match"] == [
            page_keys(PROMPT, 16)
        ]
        assert (record["hist_tokens"], record["incr_tokens"], record["rewritten"]) == (32, 32, True)
        await replica.store.publish_worker(worker("d1", held_tokens={"s": 64}), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round(token_ids=[*PROMPT, *EXPECTED, 7])
        assert record["hist_tokens"] == 64
        await replica.store.publish_worker(worker("d1", held_tokens={"s": 64}), 60.0)
        await asyncio.sleep(0)
        _, record = await replica.round(token_ids=[*PROMPT[:40], 1, 2, 3])
        assert (record["hist_tokens"], record["rewritten"]) == (40, True)
        assert len(replica.workers.asked("kv match")) == 1


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


async def test_a_round_that_ends_at_the_prefill_worker_is_taken_over() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        tokens, _ = await replica.round(stop_conditions={"max_tokens": 1})
        assert tokens == EXPECTED[:1]
        ((_, worker_id, request),) = [call for call in replica.workers.calls if call[0] == "generate"]
        assert (worker_id, request["source_worker_id"]) == ("d1", "p1")
        assert request["request"]["stop_conditions"]["max_tokens"] == 0
        assert request["token_ids"] == [*PROMPT, 64]


async def test_a_client_that_leaves_before_the_worker_was_reached_leaves_no_entry() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        context = FakeContext()

        async def never(*_: Any) -> Any:
            context.stop_generating()
            raise WorkerLostError("p1", "unreachable")

        replica.workers.prefill = never  # type: ignore[method-assign]
        chunks = [chunk async for chunk in replica.run(context=context).serve()]
        assert chunks == []
        await asyncio.gather(*replica.tasks)
        assert replica.workers.asked("generate") == []
        assert await queues(state) == {}


async def test_a_model_that_lacks_a_worker_s_parallelism_does_not_fail_rounds() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, failing="routing") as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", "no-performance-model")


async def test_nor_does_it_fail_a_binding() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, failing="binding") as replica:
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert record["decode_worker"] == "d1"


async def test_a_worker_of_unknown_parallelism_is_left_out_and_not_the_route() -> None:
    odd = worker("p1", Role.PREFILL, parallelism=Parallelism(tp=7))
    state = await cluster(worker("d1"), odd, worker("p2", Role.PREFILL))
    async with Replica(state, routing="predictive") as replica:
        records = [(await replica.round(f"s{number}"))[1] for number in range(8)]
    assert {record["reason"] for record in records} != {"no-performance-model"}
    assert "p1" not in replica.workers.asked("prefill")
    assert "p2" in replica.workers.asked("prefill")


async def test_the_sessions_of_a_dead_worker_read_the_state_once() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        for number in range(5):
            await replica.round(f"s{number}")
        others = MemoryStore(state)
        await others.publish_worker(worker("d2"), 60.0)
        await others.remove_worker("d1")
        while replica.view.worker("d1") is not None or replica.view.worker("d2") is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        before = replica.store.round_trips.calls["snapshot"]
        for number in range(5):
            _, record = await replica.round(f"s{number}")
            assert record["decode_worker"] == "d2"
        assert replica.store.round_trips.calls["snapshot"] == before + 1
