"""What goes when the store needs memory, in which order, and what never goes."""

from __future__ import annotations

from tests.workers.kv.store.store_lab import KV, MAMBA, PAGE, SWA, keys, put, session_ids, store_of
from workers.kv.store.directory import StoreDirectory


def idle(directory: StoreDirectory, session: str, text: str) -> None:
    """A session that has had a round."""
    directory.sessions.begin_request(session, keys(text))
    put(directory, session, text)
    directory.sessions.end_request(session, keys(text))


def test_records_of_no_session_go_first_from_their_ends() -> None:
    directory = store_of(9)
    idle(directory, "old", "abc")
    idle(directory, "gone", "xyz")
    put(directory, "", "pqr")
    directory.sessions.release_session("gone")
    put(directory, "", "12")
    assert [directory.match(keys(text)) for text in ("abc", "xyz", "pqr", "12")] == [3, 3, 1, 2]
    put(directory, "", "345")
    assert [directory.match(keys(text)) for text in ("abc", "xyz", "pqr", "12", "345")] == [3, 1, 0, 2, 3]


def test_a_protection_makes_records_of_no_session_young_again() -> None:
    directory = store_of(4)
    put(directory, "", "ab")
    put(directory, "", "xy")
    directory.protect("r", keys("ab"), 0.0)
    directory.unprotect("r")
    put(directory, "", "12")
    assert [directory.match(keys(text)) for text in ("ab", "xy")] == [2, 0]


def test_the_end_of_the_least_recently_used_idle_session_goes() -> None:
    directory = store_of(9)
    directory.sessions.begin_request("running", keys("abc"))
    put(directory, "running", "abc")
    idle(directory, "old", "pqr")
    idle(directory, "young", "xyz")
    directory.sessions.take_changed()
    idle(directory, "new", "12")
    assert directory.sessions.take_changed() == {"old": PAGE, "new": 2 * PAGE}
    idle(directory, "newer", "345")
    assert session_ids(directory) == ["running", "young", "new", "newer"]
    assert [directory.match(keys(text)) for text in ("abc", "pqr", "xyz", "12", "345")] == [3, 0, 1, 2, 3]
    assert directory.evicted_tokens == {"idle": 5 * PAGE}


