"""Sessions need no pages behind a hole in their context, and do not count them as held."""

from __future__ import annotations

from tests.workers.kv.store.store_lab import PAGE, keys, put, store_of, tail


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
    put(directory, "s", "ab")
    stopped = directory.reserve("s", {"kv": tail("abcd", 2)}, 0.0)
    assert stopped is not None
    put(directory, "s", "abcdef", 4)
    directory.sessions.take_changed()
    directory.give_up(stopped.id)
    assert directory.sessions.take_changed() == {"s": 2 * PAGE}
    put(directory, "s", "abcdefg", 6)
    assert directory.sessions.held_tokens("s") == 2 * PAGE
