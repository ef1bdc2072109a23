"""The coordinator's metrics, from rounds and from a coordinator's state, on real Prometheus registries."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dynamo.runtime import Context
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import RoleChange
from ampd.telemetry.metrics.exposition import ProcessCollector
from ampd.telemetry.metrics.names import OTHER, Process
from ampd.types import Role, Slo
from router.coordinator import Coordinator
from router.coordinator_metrics import CoordinatorReader, RoundRecorder
from router.decision_record import DecisionRecord
from router.frames import FrameServer
from router.policies import CoordinatorPolicies
from router.request import link
from router.settings import CoordinatorSettings
from tests.ampd.telemetry.metrics.registry_lab import registered, total
from tests.memory_store import MemoryStore
from tests.router.replica_lab import PROMPT, Answering, Workers, cluster, worker
from tests.waiting import until

SLO = Slo(ttft_s=1.0, itl_s=0.1)
STATUSES = {"InvalidRequest": 400, "RateLimited": 429, "Internal": 500, "Unavailable": 503}
"""By the class of an error."""


def recorded(recorder: RoundRecorder) -> CollectorRegistry:
    return registered(ProcessCollector(Process.COORDINATOR, recorder.recorded, tuple))


def served(**facts: Any) -> DecisionRecord:
    usual = {"is_initial": True, "is_complete": True, "was_left": False, "lasted_s": 2.0, "output_tokens": 10}
    decided = {"route": "remote", "reason": "cheapest", "hist_tokens": 100, "incr_tokens": 20, "retries": 1}
    return DecisionRecord("a session", "ampd", SLO, **{**usual, **decided, "ttft_s": 0.5, "itl_s": 0.05, **facts})


def test_one_round() -> None:
    recorder = RoundRecorder()
    recorder(served())
    metrics = recorded(recorder)
    assert total(metrics, "ampd_rounds_total", outcome="met") == total(metrics, "ampd_rounds_total") == 1
    assert total(metrics, "ampd_routes_total", route="remote", reason="cheapest") == 1
    labels = {"prefill": "initial", "route": "remote"}
    assert metrics.get_sample_value("ampd_time_to_first_token_seconds_sum", labels) == 0.5
    assert metrics.get_sample_value("ampd_time_to_first_token_seconds_bucket", {**labels, "le": "0.3"}) == 0
    assert metrics.get_sample_value("ampd_time_to_first_token_seconds_bucket", {**labels, "le": "0.5"}) == 1
    assert metrics.get_sample_value("ampd_inter_token_latency_seconds_sum") == 0.05
    assert total(metrics, "ampd_prompt_tokens_total", part="history") == 100
    assert total(metrics, "ampd_prompt_tokens_total", part="increment") == 20
    assert total(metrics, "ampd_output_tokens_total") == 10
    assert total(metrics, "ampd_round_retries_total") == 1


rounds = st.builds(
    served,
    is_initial=st.booleans(),
    is_complete=st.booleans(),
    was_left=st.booleans(),
    ttft_s=st.none() | st.floats(0, 3),
    itl_s=st.none() | st.floats(0, 0.3),
    lasted_s=st.floats(0, 5),
    route=st.sampled_from(["local", "remote"]),
    reason=st.sampled_from(["cheapest", "ttft-slack", "took 3 s", "x" * 2000]) | st.text(),
)


@pytest.mark.slow
@given(st.lists(rounds, max_size=30))
def test_nothing_is_lost_and_nothing_counted_twice(every: list[DecisionRecord]) -> None:
    recorder = RoundRecorder()
    for round_ in every:
        recorder(round_)
    metrics = recorded(recorder)
    for outcome, count in Counter(round_.outcome for round_ in every).items():
        assert total(metrics, "ampd_rounds_total", outcome=outcome) == count
    assert total(metrics, "ampd_rounds_total") == len(every)
    assert total(metrics, "ampd_routes_total") == len(every)
    for route in ("local", "remote"):
        assert total(metrics, "ampd_routes_total", route=route) == sum(round_.route == route for round_ in every)
    first_tokens = [round_ for round_ in every if round_.ttft_s is not None]
    assert total(metrics, "ampd_time_to_first_token_seconds_count") == len(first_tokens)
    assert total(metrics, "ampd_time_to_first_token_seconds_count", prefill="initial") == sum(
        round_.is_initial for round_ in first_tokens
    )
    assert total(metrics, "ampd_inter_token_latency_seconds_count") == sum(round_.itl_s is not None for round_ in every)
    samples = [sample for family in metrics.collect() for sample in family.samples]
    reasons = {sample.labels["reason"] for sample in samples if sample.name == "ampd_routes_total"}
    assert "took 3 s" not in reasons
    assert all(len(reason) < 100 for reason in reasons)
    assert "a session" not in str(samples)


# -- a coordinator's state


class Site:
    """A coordinator on a store in memory, with workers that play their part."""

    def __init__(self, coordinator: Coordinator, workers: Workers, store: MemoryStore, metrics: CollectorRegistry):
        self.coordinator, self.workers, self.store, self.metrics = coordinator, workers, store, metrics

    def total(self, name: str, **labels: str) -> float:
        return total(self.metrics, name, **labels)

    async def round(self, session: str = "s", **fields: Any) -> int | None:
        """Serve a round. The status of its error, if it fails."""
        request = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 5}, "agent_context": {"session_id": session}}
        chunks = [chunk async for chunk in self.coordinator.generate({**request, **fields}, Context())]
        errors = [STATUSES[chunk["error"]["class"]] for chunk in chunks if "error" in chunk]
        return errors[0] if errors else None


async def open_site(*views: Any, pools: Any = None, **flags: Any) -> Site:
    state = await cluster(*views)
    store = MemoryStore(state)
    workers = Workers(store)
    settings = CoordinatorSettings(model=Path("m"), perf="tiny-cpu", retries=0, **flags)
    recorder = RoundRecorder()
    coordinator = Coordinator(
        settings,
        cast(Any, Answering(workers, lambda: coordinator._ends)),
        store,
        CoordinatorPolicies(
            registry.create("binding", "least-kv"),
            registry.create("routing", "always-local"),
            load_performance_model("tiny-cpu"),
            pools,
        ),
        observers=(recorder,),
    )
    await coordinator.start()
    reader = CoordinatorReader(coordinator, settings, store, FrameServer(coordinator.take))
    loop = asyncio.get_running_loop()
    collector = ProcessCollector(Process.COORDINATOR, recorder.recorded, reader, loop)
    return Site(coordinator, workers, store, registered(collector))


async def test_the_state_of_a_coordinator() -> None:
    site = await open_site(worker("d1"), worker("d2"), worker("p1", Role.PREFILL), ttft=1.5, itl=0.03, routing="x(y=1)")
    try:
        assert site.total("ampd_slo_time_to_first_token_seconds") == 1.5
        assert site.total("ampd_slo_inter_token_latency_seconds") == 0.03
        assert site.total("ampd_live_workers", role="decode") == 2
        assert site.total("ampd_live_workers", role="prefill") == 1
        assert site.total("ampd_state_available") == 1
        assert site.total("ampd_coordinator_info", routing="x(y=1)") == 1
        assert site.total("ampd_leading") == 0
        await site.round()
        await site.round()
        assert site.total("ampd_rounds_total") == site.total("ampd_routes_total", route="local") == 2
        assert site.total("ampd_sessions_bound_total") == 1
        assert site.total("ampd_state_round_trips_total", operation="route") == 2
        assert site.total("ampd_state_errors_total") == 0
        site.store._state.lose()
        await until(lambda: not site.total("ampd_state_available"))
        assert site.total("ampd_state_losses_total") == 1
        assert site.total("ampd_live_workers", role="decode") == 2, "the last view goes on"
    finally:
        await site.coordinator.stop()


@pytest.mark.slow
async def test_a_round_that_dynamo_forgets_after_its_client_has_gone_is_no_longer_in_progress() -> None:
    """Dynamo neither reads nor drops a handler whose client goes while the frontend is behind."""
    site = await open_site(worker("d1"))

    async def endless(_worker_id: str, _request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        async def chunks() -> AsyncIterator[dict[str, Any]]:
            yield {"token_ids": [64], "index": 0}
            await context.async_killed_or_stopped()

        return chunks()

    site.workers.generate = endless
    try:
        context = Context()
        stream = site.coordinator.generate(
            {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 5}, "agent_context": {"session_id": "s"}}, context
        )
        await anext(stream)
        assert site.total("ampd_rounds_in_progress") == 1
        assert site.total("ampd_rounds_handed_on") == 0, "its frames were not started"
        context.stop_generating()
        await until(lambda: not site.total("ampd_rounds_in_progress"))
        assert site.total("ampd_rounds_total") == 1, "it is counted as a round that its client left"
        assert [chunk async for chunk in stream] == []
        await asyncio.wait_for(site.coordinator.drained(), 60.0)
    finally:
        await site.coordinator.stop()


async def test_a_round_without_a_session_is_counted_only_by_the_coordinator_that_began_it() -> None:
    site = await open_site(worker("d1"))
    try:
        await site.round(agent_context=None)
        continued: dict[str, Any] = {"token_ids": [*PROMPT, 64], "migration_link": link(None, len(PROMPT))}
        await site.round(agent_context=None, **continued)
        assert site.total("ampd_rounds_total") == 2
        assert site.total("ampd_rounds_without_session_total") == 1
    finally:
        await site.coordinator.stop()


async def test_rounds_in_progress_and_failures_by_status() -> None:
    site = await open_site(worker("d1"))
    try:
        assert site.total("ampd_round_failures_total", status="503") == 0
        assert site.total("ampd_round_failures_total", status="400") == 0
        stream = site.coordinator.generate(
            {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 5}, "agent_context": {"session_id": "s"}},
            Context(),
        )
        await anext(stream)
        assert site.total("ampd_rounds_in_progress") == 1
        await stream.aclose()
        await until(lambda: not site.total("ampd_rounds_in_progress"))
        assert await site.round(token_ids=[1] * 2000) == 400
        site.workers.fail["generate", "d1"] = 2
        assert await site.round() == 503
        assert await site.round(token_ids=None) == 400
        site.coordinator._ends.forget_lost(math.inf)  # the frontend sends it no second time
        statuses = {status: site.total("ampd_round_failures_total", status=status) for status in ("400", "500", "503")}
        assert sum(statuses.values()) == site.total("ampd_round_failures_total") == 3
        assert (statuses["503"], statuses["400"]) == (1, 2)
        assert site.total("ampd_rounds_total", outcome="met") == 1, "the one that nobody read any more"
        assert site.total("ampd_rounds_total", outcome="failed") == 1, "the one that had reached a worker"
    finally:
        await site.coordinator.stop()


async def test_a_worker_that_is_lost_and_its_sessions() -> None:
    site = await open_site(worker("d1"), worker("d2", kv_used_tokens=1))
    try:
        await site.round("a")
        await site.store.remove_worker("d1")
        await asyncio.sleep(0)
        await site.round("a")
        assert site.total("ampd_live_workers", role="decode") == 1
        assert site.total("ampd_sessions_repinned_total") == 1
        assert site.total("ampd_sessions_lost_total", reason="worker-lost") == 1
        assert site.total("ampd_sessions_bound_total") == 1
    finally:
        await site.coordinator.stop()


async def test_a_leader_and_the_roles_that_it_assigns() -> None:
    change = RoleChange("d2", Role.PREFILL, "ttft-short")
    other = RoleChange("d3", Role.PREFILL, "7 s late")
    policy = SimpleNamespace(change=lambda *_: (change, other), is_idle=False)
    site = await open_site(worker("d1"), worker("d2"), worker("d3"), pools=policy)
    try:
        await until(lambda: site.total("ampd_role_assignments_total", reason=OTHER))
        assert site.total("ampd_leading") == 1
        assert site.total("ampd_role_assignments_total", role="prefill", reason="ttft-short") >= 1
        assert site.total("ampd_role_assignments_total", role="decode") == 0
    finally:
        await site.coordinator.stop()


def test_every_metric_of_a_coordinator_is_its_own() -> None:
    recorder = RoundRecorder()
    recorder(served())
    assert all(Process.COORDINATOR in part.metric.processes for part in recorder.recorded)
