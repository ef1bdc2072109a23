"""Rounds whose workers fail: they go on elsewhere, or end with the right status."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from ampd.keys import pack_tokens
from ampd.types import Role
from ampd.wire import error_text, with_engine_start
from router.calls import worker_error
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from tests.router.replica_lab import PROMPT, Replica, cluster, queues, worker
from tests.waiting import until

EXPECTED = [64, 65, 66, 67, 68]


async def test_a_decode_worker_lost_in_mid_stream_is_replaced_and_reads_from_the_prefill_worker() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = 2
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["retries"], record["reason"], record["decode_worker"]) == (1, "resumed", "d2")
        again = [request for *call, request in replica.workers.calls if call == ["generate", "d2"]]
        assert (again[0]["source"], again[0]["is_prefilled"]) == (("p1", 1, ""), True)
        assert again[0]["prompt"] == pack_tokens(PROMPT + EXPECTED[:3])
        assert again[0]["request"]["stop_conditions"]["max_tokens"] == 2
    assert await queues(state) == {}


@pytest.mark.parametrize(
    ("error", "reason", "left"),
    [
        (WorkerLostError("p1", "gone"), "prefill-worker-lost", ["p2"]),
        (WorkerRefusedError("p1", 500, "no"), "prefill-worker-refused", ["p1", "p2"]),
    ],
)
async def test_a_prefill_that_fails_is_done_locally(error: Exception, reason: str, left: list[str]) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail["prefill", "p1"] = error
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["route"], record["reason"]) == ("local", reason)
        await replica.store.publish_worker(worker("p2", Role.PREFILL), 60.0)
        await until(lambda: replica.view.worker("p2"))
        assert [view.worker_id for view in replica.view.prefill()] == left
    assert await queues(state) == {}


@pytest.mark.parametrize("others", [(), ("d2",)])
async def test_a_round_whose_connection_broke_goes_on_at_its_worker_which_lives(others: tuple[str, ...]) -> None:
    state = await cluster(worker("d1"), *(worker(name, kv_used_tokens=1) for name in others))
    async with Replica(state, "always-local") as replica:
        replica.workers.fail["generate", "d1"] = 2
        replica.workers.alive.add("d1")
        tokens, record = await replica.round()
        assert tokens == EXPECTED
        assert (record["retries"], record["decode_worker"]) == (2, "d1"), "it broke after every second token"
        assert replica.view.worker("d1") is not None
        assert replica.services.deaths.count == 0


async def test_a_connection_that_always_breaks_ends_the_round_and_harms_no_other() -> None:
    async with Replica(await cluster(worker("d1")), "always-local") as replica:
        replica.workers.fail["generate", "d1"] = 0
        replica.workers.alive.add("d1")
        with pytest.raises(RoundRefusedError, match="its worker was lost: gone") as refusal:
            await replica.round()
        assert refusal.value.status == 503
        replica.workers.fail.clear()
        assert (await replica.round())[0] == EXPECTED


async def test_what_cannot_be_continued_ends_with_503() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = 2
        with pytest.raises(RoundRefusedError, match="presence_penalty") as refusal:
            await replica.round(sampling_options={"presence_penalty": 1.0})
        assert refusal.value.status == 503


async def test_a_round_that_is_too_long_for_the_workers_that_are_left_is_no_error_of_the_client() -> None:
    small = replace(worker("d2", kv_used_tokens=1), max_context_tokens=len(PROMPT) + 1)
    async with Replica(await cluster(worker("d1"), small)) as replica:
        replica.workers.fail["generate", "d1"] = 2
        with pytest.raises(RoundRefusedError, match="its worker was lost, and no other one can go on: ") as refusal:
            await replica.round()
        assert refusal.value.status == 503
    async with Replica(await cluster(small)) as replica:
        with pytest.raises(RoundRefusedError, match=r"^prompt is too long: ") as refusal:
            await replica.round(token_ids=[*PROMPT, *PROMPT])
        assert refusal.value.status == 400


@pytest.mark.parametrize("living", [0, 1])
async def test_workers_that_were_dead_before_use_up_no_retries(living: int) -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name, kv_used_tokens=number) for number, name in enumerate(names)))
    async with Replica(state, retries=0) as replica:
        replica.workers.fail |= {("generate", name): WorkerLostError(name, "gone") for name in names[: 4 - living]}
        if living:
            assert (await replica.round())[1]["decode_worker"] == "d3"
        else:
            with pytest.raises(RoundRefusedError, match="every decode worker has failed") as refusal:
                await replica.round()
            assert refusal.value.status == 503
        assert replica.workers.asked("generate") == names


async def test_a_request_that_ends_two_workers_is_not_given_to_a_third() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state) as replica:
        replica.workers.fail |= {("generate", name): 0 for name in names}
        for session in ("s", "again"):
            with pytest.raises(RoundRefusedError, match="workers died 2 times while they ran this request") as refusal:
                await replica.round(session)
            assert refusal.value.status == 500
        assert len(replica.workers.asked("generate")) == replica.services.deaths.count == 2


async def test_the_deaths_under_a_request_count_at_all_coordinators() -> None:
    state = await cluster(*(worker(f"d{number}") for number in range(4)))
    async with Replica(state, retries=0) as first, Replica(state) as second:
        for replica in (first, second):
            replica.workers.fail |= {("generate", f"d{number}"): 0 for number in range(4)}
        with pytest.raises(RoundRefusedError, match="1 workers failed this round"):
            await first.round()
        (dead,) = first.workers.asked("generate")
        await first.store.remove_worker(dead)
        await until(lambda: second.view.worker(dead) is None)
        for replica in (second, first):
            with pytest.raises(RoundRefusedError, match="workers died 2 times while they ran this request"):
                await replica.round("another session")
        assert [len(replica.workers.asked("generate")) for replica in (first, second)] == [1, 1]
        for replica in (first, second):
            replica.workers.fail.clear()
        assert (await first.round(token_ids=[*PROMPT, 1]))[0], "another prompt is served"


async def test_a_request_that_ended_a_worker_of_each_kind_is_given_up() -> None:
    state = await cluster(worker("d1"), worker("d2"), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL))
    async with Replica(state) as replica:
        replica.workers.fail |= {
            (name, kind + n): 0 for name, kind in (("prefill", "p"), ("generate", "d")) for n in "12"
        }
        with pytest.raises(RoundRefusedError, match="workers died 2 times"):
            await replica.round()
        assert [len(replica.workers.asked(name)) for name in ("prefill", "generate")] == [1, 1]
    assert await queues(state) == {}


async def test_an_engine_that_ended_under_a_round_counts_as_a_death() -> None:
    state = await cluster(worker("d1"), worker("d2"), worker("d3"))
    async with Replica(state) as replica:
        lost = RuntimeError(error_text(502, "SGLang has ended"))
        replica.workers.fail |= {("generate", name): worker_error(name, lost) for name in ("d1", "d2", "d3")}
        with pytest.raises(RoundRefusedError, match="workers died 2 times"):
            await replica.round()


async def test_a_request_that_ends_the_engine_of_the_only_worker_twice_is_not_tried_again() -> None:
    async with Replica(await cluster(worker("d1"))) as replica:
        for start in (1, 2):
            lost = RuntimeError(error_text(502, with_engine_start("SGLang has ended", start)))
            replica.workers.fail |= {("generate", "d1"): worker_error("d1", lost)}
            with pytest.raises(RoundRefusedError):
                await replica.round()
            await replica.store.publish_worker(worker("d1"), 60.0)  # its engine has started again
            await until(lambda: replica.view.worker("d1") is not None)
        asked = len(replica.workers.asked("generate"))
        with pytest.raises(RoundRefusedError, match="workers died 2 times"):
            await replica.round()
        assert len(replica.workers.asked("generate")) == asked


async def test_workers_that_shut_down_under_a_round_did_not_die() -> None:
    names = [f"d{number}" for number in range(4)]
    state = await cluster(*(worker(name) for name in names))
    async with Replica(state) as replica:
        replica.workers.fail |= {("generate", name): 1 for name in names}

        generate = replica.workers.generate

        async def then_ends(worker_id: str, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
            chunks = await generate(worker_id, request, context)

            async def one_chunk() -> AsyncIterator[dict[str, Any]]:
                async for chunk in chunks:
                    yield chunk
                    await replica.store.remove_worker(worker_id)
                    await until(lambda: not replica.view.knows(worker_id))

            return one_chunk()

        replica.workers.generate = then_ends
        with pytest.raises(RoundRefusedError, match="its worker was lost: gone"):
            await replica.round()
        assert replica.services.deaths.count == 0


async def test_a_refusal_is_the_client_s_with_its_status() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state) as replica:
        replica.workers.fail["generate", "d1"] = WorkerRefusedError("d1", 400, "bad grammar")
        with pytest.raises(RoundRefusedError, match="bad grammar") as refusal:
            await replica.round()
        assert refusal.value.status == 400


@pytest.mark.parametrize(
    "first",
    [
        {"token_ids": [7], "index": 1},
        {"token_ids": [], "index": 1, "finish_reason": "stop"},
        {"token_ids": [], "index": 0, "finish_reason": "stop"},
    ],
)
async def test_choices_that_the_client_has_seen_are_not_begun_again(first: dict[str, Any]) -> None:
    """Whichever of several choices comes first: another worker would send it a second time."""
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        replica.workers.generate = breaking(first)
        chunks = replica.chunks(sampling_options={"n": 2})
        assert (await anext(chunks))["index"] == first["index"]
        with pytest.raises(RoundRefusedError, match="cannot be continued elsewhere") as refusal:
            await anext(chunks)
        assert refusal.value.status == 503


async def test_a_round_is_over_with_its_last_chunk_even_if_its_worker_is_lost_then() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state) as replica:
        replica.workers.generate = breaking({"token_ids": [7], "index": 0, "finish_reason": "stop"})
        chunks = [chunk async for chunk in replica.chunks()]
        assert [chunk["token_ids"] for chunk in chunks] == [[7]]
        assert "d2" not in replica.workers.asked("generate")


def breaking(chunk: dict[str, Any]) -> Callable[..., Awaitable[AsyncIterator[dict[str, Any]]]]:
    """Calls of which one chunk comes before the worker is lost."""

    async def stream() -> AsyncIterator[dict[str, Any]]:
        yield dict(chunk)
        raise ConnectionError("gone")

    async def generate(*_: Any) -> AsyncIterator[dict[str, Any]]:
        return stream()

    return generate


async def test_another_coordinator_waits_with_a_request_until_the_death_of_its_worker_is_counted() -> None:
    state = await cluster(*(worker(f"d{number}") for number in range(4)))
    async with Replica(state, retries=0) as first, Replica(state) as second:
        for replica in (first, second):
            replica.workers.fail |= {("generate", f"d{number}"): 0 for number in range(4)}
        frontend = first.frontend("s")
        with pytest.raises(RoundRefusedError, match="1 workers failed this round"):
            await frontend.serve(lambda _: None)
        again = second.frontend("s")
        again._id = frontend._id
        with pytest.raises(RoundRefusedError, match="workers died 2 times while they ran this request"):
            await again.serve(lambda _: None)
        assert second.store.round_trips.calls["route"] == 3, "one that another coordinator had, one that is made"
