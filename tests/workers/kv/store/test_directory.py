"""The store's directory: what it answers to writers, readers and sessions, and what goes when memory is needed."""

from __future__ import annotations

import pytest

from tests.workers.kv.store.store_lab import (
    KV,
    MAMBA,
    PAGE,
    RECORD,
    SWA,
    forget_all,
    keys,
    offsets,
    pool_of,
    put,
    store_of,
    tail,
)
from workers.kv.store.directory import MAX_LEASE_S, MAX_LEASES, MAX_LEASES_PER_READER


def test_match_is_the_longest_prefix_over_several_reservations() -> None:
    directory = store_of(100)
    first = offsets(put(directory, "s", "abc"))
    second = offsets(put(directory, "s", "abcde", 3))
    assert directory.match(keys("abcdefg")) == 5
    assert directory.match(keys("abx")) == 2
    assert directory.match(keys("xbc")) == 0
    leased = directory.lease(keys("abcdz"), 1.0, 0.0)
    assert list(leased.records["kv"]) == list(enumerate([*first, second[0]]))
    loadable = directory.protect("r", keys("abz"), 0.0)
    assert list(loadable.records["kv"]) == list(zip(keys("ab"), first[:2], strict=True))
    assert directory.sessions.held_tokens("s") == 5 * PAGE


def test_records_are_read_only_once_they_are_written() -> None:
    directory = store_of(100)
    directory.sessions.touch("s", keys("abcd"))
    first = directory.reserve("s", {"kv": keys("ab")}, 0.0)
    second = directory.reserve("s", {"kv": keys("abcd")}, 0.0)
    assert first is not None
    assert second is not None
    assert second.offsets["kv"].names == [2, 3]
    directory.written(second.id)
    assert directory.match(keys("abcd")) == 0
    assert directory.protect("r", keys("abcd"), 0.0).tokens == 0
    assert directory.sessions.held_tokens("s") == 0
    directory.written(first.id)
    assert directory.match(keys("abcd")) == 4
    assert directory.sessions.take_changed() == {"s": 4 * PAGE}
    with pytest.raises(KeyError):
        directory.written(first.id)


def test_what_is_given_up_is_free_and_may_be_written_again() -> None:
    directory = store_of(3)
    first = directory.reserve("s", {"kv": keys("ab")}, 0.0)
    assert first is not None
    put(directory, "s", "abc", 2)
    directory.give_up(first.id)
    assert directory.used_bytes == RECORD
    assert directory.match(keys("abc")) == 0
    put(directory, "s", "abc")
    assert directory.match(keys("abc")) == 3


def test_what_a_withdrawn_writer_was_to_write_another_one_may_write() -> None:
    directory = store_of(8, KV, SWA)
    directory.sessions.begin_request("s", keys("ab"))
    pages = {"kv": keys("ab"), "swa": keys("ab")}
    late = directory.reserve("", pages, 0.0)
    assert late is not None
    directory.withdraw(late.id)
    again = directory.reserve("s", pages, 0.0)
    assert again is not None
    assert [len(places) for places in again.offsets.values()] == [2, 2]
    assert directory.used_bytes == 8 * RECORD, "the late writer may still write"
    directory.give_up(late.id)
    assert directory.used_bytes == 4 * RECORD
    third = directory.reserve("s", pages, 0.0)
    assert third is not None
    assert not any(len(places) for places in third.offsets.values()), "they are being written"
    directory.written(again.id)
    assert directory.sessions.held_tokens("s") == 2 * PAGE


def test_a_shared_prefix_outlives_the_session_that_came_first() -> None:
    directory = store_of(4)
    put(directory, "first", "sys")
    directory.sessions.begin_request("second", keys("sysX"))
    put(directory, "second", "sysX", 3)
    directory.sessions.release_session("first")
    assert directory.reserve("third", {"kv": keys("t")}, 0.0) is None
    assert directory.match(keys("sysX")) == 4
    assert directory.sessions.held_tokens("second") == 4 * PAGE


