"""The prefixes that a store's view publishes: those that two sessions have used."""

from ampd.serving.shared_prefixes import MOST_PUBLISHED, prefix_key
from tests.workers.kv.store.store_lab import KV, MAMBA, PAGE, SWA, forget, forget_all, keys, put, store_of
from workers.kv.store.directory import StoreDirectory


def round_of(directory: StoreDirectory, session: str, text: str, stored: int = 0) -> None:
    """A whole round: `stored` pages of its context were there already, as far as the engine knows."""
    directory.sessions.begin_request(session, keys(text))
    put(directory, session, text, stored)
    directory.sessions.end_request(session, keys(text))


def published(directory: StoreDirectory) -> dict[str, int]:
    return directory.sessions.shared.published()


def prefixes(*texts: str) -> dict[str, int]:
    return {prefix_key(text.encode()): len(text) * PAGE for text in texts}


def test_a_prefix_is_published_when_a_second_session_uses_it() -> None:
    directory = store_of(100)
    round_of(directory, "first", "sysAB")
    round_of(directory, "first", "sysABCD", 5)
    assert published(directory) == {}
    directory.sessions.begin_request("second", keys("sysX"))
    assert published(directory) == prefixes("sys")


def test_each_length_at_which_sessions_part_is_a_prefix() -> None:
    directory = store_of(100)
    round_of(directory, "first", "sysAB")
    round_of(directory, "second", "sysAC", 4)
    round_of(directory, "third", "sysX", 3)
    assert published(directory) == prefixes("sys", "sysA")
    # Two sessions may share the records of several reservations.
    round_of(directory, "fourth", "sysACD", 5)
    assert published(directory) == prefixes("sys", "sysA", "sysAC")


def test_a_prefix_outlives_its_sessions_and_not_its_records() -> None:
    directory = store_of(4)
    round_of(directory, "first", "sysA")
    directory.sessions.release_session("first")
    # The sessions need not be there at the same time.
    round_of(directory, "second", "sysA")
    directory.sessions.release_session("second")
    assert published(directory) == prefixes("sysA")
    put(directory, "third", "x")
    assert published(directory) == prefixes("sys")
    put(directory, "third", "xyzv", 1)
    assert published(directory) == {}


def test_a_prefix_ends_where_records_in_the_middle_are_lost() -> None:
    directory = store_of(6)
    round_of(directory, "first", "sys")
    middle = directory.reserve("first", {"kv": keys("sysAB")[3:]}, 0.0)
    assert middle is not None
    directory.written(middle.id)
    round_of(directory, "first", "sysABC", 5)
    round_of(directory, "second", "sysABC", 6)
    assert published(directory) == prefixes("sysABC")
    forget(directory, list(directory._runs.spans(keys("sysABC")))[1].run)
    assert published(directory) == prefixes("sys")
    forget_all(directory)
    assert published(directory) == {}


def test_what_is_still_being_written_is_not_published() -> None:
    directory = store_of(100)
    reservation = directory.reserve("first", {"kv": keys("sys")}, 0.0)
    assert reservation is not None
    for session in ("first", "second"):
        directory.sessions.begin_request(session, keys("sysX"))
    assert published(directory) == {}
    directory.written(reservation.id)
    assert published(directory) == prefixes("sys")


def test_a_hybrid_prefix_ends_where_all_pools_can_be_restored() -> None:
    directory = store_of(100, KV, SWA, MAMBA)
    put(directory, "first", "systemA", swa="systemA", mamba="tA")
    for session in ("first", "second"):
        directory.sessions.begin_request(session, keys("systemX" if session == "second" else "systemA"))
    assert published(directory) == prefixes("syst")


def test_the_prefixes_that_were_used_last_are_published() -> None:
    directory = store_of(10_000)
    names = [chr(0x4E00 + number) for number in range(MOST_PUBLISHED + 6)]
    for name in names:
        for session in ("a", "b"):
            directory.sessions.begin_request(session + name, keys(name + session))
            put(directory, session + name, name + session, 0 if session == "a" else 1)
            directory.sessions.end_request(session + name, keys(name + session))
    directory.sessions.touch("a" + names[0], keys(names[0] + "a"))
    assert published(directory) == prefixes(*names[7:], names[0])
