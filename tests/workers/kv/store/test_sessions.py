"""A session needs, and counts as held, the longest stored prefix of the context of its last request, and no more."""

from __future__ import annotations

from tests.workers.kv.store.store_lab import PAGE, keys, offer, put, session_ids, store_of, tail
from workers.kv.store.directory import StoreDirectory


def held_pages(directory: StoreDirectory) -> int:
    return directory.sessions.held_tokens("s") // PAGE


# -- holes


def test_pages_behind_a_hole_go_first() -> None:
    directory = store_of(6)
    put(directory, "", "xy")
    put(directory, "s", "ab")
    put(directory, "s", "abcde", 3)
    directory.sessions.touch("s", keys("abcde"))
    put(directory, "", "12")
    assert directory.match(keys("xy")) == 2
    assert directory.used_tokens == 6 * PAGE
    put(directory, "", "3")
    assert directory.match(keys("xy")) == 1


def test_pages_that_a_running_session_stores_behind_a_hole_go_first() -> None:
    directory = store_of(6)
    put(directory, "", "xy")
    put(directory, "s", "ab")
    directory.sessions.begin_request("s", keys("abcde"))
    put(directory, "s", "abcde", 3)
    put(directory, "", "12")
    assert directory.match(keys("xy")) == 2
    assert directory.used_tokens == 6 * PAGE


def test_pages_behind_a_hole_are_not_held_until_it_is_filled() -> None:
    directory = store_of(6)
    put(directory, "s", "abcd")
    put(directory, "", "xyz")
    assert directory.sessions.held_tokens("s") == 3 * PAGE
    put(directory, "s", "abcde", 4)
    assert directory.sessions.held_tokens("s") == 3 * PAGE
    directory.sessions.begin_request("s", keys("abcdef"))
    put(directory, "s", "abcdef", 5)
    assert directory.sessions.held_tokens("s") == directory.match(keys("abcdef")) * PAGE == 3 * PAGE
    put(directory, "s", "abcd", 3)
    assert directory.sessions.held_tokens("s") == directory.match(keys("abcdef")) * PAGE == 4 * PAGE


def test_pages_behind_a_writer_that_gave_up_are_not_held() -> None:
    directory = store_of(9)
    directory.sessions.touch("s", keys("abcdefg"))
    offer(directory, "s", "ab")
    stopped = directory.reserve("s", {"kv": tail("abcd", 2)}, 0.0)
    assert stopped is not None
    offer(directory, "s", "abcdef", 4)
    directory.sessions.take_changed()
    directory.give_up(stopped.id)
    assert directory.sessions.take_changed() == {"s": 2 * PAGE}
    offer(directory, "s", "abcdefg", 6)
    assert held_pages(directory) == 2


def test_pages_behind_an_evicted_end_are_not_held() -> None:
    directory = store_of(9)
    directory.sessions.touch("s", keys("abcde"))
    offer(directory, "s", "abcd")
    assert directory.sessions.evict_idle(1) == 1
    offer(directory, "s", "abcde", 4)
    assert held_pages(directory) == directory.match(keys("abcde")) == 3


def test_pages_behind_a_hole_are_held_when_it_is_filled() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("s", keys("abcd"))
    offer(directory, "s", "ab")
    offer(directory, "s", "abcdef", 3)
    directory.sessions.end_request("s", keys("abcdef"))
    assert held_pages(directory) == 2
    directory.sessions.take_changed()
    offer(directory, "s", "abc", 2)
    assert held_pages(directory) == 6
    assert directory.sessions.take_changed() == {"s": 6 * PAGE}


def test_pages_behind_a_hole_go_first_when_their_request_ends() -> None:
    """They are the output of the request, so that the session does not know before that a hole precedes them."""
    directory = store_of(6)
    put(directory, "", "x")
    directory.sessions.begin_request("s", keys("abc"))
    offer(directory, "s", "ab")
    offer(directory, "s", "abcde", 3)
    directory.sessions.end_request("s", keys("abcde"))
    put(directory, "", "123")
    assert directory.match(keys("x")) == 1
    assert held_pages(directory) == directory.match(keys("abcde")) == 2