def test_a_rewritten_context_keeps_its_valid_prefix_and_the_branch_goes_first() -> None:
    directory = store_of(5)
    put(directory, "old", "o")
    put(directory, "s", "ab")
    put(directory, "s", "abcd", 2)
    directory.sessions.touch("s", keys("abX"))
    assert directory.sessions.held_tokens("s") == 2 * PAGE
    put(directory, "t", "tu")
    assert directory.match(keys("abcd")) == 2
    assert directory.match(keys("o")) == 1
    assert directory.evicted_tokens == {"unused": 2 * PAGE}


def test_a_released_session_takes_no_late_pages_until_it_begins_again() -> None:
    directory = store_of(10)
    directory.sessions.begin_request("s", [])
    put(directory, "s", "a")
    directory.sessions.release_session("s")
    assert directory.reserve("s", {"kv": tail("ab", 1)}, 0.0) is None
    directory.sessions.end_request("s", keys("ab"))
    assert directory.sessions.held_tokens("s") == 0
    directory.sessions.begin_request("s", keys("ab"))
    assert directory.sessions.held_tokens("s") == PAGE
    assert directory.reserve("s", {"kv": keys("ab")}, 0.0) is not None


def test_rounds_of_one_session_at_a_time_keep_the_pages_of_all_branches() -> None:
    """The session needs the branch of the last round only; the other is not computed again while there is memory."""
    directory = store_of(10)
    for branch in ("abX", "abY"):
        directory.sessions.begin_request("s", keys(branch))
        put(directory, "s", branch)
    for branch in ("abX", "abY"):
        directory.sessions.end_request("s", keys(branch))
    assert directory.match(keys("abX")) == directory.match(keys("abY")) == 3
    assert directory.sessions.held_tokens("s") == 3 * PAGE


# -- requests that load


def test_what_is_protected_for_a_request_stays_although_memory_is_needed() -> None:
    directory = store_of(3)
    put(directory, "s", "ab")
    directory.sessions.release_session("s")
    assert directory.protect("r", keys("abc"), 0.0).tokens == 2 * PAGE
    assert directory.reserve("t", {"kv": keys("xy")}, 0.0) is None
    directory.unprotect("r")
    directory.unprotect("r")
    put(directory, "t", "xy")
    assert directory.match(keys("ab")) == 1


def test_more_may_be_protected_for_a_request_later() -> None:
    directory = store_of(3)
    put(directory, "", "a")
    directory.protect("r", keys("abc"), 0.0)
    put(directory, "", "abc", 1)
    assert directory.protect("r", keys("abc"), 0.0).tokens == 3 * PAGE
    assert directory.reserve("", {"kv": keys("x")}, 0.0) is None
    directory.unprotect("r")
    assert directory.reserve("", {"kv": keys("x")}, 0.0) is not None


def test_nothing_is_protected_for_a_request_without_stored_pages() -> None:
    loadable = store_of(3, KV, SWA).protect("r", keys("abc"), 0.0)
    assert loadable.tokens == 0
    assert {pool: list(places) for pool, places in loadable.records.items()} == {"kv": [], "swa": []}


# -- readers elsewhere


def test_leased_records_stay_until_the_lease_is_given_back() -> None:
    directory = store_of(3)
    put(directory, "", "abc")
    lease = directory.lease(keys("ab"), 5.0, 0.0)
    assert lease.pages == 2
    assert directory.reserve("", {"kv": keys("xyz")}, 1.0) is None
    assert directory.match(keys("abc")) == 3
    assert directory.unlease(lease.id, 4.9)
    assert not directory.unlease(lease.id, 4.9)
    assert directory.reserve("", {"kv": keys("xyz")}, 1.0) is not None


def test_an_expired_lease_protects_nothing_and_says_so() -> None:
    directory = store_of(1)
    put(directory, "", "a")
    lease = directory.lease(keys("a"), 5.0, 0.0)
    assert directory.reserve("", {"kv": keys("x")}, 4.9) is None
    assert directory.reserve("", {"kv": keys("x")}, 5.0) is not None
    assert not directory.unlease(lease.id, 5.0)


