"""The recent load: rounds of a window, by session."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ampd.recent_load import RecentLoad, RecentRound, all_rounds, latest_rounds, met_and_missed, sessions_met

WINDOW_S = 10.0


def ended(sent_s: float, lasted_s: float, *, is_met: bool) -> RecentRound:
    item = RecentRound(sent_s, 0, 16)
    item.end(sent_s + lasted_s, 4, is_met)
    return item


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("abc")), max_size=30), st.floats(0, 120))
def test_it_has_the_rounds_of_the_window_and_forgets_the_others(
    arrivals: Sequence[tuple[float, str]], later_s: float
) -> None:
    recorded = RecentLoad(WINDOW_S)
    arrivals = sorted(arrivals)
    for sent_s, session_id in arrivals:
        recorded.add(session_id, RecentRound(sent_s, 0, 16))
    now_s = max([later_s, *(sent_s for sent_s, _ in arrivals)])
    load = recorded.until(now_s)
    expected = [(sent_s, name) for sent_s, name in arrivals if sent_s >= now_s - WINDOW_S]
    assert sorted((item.sent_s, name) for name, rounds in load.items() for item in rounds) == expected
    assert all(rounds for rounds in load.values())
    assert set(recorded._sessions) == {name for _, name in expected}


def test_the_latest_rounds() -> None:
    load = {"a": [RecentRound(1.0, 0, 16), RecentRound(5.0, 0, 16)], "b": [RecentRound(3.0, 0, 16)]}
    assert sorted(item.sent_s for item in all_rounds(latest_rounds(load, 2))) == [3.0, 5.0]
    assert latest_rounds(load, 3) == load


def test_ended_rounds_count_at_their_end() -> None:
    load = {"a": [ended(0.0, 1.0, is_met=False), ended(8.0, 1.0, is_met=True), ended(8.5, 1.0, is_met=False)]}
    assert met_and_missed(load, now_s=10.0, last_s=2.0, ttft_s=1.0) == (1, 1)


def test_a_round_that_never_ends_is_missed_once_it_is_older_than_the_others_and_the_target() -> None:
    load = {"a": [ended(0.0, 2.0, is_met=True)], "b": [RecentRound(5.0, 0, 16)]}
    assert met_and_missed(load, now_s=8.0, last_s=20.0, ttft_s=1.0) == (1, 0)
    assert met_and_missed(load, now_s=8.1, last_s=20.0, ttft_s=1.0) == (1, 1)


def test_a_session_counts_as_met_if_all_its_ended_rounds_are() -> None:
    def ended(ended_s: float | None, is_met: bool | None) -> RecentRound:
        return RecentRound(0.0, 0, 10, ended_s, 4, is_met=is_met)

    load = {
        "met": [ended(5.0, True), ended(None, None)],
        "missed": [ended(5.0, True), ended(6.0, False)],
        "missed before": [ended(1.0, False), ended(6.0, True)],
        "runs": [ended(None, None)],
    }
    assert sessions_met(load, 2.0) == 2 / 3
    assert sessions_met(load, 0.0) == 1 / 3
    assert sessions_met({}, 0.0) == 1.0
