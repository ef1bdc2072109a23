"""Simulations that begin with sessions in progress, and that record gaps from a later time on."""

from planner.simulator.options import SimulationOptions

from .lab import AMPD, run, session, single


def test_the_kv_of_an_idle_session_is_there_from_the_beginning_and_may_be_evicted() -> None:
    idle = session("idle", (10, 5), (10, 5), arrival_s=5.0)
    how = SimulationOptions(idle_tokens={"idle": 4000})
    first = run([idle], single(capacity=20_000), AMPD, how).rounds[0]
    assert (first.sent_s, first.hist_tokens, first.missing_tokens) == (5.0, 4000, 0)
    # A session that needs all the memory takes it before the idle one comes back.
    large = session("large", (19_000, 2))
    rounds = run([idle, large], single(capacity=20_000), AMPD, how).rounds
    back = next(each for each in rounds if each.session_id == "idle")
    assert rounds[0].session_id == "large", "it has ended, and its memory is free again"
    assert (back.sent_s, back.hist_tokens) == (5.0, 4000)
    assert back.missing_tokens > 3000


def test_gaps_are_recorded_from_a_time_on() -> None:
    sessions = [session("one", (10, 50)), session("two", (10, 30), arrival_s=10.0)]

    def gaps(from_s: float) -> int:
        made = run(sessions, single(), AMPD, SimulationOptions(gaps_from_s=from_s))
        return sum(each.steps * each.batch for each in made.gaps)

    assert gaps(0.0) == 49 + 29
    assert gaps(9.0) == 29
