"""Prefills in a simulation: the history of the next one is read while the one before it computes."""

from planner.simulator.options import SimulationOptions

from .lab import REMOTE, run, session, single


def test_reads_overlap_the_computation_before_them() -> None:
    # The first rounds follow each other, the second ones come together.
    sessions = [
        session(f"s{number}", (3000, 40), (3000, 40), arrival_s=0.01 * number, tool_s=6 - 0.55 * number)
        for number in range(6)
    ]
    slow_reads = SimulationOptions(kv_read_s=0.2, keeps_timeline=True)
    with_overlap, without = (
        run(sessions, single(), REMOTE, SimulationOptions(kv_read_s=0.2, prefetch=prefetch)) for prefetch in (1, 0)
    )
    assert with_overlap.duration_s < without.duration_s - 0.2
    done = run(sessions, single(), REMOTE, slow_reads)
    reads = [each for each in done.timeline if each.kind == "kv-history"]
    computes = [each for each in done.timeline if each.kind == "prefill" and each.worker_id == "prefill-0"]
    assert any(
        read.start_s < compute.start_s < read.end_s or compute.start_s < read.start_s < compute.end_s
        for read in reads
        for compute in computes
    )
