"""The KV of a round of one token follows its client's next round: late, stale and unwanted arrivals."""

from ampd.types import Parallelism
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from workloads.trace import Round, Session

from .lab import LOCAL, MODEL, RouteBy, run, session, single, watched_memories

SLOW_READS = SimulationOptions(kv_read_s=1.0)
FIRST_REMOTE = RouteBy(lambda index: index == 0)


def test_late_kv_of_a_rewritten_context_is_not_taken_for_the_new_one() -> None:
    rounds = (
        Round(incr_tokens=1600, output_tokens=1),
        Round(incr_tokens=1600, output_tokens=20, tool_s=0.5, keep_tokens=0),
        Round(incr_tokens=16, output_tokens=20, tool_s=3.0),
    )
    # Its second round keeps the decode worker busy until the KV is there, so that the rewritten round waits.
    blocker = session("blocker", (10, 2), (16000, 2), arrival_s=0.2, tool_s=0.4)
    rewritten = Session(session_id="s", arrival_s=0.0, rounds=rounds)
    done = run([rewritten, blocker], single(), FIRST_REMOTE.policies(), SLOW_READS)
    again = next(record for record in done.rounds if (record.session_id, record.index) == ("s", 1))
    assert again.queued_s > 0.5
    assert again.ttft_s is not None
    # All 1600 tokens are new.
    assert again.ttft_s - again.queued_s >= MODEL.prefill_s(0, 1600, Parallelism(1)) - 1e-9


def test_late_kv_of_an_old_round_does_not_shrink_what_a_newer_one_has_left() -> None:
    first_remote = session("s", (160, 1), (1600, 2), (16, 2), tool_s=0.0)
    slow = SimulationOptions(kv_read_s=5.0)
    patient = first_remote.model_copy(update={"rounds": _slowly(first_remote, 10.0)})
    third = run([patient], single(), FIRST_REMOTE.policies(), slow).rounds[-1]
    assert third.missing_tokens == 0
    assert third.ttft_s is not None
    assert third.ttft_s < MODEL.prefill_s(0, 1600, Parallelism(1)) / 4


def test_late_kv_of_a_session_that_failed_is_not_kept() -> None:
    cluster = Cluster((ReplicaGroup(1, Parallelism(1), 1000),), (ReplicaGroup(1, Parallelism(1), 1000),))
    with watched_memories() as memories:
        done = run([session("s", (400, 1), (900, 1), tool_s=0.1)], cluster, FIRST_REMOTE.policies(), SLOW_READS)
    assert [record.error is None for record in done.rounds] == [True, False]
    assert [memory.used_tokens for memory in memories] == [0, 0]


def test_a_round_of_one_token_ends_with_its_first_token() -> None:
    for policies in (LOCAL, FIRST_REMOTE.policies()):
        (record,) = run([session("s", (400, 1))], single(), policies, SLOW_READS).rounds
        assert record.e2e_s == record.ttft_s == MODEL.prefill_s(0, 400, Parallelism(1))


def _slowly(each: Session, last_tool_s: float) -> tuple[Round, ...]:
    return (*each.rounds[:-1], each.rounds[-1].model_copy(update={"tool_s": last_tool_s}))
