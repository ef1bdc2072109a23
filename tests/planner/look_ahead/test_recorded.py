"""Recorded rounds become sessions that the simulator serves as they were."""

from ampd.recent_load import RecentRound
from planner.look_ahead.recorded import Decoding, Present, Waiting, recorded_load
from planner.simulator.options import UnderWay


def ended(sent_s: float, kept_tokens: int, prompt_tokens: int, ended_s: float, output_tokens: int) -> RecentRound:
    return RecentRound(sent_s, kept_tokens, prompt_tokens, ended_s, output_tokens, is_met=True)


def test_a_session_under_way_keeps_its_context_and_its_pauses() -> None:
    load = {
        "new": [ended(12.0, 0, 50, 13.0, 10)],
        "old": [ended(10.0, 100, 140, 11.0, 20), ended(14.0, 160, 200, 16.0, 5), ended(17.0, 64, 96, 18.0, 6)],
    }
    recorded = recorded_load(load)
    old, new = recorded.sessions
    assert (old.session_id, old.arrival_s, new.arrival_s) == ("old", 0.0, 2.0)
    assert recorded.under_way == {"old": UnderWay(100)}
    assert recorded.counted == {"old", "new"}
    assert [(item.keep_tokens, item.incr_tokens, item.output_tokens) for item in old.rounds] == [
        (100, 40, 20),
        (160, 40, 5),
        (64, 32, 6),  # its context was rewritten
    ]
    assert [item.tool_s for item in old.rounds] == [0.0, 3.0, 1.0]
    assert (recorded.rounds, recorded.span_s) == (4, 7.0)


def test_a_round_in_progress_gets_the_mean_output_and_ends_its_session() -> None:
    load = {"a": [ended(0.0, 0, 50, 1.0, 10), RecentRound(2.0, 60, 80), RecentRound(3.0, 60, 90)]}
    recorded = recorded_load(load)
    assert [item.output_tokens for item in recorded.sessions[0].rounds] == [10, 10]
    assert recorded.rounds == 2


def test_nothing_recorded_is_nothing_to_serve() -> None:
    recorded = recorded_load({})
    assert (list(recorded.sessions), recorded.rounds, recorded.span_s) == ([], 0, 0.0)


def test_rounds_in_progress_come_first_where_they_are() -> None:
    long, queued = RecentRound(1.0, 100, 140), RecentRound(5.0, 0, 50)
    load = {"long": [long], "short": [ended(2.0, 0, 50, 3.0, 10)], "queued": [queued]}
    present = Present({"long": "d0"}, [Decoding("long", "d0", long, 90, 0.02)], [Waiting("queued", "p0", queued, 4.0)])
    recorded = recorded_load(load, present)
    waiting, decoding, *again = recorded.sessions
    assert [each.session_id for each in (waiting, decoding)] == ["now/queued", "now/long"]
    assert recorded.decoding == {"now/long": present.decoding[0]}
    assert {each.session_id for each in again} == set(load)
    assert (decoding.rounds[0].incr_tokens, decoding.rounds[0].output_tokens) == (1, 90)  # twice what is there
    assert (waiting.rounds[0].keep_tokens, waiting.rounds[0].incr_tokens) == (0, 50)
    assert recorded.under_way == {
        "now/long": UnderWay(230, "d0", "d0"),
        "now/queued": UnderWay(0, "", "p0", 4.0),
        "long": UnderWay(100, "d0"),
    }
    assert recorded.counted == {"now/long", *load}  # what waits is late or not whatever the roles
    assert next(each for each in again if each.session_id == "long").rounds[0].output_tokens == 180


def test_a_waiting_round_has_the_kv_that_its_owner_still_holds() -> None:
    half, gone = RecentRound(5.0, 100, 140), RecentRound(5.0, 100, 140)
    waiting = [Waiting("half", "p0", half, 1.0), Waiting("gone", "p0", gone, 1.0)]
    recorded = recorded_load({}, Present({"half": "d0"}, [], waiting, {"half": 48}))
    assert recorded.under_way == {
        "now/half": UnderWay(48, "d0", "p0", 1.0),
        "now/gone": UnderWay(0, "", "p0", 1.0),
    }
    assert [each.rounds[0].incr_tokens for each in recorded.sessions] == [92, 140]


def test_outputs_are_as_long_as_those_of_a_record_that_goes_back_far_enough() -> None:
    now = RecentRound(9.0, 0, 50)
    longer = {"before": [ended(0.0, 0, 50, 8.0, 300)]}
    assert recorded_load({"now": [now]}, outputs=longer).sessions[0].rounds[0].output_tokens == 300