def test_a_lease_ends_in_bounded_time() -> None:
    directory = store_of(4)
    put(directory, "", "a")
    assert directory.lease(keys("a"), 1e18, 0.0).ttl_s == MAX_LEASE_S
    directory.collect(MAX_LEASE_S)
    assert not directory._leases


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_lease_of_no_time_is_refused(ttl_s: float) -> None:
    directory = store_of(4)
    put(directory, "", "a")
    with pytest.raises(ValueError, match="a lease of"):
        directory.lease(keys("a"), ttl_s, 0.0)


def test_the_live_leases_of_a_reader_are_bounded() -> None:
    directory = store_of(4)
    put(directory, "", "a")
    leases = [directory.lease(keys("a"), 5.0, 0.0, "greedy") for _ in range(MAX_LEASES_PER_READER)]
    with pytest.raises(ValueError, match="leases of this reader are live"):
        directory.lease(keys("a"), 5.0, 0.0, "greedy")
    assert directory.lease(keys("a"), 5.0, 0.0, "other").id
    directory.unlease(leases[0].id, 1.0)
    assert directory.lease(keys("a"), 5.0, 1.0, "greedy").id


@pytest.mark.slow
def test_the_live_leases_of_all_readers_are_bounded() -> None:
    directory = store_of(4)
    put(directory, "", "a")
    for number in range(MAX_LEASES):
        assert directory.lease(keys("a"), 5.0, 0.0, f"r{number}").id
    with pytest.raises(ValueError, match=f"{MAX_LEASES} of all readers"):
        directory.lease(keys("a"), 5.0, 0.0, "late")
    assert directory.lease(keys("a"), 5.0, 5.0, "late").id


def test_a_lease_of_a_contexts_tail() -> None:
    directory = store_of(9, KV, SWA)
    put(directory, "s", "abcd", swa="cd")
    lease = directory.lease(tail("abcdX", 3), 5.0, 0.0)
    assert lease.pages == 1
    assert list(lease.records["kv"].names) == list(lease.records["swa"].names) == [0]


def test_nothing_stored_is_no_lease() -> None:
    directory = store_of(9)
    lease = directory.lease(keys("abc"), 1.0, 0.0)
    assert (lease.id, lease.pages) == ("", 0)
    assert not directory.unlease(lease.id, 0.0)


def test_checksums_come_back_with_the_records() -> None:
    directory = store_of(20, KV, MAMBA)
    named = {"kv": keys("abc"), "mamba": keys("abc")[2:]}
    reservation = directory.reserve("s", named, 0.0)
    assert reservation is not None
    directory.written(reservation.id, {"kv": [1, 2, 3], "mamba": [9]})
    put(directory, "s", "abcd", 3, mamba="d")
    assert directory.lease(keys("abc"), 1.0, 0.0).checksums == {"kv": [1, 2, 3], "mamba": [9]}
    assert directory.lease(keys("abcd"), 1.0, 0.0).checksums == {"kv": [1, 2, 3, None], "mamba": [None]}


# -- pools with windows


def test_a_prefix_needs_the_window_of_every_pool() -> None:
    directory = store_of(40, KV, SWA, MAMBA)
    put(directory, "s", "abcd", swa="cd", mamba="d")
    put(directory, "s", "abcdefg", 4, swa="efg")
    assert directory.match(keys("abcdefg")) == 4
    assert directory.match(keys("abc")) == 0
    put(directory, "s", "abcdefg", 0, mamba="f")
    assert directory.match(keys("abcdefg")) == 6
    assert directory.sessions.held_tokens("s") == 6 * PAGE
    loadable = directory.protect("r", keys("abcdefg"), 0.0)
    assert [key.decode()[-1] for key in loadable.records["swa"].names] == ["c", "d", "e", "f"]
    assert [key.decode()[-1] for key in loadable.records["mamba"].names] == ["d", "f"]
    lease = directory.lease(keys("abcdefg"), 1.0, 0.0)
    assert [list(lease.records[pool].names) for pool in ("kv", "swa", "mamba")] == [[*range(6)], [4, 5], [5]]


