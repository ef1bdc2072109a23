"""Deaths under a request are counted in the shared state, by tenant and prompt, and at the round itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from ampd.state.store import FatalRequestError
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


class Lab:
    """Coordinators with one shared state."""

    def __init__(self) -> None:
        self.state = MemoryState()

    def coordinator(self) -> WorkerDeaths:
        return WorkerDeaths(MemoryStore(self.state))

    async def is_refused(self, deaths: RequestDeaths) -> bool:
        """Whether the write of a placement would be."""
        with suppress(RoundRefusedError):
            await deaths.check()
        try:
            self.state.check_deaths(deaths.prompt_digest)
        except FatalRequestError:
            return True
        return False


async def test_a_prompt_is_known_at_all_coordinators() -> None:
    lab = Lab()
    first, second = lab.coordinator(), lab.coordinator()
    began = RequestDeaths(first, request([1, 2]))
    began.add(died("w1"))
    await began.check()
    another, again = RequestDeaths(first, request([1, 2, 3])), RequestDeaths(second, request([1, 2]))
    another.add(died("w2"))
    assert not await lab.is_refused(again)
    again.add(died("w2"))
    assert await lab.is_refused(again)
    assert not await lab.is_refused(another)
    assert (first.count, second.count) == (2, 1)


async def test_a_round_is_refused_at_its_second_death_when_the_others_know() -> None:
    lab = Lab()
    deaths = RequestDeaths(lab.coordinator(), request([1, 2]))
    deaths.add(died("w1"))
    assert not await lab.is_refused(deaths)
    deaths.add(died("w2"))
    with pytest.raises(RoundRefusedError, match="workers died 2 times while they ran this request") as refusal:
        await deaths.check()
    assert refusal.value.status == 500
    with pytest.raises(FatalRequestError):
        lab.state.check_deaths(deaths.prompt_digest)


async def test_a_round_that_another_coordinator_began_is_known_by_its_client_s_prompt() -> None:
    deaths = Lab().coordinator()
    began, goes_on = request([1, 2]), replace(request([1, 2, 7]), continued_tokens=1)
    assert RequestDeaths(deaths, goes_on).prompt_digest == RequestDeaths(deaths, began).prompt_digest


async def test_no_tenant_learns_what_another_one_sent() -> None:
    lab = Lab()
    for worker_id in ("w1", "w2"):
        first = RequestDeaths(lab.coordinator(), request([1, 2], routing={"cache_salt": "first"}))
        first.add(died(worker_id))
    assert await lab.is_refused(first)
    assert not await lab.is_refused(RequestDeaths(lab.coordinator(), request([1, 2], routing={"cache_salt": "second"})))


async def test_an_engine_that_starts_again_and_dies_again_counts_twice() -> None:
    lab = Lab()
    rounds = [RequestDeaths(lab.coordinator(), request([1, 2])) for _ in range(2)]
    for deaths in rounds:
        deaths.add(died("w1", 1))  # one death under both
        await deaths.check()
    assert not await lab.is_refused(rounds[0])
    rounds[0].add(died("w1", 2))
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        await rounds[0].check()
    assert await lab.is_refused(rounds[1])


async def test_a_round_counts_its_deaths_while_the_shared_state_is_away() -> None:
    lab = Lab()
    lab.state.lose()
    deaths = RequestDeaths(lab.coordinator(), request([1, 2]))
    deaths.add(died("w1"))
    deaths.add(died("w2"))
    with pytest.raises(RoundRefusedError, match="workers died 2 times"):
        await deaths.check()
    assert not await lab.is_refused(deaths)
