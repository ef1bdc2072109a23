"""A worker's metrics, from rounds on modelled engines in this process, on real Prometheus registries."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.registry import create
from ampd.state.store import RoleAssigned
from ampd.telemetry.metrics.exposition import ProcessCollector
from ampd.telemetry.metrics.names import Process
from ampd.types import Role, WorkerView
from tests.ampd.policies.routing_lab import queue_of
from tests.ampd.telemetry.metrics.registry_lab import registered, total
from tests.memory_store import MemoryStore
from tests.waiting import until
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import Switched, chunks_of, message
from workers.component import WorkerReader
from workers.kv.exchange import KvFetch
from workers.worker_recorder import WorkerRecorder


class Station:
    """One worker without Dynamo."""

    def __init__(self, name: str, role: Role, engine: Any, times: Any, store: MemoryStore) -> None:
        self.parts = worker_parts(
            name,
            engine,
            times,
            store=store,
            ordering_policy=(ordering := Switched(create("ordering", "fcfs"))),
            role=role.value,
            session_ttl_s=60.0,
            kv_timeout_s=1.0,
        )
        self.ordering = ordering
        self.role, self.sessions, self.queue = self.parts.role, self.parts.sessions, self.parts.queue
        self.changes, self.rounds = self.parts.changes, self.parts.rounds
        loop = asyncio.get_running_loop()
        recorded = self.parts.recorder.recorded
        self.metrics = registered(ProcessCollector(Process.WORKER, recorded, WorkerReader(self.parts), loop))

    def total(self, name: str, **labels: str) -> float:
        return total(self.metrics, name, **labels)


@asynccontextmanager
async def stations(folder: Path, **times: Any) -> AsyncIterator[tuple[Lab, Station, Station]]:
    """A prefill worker `P` and a decode worker `D` that read from each other."""
    lab, store = Lab(folder, Times(**times)), MemoryStore()
    async with AsyncExitStack() as stack:
        both = []
        for name, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
            engine = await stack.enter_async_context(lab.engine(name))
            both.append(Station(name, role, engine, lab.times, store))
        yield lab, both[0], both[1]


async def remote_round(
    prefill: Station, decode: Station, context: list[int], source: str | None
) -> tuple[list[int], tuple[dict[str, Any], dict[str, Any]]]:
    """Prefill at `P`, decode at `D`: the output, and what both reported."""
    call: Any = message(context, 1, "s", source=source)
    async with aclosing(chunks_of(prefill.rounds.prefill, call)) as chunks:
        (first,) = [chunk async for chunk in chunks]
    call = message(context + first["token_ids"], 7, "s", source="P")
    async with aclosing(chunks_of(decode.rounds.generate, call)) as chunks:
        rest = [chunk async for chunk in chunks]
    out = [token for chunk in (first, *rest) for token in chunk["token_ids"]]
    return out, (first["ampd"], rest[-1]["ampd"])


async def test_rounds_that_move_kv_both_ways(model_folder: Path) -> None:
    async with stations(model_folder, per_token_s=1e-5, reload_token_s=1e-6) as (_, prefill, decode):
        context = prompt_of(500)
        out, reported = await remote_round(prefill, decode, context, None)
        # A round in between makes some history that the prefill worker lacks.
        context += out + prompt_of(60, seed=3)
        call: Any = message(context, 4, "s")
        async with aclosing(chunks_of(decode.rounds.generate, call)) as chunks:
            answer = [chunk async for chunk in chunks]
        local = answer[-1]["ampd"]
        context += [token for chunk in answer for token in chunk["token_ids"]] + prompt_of(40, seed=4)
        reports = [reported, (await remote_round(prefill, decode, context, "D"))[1]]
        for station, part, side in ((prefill, "history", 0), (decode, "increment", 1)):
            other = "increment" if part == "history" else "history"
            for what, key in (("bytes", "kv_read_bytes"), ("tokens", "kv_read_tokens")):
                expected = sum(pair[side][key] for pair in reports)
                assert expected > 0
                assert station.total(f"ampd_kv_read_{what}_total", direction=part) == expected
                assert station.total(f"ampd_kv_read_{what}_total", direction=other) == 0
            reads = [pair[side]["kv_read_s"] for pair in reports if pair[side]["kv_read_tokens"]]
            assert station.total("ampd_kv_read_seconds_count", direction=part) == len(reads)
            assert station.total("ampd_kv_read_seconds_sum", direction=part) == pytest.approx(sum(reads))
            assert station.total("ampd_kv_read_failures_total") == 0
        assert prefill.total("ampd_prefill_seconds_count") == prefill.total("ampd_prefill_wait_seconds_count") == 2
        assert prefill.total("ampd_prefill_seconds_sum") == pytest.approx(
            sum(report["prefill_s"] for report, _ in reports)
        )
        assert prefill.total("ampd_prefill_wait_seconds_sum") == pytest.approx(
            sum(report["queued_s"] for report, _ in reports)
        )
        # Seven tokens follow a first one that came from elsewhere, four have three gaps.
        assert decode.total("ampd_token_gap_seconds_count") == 7 + 3 + 7
        assert prefill.total("ampd_token_gap_seconds_count") == 0
        prefills, decodes = [pair[0] for pair in reports], [local, *(pair[1] for pair in reports)]
        for station, calls in ((prefill, prefills), (decode, decodes)):
            for tier in ("device", "store", "peer", "recomputed"):
                hits = sum(call["hit_tokens"][tier] for call in calls)
                assert station.total("ampd_kv_hit_tokens_total", tier=tier) == hits, tier
            assert (
                sum(call["hit_tokens"]["peer"] for call in calls) == sum(call["kv_read_tokens"] for call in calls) > 0
            )
            reloads = [call["reload_s"] for call in calls if "reload_s" in call]
            assert station.total("ampd_kv_reload_seconds_count") == len(reloads) > 0
            assert station.total("ampd_kv_reload_seconds_sum") == pytest.approx(sum(reloads))
            lately = station.parts.read_view().kv_window
            assert (lately.store_tokens, lately.peer_tokens) == tuple(
                station.total("ampd_kv_hit_tokens_total", tier=tier) for tier in ("store", "peer")
            )
            assert (lately.reloads, lately.reload_s) == (len(reloads), pytest.approx(sum(reloads)))
        assert decode.total("ampd_kv_used_tokens") == 0, "nothing runs"
        assert decode.total("ampd_kv_pinned_tokens") == decode.total("ampd_kv_store_used_tokens") > 500
        token_bytes = decode.parts.engine.info.kv_bytes_per_token
        for figure in ("used", "capacity"):
            stored_tokens = decode.total(f"ampd_kv_store_{figure}_tokens")
            assert decode.total(f"ampd_kv_store_{figure}_bytes") == stored_tokens * token_bytes
        assert decode.total("ampd_worker_rounds_in_progress") == 0


async def test_a_read_that_fails(model_folder: Path) -> None:
    async with stations(model_folder) as (lab, prefill, _):
        del lab.peers.engines["D"]
        call: Any = message(prompt_of(300), 1, "s", source="D")
        async with aclosing(chunks_of(prefill.rounds.prefill, call)) as chunks:
            (chunk,) = [chunk async for chunk in chunks]
        assert chunk["ampd"]["kv_read_error"]
        assert prefill.total("ampd_kv_read_failures_total", direction="history") == 1
        assert prefill.total("ampd_kv_read_failures_total", direction="increment") == 0
        assert prefill.total("ampd_kv_read_seconds_count", direction="history") == 1
        assert prefill.total("ampd_kv_read_bytes_total") == 0


async def test_what_runs_and_waits(model_folder: Path) -> None:
    async with stations(model_folder, per_token_s=0.5, step_s=0.01) as (_, _, decode):
        calls: list[Any] = [message(prompt_of(100, seed=seed), 5, f"s{seed}") for seed in range(3)]
        tasks = [asyncio.create_task(decode.rounds.generate(call, lambda _: None)) for call in calls]
        await until(lambda: decode.total("ampd_prefill_queue_tasks") == 3)
        assert decode.total("ampd_worker_rounds_in_progress") == 3
        assert decode.total("ampd_prefill_queue_predicted_wait_seconds") == pytest.approx(3 * 100 * 0.5)
        assert decode.total("ampd_decode_batch_rounds") == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_prefills_that_are_overtaken(model_folder: Path) -> None:
    """The last one first: each that is picked postpones all who came before it."""

    def last(situation: OrderingSituation) -> Pick:
        others = len(situation.queue) - 1
        return Run(others, tuple(range(others)))

    async with stations(model_folder) as (_, _, decode):
        decode.ordering.now = SimpleNamespace(pick=last)
        calls: list[Any] = [message(prompt_of(100, seed=seed), 1, f"s{seed}") for seed in range(4)]

        async def run(call: Any) -> None:
            async with aclosing(chunks_of(decode.rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]

        await asyncio.gather(*map(run, calls))
        # The first runs at once, alone; then the fourth overtakes two, the third one.
        assert decode.total("ampd_prefill_postponements_total") == 2 + 1


async def test_a_batch_that_decodes(model_folder: Path) -> None:
    async with stations(model_folder, step_s=0.01) as (_, _, decode):
        call: Any = message(prompt_of(100), 3000, "s")
        async with aclosing(chunks_of(decode.rounds.generate, call)) as chunks:
            await anext(chunks)
            await anext(chunks)
            assert decode.total("ampd_decode_batch_rounds") == 1
            assert decode.total("ampd_decode_context_tokens") > 100
            assert decode.total("ampd_kv_capacity_tokens") == 100_000


async def test_a_role_that_changes(model_folder: Path) -> None:
    async with stations(model_folder) as (_, _, decode):
        assert decode.total("ampd_worker_role", role="decode") == 1
        decode.role.adopt(RoleAssigned("w", Role.PREFILL, "", "ttft-short"))
        decode.role.adopt(RoleAssigned("w", Role.PREFILL, "long", "balance"))  # another label is no other role
        assert decode.total("ampd_worker_role", role="decode") == 0
        assert decode.total("ampd_worker_role", role="prefill") == 1
        assert decode.total("ampd_worker_role_changes_total", role="prefill") == 1
        assert decode.total("ampd_worker_role_changes_total", role="decode") == 0


async def test_sessions_that_lose_their_kv(model_folder: Path) -> None:
    async with stations(model_folder) as (_, _, decode):
        for name in ("evicted", "ended", "running", "idle"):
            async with decode.sessions.round(name):
                pass
            decode.changes.held(name, 64)
            decode.sessions.held(name, 64)
        assert decode.total("ampd_sessions_held") == 4
        decode.sessions.held("evicted", 0)
        await decode.sessions.release("ended")
        decode.sessions.held("ended", 0)
        decode.sessions.held("idle", 32)
        async with decode.sessions.round("running"):
            decode.sessions.held("running", 0)  # its prompt was rewritten
        assert decode.total("ampd_sessions_lost_total", reason="evicted") == 1
        assert decode.total("ampd_sessions_lost_total", reason="idle") == 0


async def test_kv_that_leaves_the_store(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("S", store=500) as engine:
        station = Station("S", Role.DECODE, engine, lab.times, MemoryStore())
        for session in ("a", "b"):
            call: Any = message(prompt_of(400, seed=ord(session)), 2, session)
            async with aclosing(chunks_of(station.rounds.generate, call)) as chunks:
                assert [chunk async for chunk in chunks]
        # 31 pages fit. The second session needs 25 of them, and the first one's are computed again in no time.
        assert station.total("ampd_kv_store_evicted_tokens_total", cause="surplus") == 400 - 6 * 16
        assert station.total("ampd_kv_store_evicted_tokens_total") == 400 - 6 * 16
        assert station.parts.read_view().kv_window.evicted_tokens == 400 - 6 * 16
        assert station.total("ampd_kv_store_capacity_tokens") == station.total("ampd_kv_pinned_tokens") == 31 * 16
        await station.sessions.release("b")
        assert station.total("ampd_kv_pinned_tokens") == 6 * 16
        assert station.total("ampd_kv_store_used_tokens") == 31 * 16, "its KV stays until the memory is needed"


async def test_sessions_that_stay_away_for_too_long(model_folder: Path) -> None:
    async with stations(model_folder) as (_, _, decode):
        keeper = decode.sessions
        for name in ("a", "b"):
            async with keeper.round(name):
                pass
        keeper._ttl_s = keeper._first_ttl_s = 0.0
        await keeper.release_idle()
        assert decode.total("ampd_sessions_lost_total", reason="idle") == 2
        assert decode.total("ampd_sessions_lost_total", reason="evicted") == 0


async def test_a_model_that_lacks_this_parallelism_takes_only_its_prediction(model_folder: Path) -> None:
    class Lacking(Times):
        def prefill_s(self, *_: Any) -> float:
            raise UserError("no tp 3")

    async with stations(model_folder) as (_, _, decode):
        decode.parts.model = Lacking()
        decode.parts.read_view = lambda: WorkerView("w", Role.DECODE, queue=queue_of(10), kv_capacity_tokens=7)
        assert decode.total("ampd_prefill_queue_tasks") == 1
        assert decode.total("ampd_kv_capacity_tokens") == 7
        assert decode.metrics.get_sample_value("ampd_prefill_queue_predicted_wait_seconds") is None


fetches = st.builds(
    KvFetch,
    tokens=st.integers(0, 1000),
    bytes=st.integers(0, 1 << 40),
    seconds=st.floats(0, 20),
    error=st.none() | st.text(),
)


@given(st.lists(st.tuples(st.sampled_from(["history", "increment"]), fetches), max_size=30))
def test_reads_add_up(every: list[tuple[str, KvFetch]]) -> None:
    recorder = WorkerRecorder()
    for part, fetch in every:
        recorder.read(part, fetch)
    metrics = registered(ProcessCollector(Process.WORKER, recorder.recorded, tuple))
    for part in ("history", "increment"):
        real = [fetch for at, fetch in every if at == part and (fetch.tokens or fetch.error is not None)]
        assert total(metrics, "ampd_kv_read_seconds_count", direction=part) == len(real)
        assert total(metrics, "ampd_kv_read_tokens_total", direction=part) == sum(fetch.tokens for fetch in real)
        assert total(metrics, "ampd_kv_read_bytes_total", direction=part) == sum(fetch.bytes for fetch in real)
        failed = sum(fetch.error is not None for fetch in real)
        assert total(metrics, "ampd_kv_read_failures_total", direction=part) == failed


def test_an_engine_may_still_choose_how_prometheus_stores_its_values() -> None:
    """SGLang sets that in the environment when it starts, and prometheus_client reads it when it is imported."""
    code = "import sys, workers.component; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
