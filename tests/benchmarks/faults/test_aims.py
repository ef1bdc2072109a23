"""The aims for workers that hang are one rule for both engines, and no such fault ends before its aim."""

from benchmarks.faults.aims import hung_worker_aim_s
from benchmarks.faults.cluster import LEASE_S
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.sglang import SGLANG_FAULTS
from router.settings import CALL_TIMEOUT_S

SGLANG = {fault.name: fault for fault in SGLANG_FAULTS}


def test_the_last_worker_of_a_role_is_asked_before_it_counts_as_lost() -> None:
    asked_s = hung_worker_aim_s(1) - hung_worker_aim_s(2)
    assert asked_s > CALL_TIMEOUT_S
    assert hung_worker_aim_s(2) > 4 / 3 * LEASE_S


def test_both_engines_have_the_same_aims_for_workers_that_hang() -> None:
    assert FAULTS["stop-prefill"].aim_s == FAULTS["stop-decode"].aim_s == SGLANG["stop-decode"].aim_s
    assert SGLANG["stop-prefill"].aim_s == hung_worker_aim_s(1), "there is one prefill worker"


def test_a_worker_hangs_for_longer_than_its_aim() -> None:
    """Otherwise the round goes on when the worker does, and nobody need have noticed."""
    for fault in (*FAULTS.values(), *SGLANG.values()):
        if fault.name in ("stop-prefill", "stop-decode"):
            assert fault.holds_s > fault.aim_s, fault.name
