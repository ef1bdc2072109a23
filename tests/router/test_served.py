"""What observers are told of a round: once, at its end, and what it counts as."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.keys import session_key
from ampd.telemetry.metrics import names
from ampd.types import Role, Slo
from router.decision_record import DecisionRecord, notify
from router.round_errors import RoundRefusedError, WorkerLostError, WorkerRefusedError
from tests.router.replica_lab import PROMPT, FakeContext, Replica, cluster, worker
from tests.waiting import until

SLO = Slo(ttft_s=1.0, itl_s=0.1)


def round_that(**facts: Any) -> DecisionRecord:
    """A complete round within both targets, but for `facts`."""
    usual = {"is_initial": True, "is_complete": True, "was_left": False, "lasted_s": 2.0, "output_tokens": 10}
    return DecisionRecord("s", "ampd", SLO, **{**usual, "ttft_s": 0.5, "itl_s": 0.05, **facts})


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        ({}, names.MET),
        ({"ttft_s": 1.0, "itl_s": 0.1}, names.MET),
        ({"itl_s": None}, names.MET),
        ({"ttft_s": 1.01}, names.MISSED_TTFT),
        ({"itl_s": 0.101}, names.MISSED_ITL),
        ({"ttft_s": 1.01, "itl_s": 0.101}, names.MISSED_BOTH),
        ({"is_complete": False}, names.FAILED),
        ({"is_complete": False, "ttft_s": None, "itl_s": None}, names.FAILED),
        # The frontend ends a round at a stop string as a client does that leaves.
        ({"is_complete": False, "was_left": True}, names.MET),
        ({"is_complete": False, "was_left": True, "itl_s": 0.2}, names.MISSED_ITL),
        ({"is_complete": False, "was_left": True, "ttft_s": None, "itl_s": None, "lasted_s": 0.9}, names.ABANDONED),
        ({"is_complete": False, "was_left": True, "ttft_s": None, "itl_s": None, "lasted_s": 1.1}, names.MISSED_TTFT),
        ({"ttft_s": None, "itl_s": None, "lasted_s": 0.9, "output_tokens": 0}, names.MET),
    ],
)
def test_what_a_round_counts_as(facts: dict[str, Any], outcome: str) -> None:
    assert round_that(**facts).outcome == outcome


@given(
    st.booleans(),
    st.booleans(),
    st.none() | st.floats(0, 3),
    st.none() | st.floats(0, 0.3),
    st.floats(0, 5),
)
def test_every_round_counts_as_one_known_outcome(
    is_complete: bool, was_left: bool, ttft_s: float | None, itl_s: float | None, lasted_s: float
) -> None:
    served = round_that(is_complete=is_complete, was_left=was_left, ttft_s=ttft_s, itl_s=itl_s, lasted_s=lasted_s)
    assert served.outcome in names.OUTCOMES
    if served.outcome == names.MET:
        assert served.itl_met
        assert served.ttft_met or ttft_s is None


def test_an_observer_that_fails_concerns_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    told: list[DecisionRecord] = []

    def fails(_: DecisionRecord) -> None:
        raise ValueError("disk full")

    with caplog.at_level(logging.ERROR):
        notify([fails, told.append], round_that())
    assert len(told) == 1
    assert "disk full" in caplog.text


class Told:
    """A replica with an observer; what that was told."""

    def __init__(self, replica: Replica) -> None:
        self.rounds: list[DecisionRecord] = []
        replica.services = replace(replica.services, observers=(self.rounds.append,))

    @property
    def only(self) -> DecisionRecord:
        (served,) = self.rounds
        return served


@pytest.mark.parametrize("routing", ["always-remote", "always-local"])
async def test_told_once_of_a_round_that_ends_by_itself(routing: str) -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state, routing) as replica:
        told = Told(replica)
        await replica.round()
        served = told.only
        assert (served.is_initial, served.is_complete, served.was_left) == (True, True, False)
        assert (served.route, served.output_tokens) == (routing.removeprefix("always-"), 5)
        assert served.ttft_s is not None
        assert served.itl_s is not None
        assert served.lasted_s >= served.ttft_s + 4 * served.itl_s
        await replica.round()
        assert [served.is_initial for served in told.rounds] == [True, False]


async def test_told_once_of_a_round_whose_first_token_is_its_last() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        told = Told(replica)
        await replica.round(stop_conditions={"max_tokens": 1})
        assert (told.only.is_complete, told.only.output_tokens, told.only.itl_s) == (True, 1, None)


async def test_an_announcement_is_no_round_that_meets_or_misses_a_target() -> None:
    state = await cluster(worker("d1"), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        told = Told(replica)
        await replica.round("s")
        context = [*PROMPT, 64, 65, 66, 67, 68]
        tokens, record = await replica.round("s", token_ids=[*context[:-1], 9], annotations=["announce"])
        assert (tokens, record["route"], record["reason"]) == ([], "local", "cannot-carry-max-tokens")
        assert len(told.rounds) == 1
        # The context that the next round goes on from is the last round's.
        _, record = await replica.round("s", token_ids=[*context, 1])
        assert record["rewritten"] is False
        assert len(told.rounds) == 2


async def test_told_once_when_the_client_leaves_in_mid_stream() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        told, context = Told(replica), FakeContext()
        stream = replica.chunks(context=context, stop_conditions={"max_tokens": 50})
        await _take(stream, 3)
        context.stop_generating()
        await stream.aclose()
        await until(lambda: told.rounds)
        assert (told.only.is_complete, told.only.was_left) == (False, True)
        assert 3 <= told.only.output_tokens < 50


async def test_told_once_when_the_client_leaves_before_the_first_token() -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local") as replica:
        told, context = Told(replica), FakeContext()
        asked = asyncio.Event()

        async def never(*_: Any) -> AsyncIterator[dict[str, Any]]:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        replica.workers.generate = never
        stream = replica.chunks(context=context)
        task = asyncio.ensure_future(_take(stream, 1))
        await asked.wait()
        context.stop_generating()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        assert (told.only.ttft_s, told.only.outcome) == (None, names.ABANDONED)


async def test_told_once_of_a_round_that_goes_on_elsewhere() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1), worker("p1", Role.PREFILL))
    async with Replica(state) as replica:
        told = Told(replica)
        replica.workers.fail["generate", "d1"] = 2
        await replica.round()
        assert (told.only.is_complete, told.only.retries, told.only.is_initial) == (True, 1, True)
        assert (replica.counts["bound"], replica.counts["moved"]) == (1, 1)


@pytest.mark.parametrize(
    "error", [WorkerLostError("d1", "gone"), WorkerRefusedError("d1", 400, "bad grammar"), 2], ids=str
)
async def test_told_once_of_a_round_that_fails_for_good(error: Any) -> None:
    state = await cluster(worker("d1"))
    async with Replica(state, "always-local", retries=0) as replica:
        told = Told(replica)
        replica.workers.fail["generate", "d1"] = error
        with pytest.raises(RoundRefusedError):
            await replica.round()
        assert (told.only.outcome, told.only.was_left) == (names.FAILED, False)
        assert told.only.output_tokens == (2 if error == 2 else 0)


async def test_not_told_of_a_round_that_found_no_place() -> None:
    async with Replica(await cluster(worker("p1", Role.PREFILL))) as replica:
        told = Told(replica)
        with pytest.raises(RoundRefusedError):
            await replica.round()
        assert told.rounds == []


async def test_sessions_are_counted_where_they_are_bound() -> None:
    state = await cluster(worker("d1"), worker("d2", kv_used_tokens=1))
    async with Replica(state, "always-local") as replica, Replica(state, "always-local") as other:
        for _ in range(3):
            await replica.round("a")
        await replica.round("b")
        await replica.store.publish_worker(worker("d1", held_tokens={session_key("", "a"): 64}), 60.0)
        await asyncio.sleep(0)
        await other.round("a")
        counters = [replica.counts for replica in (replica, other)]
        assert [counter["bound"] for counter in counters] == [2, 0]
        await replica.store.remove_worker("d1")
        await asyncio.sleep(0)
        await replica.round("a")
        assert [counter["moved"] for counter in counters] == [1, 0], "by the one that moved it"


async def _take(stream: AsyncIterator[Any], count: int) -> None:
    async for _ in stream:
        count -= 1
        if not count:
            return
