"""Routing stays inside one fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampd.serving.placement import readable
from ampd.state import codec
from ampd.types import Role, WorkerView
from router.fingerprints import ForeignWorkers
from tests.router.replica_lab import Replica, cluster, worker

DECODE = WorkerView("d", Role.DECODE, fingerprint="a")
SAME, OTHER = (WorkerView(name, Role.PREFILL, fingerprint=name) for name in "ab")
OLDER = WorkerView("o", Role.PREFILL)


def test_prefill_workers_with_other_weights_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    foreign = ForeignWorkers()
    for _ in range(3):
        assert readable(DECODE, [SAME, OTHER, OLDER]) == [SAME, OLDER]
        foreign.note(DECODE, [SAME, OTHER, OLDER])
    (line,) = caplog.messages
    assert "prefill worker b has other weights or settings" in line
    other = replace(DECODE, fingerprint="b")
    assert readable(other, [SAME, OTHER]) == [OTHER]
    foreign.note(other, [SAME, OTHER])
    assert len(caplog.messages) == 2


def test_a_decode_worker_of_an_older_version_takes_all() -> None:
    assert readable(replace(DECODE, fingerprint=""), [SAME, OTHER]) == [SAME, OTHER]


def test_a_view_carries_its_fingerprint_and_may_lack_it() -> None:
    record = codec.encode_view(DECODE, 0.0)
    assert codec.decode_view(record, 0.0) == DECODE
    assert codec.decode_view(record.replace(',"fingerprint":"a"', ""), 0.0) == replace(DECODE, fingerprint="")


async def test_a_round_is_not_prefilled_by_a_worker_with_other_weights() -> None:
    decode = worker("d", fingerprint="new")
    old, new = worker("p1", Role.PREFILL, fingerprint="old"), worker("p2", Role.PREFILL, fingerprint="new")
    async with Replica(await cluster(decode, old)) as replica:
        assert (await replica.round())[1]["reason"] == "no-prefill-worker"
    async with Replica(await cluster(decode, old, new)) as replica:
        for number in range(4):
            assert (await replica.round(f"s{number}"))[1]["prefill_worker"] == "p2"
