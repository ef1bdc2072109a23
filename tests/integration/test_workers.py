"""Workers on real Dynamo and real Redis, driven as a coordinator drives them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from dynamo.runtime import Context

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import Watcher, open_store
from ampd.state.store import WorkerUpdated
from ampd.types import Role
from ampd.wire import GENERATE_ENDPOINT, PREFILL_ENDPOINT, parse_error
from tests.harness.driver import Driver, driving, message, tokens
from tests.harness.graph import SHORT_LEASE, Graph
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(31 * position) % 500 + 5 for position in range(500)]
LONG = [(37 * position) % 500 + 5 for position in range(1600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(graph: Graph) -> AsyncIterator[Driver]:
    async with driving(graph) as driver:
        yield driver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(live: Driver) -> tuple[str, str]:
    """A prefill and a decode worker that serve all the tests that leave them whole."""
    limit = ("--max-context-tokens", "4096", "--kv-capacity-tokens", "8192", "--kv-store-tokens", "8192")
    return await live.start(Role.PREFILL, *limit), await live.start(Role.DECODE, *limit)


async def local_round(live: Driver, decode: str, context: list[int], session: str) -> tuple[list[int], dict[str, Any]]:
    chunks = await live.chunks(GENERATE_ENDPOINT, decode, message(context, session=session, max_tokens=8))
    return tokens(chunks), chunks[-1]


async def remote_round(
    live: Driver, pair: tuple[str, str], context: list[int], session: str
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    prefill, decode = pair
    request = message(context, session=session, source=decode, max_tokens=8)
    (first,) = await live.chunks(PREFILL_ENDPOINT, prefill, request)
    request = message(context + first["token_ids"], session=session, source=prefill, max_tokens=7)
    chunks = await live.chunks(GENERATE_ENDPOINT, decode, request)
    return first["token_ids"] + tokens(chunks), first, chunks[-1]


async def others_need_all_memory(live: Driver, worker: str) -> None:
    """Fill store and device, so that nothing of ended sessions is left."""
    for seed in range(12):
        context = [(seed + 13 * position) % 400 + 7 for position in range(800)]
        await local_round(live, worker, context, f"other-{seed}")
        await live.kv(worker, op="release_session", session_id=f"other-{seed}")


@pytest.mark.long
@pytest.mark.parametrize("mixed", ["rl", "lr", "rrl"])
async def test_all_routes_give_the_same_tokens_and_move_what_is_missing(
    live: Driver, pair: tuple[str, str], mixed: str
) -> None:
    """Six rounds. Others need all memory between the sessions, so that none lives on what another left."""
    outs: dict[str, list[list[int]]] = {}
    for routes in ("l" * 6, "r" * 6, (mixed * 6)[:6]):
        context, held, outs[routes] = [*PROMPT], 0, []
        for number, route in enumerate(routes):
            if route == "l":
                out, last = await local_round(live, pair[1], context, routes)
                assert last["ampd"]["cached_tokens"] == held
            else:
                out, first, last = await remote_round(live, pair, context, routes)
                assert "finish_reason" not in first
                assert first["ampd"]["cached_tokens"] == held, "the prefill worker computes the increment alone"
                assert (first["ampd"]["kv_read_bytes"] > 0) == (first["ampd"]["kv_read_tokens"] > 0)
                assert (first["ampd"]["kv_read_tokens"] > 0) == ("l" in routes[:number][-1:])
                assert last["ampd"]["kv_read_tokens"] == len(context) // 16 * 16 - held, "and the increment comes back"
                assert last["ampd"]["cached_tokens"] == len(context) // 16 * 16
            assert last["finish_reason"] == "length"
            held = last["ampd"]["held_tokens"]
            assert held == (len(context) + len(out) - 1) // 16 * 16
            outs[routes].append(out)
            context += out + [(number + 11 * position) % 400 + 7 for position in range(40)]
        for worker in pair:
            await live.kv(worker, op="release_session", session_id=routes)
            await others_need_all_memory(live, worker)
    first_outs, *others = outs.values()
    assert all(other == first_outs for other in others)
    assert all(len(out) == 8 for out in first_outs)


async def test_a_chunk_is_as_in_dynamo(live: Driver, pair: tuple[str, str]) -> None:
    out, last = await local_round(live, pair[1], PROMPT[:100], "chunks")
    assert last["index"] == 0
    assert last["completion_usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "total_tokens": 108,
        "prompt_tokens_details": {"cached_tokens": 96 if last["ampd"]["cached_tokens"] else 0},
    }
    assert set(last["ampd"]) - {"reload_s"} == {
        "held_tokens",
        "cached_tokens",
        "hit_tokens",
        "queued_s",
        "prefill_s",
        "kv_read_tokens",
        "kv_read_bytes",
        "kv_read_s",
        "decode_batch",
        "decode_context_tokens",
    }
    assert len(out) == 8


async def test_windows_queue_and_held_sessions_are_published(live: Driver, pair: tuple[str, str]) -> None:
    prefill, decode = pair
    await remote_round(live, pair, PROMPT[:200], "published")

    def complete(views: list[Any]) -> bool:
        seen = {view.worker_id: view for view in views}
        return bool(
            seen[prefill].ttft.count
            and seen[decode].itl.count
            and seen[prefill].held_tokens.get("published") == 192
            and seen[decode].held_tokens.get("published") == 192
            and not seen[prefill].queue
        )

    await live.until(complete)
    view = await live.view(decode)
    assert view.role is Role.DECODE
    assert view.itl.mean_s > 0.005
    assert await live.kv(decode, op="release_session", session_id="published") == {"released_tokens": 192}
    await live.until(lambda views: all("published" not in v.held_tokens for v in views if v.worker_id == decode))


async def test_taking_over_without_decoding(live: Driver, pair: tuple[str, str]) -> None:
    prefill, decode = pair
    context = [(41 * position) % 500 + 6 for position in range(320)]
    request = message(context, session="over", max_tokens=1)
    (first,) = await live.chunks(PREFILL_ENDPOINT, prefill, request)
    request = message(context + first["token_ids"], session="over", source=prefill, max_tokens=0)
    (chunk,) = await live.chunks(GENERATE_ENDPOINT, decode, request)
    assert chunk["token_ids"] == []
    assert chunk["ampd"]["held_tokens"] == 320
    assert chunk["ampd"]["kv_read_tokens"] == 320


async def test_a_round_whose_source_has_gone_is_recomputed(live: Driver, pair: tuple[str, str]) -> None:
    context = [*reversed(PROMPT)]
    expected, _ = await local_round(live, pair[1], context, "gone-a")
    request = message(context + expected[:1], session="gone-b", source="dead", max_tokens=7)
    await live.kv(pair[1], op="release_session", session_id="gone-a")
    await others_need_all_memory(live, pair[1])
    chunks = await live.chunks(GENERATE_ENDPOINT, pair[1], request)
    assert tokens(chunks) == expected[1:]
    assert "dead" in chunks[-1]["ampd"]["kv_read_error"]


async def test_a_refusal_keeps_its_status(live: Driver, pair: tuple[str, str]) -> None:
    with pytest.raises(Exception, match="ampd-error") as caught:
        await live.chunks(GENERATE_ENDPOINT, pair[1], message([5] * 5000, session="long", max_tokens=8))
    refusal = parse_error(str(caught.value))
    assert refusal is not None
    assert refusal[0] == 400
    assert "5000 tokens" in refusal[1]


@pytest.mark.parametrize("stage", ["waiting", "fetching", "computing", "decoding"])
async def test_a_client_that_goes_leaves_nothing_behind(live: Driver, pair: tuple[str, str], stage: str) -> None:
    """Ten minutes' work of a stage is given up long before its end; the worker is empty and serves the next round."""
    prefill, decode = pair
    worker, endpoint = (decode, GENERATE_ENDPOINT) if stage == "decoding" else (prefill, PREFILL_ENDPOINT)
    session, used = f"bye-{stage}", (await live.view(decode)).kv_used_tokens
    if stage == "fetching":
        # The decode worker holds a long context whose transfer takes ten minutes, but got it in quick pieces.
        for end in range(500, 1601, 500):
            await live.chunks(GENERATE_ENDPOINT, decode, message(LONG[:end], session=session, max_tokens=1))
        request = message(LONG, session=session, source=decode, max_tokens=8)
    elif stage == "decoding":
        request = message(LONG[:300], session=session, max_tokens=3000)
    else:
        request = message([*reversed(LONG)], session=session, max_tokens=8)
    blocker = Context()
    blocking = None
    if stage == "waiting":
        blocking = asyncio.create_task(consume(live, endpoint, worker, message([7] * 1500, session="block"), blocker))
        await live.until(lambda views: [len(v.queue) for v in views if v.worker_id == worker] == [1])
    context = Context()
    calling = asyncio.create_task(consume(live, endpoint, worker, request, context))
    if stage == "decoding":
        await live.until(lambda views: [v.decode_batch for v in views if v.worker_id == worker] == [1])
    else:
        count = 2 if stage == "waiting" else 1
        await live.until(lambda views: [len(v.queue) for v in views if v.worker_id == worker] == [count])
        await asyncio.sleep(0.2)
    context.stop_generating()
    count = 1 if stage == "waiting" else 0
    await live.until(
        lambda views: [(len(v.queue), v.decode_batch) for v in views if v.worker_id == worker] == [(count, 0)]
    )
    blocker.stop_generating()
    await asyncio.wait({calling, *([blocking] if blocking else [])}, timeout=PATIENCE_S)
    await live.until(lambda views: [len(v.queue) for v in views if v.worker_id == worker] == [0])
    if stage == "fetching":
        released = (await live.kv(decode, op="release_session", session_id=session))["released_tokens"]
        assert released == 1488, "its lease went with the reader"
        await live.until(lambda views: next(v.kv_used_tokens for v in views if v.worker_id == decode) <= used)
    async with asyncio.timeout(PATIENCE_S):
        (first,) = await live.chunks(PREFILL_ENDPOINT, prefill, message(PROMPT[:50], session="next", max_tokens=8))
    assert len(first["token_ids"]) == 1


