"""The store's directory: what it answers to writers, readers and sessions, and what goes when memory is needed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workers.kv.store.directory import Reservation, StoreDirectory
from workers.kv.store.sessions import Surplus

PAGE = 16
RECORD = 64


@dataclass(frozen=True)
class PoolOf:
    name: str
    record_bytes: int = RECORD
    window_pages: int = 0


KV = PoolOf("kv")
SWA = PoolOf("swa", window_pages=2)
MAMBA = PoolOf("mamba", record_bytes=4 * RECORD, window_pages=1)


def keys(text: str) -> list[bytes]:
    """One key a letter, each naming all the letters before it, as chained hashes do."""
    return [text[: i + 1].encode() for i in range(len(text))]


def tail(text: str, shared: int) -> list[bytes]:
    return keys(text)[shared:]


def store_of(pages: int, *pools: PoolOf, surplus: Surplus | None = None) -> StoreDirectory:
    return StoreDirectory(pages * RECORD, PAGE, pools or (KV,), surplus)


def put(directory: StoreDirectory, session: str, text: str, shared: int = 0, **trailing: str) -> Reservation:
    """Store the pages of a context from page `shared` on; `trailing`: pool=letters whose pages have a record."""
    named = {"kv": tail(text, shared)}
    for pool, letters in trailing.items():
        named[pool] = [key for key in keys(text) if key.decode()[-1] in letters]
    reservation = directory.reserve(session, named, 0.0)
    assert reservation is not None
    directory.written(reservation.id)
    return reservation


def offsets(reservation: Reservation | None, pool: str = "kv") -> list[int]:
    assert reservation is not None
    return list(reservation.offsets[pool].offsets)


def test_match_is_the_longest_prefix_over_several_reservations() -> None:
    directory = store_of(100)
    first = offsets(put(directory, "s", "abc"))
    second = offsets(put(directory, "s", "abcde", 3))
    assert directory.match(keys("abcdefg")) == 5
    assert directory.match(keys("abx")) == 2
    assert directory.match(keys("xbc")) == 0
    leased = directory.lease(keys("abcdz"), 1.0, 0.0)
    assert list(leased.records["kv"]) == list(enumerate([*first, second[0]]))
    held = directory.hold("r", keys("abz"), 0.0)
    assert list(held.records["kv"]) == list(zip(keys("ab"), first[:2], strict=True))
    assert directory.sessions.held_tokens("s") == 5 * PAGE


def test_records_are_read_only_once_they_are_written() -> None:
    directory = store_of(100)
    first = directory.reserve("s", {"kv": keys("ab")}, 0.0)
    second = directory.reserve("s", {"kv": keys("abcd")}, 0.0)
    assert first is not None
    assert second is not None
    assert second.offsets["kv"].names == [2, 3]
    directory.written(second.id)
    assert directory.match(keys("abcd")) == 0
    assert directory.hold("r", keys("abcd"), 0.0).tokens == 0
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
