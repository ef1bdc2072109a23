"""Coordinators: rounds that some worker can never take are refused in one line or prefilled elsewhere."""

from dataclasses import replace

from ampd.types import Parallelism
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulationRun

from .lab import AMPD, REMOTE, SLO, BindTo, run, session, single

THETA = Parallelism(1)


def test_a_session_bound_to_a_small_worker_is_refused_when_it_outgrows_it() -> None:
    """That another decode worker would have room does not help: sessions do not move."""
    cluster = Cluster(decode=(ReplicaGroup(1, THETA, 1000), ReplicaGroup(1, THETA, 9000)))
    bound_small = replace(AMPD, binding=BindTo("decode-0"))
    sessions = [session("grows", (500, 10), (800, 10)), session("stays", (500, 10), (5, 5), arrival_s=0.1)]
    done = run(sessions, cluster, bound_small)
    errors = {(record.session_id, record.index): record.error for record in done.rounds}
    assert errors == {
        ("grows", 0): None,
        ("grows", 1): "prompt and output have 1320 tokens, the KV memory of a decode worker holds 1000 tokens",
        ("stays", 0): None,
        ("stays", 1): None,
    }


def test_a_prefill_worker_without_room_for_the_prompt_leaves_it_to_the_decode_worker() -> None:
    """Of a memory of exactly the prompt's length the first output token has no place left."""
    cluster = Cluster(decode=(ReplicaGroup(1, THETA, 5000),), prefill=(ReplicaGroup(1, THETA, 500),))
    fits, not_quite = (run([session("s", (tokens, 10))], cluster, REMOTE).rounds[0] for tokens in (499, 500))
    assert (fits.route, fits.error) == ("remote", None)
    assert (not_quite.route, not_quite.reason, not_quite.error) == ("local", "no-prefill-worker", None)


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


def test_refused_rounds_come_back_and_running_sessions_go_first() -> None:
    """One burst: new sessions wait outside until those that were taken have less than a quarter of the bound to do."""
    sessions = [session(f"s{number}", (20_000, 2), (500, 2), arrival_s=0.01 * number) for number in range(60)]
    options = SimulationOptions(max_wait=8.0)
    bounded, unbounded = run(sessions, single(), REMOTE, options), run(sessions, single(), REMOTE)
    assert bounded.refusals
    assert bounded.refusals > 30
    assert unbounded.refusals is None
    assert len(bounded.rounds) == len(unbounded.rounds) == 120
    assert not any(record.error for record in bounded.rounds)

    def longest_wait_s(done: SimulationRun) -> float:
        return max(record.queued_s for record in done.rounds)

    assert longest_wait_s(bounded) < 8.0 * SLO.ttft_s < longest_wait_s(unbounded)
    assert bounded.result(SLO)["refusals"] == bounded.refusals
    assert "refusals" not in unbounded.result(SLO)
