"""Prefills in a simulation: the history of the next one is read while the one before it computes."""

import pytest

from ampd.serving import prefill_queue
from planner.simulator.options import SimulationOptions

from .lab import REMOTE, run, session, single


def test_reads_overlap_the_computation_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first rounds follow each other, the second ones come together.
    sessions = [
        session(f"s{number}", (3000, 40), (3000, 40), arrival_s=0.01 * number, tool_s=6 - 0.55 * number)
        for number in range(6)
    ]
    done = run(sessions, single(), REMOTE, SimulationOptions(kv_read_s=0.2, keeps_timeline=True))
    reads = [each for each in done.timeline if each.kind == "kv-history"]
    computes = [each for each in done.timeline if each.kind == "prefill" and each.worker_id == "prefill-0"]
    assert any(
        read.start_s < compute.start_s < read.end_s or compute.start_s < read.start_s < compute.end_s
        for read in reads
        for compute in computes
    )
    monkeypatch.setattr(prefill_queue, "PREFETCH", 0)
    without = run(sessions, single(), REMOTE, SimulationOptions(kv_read_s=0.2))
    assert done.duration_s < without.duration_s - 0.2
