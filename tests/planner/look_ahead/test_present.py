"""What decodes and waits where, by views and the recent load."""

from ampd.recent_load import RecentRound
from ampd.types import PrefillTask, Role, Window, WorkerView
from planner.look_ahead.recorded import present_state

from .lab import SLO, question


def test_a_round_decodes_where_its_session_is_and_others_where_places_are_left() -> None:
    load = {
        "known": [RecentRound(1.0, 0, 50, 2.0, 4, is_met=True), RecentRound(6.0, 54, 60)],
        "new": [RecentRound(8.0, 0, 60)],
        "over": [RecentRound(8.0, 0, 60, 9.0, 4, is_met=True)],
    }
    found = present_state(
        question(
            [
                WorkerView("d0", Role.DECODE, itl=Window(0.01, 9), decode_batch=1, held_tokens={"known": 48}),
                WorkerView("d1", Role.DECODE, itl=Window(0.02, 9), decode_batch=1, held_tokens={"over": 48}),
            ],
            load,
        )
    )
    by_session = {each.session_id: each for each in found.decoding}
    assert {name: each.worker_id for name, each in by_session.items()} == {"known": "d0", "new": "d1"}
    assert 380 <= by_session["known"].tokens <= 400
    assert 90 <= by_session["new"].tokens <= 100
    assert found.owners == {"known": "d0", "over": "d1"}
    assert not found.waiting


def test_a_prefill_waits_in_its_queue_and_a_decode_worker_prefills_its_own_sessions() -> None:
    task = PrefillTask("s/0", "s", 0, 60, 7.0, SLO)
    load = {"s": [RecentRound(7.0, 0, 60)]}
    for role, owners in ((Role.PREFILL, {}), (Role.DECODE, {"s": "w"})):
        found = present_state(question([WorkerView("w", role, queue=(task,))], load))
        assert [(each.session_id, each.worker_id, each.waited_s) for each in found.waiting] == [("s", "w", 3.0)]
        assert not found.decoding
        assert found.owners == owners


def test_more_rounds_than_decode_are_on_their_way() -> None:
    load = {name: [RecentRound(9.0, 0, 60)] for name in "ab"}
    found = present_state(question([WorkerView("d", Role.DECODE, decode_batch=1)], load))
    assert (len(found.decoding), [each.worker_id for each in found.waiting]) == (1, [""])


def test_the_time_to_the_first_token_is_no_time_of_decoding() -> None:
    load = {"s": [RecentRound(5.0, 0, 60)]}
    workers = [
        WorkerView("p", Role.PREFILL, ttft=Window(2.0, 3)),
        WorkerView("d", Role.DECODE, itl=Window(0.01, 9), decode_batch=1),
    ]
    (decoding,) = present_state(question(workers, load)).decoding
    assert (decoding.tokens, decoding.token_s) == (300, 0.01)