# -- contexts of other requests


def test_output_is_held_when_its_request_has_ended() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("s", keys("ab"))
    offer(directory, "s", "ab")
    offer(directory, "s", "abcd", 2)
    assert held_pages(directory) == 2
    directory.sessions.end_request("s", keys("abcd"))
    assert held_pages(directory) == 4


def test_pages_that_come_after_their_request_has_ended_are_held() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("s", keys("ab"))
    directory.sessions.end_request("s", keys("abcd"))
    for start in range(4):
        offer(directory, "s", "abcd"[: start + 1], start)
        assert held_pages(directory) == start + 1


def test_requests_at_the_same_time_count_one_context() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("s", keys("abX"))
    directory.sessions.begin_request("s", keys("abYZ"))
    offer(directory, "s", "abYZ")
    offer(directory, "s", "abX1", 2)
    assert held_pages(directory) == 4
    directory.sessions.end_request("s", keys("abX1"))
    assert held_pages(directory) == 4
    offer(directory, "s", "abYZ2", 4)
    assert held_pages(directory) == 4
    directory.sessions.end_request("s", keys("abYZ2"))
    assert held_pages(directory) == directory.match(keys("abYZ2")) == 5


def test_pages_of_a_request_beside_the_last_one_are_not_the_first_to_go() -> None:
    directory = store_of(6)
    put(directory, "", "x")
    directory.sessions.begin_request("s", keys("ab1"))
    directory.sessions.begin_request("s", keys("XY"))
    offer(directory, "s", "ab")
    put(directory, "", "1234")
    assert directory.match(keys("x")) == 0
    assert directory.match(keys("ab")) == 2


def test_pages_that_another_session_has_stored_are_held_with_the_next_of_its_own() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("s", keys("abc"))
    offer(directory, "", "ab")
    directory.sessions.take_changed()
    assert directory.reserve("s", {"kv": tail("abc", 2)}, 0.0) is not None
    assert directory.sessions.take_changed() == {"s": 2 * PAGE}


def test_late_pages_of_an_old_context_are_not_held() -> None:
    directory = store_of(9)
    put(directory, "s", "ab")
    directory.sessions.begin_request("s", keys("ab"))
    offer(directory, "s", "abcd", 2)
    assert held_pages(directory) == directory.match(keys("ab")) == 2


# -- evicted sessions


def test_an_idle_session_whose_pages_are_still_to_come_is_not_refused() -> None:
    directory = store_of(2)
    put(directory, "", "xy")
    directory.protect("r", keys("xy"), 0.0)
    directory.sessions.begin_request("s", keys("ab"))
    directory.sessions.end_request("s", keys("ab"))
    assert directory.sessions.evict_idle(1) == 0
    assert session_ids(directory) == []
    directory.unprotect("r")
    offer(directory, "s", "ab")
    directory.sessions.begin_request("s", keys("abc"))
    assert held_pages(directory) == 2


def test_late_pages_of_a_session_without_a_page_are_refused() -> None:
    directory = store_of(2)
    put(directory, "s", "ab")
    put(directory, "t", "xy")
    assert directory.reserve("s", {"kv": tail("abc", 2)}, 0.0) is None


def test_late_pages_of_a_forgotten_session_are_not_held() -> None:
    directory = store_of(6)
    put(directory, "s", "ab")
    directory.sessions.begin_request("t", keys("ab"))
    assert directory.sessions.evict_idle(1) == 0
    assert session_ids(directory) == ["t"], "the other has no page of its own to give"
    offer(directory, "s", "abcd", 2)
    assert held_pages(directory) == 0
    directory.sessions.begin_request("s", keys("abcd"))
    assert held_pages(directory) == 4
