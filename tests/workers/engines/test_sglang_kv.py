"""The KV exchange between two real SGLang engines: exactly one engine's tokens, and no history computed twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, partialmethod
from typing import Any

import pytest
from msgspec.structs import replace

from ampd.keys import page_keys
from ampd.perf.corrections import CorrectedModel
from ampd.wire import KvReply, KvRequest
from workers.engines.base import EngineError, EngineLoad, EngineRequest

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.ampd.policies.routing_lab import PlainModel, SlowHost
from tests.harness.sglang_pair import (
    GREEDY,
    PAGE,
    POOL_TOKENS,
    STOPPING,
    TIMEOUT_S,
    LocalPeers,
    Pair,
    Round,
    Script,
    SwitchedTransport,
    empty,
    idle,
    local_round,
    play,
    read,
    remote_round,
    rid,
    run,
    text,
)
from tests.waiting import PATIENCE_S, until
from workers.engines.sglang import SglangEngine
from workers.kv.nixl_transport import NixlTransport
from workers.kv.shared import NEIGHBOUR_BYTES, Records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
]


async def one_engine(pair: Pair, script: Script, **request: Any) -> list[list[int]]:
    """The script on one engine alone, which is emptied afterwards."""
    tokens, rounds = await play(script, lambda _: partial(local_round, pair, f"alone-{script.seed}", **request))
    assert rounds[0].decode.cached_tokens == 0
    await pair.decode.kv.release_session(f"alone-{script.seed}")
    await empty(pair.prefill, pair.decode)
    return tokens


def route(pair: Pair, kind: str, session: str, number: int, **request: Any) -> Any:
    remote = kind == "remote" or (kind == "alternating" and number % 2 == 0)
    return partial(remote_round if remote else local_round, pair, session, **request)


@pytest.mark.parametrize(
    "kind", ["alternating", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("remote", "local"))]
)
async def test_every_route_gives_the_tokens_of_one_engine(pair: Pair, kind: str) -> None:
    script = Script(seed=1)
    alone = await one_engine(pair, script)
    tokens, rounds = await play(script, lambda number: route(pair, kind, kind, number))
    assert tokens == alone
    check_nothing_computed_twice(script, rounds)
    await empty(pair.prefill, pair.decode)


async def test_rounds_that_end_by_a_stop_token_give_the_tokens_of_one_engine(pair: Pair) -> None:
    """Under the overlap schedule each engine then computes one step too many."""
    script = Script(seed=4)
    alone = await one_engine(pair, script, **STOPPING)
    tokens, rounds = await play(script, lambda number: route(pair, "alternating", "s", number, **STOPPING))
    assert tokens == alone
    assert len({len(served.tokens) for served in rounds}) > 2
    check_nothing_computed_twice(script, rounds)
    await empty(pair.prefill, pair.decode)


def check_nothing_computed_twice(script: Script, rounds: list[Round]) -> None:
    """By the engines' own counts: what was history is not computed again, on either side."""
    history = 0
    for number, served in enumerate(rounds):
        prompt = history + script.incr_tokens[number]
        computed_at_decode = served.decode.prompt_tokens - served.decode.cached_tokens
        if served.prefill is None:
            assert computed_at_decode <= script.incr_tokens[number] + PAGE
        else:
            assert served.prefill.prompt_tokens == prompt
            assert prompt - served.prefill.cached_tokens <= script.incr_tokens[number] + PAGE
            assert computed_at_decode <= PAGE + 1
            assert served.to_prefill is not None
            assert served.to_decode is not None
            assert served.to_prefill.error is None
            assert served.to_decode.error is None
            assert served.to_decode.tokens >= script.incr_tokens[number] - PAGE
        history = prompt + len(served.tokens)


@pytest.mark.long
async def test_pages_that_were_not_moved_change_the_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(seed=2)
    alone = await one_engine(pair, script)
    for engine in (pair.prefill, pair.decode):
        monkeypatch.setattr(engine.kv.store, "_has_checksums", False)
    monkeypatch.setattr(SwitchedTransport, "moves", False)
    tokens, rounds = await play(script, lambda number: route(pair, "remote", "unmoved", number))
    assert tokens != alone
    # The engines did take those pages for the history: what failed is the content, not the books.
    assert rounds[1].decode.prompt_tokens - rounds[1].decode.cached_tokens <= PAGE + 1
    await empty(pair.prefill, pair.decode)