async def consume(live: Driver, endpoint: str, worker: str, request: Any, context: Context) -> None:
    try:
        async for _ in await live.call(endpoint, worker, request, context):
            pass
    except Exception:
        return  # a stream that is given up may end in an error


async def test_sigterm_drains(live: Driver) -> None:
    """In-flight rounds finish, the KV stays readable meanwhile, newcomers are refused, the view goes at once."""
    # With a lease this long, only the worker itself can take its view away in time.
    worker = await live.start(Role.DECODE, "--lease-s", "60")
    name = live.graph.processes[worker]
    stream = await live.call(GENERATE_ENDPOINT, worker, message(PROMPT, session="drain", max_tokens=400))
    out = [await anext(aiter(stream))]
    os.kill(live.graph.pid(name), signal.SIGTERM)
    await live.until(lambda views: worker not in {view.worker_id for view in views})
    assert name not in live.graph.supervisor.ended()
    client = await live.client(GENERATE_ENDPOINT)
    await until(lambda: int(worker, 16) not in client.instance_ids())
    assert name not in live.graph.supervisor.ended()
    assert (await live.kv(worker, op="match", keys=[]))["matched"] == 0
    out += [chunk async for chunk in stream]
    assert len(tokens(out)) == 400
    assert "exit code 0:" in await live.graph.until_ended(name)