def test_a_short_prefix_needs_the_window_from_its_beginning() -> None:
    directory = store_of(9, KV, SWA)
    put(directory, "s", "ab", swa="a")
    assert directory.match(keys("ab")) == 1


def test_a_further_pool_may_need_every_page() -> None:
    directory = store_of(9, KV, pool_of("index"))
    put(directory, "s", "abc", index="ab")
    assert directory.match(keys("abc")) == 2


def test_a_record_without_its_page_is_left_out() -> None:
    directory = store_of(9, KV, SWA)
    reservation = directory.reserve("s", {"kv": keys("ab"), "swa": keys("abcd")}, 0.0)
    assert reservation is not None
    assert reservation.offsets["swa"].names == [0, 1]
    again = directory.reserve("s", {"kv": keys("ab"), "swa": keys("ab")}, 0.0)
    assert again is not None
    assert [len(again.offsets[pool]) for pool in ("kv", "swa")] == [0, 0]


def test_a_page_is_named_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        store_of(9).reserve("s", {"kv": [b"a", b"a"]}, 0.0)
    with pytest.raises(ValueError, match="the first pool must have a record of every page"):
        store_of(9, SWA, KV)


def test_what_was_read_for_a_request_stays_until_it_lets_it_go() -> None:
    """Also what lies behind a page that another read still brings."""
    directory = store_of(6)
    first = directory.reserve("", {"kv": keys("ab")}, 0.0)
    second = directory.reserve("", {"kv": keys("abcd")}, 0.0)
    assert first is not None
    assert second is not None
    directory.written(second.id, rid="r")
    assert directory.reserve("t", {"kv": keys("1234")}, 0.0) is None
    directory.written(first.id)
    assert directory.match(keys("abcd")) == 4
    assert directory.reserve("t", {"kv": keys("1234")}, 0.0) is None
    directory.unprotect("r")
    assert directory.reserve("t", {"kv": keys("1234")}, 0.0) is not None


def test_a_lease_is_unknown_to_a_store_that_took_the_place_of_its_own() -> None:
    before, after = store_of(4), store_of(4)
    for directory in (before, after):
        put(directory, "s", "ab")
    leases = [directory.lease(keys("ab"), 10.0, 0.0) for directory in (before, after)]
    assert not after.unlease(leases[0].id, 0.0)
    assert after.unlease(leases[1].id, 0.0)


# -- forgotten records


def test_forgotten_records_cannot_be_found_but_keep_memory_that_is_in_use() -> None:
    directory = store_of(9)
    put(directory, "s", "ab")
    put(directory, "", "xy")
    put(directory, "", "q")
    lease = directory.lease(keys("xy"), 10.0, 0.0)
    directory.protect("r", keys("q"), 0.0)
    writing = directory.reserve("s", {"kv": tail("abc", 2)}, 0.0)
    assert writing is not None
    forget_all(directory)
    assert [directory.match(keys(text)) for text in ("abc", "xy", "q")] == [0, 0, 0]
    assert directory.sessions.take_changed() == {"s": 0}
    assert directory.used_bytes == 4 * RECORD
    assert (directory.used_tokens, directory.session_tokens) == (0, 0)
    directory.written(writing.id)
    assert directory.match(keys("abc")) == 0
    assert directory.unlease(lease.id, 1.0)
    directory.unprotect("r")
    assert directory.used_bytes == 0


def test_a_running_session_survives_the_loss_of_its_records() -> None:
    directory = store_of(2)
    directory.sessions.begin_request("s", keys("ab"))
    forget_all(directory)
    put(directory, "s", "ab")
    assert directory.reserve("t", {"kv": keys("x")}, 0.0) is None
    directory.sessions.end_request("s", keys("ab"))
    assert directory.reserve("t", {"kv": keys("x")}, 0.0) is not None


def test_changes_are_told_once() -> None:
    directory = store_of(9)
    put(directory, "s", "ab")
    assert directory.sessions.take_changed() == {"s": 2 * PAGE}
    assert directory.sessions.take_changed() == {}
    directory.sessions.release_session("s")
    assert directory.sessions.take_changed() == {"s": 0}
