"""Deaths under a request are counted in the shared state, by tenant and prompt, and at the round itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.request import RoundRequest, parse_round
from router.round_errors import RoundRefusedError, WorkerLostError
from router.targets import TargetLimits
from router.worker_deaths import RequestDeaths, WorkerDeaths
from tests.memory_store import MemoryState, MemoryStore
from tests.router.replica_lab import SLO


def request(prompt: list[int], **fields: Any) -> RoundRequest:
    return parse_round({"token_ids": prompt, "stop_conditions": {}, **fields}, TargetLimits(SLO, 0.5))


def died(worker_id: str, start: int | None = None) -> WorkerLostError:
    return WorkerLostError(worker_id, "gone", has_died=True, start=start)


async def test_a_prompt_is_known_at_all_coordinators() -> None:
    state = MemoryState()
    first, second = (WorkerDeaths(MemoryStore(state)) for _ in range(2))
    await RequestDeaths(first, request([1, 2])).add(died("w1"))
    await RequestDeaths(first, request([1, 2, 3])).add(died("w2"))
    with pytest.raises(RoundRefusedError, match="workers died 2 times while they ran this request") as refusal:
        await RequestDeaths(second, request([1, 2])).add(died("w2"))
    assert refusal.value.status == 500
    assert (first.count, second.count) == (2, 1)


async def test_a_round_that_another_coordinator_began_is_known_by_its_client_s_prompt() -> None:
    deaths = WorkerDeaths(MemoryStore())
    began, goes_on = request([1, 2]), replace(request([1, 2, 7]), continued_tokens=1)
    assert RequestDeaths(deaths, goes_on).prompt_digest == RequestDeaths(deaths, began).prompt_digest


async def test_no_tenant_learns_what_another_one_sent() -> None:
    deaths = WorkerDeaths(MemoryStore())
    await RequestDeaths(deaths, request([1, 2], routing={"cache_salt": "first"})).add(died("w1"))
    await RequestDeaths(deaths, request([1, 2], routing={"cache_salt": "second"})).add(died("w2"))


async def test_an_engine_that_starts_again_and_dies_again_counts_twice() -> None:
    deaths = WorkerDeaths(MemoryStore())
    await RequestDeaths(deaths, request([1, 2])).add(died("w1", 1))
    beside = RequestDeaths(deaths, request([1, 2]))
    await beside.add(died("w1", 1))  # the same death, under another round
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        await beside.add(died("w1", 2))


async def test_a_round_counts_its_deaths_while_the_shared_state_is_away() -> None:
    state = MemoryState()
    state.lose()
    deaths = RequestDeaths(WorkerDeaths(MemoryStore(state)), request([1, 2]))
    await deaths.add(died("w1"))
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        await deaths.add(died("w2"))
