"""Rounds in a simulation: KV memory under pressure, refusals, histories and reads that overlap."""

from hypothesis import settings

from planner.simulator.cluster import Cluster
from planner.simulator.options import SimulationOptions

from .lab import LOCAL, REMOTE, RouteBy, run, session, single

untimed = settings(deadline=None)


# -- memory


def test_a_session_that_loses_its_kv_computes_it_again() -> None:
    first = session("first", (1000, 10), (10, 10), tool_s=5.0)
    second = session("second", (1000, 10), arrival_s=2.0)
    roomy, tight = (run([first, second], single(1, capacity, prefill=0), LOCAL) for capacity in (4000, 1500))
    again = {each.lost_sessions: each.rounds[-1] for each in (roomy, tight)}
    assert set(again) == {0, 1}
    assert again[0].missing_tokens == 0
    assert again[1].missing_tokens > 900
    assert again[1].ttft_s is not None
    assert again[0].ttft_s is not None
    assert again[1].ttft_s > 5 * again[0].ttft_s


def test_kv_read_behind_a_history_that_was_evicted_meanwhile_is_of_no_use() -> None:
    """While `split` gets its increment back, `large` takes the decode worker's whole memory, history included."""
    split = session("split", (1000, 10), (300, 10), tool_s=1.0)
    large = session("large", (1900, 10), arrival_s=2.8)
    how = SimulationOptions(kv_read_s=1.0, keeps_timeline=True)
    done = run([split, large], single(1, 2000), RouteBy(lambda index: index == 1).policies(), how)
    (large_done,) = [record for record in done.rounds if record.session_id == "large"]
    assert large_done.ttft_s is not None
    assert large_done.ttft_s < 0.5
    computed = [
        each.detail["tokens"]
        for each in done.timeline
        if (each.worker_id, each.kind, each.detail.get("session")) == ("decode-0", "prefill", "split")
    ]
    assert computed == [1000, 1010 + 300 + 1]


def test_a_round_that_does_not_fit_now_waits_for_one_that_ends() -> None:
    sessions = [session("one", (1000, 200)), session("two", (1000, 10), arrival_s=0.001)]
    one_slot, two_slots = (
        {record.session_id: record for record in run(sessions, single(1, capacity, prefill=0), LOCAL).rounds}
        for capacity in (1300, 5000)
    )
    assert one_slot["two"].ttft_s is not None
    assert two_slots["two"].ttft_s is not None
    assert one_slot["one"].e2e_s is not None
    assert one_slot["two"].ttft_s > one_slot["one"].e2e_s - 0.01
    assert two_slots["two"].ttft_s < one_slot["one"].e2e_s / 2


def test_a_round_that_can_never_fit_is_refused_and_the_others_go_on() -> None:
    sessions = [session("large", (5000, 10), (5, 5)), session("small", (500, 10), (5, 5))]
    done = run(sessions, single(1, 2000), REMOTE)
    by_name = {name: [record for record in done.rounds if record.session_id == name] for name in ("large", "small")}
    assert [each.error is None for each in by_name["small"]] == [True, True]
    (refused,) = by_name["large"]
    assert refused.error == "prompt and output have 5010 tokens, the KV memory of a decode worker holds 2000 tokens"
    limited = Cluster(single().decode, single().prefill, max_context_tokens=4096)
    assert "longest context" in str(
        next(record.error for record in run(sessions, limited, REMOTE).rounds if record.error)
    )


def test_history_at_a_prefill_worker_is_not_read_again() -> None:
    done = run([session("s", (1600, 20), (100, 20), (100, 20))], single(), REMOTE)
    first, second, third = sorted(done.rounds, key=lambda record: record.index)
    assert first.kv_history_tokens == 0
    assert first.kv_increment_tokens == 1600
    # Only what the decode worker generated in between travels, in whole pages.
    assert 0 < second.kv_history_tokens <= 32
    assert 0 < third.kv_history_tokens <= 48


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
