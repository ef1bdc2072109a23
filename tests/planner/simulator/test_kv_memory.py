"""The KV memory by itself, small enough that every operation matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .lab import WatchedMemory

CAPACITY, PAGE = 64, 4
NAMES = "abcd"
operations = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "settle", "protect", "unprotect", "release", "cut"]),
        st.sampled_from(NAMES),
        st.integers(1, CAPACITY),
    ),
    min_size=15,
    max_size=60,
)


@pytest.mark.slow
@given(operations)
def test_the_books_are_right_after_every_operation(given_operations: list[tuple[str, str, int]]) -> None:
    memory = WatchedMemory(CAPACITY, PAGE)
    running: dict[str, int] = {}
    kept = dict.fromkeys(NAMES, 0)
    for operation, name, tokens in given_operations:
        held, evicted = dict(memory.held), memory.evicted
        match operation:
            case "reserve" if name not in running:
                others = sum(running.values())
                kept_tokens = sum(
                    held.get(other, 0) for other in NAMES if kept[other] and other not in (*running, name)
                )
                fits = others + (kept_tokens if running else 0) + tokens <= CAPACITY
                assert memory.reserve(name, tokens) == fits
                if fits:
                    running[name] = tokens
            case "settle" if name in running:
                total = running.pop(name)
                memory.settle(name, total)
                assert memory.held.get(name, 0) == total // PAGE * PAGE
            case "protect":
                memory.protect(name)
                kept[name] += 1
            case "unprotect" if kept[name]:
                memory.unprotect(name)
                kept[name] -= 1
            case "release" if name not in running:
                memory.release(name)
                assert name not in memory.held
            case "cut" if name not in running:
                memory.cut(name, tokens)
                assert memory.held.get(name, 0) == min(held.get(name, 0), tokens // PAGE * PAGE)
        gone = [other for other in held if other not in memory.held and other != name]
        assert memory.evicted - evicted == len(gone)
        assert not any(other in running for other in gone)
        assert all(memory.held[other] == held[other] for other in NAMES if other in memory.held and other != name)


def test_the_least_recently_used_session_goes_first_and_only_when_it_must() -> None:
    memory = WatchedMemory(CAPACITY, PAGE)
    for name in "abc":
        assert memory.reserve(name, 20)
        memory.settle(name, 20)
    assert memory.reserve("a", 24)  # as much as there is, with what it holds
    memory.settle("a", 24)
    assert set(memory.held) == {"a", "b", "c"}
    assert memory.reserve("d", 4)
    assert set(memory.held) == {"a", "c"}
    assert (memory.evicted, memory.used_tokens) == (1, 48)


def test_a_kept_session_stays_while_something_runs_and_goes_when_nothing_else_helps() -> None:
    memory = WatchedMemory(CAPACITY, PAGE)
    for name, tokens in (("kept", 40), ("runs", 8)):
        assert memory.reserve(name, tokens)
        if name == "kept":
            memory.settle(name, tokens)
            memory.protect(name)
    assert not memory.reserve("large", 32)
    assert memory.held == {"kept": 40}
    memory.settle("runs", 8)
    assert memory.reserve("large", 32)
    assert memory.held == {}


def test_a_session_is_not_evicted_to_make_room_for_itself() -> None:
    memory = WatchedMemory(160, 16)
    assert memory.reserve("other", 112)
    assert memory.reserve("own", 48)
    memory.settle("own", 48)
    assert not memory.reserve("own", 64)
    assert memory.held == {"own": 48}
    assert memory.reserve("own", 48)


def test_copies_go_before_the_sessions_of_the_worker_and_do_not_count() -> None:
    memory = WatchedMemory(CAPACITY, PAGE)
    for name in "ab":
        assert memory.reserve(name, 24)
        memory.settle(name, 24)
    memory.copy("b")
    assert (memory.used_tokens, memory.session_tokens) == (48, 24)
    assert memory.reserve("c", 32)
    assert list(memory.held) == ["a"]
    assert memory.session_tokens == 56
    assert memory.evicted == 0


def test_a_copy_whose_worker_becomes_the_owner_counts() -> None:
    memory = WatchedMemory(CAPACITY, PAGE)
    memory.copy("a")
    for name in "ab":
        assert memory.reserve(name, 24)
        memory.settle(name, 24)
    memory.own("a")
    assert memory.session_tokens == 48
    memory.copy("a")
    memory.own("a")
    assert memory.reserve("c", 32), "the other session is the one that was used longer ago"
    assert list(memory.held) == ["a"]
