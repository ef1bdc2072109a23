"""A round that begins to decode is published at once, wherever it was prefilled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import ampd.keys
import workers.publisher
from ampd.keys import pack_tokens
from ampd.state.store import RoleAssigned
from ampd.types import Parallelism, WorkerView
from tests.memory_store import MemoryStore
from tests.waiting import PATIENCE_S, until
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import Recorded, chunks_of, message
from workers.engines.base import EngineError
from workers.round_service import RoundService


async def is_decoding(store: MemoryStore) -> bool:
    return [view.decode_batch for view in await store.snapshot()] == [1]


@pytest.mark.parametrize("source", [None, "gone"], ids=["prefilled here", "prefilled elsewhere"])
async def test_a_round_that_begins_to_decode_is_published(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    # Only changes are published, neither samples nor heartbeats.
    monkeypatch.setattr(workers.publisher, "SAMPLE_INTERVAL_S", 60.0)
    store, lab = MemoryStore(), Lab(model_folder, Times(step_s=0.02))
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times, store=store, lease_s=300.0)
        publisher, rounds = parts.publisher, parts.rounds
        await publisher.start()
        call: Any = message(prompt_of(40), 3000, "s", source=source)
        async with aclosing(chunks_of(rounds.generate, call)) as chunks:
            await anext(chunks)
            await until(lambda: is_decoding(store))
            # The report of a round that ends meanwhile counts the rounds that stay.
            short: Any = message(prompt_of(40, seed=2), 4, "short", source=source)
            async with aclosing(chunks_of(rounds.generate, short)) as others:
                report = [chunk async for chunk in others][-1]["ampd"]
            assert report["decode_batch"] == 1
            assert report["decode_context_tokens"] > 40
        await publisher.retire()


@pytest.mark.parametrize("kind", ["generate", "prefill"])
async def test_a_prefill_leaves_the_queue_with_its_first_token(model_folder: Path, kind: str) -> None:
    """Coordinators hear so once, while the round goes on, because no published queue may have listed the prefill."""
    finished: list[str] = []

    class Store(MemoryStore):
        async def publish_worker(
            self, view: WorkerView, lease_s: float, done: Sequence[str] = ()
        ) -> RoleAssigned | None:
            finished.extend(done)
            return await super().publish_worker(view, lease_s, done)

    lab = Lab(model_folder, Times(step_s=0.02))
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times, store=Store(), lease_s=300.0)
        await parts.publisher.start()
        call: Any = message(prompt_of(40), 3000, "s")
        async with aclosing(chunks_of(getattr(parts.rounds, kind), call)) as chunks:
            await anext(chunks)
            await until(lambda: finished == ["s"])
            assert parts.rounds.running == (kind == "generate")
        await until(lambda: parts.rounds.running == 0)
        assert parts.changes.finished_tasks() == []
        await parts.publisher.retire()
    assert finished == ["s"]


async def test_an_announcement_brings_the_kv_to_the_device(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D", capacity=720) as engine:
        parts = worker_parts("D", engine, lab.times)

        async def tiers(session: str, seed: int, tokens: int, new: int) -> dict[str, int]:
            """Where the KV of a prompt was."""
            call: Any = message(prompt_of(tokens, seed), new, session)
            async with aclosing(chunks_of(parts.rounds.generate, call)) as chunks:
                last = [chunk async for chunk in chunks][-1]
            return {tier: count for tier, count in last["ampd"]["hit_tokens"].items() if count}

        await tiers("s", 1, 640, 4)
        await tiers("other", 2, 640, 4)
        assert parts.read_view().ttft.count == 2
        assert (await tiers("s", 1, 640, 0))["store"] > 500
        assert parts.read_view().ttft.count == 2
        assert await tiers("s", 1, 700, 4) == {"device": 640}


async def test_tenants_share_no_kv(model_folder: Path) -> None:
    prompt = prompt_of(800)
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as decode, lab.engine("P") as prefill:
        here = worker_parts("D", decode, lab.times).rounds
        there = worker_parts("P", prefill, lab.times).rounds

        async def tiers(rounds: RoundService, session: str, tenant: str, source: str | None = None) -> dict[str, int]:
            """Where the KV of the prompt was, by the worker's report; the usage counts the same."""
            call: Any = message(prompt, 4, session, source=source, routing={"cache_salt": tenant})
            async with aclosing(chunks_of(rounds.generate, call)) as chunks:
                last = [chunk async for chunk in chunks][-1]
            hits: dict[str, int] = last["ampd"]["hit_tokens"]
            kept = sum(hits[tier] for tier in ("device", "store", "peer"))
            assert last["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == kept
            return {tier: tokens for tier, tokens in hits.items() if tokens}

        assert await tiers(here, "first", "acme") == {}
        assert await tiers(here, "other", "spy") == await tiers(here, "nobody's", "") == {}
        assert await tiers(here, "second", "acme") == {"device": 784}
        assert await tiers(there, "reader", "third", "D") == {"recomputed": 784}
        assert await tiers(there, "reader", "acme", "D") == {"peer": 784}


async def test_each_page_of_a_round_is_hashed_once(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the round, the engine and the read of its history together."""
    hashed: Counter[bytes] = Counter()

    def counted(parent: bytes) -> Any:
        hashed[parent] += 1
        return sha256(parent)

    lab, prompt = Lab(model_folder, Times()), prompt_of(800)
    async with lab.engine("D") as decode, lab.engine("P") as prefill:
        here = worker_parts("D", decode, lab.times).rounds
        there = worker_parts("P", prefill, lab.times).rounds
        monkeypatch.setattr(ampd.keys, "sha256", counted)
        for rounds, source in ((here, None), (there, "D")):
            hashed.clear()
            call: Any = message(prompt, 40, "s", source=source)
            async with aclosing(chunks_of(rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]
            # The last token has no KV.
            assert hashed.total() == len(hashed) == (len(prompt) + 40 - 1) // 16
            # The next round of the session: what is new of its prompt, the output of the round before included.
            hashed.clear()
            longer = [*prompt, *prompt_of(160, seed=3)]
            call = message(longer, 40, "s", source=source)
            async with aclosing(chunks_of(rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]
            assert hashed.total() == len(hashed) == (160 + 40 - 1) // 16
            # A session that has ended is forgotten.
            await rounds.kv({"op": "release_session", "session_id": "s"})
            hashed.clear()
            async with aclosing(chunks_of(rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]
            assert hashed.total() == (len(longer) + 40 - 1) // 16


@pytest.mark.parametrize(
    ("holder", "expected"), [("old", {"peer": 784}), ("gone", {"recomputed": 784}), (None, {"recomputed": 784})]
)
async def test_a_local_round_reads_its_history_from_the_owner_before(
    model_folder: Path, holder: str | None, expected: dict[str, int]
) -> None:
    """The session has moved. A read that fails costs the computation of the history, and never the round."""
    lab, first, second = Lab(model_folder, Times()), prompt_of(792), prompt_of(64, seed=2)
    async with lab.engine("old") as before, lab.engine("new") as after, lab.engine("other") as other:
        old, new, fresh = (
            worker_parts(name, engine, lab.times).rounds
            for name, engine in (("old", before), ("new", after), ("other", other))
        )

        async def play(rounds: RoundService, prompt: list[int], **more: Any) -> tuple[list[int], Any]:
            call: Any = {**message(prompt, 8, "s", hist=792 if more else 0), **more}
            async with aclosing(chunks_of(rounds.generate, call)) as chunks:
                every = [chunk async for chunk in chunks]
            return [token for chunk in every for token in chunk["token_ids"]], every[-1]["ampd"]

        output, _ = await play(old, first)
        prompt = first + output + second
        more = {"source": (holder, 1, "") if holder else None}
        answer, report = await play(new, prompt, **more)
        assert {tier: tokens for tier, tokens in report["hit_tokens"].items() if tokens} == expected
        assert report["kv_read_tokens"] == expected.get("peer", 0)
        assert answer == (await play(fresh, prompt))[0]


async def test_a_session_that_moved_here_keeps_its_kv_as_long_as_at_its_old_owner(model_folder: Path) -> None:
    now_s = 0.0
    async with Lab(model_folder, Times()).engine("new") as engine:
        parts = worker_parts(
            "new", engine, Times(), clock=lambda: now_s, session_ttl_s=1800.0, session_first_ttl_s=300.0
        )
        for session, kept_tokens in (("begins", 0), ("moved", 400)):
            call: Any = {**message(prompt_of(480), 4, session), "kept_tokens": kept_tokens}
            async with aclosing(chunks_of(parts.rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]
        now_s = 300.0
        assert await parts.sessions.release_idle() == ["begins"]
        now_s = 1800.0
        assert await parts.sessions.release_idle() == ["moved"]


async def test_a_history_is_read_while_its_round_waits(model_folder: Path) -> None:
    """When the worker is free, the KV is there: the read began while the round before it computed."""
    lab, history = Lab(model_folder, Times()), prompt_of(784)
    async with lab.engine("D") as decode, lab.engine("P") as prefill:
        workers = {name: worker_parts(name, each, lab.times) for name, each in (("D", decode), ("P", prefill))}
        first: Any = message(history, 4, "s")
        async with aclosing(chunks_of(workers["D"].rounds.generate, first)) as chunks:
            assert [chunk async for chunk in chunks]
        lab.times.per_token_s = 60.0

        async def run(call: Any) -> None:
            async with aclosing(chunks_of(workers["P"].rounds.prefill, call)) as chunks:
                assert [chunk async for chunk in chunks]

        before = asyncio.create_task(run(message(prompt_of(64, seed=2), 4, "before")))
        await until(lambda: len(workers["P"].queue.computing) == 1)
        second: Any = message(history + prompt_of(64, seed=3), 4, "s", hist=784, source="D")
        waits = asyncio.create_task(run(second))
        keys = ampd.keys.page_keys(history, 16, tenant="")
        try:
            await until(lambda: prefill.kv.store.directory.match(keys) == len(keys))
            await until(lambda: len(workers["P"].queue.staged) == 1)
            assert not before.done()
        finally:
            for task in (before, waits):
                task.cancel()
            await asyncio.wait((before, waits))


class SlowFromEight(Times):
    """Reads from workers of TP 8 take longer than a computation."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return 1e3 if tokens and source.tp == 8 else 0.0


@pytest.mark.parametrize(("source_tp", "tier"), [(1, "peer"), (8, "recomputed")])
@pytest.mark.parametrize("endpoint", ["prefill", "generate"])
async def test_a_read_is_predicted_with_the_parallelism_of_its_source(
    model_folder: Path, endpoint: str, source_tp: int, tier: str
) -> None:
    lab, prompt = Lab(model_folder, SlowFromEight(per_token_s=1e-6)), prompt_of(800)
    async with lab.engine("D") as decode, lab.engine("P") as prefill:
        workers = {name: worker_parts(name, each, lab.times).rounds for name, each in (("D", decode), ("P", prefill))}
        first: Any = message(prompt, 4, "s")
        async with aclosing(chunks_of(workers["D"].generate, first)) as chunks:
            assert [chunk async for chunk in chunks]
        second: Any = {**message(prompt, 4, "s", hist=784, source="D"), "source": ("D", source_tp, "")}
        async with aclosing(chunks_of(getattr(workers["P"], endpoint), second)) as chunks:
            last = [chunk async for chunk in chunks][-1]
        assert {name: tokens for name, tokens in last["ampd"]["hit_tokens"].items() if tokens} == {tier: 784}


async def test_an_engine_knows_what_is_left_of_a_round_that_was_prefilled_elsewhere(model_folder: Path) -> None:
    """As a coordinator sends it, the round has all of its prompt to prefill."""
    lab, prompt = Lab(model_folder, Times()), prompt_of(100)
    async with lab.engine("D") as decode, lab.engine("P") as prefill:
        ask: Any = message(prompt, 5, "s")
        async with aclosing(chunks_of(worker_parts("P", prefill, lab.times).rounds.prefill, ask)) as chunks:
            tokens = [token for chunk in [each async for each in chunks] for token in chunk["token_ids"]]
        engine = Recorded(decode)
        rounds = worker_parts("D", engine, lab.times).rounds
        more: Any = {**ask, "prompt": pack_tokens(prompt + tokens), "source": ("P", 1, ""), "is_prefilled": True}
        async with aclosing(chunks_of(rounds.generate, more)) as chunks:
            assert [chunk async for chunk in chunks]
    (request,) = engine.requests
    assert request.first_s is not None
    assert request.task is not None
    assert (request.task.hist_tokens, request.task.incr_tokens) == (100, 1)


@pytest.mark.parametrize("endpoint", ["prefill", "generate"])
async def test_a_request_that_cannot_run_is_not_counted(model_folder: Path, endpoint: str) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        rounds = worker_parts("D", engine, lab.times).rounds
        known = engine.info.vocabulary_size
        assert known is not None
        foreign: Any = message([5, known], 3, "s")
        with pytest.raises(EngineError, match=f"token id {known} in the prompt") as refusal:
            await anext(chunks_of(getattr(rounds, endpoint), foreign))
        assert refusal.value.status == 400
        unsound: Any = message(prompt_of(40), 3, "s")
        unsound["request"]["sampling_options"] = {"repetition_penalty": 1e-40}
        with pytest.raises(EngineError, match="repetition_penalty must be at least") as refusal:
            await anext(chunks_of(getattr(rounds, endpoint), unsound))
        assert refusal.value.status == 400
        malformed: Any = message(prompt_of(40), 3, "s")
        del malformed["source"]
        with pytest.raises(KeyError):
            await anext(chunks_of(getattr(rounds, endpoint), malformed))
        assert rounds.running == 0
        async with asyncio.timeout(PATIENCE_S):
            await rounds.drained()


@pytest.mark.parametrize(
    "field", [{"slo": {"ttft_s": 1.0, "itl_s": "s"}}, {"hist_tokens": -1}, {"arrival_s": 10**400}, {"incr_tokens": 0.5}]
)
async def test_a_malformed_task_never_reaches_the_published_queue(model_folder: Path, field: dict[str, Any]) -> None:
    """A view with it is refused by every coordinator, which would then count the worker as gone."""
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times)
        malformed: Any = message(prompt_of(40), 3, "s")
        malformed["task"].update(field)
        with pytest.raises(ValueError, match=r"Expected|range"):
            await anext(chunks_of(parts.rounds.generate, malformed))
        assert parts.rounds.running == len(parts.queue) == 0


@pytest.mark.parametrize("change", [{"prompt": b"\xff" * 39}, {"prompt": [5, 0.5]}])
async def test_a_prompt_that_is_no_packed_token_ids_never_reaches_the_engine(
    model_folder: Path, change: dict[str, Any]
) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        rounds = worker_parts("D", engine, lab.times).rounds
        malformed: Any = message(prompt_of(40), 3, "s") | change
        with pytest.raises((TypeError, ValueError)):
            await anext(chunks_of(rounds.generate, malformed))
        many: Any = message(prompt_of(40), 3, "s", sampling_options={"n": 1 << 31})
        with pytest.raises(EngineError, match="n must be at most"):
            await anext(chunks_of(rounds.generate, many))


async def test_only_a_prefill_for_another_worker_does_not_wait_for_the_store(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one chunk is the client's first token."""
    lab = Lab(model_folder, Times())
    waited: list[bool] = []
    async with lab.engine("D") as engine:
        rounds = worker_parts("D", engine, lab.times).rounds

        async def held_tokens(_session_id: str, *, waits: bool = True) -> int:
            waited.append(waits)
            return 0

        monkeypatch.setattr(engine.kv, "held_tokens", held_tokens)
        call: Any = message(prompt_of(40), 3, "s")
        for served in (rounds.prefill, rounds.generate):
            async with aclosing(chunks_of(served, call)) as chunks:
                assert [chunk async for chunk in chunks][-1]["ampd"]["held_tokens"] == 0
        assert waited == [False, True]


async def test_a_prefill_for_another_worker_leaves_a_copy_that_is_no_session_of_this_one(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("P") as engine:
        rounds = worker_parts("P", engine, lab.times).rounds
        call: Any = message(prompt_of(40), 3, "s")
        used: list[tuple[bool, bool]] = []
        for served in (rounds.prefill, rounds.generate):
            async with aclosing(chunks_of(served, call)) as chunks:
                held_tokens = [chunk async for chunk in chunks][-1]["ampd"]["held_tokens"]
            used.append((held_tokens > 0, engine.kv.session_tokens > 0))
        assert used == [(True, False), (True, True)]
