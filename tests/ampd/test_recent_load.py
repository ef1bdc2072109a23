"""The recent load: rounds of a window, by session."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ampd.recent_load import RecentLoad, RecentRound, all_rounds, latest_rounds

WINDOW_S = 10.0


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