async def test_checksums_show_pages_that_were_not_moved(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = text(25, 300)
    alone = await run(pair.decode, "s", prompt, 12)
    monkeypatch.setattr(SwitchedTransport, "moves", False)
    request_id = rid()
    fetched = await read(pair.prefill, request_id, prompt, "D", 60.0)
    assert fetched.tokens == 0
    assert "other checksums" in str(fetched.error)
    assert (await run(pair.prefill, "s", prompt, 12, request_id)).token_ids == alone.token_ids
    await empty(pair.prefill, pair.decode)


async def test_records_of_a_neighbour_are_loaded_where_they_lie(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(seed=5)
    alone = await one_engine(pair, script)
    monkeypatch.setattr(SwitchedTransport, "moves", False)
    in_place: list[str] = []
    stores = [engine.kv.store for engine in (pair.prefill, pair.decode)]
    for store in stores:
        monkeypatch.setattr(store, "host", "here")
        allow = store._links.allow

        async def note(
            request_id: str, records: dict[str, Records], *more: Any, _allow: Any = allow, **way: Any
        ) -> None:
            if any(offset >= NEIGHBOUR_BYTES for of in records.values() for offset in of.offsets):
                in_place.append(request_id)
            await _allow(request_id, records, *more, **way)

        monkeypatch.setattr(store._links, "allow", note)

    def late_copies(number: int) -> Any:
        for store in stores:
            store._neighbours._copying.submit(time.sleep, 0.5)
        return route(pair, "remote", "neighbours", number)

    tokens, rounds = await play(script, late_copies)
    assert tokens == alone
    check_nothing_computed_twice(script, rounds)
    # Each round's prefill loads the history from D, but for the first one, and its decode the increment from P.
    assert len(in_place) >= 2 * len(rounds) - 1
    await until(lambda: not any(store._lent or store.directory._leases for store in stores))
    await empty(pair.prefill, pair.decode)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_load_that_fails_is_computed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    prompt, store = text(26, 300), pair.decode.kv.store
    first = await run(pair.decode, "s", prompt, 12)
    await store.settle(TIMEOUT_S)
    await until(lambda: idle(pair.decode))
    allow = store._links.allow

    async def allow_misaligned(request_id: str, records: dict[str, Records], _until_s: float) -> None:
        misplaced = {pool: Records(of.keys, [at + 1 for at in of.offsets]) for pool, of in records.items()}
        await allow(request_id, misplaced)

    with monkeypatch.context() as patch:
        patch.setattr(store._links, "allow", allow_misaligned)
        options = {**GREEDY, "sampling_options": {"n": choices, "temperature": 0.0}}
        outputs = [output async for output in pair.decode.generate(EngineRequest(rid(), "s", prompt, 12, options))]
    for index in range(choices):
        assert [token for output in outputs if output.index == index for token in output.token_ids] == first.token_ids
    assert {(output.cached_tokens, output.reloaded_tokens) for output in outputs if output.finish_reason} == {(0, 0)}
    await until(lambda: idle(pair.decode))
    again = await run(pair.decode, "s", prompt, 12)
    assert (again.token_ids, again.reloaded_tokens) == (first.token_ids, (len(prompt) - 1) // PAGE * PAGE)
    await empty(pair.prefill, pair.decode)


async def test_a_request_without_output_brings_kv_to_the_device(pair: Pair) -> None:
    prompt = text(28, 300)
    pages = (len(prompt) - 1) // PAGE * PAGE
    first = await run(pair.decode, "s", prompt, 12)
    await until(lambda: idle(pair.decode))
    announced = await run(pair.decode, "s", prompt, 0)
    assert (announced.token_ids, announced.cached_tokens, announced.reloaded_tokens) == ([], pages, pages)
    again = await run(pair.decode, "s", prompt, 12)
    assert (again.token_ids, again.cached_tokens, again.reloaded_tokens) == (first.token_ids, pages, 0)
    await empty(pair.prefill, pair.decode)


async def test_what_is_computed_sooner_than_it_is_copied_is_not_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(29, 300)
    first = await run(pair.decode, "s", prompt, 12)
    await pair.decode.kv.store.settle(TIMEOUT_S)
    for model, loaded in ((SlowHost(), 0), (PlainModel(), 288)):
        await until(lambda: idle(pair.decode))
        monkeypatch.setattr(pair.decode, "_model", CorrectedModel(model, pair.decode.info.parallelism))
        again = await run(pair.decode, "s", prompt, 12)
        assert again.token_ids == first.token_ids
        assert (again.cached_tokens, again.reloaded_tokens) == (loaded, loaded)
    await empty(pair.prefill, pair.decode)


async def test_several_choices_load_their_prompt_once(pair: Pair) -> None:
    prompt = text(29, 300)
    pages = (len(prompt) - 1) // PAGE * PAGE
    await run(pair.decode, "s", prompt, 12)
    await until(lambda: idle(pair.decode))
    options = {"sampling_options": {"n": 2, "temperature": 0.0}}
    request = EngineRequest(rid(), "s", prompt, 12, options)
    finished = [output async for output in pair.decode.generate(request) if output.finish_reason]
    assert [(output.cached_tokens, output.reloaded_tokens) for output in finished] == [(pages, pages)] * 2
    await empty(pair.prefill, pair.decode)


async def test_a_client_that_leaves_before_the_engine_has_its_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, store = text(30, 300), pair.decode.kv.store
    await run(pair.decode, "s", prompt, 12)
    await until(lambda: idle(pair.decode))
    links, asked = store._links, asyncio.Event()
    allow = links.allow

    async def allowed_and_then_silent(*of_request: Any) -> None:
        await allow(*of_request)
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(links, "allow", allowed_and_then_silent)
    round_ = asyncio.create_task(run(pair.decode, "s", prompt, 12))
    await asked.wait()
    round_.cancel()
    with pytest.raises(asyncio.CancelledError):
        await round_
    assert pair.decode.load() == EngineLoad(0, 0, 0)
    await until(lambda: not store._known)
    monkeypatch.undo()
    await empty(pair.prefill, pair.decode)


async def test_tenants_share_no_kv(pair: Pair) -> None:
    prompt = text(26, 300)
    pages = (len(prompt) - 1) // PAGE * PAGE
    first = await run(pair.decode, "acme", prompt, 8, tenant="acme")
    assert first.cached_tokens == 0
    for tenant, cached in (("spy", 0), ("", 0), ("acme", pages)):
        output = await run(pair.decode, f"again-{tenant}", prompt, 8, tenant=tenant)
        assert (output.cached_tokens, output.token_ids) == (cached, first.token_ids)
    # On the device there is nothing now: what is found comes from the store, here or at the peer.
    await until(lambda: idle(pair.decode))
    for tenant, cached in (("new", 0), ("acme", pages)):
        request_id = rid()
        fetched = await read(pair.prefill, request_id, prompt, "D", 5.0, tenant=tenant)
        assert (fetched.error, fetched.tokens) == (None, cached)
        elsewhere = await run(pair.prefill, f"peer-{tenant}", prompt, 8, request_id, tenant=tenant)
        here = await run(pair.decode, f"stored-{tenant}", prompt, 8, tenant=tenant)
        for output in (elsewhere, here):
            assert (output.cached_tokens, output.reloaded_tokens) == (cached, cached)
            assert output.token_ids == first.token_ids
    await empty(pair.prefill, pair.decode)


async def test_a_rewritten_context_keeps_its_valid_prefix(pair: Pair) -> None:
    first = text(31, 600)
    rewritten = first[:400] + text(32, 300)
    alone = await run(pair.decode, "alone", rewritten, 12)
    await empty(pair.prefill, pair.decode)
    before = await remote_round(pair, "s", first, 12)
    assert before.decode.cached_tokens >= len(first) - PAGE
    after = await remote_round(pair, "s", rewritten, 12)
    assert after.tokens == alone.token_ids
    assert after.prefill is not None
    assert 400 - PAGE < after.prefill.cached_tokens <= 400
    assert await pair.decode.kv.held_tokens("s") == (len(rewritten) + 11) // PAGE * PAGE
    await empty(pair.prefill, pair.decode)


async def failing(kind: str, worker_id: str, request: KvRequest) -> None:
    if kind == "gone":
        raise ConnectionError(f"no worker {worker_id}")
    if kind == "silent":
        await asyncio.sleep(60)
    if kind == "no unlease" and request["op"] == "unlease":
        raise ConnectionError("vanished in the middle")


@pytest.mark.parametrize("kind", ["gone", "silent", "no unlease"])
async def test_a_failed_read_is_recomputed(pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    prompt = text(41, 500)
    alone = await run(pair.decode, "alone", prompt, 12)
    await empty(pair.prefill, pair.decode)
    await run(pair.decode, "s", prompt, 1)
    monkeypatch.setattr(pair.peers, "before", partial(failing, kind))
    request_id = rid()
    fetched = await read(pair.prefill, request_id, prompt, "D", 0.5)
    assert fetched.tokens == 0
    assert fetched.error
    output = await run(pair.prefill, "s", prompt, 12, request_id)
    assert output.token_ids == alone.token_ids
    assert output.cached_tokens == 0
    monkeypatch.undo()
    await empty(pair.prefill, pair.decode)


async def test_another_kind_of_pool_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = text(51, 200)
    await run(pair.decode, "s", prompt, 1)
    store = pair.prefill.kv.store
    monkeypatch.setattr(store, "_geometry", replace(store.geometry, fingerprint="another model"))
    fetched = await read(pair.prefill, rid(), prompt, "D", 60.0)
    assert fetched.tokens == 0
    assert fetched.error is not None
    assert "weights or settings differ" in fetched.error
    monkeypatch.undo()
    pair.connect()  # it forgets the refusal
    await empty(pair.prefill, pair.decode)


@pytest.mark.long
async def test_a_session_comes_back_from_the_store(pair: Pair) -> None:
    script = Script(seed=3)
    alone = await one_engine(pair, script)

    async def after_a_flush(prompt: list[int], new: int) -> Round:
        # A flush gives up what is still being stored.
        await pair.decode.kv.store.settle(TIMEOUT_S)
        await until(lambda: idle(pair.decode))
        return await local_round(pair, "s", prompt, new)

    tokens, rounds = await play(script, lambda _: after_a_flush)
    assert tokens == alone
    for played in rounds:
        assert played.decode.reloaded_tokens == played.decode.cached_tokens
        assert (played.decode.reload_s > 0) == (played.decode.reloaded_tokens > 0)
    check_nothing_computed_twice(script, rounds)
    await empty(pair.prefill, pair.decode)


@pytest.mark.long
async def test_more_sessions_than_the_device_holds_are_not_computed_again(pair: Pair) -> None:
    prompts = {f"s{number:02}": text(100 + number, 1000) for number in range(24)}
    assert sum(map(len, prompts.values())) > 2 * POOL_TOKENS
    for session, prompt in prompts.items():
        await run(pair.decode, session, prompt, 4)
    for session, prompt in prompts.items():
        again = await run(pair.decode, session, prompt + text(99, 20), 4)
        assert again.cached_tokens >= len(prompt) // PAGE * PAGE
    await empty(pair.prefill, pair.decode)


async def test_a_decode_batch_does_not_wait_for_a_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole request decodes on the worker that reads, while nothing of the read arrives."""
    prompt = text(161, 500)
    expected = await run(pair.prefill, "s", prompt, 12)
    starts: list[Callable[[], None]] = []
    monkeypatch.setattr(SwitchedTransport, "read", partialmethod(stalled_read, starts))
    batch: Any = pair.decode.generate(EngineRequest(rid(), "other", text(162, 100), 100, GREEDY))
    await anext(batch)
    request_id = rid()
    fetch = asyncio.create_task(read(pair.decode, request_id, prompt, "P", 120.0))
    await until(lambda: starts)
    parts = [part async for part in batch]
    assert sum(len(part.token_ids) for part in parts) == 99
    assert not fetch.done()
    starts.pop()()
    fetched = await fetch
    assert (fetched.error, fetched.tokens) == (None, 499 // PAGE * PAGE)
    output = await run(pair.decode, "s", prompt, 12, request_id)
    assert output.token_ids == expected.token_ids
    assert output.cached_tokens == output.reloaded_tokens == fetched.tokens
    assert output.reload_s > 0
    await empty(pair.prefill, pair.decode)


def stalled_read(
    transport: SwitchedTransport, starts: list[Callable[[], None]], *blocks: Any
) -> tuple[Future[int], Callable[[], None]]:
    """A read that begins when the function that it adds to `starts` is called."""
    done: Future[int] = Future()

    def start() -> None:
        read, _ = NixlTransport.read(transport, *blocks)
        read.add_done_callback(lambda ended: done.set_result(ended.result()))

    starts.append(start)
    return done, lambda: None


async def test_ended_sessions_leave_no_trace(pair: Pair) -> None:
    prompts = {f"s{number}": text(80 + number, 250) for number in range(4)}
    for session, prompt in prompts.items():
        await remote_round(pair, session, prompt, 4)
    await until(lambda: pair.held["D"].get("s3") == 253 // PAGE * PAGE)
    assert pair.held["P"]["s3"] == 250 // PAGE * PAGE
    for session in ("s2", "s0", "s3", "s1"):
        assert await pair.decode.kv.release_session(session) == 253 // PAGE * PAGE
        assert await pair.prefill.kv.release_session(session) == 250 // PAGE * PAGE
    assert pair.held["D"]["s1"] == 0
    assert pair.held["P"]["s1"] == 0
    assert pair.decode.kv.session_tokens == 0
    assert pair.decode.load().kv_used_tokens == 0
    # Nothing is locked on the device: all of it can be used.
    await empty(pair.prefill, pair.decode)
    whole = text(89, POOL_TOKENS - 200)
    assert len((await run(pair.decode, "", whole, 2)).token_ids) == 2
    await empty(pair.prefill, pair.decode)


async def test_a_prefix_shared_by_sessions_outlives_the_first(pair: Pair) -> None:
    shared = text(91, 320)
    await run(pair.decode, "first", shared + text(92, 100), 4)
    await run(pair.decode, "second", shared + text(93, 100), 4)
    await pair.decode.kv.release_session("first")
    prompt = shared + text(93, 100) + text(94, 50)
    request_id = rid()
    fetched = await read(pair.prefill, request_id, prompt, "D", 60.0)
    assert fetched.tokens == 420 // PAGE * PAGE
    await pair.prefill.kv.unprotect(request_id)
    await empty(pair.prefill, pair.decode)


async def test_closing_the_stream_aborts_and_frees(pair: Pair) -> None:
    prompt = text(131, 400)
    stream: Any = pair.decode.generate(EngineRequest(rid(), "s", prompt, 5000, GREEDY))
    for _ in range(3):
        await anext(stream)
    assert pair.decode.load().running_requests == 1
    assert pair.decode.load().running_context_tokens >= 402
    await stream.aclose()
    assert pair.decode.load().running_requests == 0
    manager: Any = pair.decode._manager
    await until(lambda: not manager.rid_to_state)
    assert await pair.decode.kv.held_tokens("s") < 2000, "it was not computed to its end"
    await pair.decode.kv.release_session("s")
    await until(lambda: emptied(pair.decode))
    await empty(pair.prefill, pair.decode)


async def emptied(engine: SglangEngine) -> bool:
    return engine.kv.session_tokens == 0


async def test_a_request_may_load_until_it_ends(pair: Pair) -> None:
    """SGLang computes a request again that it had to interrupt while it decoded."""
    prompt, store, request_id = text(133, 300), pair.decode.kv.store, rid()
    await run(pair.decode, "s", prompt, 4)
    await until(lambda: idle(pair.decode))
    stream: Any = pair.decode.generate(EngineRequest(request_id, "s", prompt, 5000, GREEDY))
    for _ in range(8):
        await anext(stream)
    assert list(store._known) == [request_id]
    assert request_id in store.directory._requests
    await stream.aclose()
    await until(lambda: not store._known and not store.directory._requests)
    await empty(pair.prefill, pair.decode)


@pytest.mark.long
async def test_parallel_sessions_on_both_routes(pair: Pair) -> None:
    scripts = [Script(seed=140 + number, incr_tokens=(301, 80, 120)) for number in range(4)]
    alone = [await one_engine(pair, script) for script in scripts]
    played = await asyncio.gather(
        *(play(script, partial(route, pair, "alternating", f"s{script.seed}")) for script in scripts)
    )
    assert [tokens for tokens, _ in played] == alone
    await empty(pair.prefill, pair.decode)


@pytest.mark.long
async def test_a_killed_peer_means_recompute(pair: Pair) -> None:
    prompt = text(151, 800)
    alone = await run(pair.decode, "alone", prompt, 12)
    await empty(pair.decode)
    with_victim = Pair(SglangEngine(pair.prefill._settings), pair.decode, LocalPeers())
    victim = with_victim.prefill
    try:
        await victim.start()
        with_victim.connect()
        await a_peer_is_killed(with_victim, prompt, alone.token_ids)
    finally:
        await victim.stop()
        pair.connect()
    await empty(pair.decode)


async def a_peer_is_killed(pair: Pair, prompt: list[int], expected: list[int]) -> None:
    await run(pair.prefill, "s", prompt, 1)
    lease = await pair.peers.call("P", KvRequest(op="lease", keys=page_keys(prompt, PAGE, tenant=""), ttl_s=30.0), 5.0)
    assert pair.prefill._sglang is not None
    for process in pair.prefill._sglang.children:
        process.kill()
    assert "ended by itself" in await asyncio.wait_for(pair.prefill.wait_lost(), PATIENCE_S)

    async def from_memory(_worker_id: str, request: KvRequest, _timeout_s: float) -> KvReply:
        if request["op"] == "lease":
            return lease
        raise ConnectionError("the worker is gone")

    pair.peers.call = from_memory
    request_id = rid()
    fetched = await read(pair.decode, request_id, prompt, "P", 3.0)
    assert fetched.tokens == 0
    assert fetched.error
    output = await run(pair.decode, "s", prompt, 12, request_id)
    assert output.token_ids == expected
    with pytest.raises(EngineError, match="ended"):
        await run(pair.prefill, "s", prompt, 1)
