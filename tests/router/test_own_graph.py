"""Workers whose token ids mean another text get no rounds."""

from __future__ import annotations

import time

import pytest

from ampd.call_signatures import MAX_AGE_S, secret_mark
from ampd.state import codec
from ampd.types import Role
from router.own_graph import OwnGraph
from router.round_errors import RoundRefusedError
from tests.router.replica_lab import Replica, cluster, worker
from tests.waiting import until

OURS = worker("d1", tokenizer="ours")
THEIRS = worker("d2", tokenizer="theirs")
OLDER = worker("d3")


def test_only_another_known_tokenizer_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    own = OwnGraph("ours")
    for _ in range(3):
        assert [own.serves(each) for each in (OURS, THEIRS, OLDER)] == [True, False, True]
    (line,) = caplog.messages
    assert "worker d2 has another tokenizer (theirs)" in line
    assert OwnGraph("").serves(THEIRS)


def test_a_view_carries_its_tokenizer() -> None:
    assert codec.decode_view(codec.encode_view(OURS, 0.0), 0.0) == OURS


def test_a_worker_that_would_refuse_every_call_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = b"our secret of the graph", b"another secret of a graph"
    own = OwnGraph("", lambda: 1000.0)
    marks = (secret_mark(theirs), secret_mark(ours))
    assert not own.serves(worker("d1", secrets=marks))  # this coordinator has no secret, and does not sign
    own.sign_with((ours,))
    assert own.serves(worker("d1", secrets=marks, clock_s=1000.0 - MAX_AGE_S))
    assert own.serves(worker("d1", secrets=marks))
    assert own.serves(worker("d1", clock_s=1.0))  # takes calls of everybody
    for _ in range(2):
        assert not own.serves(worker("d1", secrets=marks[:1]))
        assert not own.serves(worker("d1", secrets=marks, clock_s=999.0 - MAX_AGE_S))
    assert [message.count("--graph-secret-file") for message in caplog.messages] == [1, 0]


async def test_a_worker_is_judged_when_it_publishes() -> None:
    """Its clock stands still here while the shared state is away."""
    marks, now_s = (secret_mark(b"secret"),), time.time()
    async with Replica(await cluster(worker("d1", secrets=marks, clock_s=now_s)), "always-local") as replica:
        assert not replica.view.decode()
        replica.own.sign_with((b"secret",))
        await replica.store.publish_worker(worker("d1", secrets=marks, clock_s=now_s), 60)
        await until(lambda: bool(replica.view.decode()))
        replica.own._clock = lambda: now_s + 2 * MAX_AGE_S
        replica.view.suspect("d1", 0.0)
        assert replica.view.decode()


async def test_rounds_use_workers_with_the_own_tokenizer() -> None:
    prefill = [worker("p1", Role.PREFILL, tokenizer="theirs"), worker("p2", Role.PREFILL, tokenizer="ours")]
    async with Replica(await cluster(THEIRS, OURS, *prefill), tokenizer="ours") as replica:
        for number in range(4):
            record = (await replica.round(f"s{number}"))[1]
            assert (record["decode_worker"], record["prefill_worker"]) == ("d1", "p2")


async def test_a_session_of_a_worker_with_another_tokenizer_moves() -> None:
    """Another coordinator, with that tokenizer, had bound it there."""
    state = await cluster(THEIRS, OURS)
    async with Replica(state, "always-local", tokenizer="theirs") as theirs:
        assert (await theirs.round("s"))[1]["decode_worker"] == "d2"
    async with Replica(state, "always-local", tokenizer="ours") as ours:
        assert (await ours.round("s"))[1]["decode_worker"] == "d1"


async def test_without_a_worker_with_the_own_tokenizer_rounds_are_refused() -> None:
    async with Replica(await cluster(THEIRS), "always-local", tokenizer="ours") as replica:
        with pytest.raises(RoundRefusedError, match="no live decode worker"):
            await replica.round()