def test_tokens_that_can_be_computed_again_go_before_whole_sessions() -> None:
    directory = store_of(10, surplus=lambda _tokens, session: {"old": 0, "young": 2 * PAGE + 1}.get(session, 0))
    idle(directory, "old", "abcde")
    idle(directory, "young", "vwxyz")
    put(directory, "", "1")
    assert [directory.sessions.held_tokens(name) // PAGE for name in ("old", "young")] == [5, 4]
    put(directory, "", "23")
    assert [directory.sessions.held_tokens(name) // PAGE for name in ("old", "young")] == [5, 3]
    directory.protect("r", keys("23"), 0.0)
    put(directory, "", "4567")
    assert [directory.sessions.held_tokens(name) // PAGE for name in ("old", "young")] == [1, 3]
    assert directory.evicted_tokens == {"unused": PAGE, "surplus": 2 * PAGE, "idle": 4 * PAGE}


def test_what_remains_of_a_surplus_session_can_be_restored() -> None:
    """States end at pages 2 and 4. With one page to spare nothing goes, with two the pages behind page 2 go."""
    for spare_pages, remain in ((1, 4), (2, 2)):
        directory = store_of(16, KV, MAMBA, surplus=lambda *_, spare=spare_pages: spare * PAGE)
        put(directory, "s", "abcd", mamba="bd")
        directory.sessions.begin_request("s", keys("abcd"))
        directory.sessions.end_request("s", keys("abcd"))
        assert directory.sessions.evict_surplus(9) == 4 - remain
        assert directory.sessions.held_tokens("s") == remain * PAGE


def test_pages_that_idle_sessions_share_go_last() -> None:
    directory = store_of(6)
    for session, text in (("one", "sysA"), ("two", "sysB")):
        directory.sessions.begin_request(session, keys(text))
        put(directory, session, text)
        directory.sessions.end_request(session, keys(text))
    put(directory, "", "12")
    directory.protect("r", keys("12"), 0.0)
    put(directory, "", "3")
    assert [directory.match(keys(text)) for text in ("sysA", "sysB")] == [3, 3]
    assert directory.used_tokens == 6 * PAGE
    directory.protect("r", keys("3"), 0.0)
    put(directory, "", "456")
    assert session_ids(directory) == []
    assert directory.match(keys("456")) == 3


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    directory = store_of(4)
    idle(directory, "old", "ab")
    directory.sessions.begin_request("running", keys("xy"))
    put(directory, "running", "xy")
    assert directory.reserve("new", {"kv": keys("123")}, 0.0) is None
    assert directory.sessions.held_tokens("old") == 2 * PAGE


def test_records_of_further_pools_count_before_anything_is_evicted() -> None:
    directory = store_of(8, KV, SWA)
    put(directory, "idle", "abcd")
    put(directory, "running", "wxyz")
    directory.sessions.begin_request("running", keys("wxyz"))
    needed = {"kv": keys("1234"), "swa": keys("1234")[-2:]}
    assert directory.reserve("s", needed, 0.0) is None
    assert directory.evicted_tokens.total() == 0
    directory.sessions.end_request("running", keys("wxyz"))
    assert directory.reserve("s", needed, 0.0) is not None


def test_nothing_is_evicted_for_a_size_that_finds_no_room_between_what_stays() -> None:
    """A slab has room for one state or for four pages, and in each slab a running session has two pages."""
    directory = StoreDirectory(4 * MAMBA.record_bytes, PAGE, (KV, MAMBA))
    for running, waiting in zip(("ab", "cd", "ef", "gh"), ("ij", "kl", "mn", "op"), strict=True):
        put(directory, running, running)
        put(directory, waiting, waiting)
        directory.sessions.begin_request(running, keys(running))
    needed = {"kv": keys("1"), "mamba": keys("1")}
    assert directory.reserve("s", needed, 0.0) is None
    assert directory.evicted_tokens.total() == 0
    directory.sessions.end_request("gh", keys("gh"))
    assert directory.reserve("s", needed, 0.0) is not None


def test_what_precedes_the_new_pages_is_not_evicted_for_them() -> None:
    directory = store_of(4)
    put(directory, "", "abc")
    assert directory.reserve("", {"kv": keys("abcde")}, 0.0) is None
    assert directory.match(keys("abc")) == 3
    assert directory.reserve("", {"kv": keys("abcd")}, 0.0) is not None


def test_copies_of_other_workers_sessions_go_before_sessions_of_this_worker() -> None:
    directory = store_of(6)
    idle(directory, "own", "abc")
    directory.sessions.begin_request("copy", keys("xyz"), is_copy=True)
    put(directory, "copy", "xyz")
    assert directory.session_tokens == 3 * PAGE
    directory.sessions.end_request("copy", keys("xyz"))
    assert directory.session_tokens == 3 * PAGE
    assert directory.sessions.held_tokens("copy") == 3 * PAGE
    put(directory, "", "12")
    assert [directory.match(keys(text)) for text in ("abc", "xyz", "12")] == [3, 1, 2]


def test_a_copy_counts_from_the_first_request_of_its_new_owner_on() -> None:
    directory = store_of(6)
    directory.sessions.begin_request("s", keys("abc"), is_copy=True)
    put(directory, "s", "abc")
    directory.sessions.end_request("s", keys("abc"))
    assert directory.session_tokens == 0
    idle(directory, "s", "abcd")
    assert directory.session_tokens == 4 * PAGE


def test_pages_that_two_copies_share_can_go() -> None:
    directory = store_of(4)
    for session, text in (("one", "abc"), ("two", "abd")):
        directory.sessions.begin_request(session, keys(text), is_copy=True)
        put(directory, session, text)
        directory.sessions.end_request(session, keys(text))
    put(directory, "", "1234")
    assert directory.match(keys("1234")) == 4
