"""Routing stays inside one fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampd.serving.placement import readable
from ampd.state import codec
from ampd.types import Role, WorkerView
from router.fingerprints import ForeignWorkers, mark_of, may_continue
from router.round_errors import RoundRefusedError
from tests.memory_store import MemoryStore
from tests.router.replica_lab import PROMPT, Replica, cluster, worker
from tests.waiting import until

DECODE = WorkerView("d", Role.DECODE, fingerprint="a")
SAME, OTHER = (WorkerView(name, Role.PREFILL, fingerprint=name) for name in "ab")
OLDER = WorkerView("o", Role.PREFILL)
TOKENS = [64, 65, 66, 67, 68]


def test_prefill_workers_with_other_weights_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    foreign = ForeignWorkers(lambda _: True)
    for _ in range(3):
        assert readable(DECODE, [SAME, OTHER, OLDER]) == [SAME, OLDER]
        foreign.note(DECODE, [SAME, OTHER, OLDER])
    (line,) = caplog.messages
    assert "prefill worker b has other weights or settings" in line
    other = replace(DECODE, fingerprint="b")
    assert readable(other, [SAME, OTHER]) == [OTHER]
    foreign.note(other, [SAME, OTHER])
    assert len(caplog.messages) == 2


def test_a_decode_worker_of_an_older_version_takes_all() -> None:
    assert readable(replace(DECODE, fingerprint=""), [SAME, OTHER]) == [SAME, OTHER]


def test_a_view_carries_its_fingerprint_and_may_lack_it() -> None:
    record = codec.encode_view(DECODE, 0.0)
    assert codec.decode_view(record, 0.0) == DECODE
    assert codec.decode_view(record.replace(b',"fingerprint":"a"', b""), 0.0) == replace(DECODE, fingerprint="")


async def test_a_round_is_not_prefilled_by_a_worker_with_other_weights() -> None:
    decode = worker("d", fingerprint="new")
    old, new = worker("p1", Role.PREFILL, fingerprint="old"), worker("p2", Role.PREFILL, fingerprint="new")
    async with Replica(await cluster(decode, old)) as replica:
        assert (await replica.round())[1]["reason"] == "no-prefill-worker"
    async with Replica(await cluster(decode, old, new)) as replica:
        for number in range(4):
            assert (await replica.round(f"s{number}"))[1]["prefill_worker"] == "p2"


def test_a_decode_worker_unlike_the_others_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    foreign = ForeignWorkers(lambda _: True)
    like, unlike = [replace(DECODE, worker_id=name) for name in ("d1", "d2")], replace(DECODE, fingerprint="b")
    foreign.note_decode([*like, replace(DECODE, worker_id="older", fingerprint="")])
    assert caplog.messages == []
    for _ in range(3):
        foreign.note_decode([unlike, *like])
    (line,) = caplog.messages
    assert "decode worker d has other weights or settings (fingerprint b) than most decode workers (a)" in line


def test_workers_that_are_gone_are_forgotten() -> None:
    alive: set[str] = set()
    foreign = ForeignWorkers(alive.__contains__)
    for number in range(50):
        alive.clear()
        alive.add(f"p{number}")
        foreign.note(DECODE, [replace(OTHER, worker_id=f"p{number}")])
    assert len(foreign._logged) == 1


async def test_a_new_session_on_a_decode_worker_unlike_the_others_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    workers = [worker(name, fingerprint="a") for name in ("d1", "d2")]
    async with Replica(await cluster(*workers, worker("d3", fingerprint="b")), "always-local") as replica:
        for number in range(3):
            await replica.round(f"s{number}")
    assert sum("decode worker d3 has other weights" in message for message in caplog.messages) == 1


def test_a_mark_tells_fingerprints_apart_and_unknown_ones_match() -> None:
    assert mark_of("") == 0 < mark_of("a") != mark_of("b")
    assert mark_of("a") < 1 << 32
    assert may_continue(mark_of("a"), DECODE)
    assert not may_continue(mark_of("b"), DECODE)
    assert may_continue(0, DECODE)
    assert may_continue(mark_of("b"), replace(DECODE, fingerprint=""))


@pytest.mark.parametrize("routing", ["always-local", "always-remote"])
async def test_an_answer_goes_on_at_the_same_weights_only(routing: str) -> None:
    state = await cluster(
        worker("d1", fingerprint="a"),
        worker("d2", fingerprint="b", kv_used_tokens=1),
        worker("d3", fingerprint="a", kv_used_tokens=2),
        worker("p1", Role.PREFILL, fingerprint="a"),
    )
    async with Replica(state, routing) as replica:
        replica.workers.fail["generate", "d1"] = 2
        tokens, record = await replica.round()
        assert tokens == TOKENS
        assert (record["retries"], record["decode_worker"]) == (1, "d3")


async def test_an_answer_that_no_worker_may_continue_ends_clearly() -> None:
    state = await cluster(worker("d1", fingerprint="a"), worker("d2", fingerprint="b", kv_used_tokens=1))
    async with Replica(state, "always-local") as replica:
        replica.workers.fail["generate", "d1"] = 2
        with pytest.raises(RoundRefusedError, match="all others have other weights or settings; send") as refused:
            await replica.round()
        assert refused.value.status == 503
        assert (await replica.round())[1]["decode_worker"] == "d2", "nothing of this answer is out"


async def test_a_round_without_output_goes_on_at_any_weights() -> None:
    state = await cluster(worker("d1", fingerprint="a"), worker("d2", fingerprint="b", kv_used_tokens=1))
    async with Replica(state, "always-local") as replica:
        replica.workers.fail["generate", "d1"] = 0
        tokens, record = await replica.round()
        assert (tokens, record["decode_worker"]) == (TOKENS, "d2")


@pytest.mark.parametrize("session", [None, "s"])
async def test_another_coordinator_continues_an_answer_at_the_same_weights(session: str | None) -> None:
    state = await cluster(worker("d1", fingerprint="a"))
    async with Replica(state, "always-local") as first, Replica(state, "always-local") as second:
        chunks = [chunk async for chunk in first.chunks(session)]
        again = {
            "token_ids": [*PROMPT, *TOKENS[:2]],
            "stop_conditions": {"max_tokens": 3},
            "migration_link": chunks[0]["worker_trace_link"],
        }
        store = MemoryStore(state)
        await store.remove_worker("d1")
        await store.publish_worker(worker("d2", fingerprint="b"), 60.0)
        await until(lambda: [view.worker_id for view in second.view.decode()] == ["d2"])
        with pytest.raises(RoundRefusedError, match="other weights or settings"):
            await second.round(session, **again)
        await store.publish_worker(worker("d3", fingerprint="a", kv_used_tokens=1), 60.0)
        await until(lambda: len(second.view.decode()) == 2)
        tokens, record = await second.round(session, **again)
        assert (tokens, record["decode_worker"]) == (TOKENS[2:], "d3")
