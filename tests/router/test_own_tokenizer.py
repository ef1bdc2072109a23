"""Workers whose token ids mean another text get no rounds."""

from __future__ import annotations

import pytest

from ampd.state import codec
from ampd.types import Role
from router.fingerprints import OwnTokenizer
from router.round_errors import RoundRefusedError
from tests.router.replica_lab import Replica, cluster, worker

OURS = worker("d1", tokenizer="ours")
THEIRS = worker("d2", tokenizer="theirs")
OLDER = worker("d3")


def test_only_another_known_tokenizer_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    own = OwnTokenizer("ours")
    for _ in range(3):
        assert [own.serves(each) for each in (OURS, THEIRS, OLDER)] == [True, False, True]
    (line,) = caplog.messages
    assert "worker d2 has another tokenizer (theirs)" in line
    assert OwnTokenizer("").serves(THEIRS)


def test_a_view_carries_its_tokenizer() -> None:
    assert codec.decode_view(codec.encode_view(OURS, 0.0), 0.0) == OURS


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
