"""Questions of the status relay: each is answered, and none is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from dynamo.runtime import Context

from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.relay_mark import RelayMark, relay_mark
from ampd.state.store import RequestRefused
from ampd.wire import OVERLOADED, RELAYED, Refused, refusal_in
from router import echoes, told_refusals
from router.coordinator import Coordinator
from router.policies import CoordinatorPolicies
from router.round_errors import WorkerRefusedError
from router.settings import CoordinatorSettings
from router.told_refusals import MEMORY_S, ToldRefusals
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import PROMPT, Workers, cluster, worker

A_MOMENT_AGO = "the graph had no room for this round a moment ago; retry after 1 s"


class Replica:
    """A coordinator on a shared state, with workers of its own script."""

    def __init__(self, state: MemoryState, **flags: Any) -> None:
        self.store = MemoryStore(state)
        self.workers = Workers(self.store)
        self.coordinator = Coordinator(
            CoordinatorSettings(model=Path("m"), perf="tiny-cpu", retries=0, **flags),
            self.workers,
            self.store,
            CoordinatorPolicies(
                registry.create("binding", "least-kv"),
                registry.create("routing", "always-local"),
                load_performance_model("tiny-cpu"),
                None,
            ),
        )

    async def refusal(self, mark: RelayMark, **fields: Any) -> Refused | None:
        """Why a round is refused; None: it is served."""
        chunks = [chunk async for chunk in self.start(mark, **fields)]
        found = [refusal_in(text) for chunk in chunks for text in chunk.get("comment", ())]
        return found[0] if found else None

    def start(self, mark: RelayMark, **fields: Any) -> Any:
        context = Context()
        context.metadata[RELAYED] = str(mark)
        request = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 5}, "agent_context": {"session_id": "s"}}
        return self.coordinator.generate({**request, **fields}, context)

    def rounds_at_workers(self) -> int:
        return sum(endpoint in ("prefill", "generate") for endpoint, _, _ in self.workers.calls)


async def replicas(count: int, *views: Any, **flags: Any) -> list[Replica]:
    state = await cluster(*views)
    made = [Replica(state, **flags) for _ in range(count)]
    for each in made:
        await each.coordinator.start()
    return made


async def test_a_question_is_not_served_though_a_place_has_become_free() -> None:
    first_replica, other = await replicas(2, worker("d1"), max_rounds=1)
    mark = RelayMark.fresh()
    first = first_replica.start(RelayMark.fresh())
    await anext(first)
    refused = await first_replica.refusal(mark, agent_context={"session_id": "late"})
    assert refused is not None
    assert refused.status == OVERLOADED
    await first.aclose()
    before = first_replica.rounds_at_workers()
    fresh = {"agent_context": {"session_id": "late"}}
    answers = [await each.refusal(mark.question(), **fresh) for each in (first_replica, other)]
    assert answers[0] == refused, "with the id of the first request, which the log has"
    assert answers[1] is not None
    assert answers[1].message.startswith(A_MOMENT_AGO)
    assert answers[1].status == OVERLOADED
    assert (first_replica.rounds_at_workers(), other.rounds_at_workers()) == (before, 0)
    assert await first_replica.refusal(RelayMark.fresh(), **fresh) is None, "a place was free"
    for each in (first_replica, other):
        assert not each.coordinator.running
        assert sum(each.coordinator.gate.decisions.values()) == (3 if each is first_replica else 0)
        await each.coordinator.stop()


@pytest.mark.parametrize(("fails", "status"), [(0, 503), (WorkerRefusedError("d1", 400, "this grammar is wrong"), 400)])
async def test_what_only_a_worker_finds_is_told_by_every_coordinator_and_not_tried_again(
    fails: Any, status: int
) -> None:
    first_replica, other = await replicas(2, worker("d1"))
    first_replica.workers.fail["generate", "d1"] = fails
    mark = RelayMark.fresh()
    refused = await first_replica.refusal(mark)
    assert refused is not None
    assert refused.status == status
    before = first_replica.rounds_at_workers()
    for each in (first_replica, other):
        assert await each.refusal(mark.question()) == refused
        assert await each.refusal(mark.question(as_text=True)) is None, "it comes as text"
    assert (first_replica.rounds_at_workers(), other.rounds_at_workers()) == (before, 0)
    assert first_replica.coordinator.failures.total() == 1, "a question is no round that failed"
    assert other.coordinator.failures.total() == 0
    for each in (first_replica, other):
        await each.coordinator.stop()


async def test_what_ends_a_round_within_its_output_is_told_too() -> None:
    """A completion that is not streamed has shown none of its output."""
    (replica,) = await replicas(1, worker("d1"))
    replica.workers.fail["generate", "d1"] = 2
    mark = RelayMark.fresh()
    chunks = [chunk async for chunk in replica.start(mark)]
    assert sum(bool(chunk.get("token_ids")) for chunk in chunks) == 2
    error = json.loads(chunks[-1]["comment"][0])
    assert error["code"] == 503
    assert await replica.refusal(mark.question()) == Refused(error["code"], error["message"])
    await replica.coordinator.stop()


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"token_ids": [1] * 2000}, 400), ({"token_ids": []}, 400), ({"annotations": ["announce"]}, 429)],
)
async def test_another_coordinator_finds_the_reason_by_itself(fields: dict[str, Any], status: int) -> None:
    (first_replica,) = await replicas(1, worker("d1"))
    refused = await first_replica.refusal(RelayMark.fresh().question(), **fields)
    assert refused is not None
    assert refused.status == status
    assert first_replica.rounds_at_workers() == 0
    await first_replica.coordinator.stop()


async def test_a_question_without_any_worker_is_503() -> None:
    (first_replica,) = await replicas(1)
    refused = await first_replica.refusal(RelayMark.fresh().question())
    assert refused is not None
    assert refused.status == 503
    await first_replica.coordinator.stop()


async def test_the_client_waits_until_the_others_know_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "TOLD_S", 3600.0)
    told: list[RequestRefused] = []
    refusals = ToldRefusals(lambda: 0.0, told.append)
    adding = asyncio.create_task(refusals.add("a", Refused(400, "wrong"), is_found_anywhere=False))
    await asyncio.sleep(0)
    assert not adding.done()
    refusals.announced(told[0])
    await adding
    await refusals.add("b", Refused(429, "full"), is_found_anywhere=False)
    await refusals.add("c", Refused(503, "none"), is_found_anywhere=True)
    assert told == [RequestRefused("a", 400, "wrong")]
    monkeypatch.setattr(echoes, "TOLD_S", 0.0)
    await refusals.add("d", Refused(400, "wrong"), is_found_anywhere=False)
    assert refusals.of("d") == Refused(400, "wrong"), "without the shared state it is known here"


async def test_refusals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    refusals = ToldRefusals(lambda: now_s)
    await refusals.add("a", Refused(429, "full"), is_found_anywhere=True)
    now_s = MEMORY_S
    assert refusals.of("a") is None
    monkeypatch.setattr(told_refusals, "_MAX_REMEMBERED", 2)
    for name in "abc":
        await refusals.add(name, Refused(429, name), is_found_anywhere=True)
    assert [refusals.of(name) for name in "abc"] == [None, Refused(429, "b"), Refused(429, "c")]
    assert len(refusals) == 2


@pytest.mark.parametrize("value", [None, "", "1", "round:", "round", "other:a", "question:" + "a" * 65])
def test_another_value_is_no_mark(value: str | None) -> None:
    assert relay_mark(value) is None


@pytest.mark.parametrize("as_text", [False, True])
def test_a_mark_comes_back_from_its_header(as_text: bool) -> None:
    mark = RelayMark.fresh()
    assert relay_mark(str(mark)) == mark
    assert relay_mark(str(mark.question(as_text=as_text))) == mark.question(as_text=as_text)