async def test_the_lease_of_a_killed_worker_ends(live: Driver) -> None:
    worker = await live.start(Role.PREFILL, *SHORT_LEASE)
    os.kill(live.graph.pid(live.graph.processes[worker]), signal.SIGKILL)
    await live.until(lambda views: worker not in {view.worker_id for view in views})


async def held_by(worker: str, session: str, watcher: Watcher) -> int | None:
    """How many tokens of the session a worker holds, by the next view that it publishes."""
    while True:
        event = await anext(watcher)
        if isinstance(event, WorkerUpdated) and event.view.worker_id == worker:
            return event.view.held_tokens.get(session)


async def test_idle_sessions_are_released(live: Driver) -> None:
    worker = await live.start(Role.DECODE, "--session-ttl-s", "2")
    # As events, because a busy machine may let this test look only when the session has gone.
    watcher = live.store.watch()
    await watcher.start()
    await local_round(live, worker, PROMPT, "idle")
    for expected in (496, None):
        async with asyncio.timeout(PATIENCE_S):
            while await held_by(worker, "idle", watcher) != expected:
                pass
    await watcher.aclose()


async def test_a_worker_outlives_its_redis(live: Driver) -> None:
    with EmbeddedRedis() as redis:
        store = await open_store(redis.url, live.graph.namespace)
        own = replace(live, store=store)
        worker = await own.start(Role.DECODE, "--state-url", redis.url)
        redis.stop()
        out, _ = await local_round(own, worker, PROMPT, "lost")
        assert len(out) == 8
        redis.start()
        view = await own.until(lambda views: [v for v in views if v.worker_id == worker])
        assert view[0].held_tokens == {"lost": 496}
        await store.close()


async def test_a_lost_engine_ends_the_worker(live: Driver) -> None:
    worker = await live.start(Role.DECODE, module="tests.harness.breaking_worker")
    name = live.graph.processes[worker]
    with pytest.raises(Exception, match=r"no more|ampd-error 502|Disconnected|closed"):
        await live.chunks(GENERATE_ENDPOINT, worker, message(PROMPT, session="lost", max_tokens=8))
    assert "exit code 1:" in await live.graph.until_ended(name)
    # Dynamo's own threads may still log after the worker's last line.
    lines = live.graph.log(name).splitlines()
    assert any(line.startswith("ampd worker: the modelled engine failed") for line in lines), lines
    await live.until(lambda views: worker not in {view.worker_id for view in views})


async def test_a_worker_whose_engine_hangs_leaves_and_ends(live: Driver) -> None:
    worker = await live.start(Role.DECODE, module="tests.harness.hanging_worker")
    with pytest.raises(Exception, match=r"ampd-error 502: the engine hangs|Disconnected|closed"):
        await live.chunks(GENERATE_ENDPOINT, worker, message(PROMPT, session="hung", max_tokens=8))
    await live.until(lambda views: worker not in {view.worker_id for view in views})
    name = live.graph.processes[worker]
    assert "exit code 1:" in await live.graph.until_ended(name)
    assert any(line.startswith("ampd worker: the engine hangs") for line in live.graph.log(name).splitlines())
