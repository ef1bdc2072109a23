"""The KV that a round finds: lost with its session, read behind a history, or there already."""

from planner.simulator.options import SimulationOptions

from .lab import LOCAL, REMOTE, RouteBy, run, session, single


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


def test_history_at_a_prefill_worker_is_not_read_again() -> None:
    done = run([session("s", (1600, 20), (100, 20), (100, 20))], single(), REMOTE)
    first, second, third = sorted(done.rounds, key=lambda record: record.index)
    assert first.kv_history_tokens == 0
    assert first.kv_increment_tokens == 1600
    # Only what the decode worker generated in between travels, in whole pages.
    assert 0 < second.kv_history_tokens <= 32
    assert 0 < third.kv_history_tokens <= 48
