"""The KV store by itself, small enough that every operation matters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulator.kv_memory import KvStore

CAPACITY, PAGE = 64, 4
NAMES = "abcd"
operations = st.lists(
    st.tuples(
        st.sampled_from(["protect", "protect", "unprotect", "unprotect", "write", "write", "write", "release", "cut"]),
        st.sampled_from(NAMES),
        st.integers(1, CAPACITY),
    ),
    min_size=15,
    max_size=60,
)


def store_of(surplus_tokens: int = 0) -> KvStore:
    """A store in which every session can spare some tokens."""
    return KvStore(CAPACITY, PAGE, lambda context_tokens, _: min(context_tokens, surplus_tokens))


def written(store: KvStore, *sessions: tuple[str, int]) -> None:
    for name, tokens in sessions:
        store.protect(name)
        store.write(name, tokens)
        store.unprotect(name)


@settings(max_examples=100)
@given(operations, st.integers(0, 30))
def test_the_books_are_right_after_every_operation(
    given_operations: list[tuple[str, str, int]], surplus_tokens: int
) -> None:
    store = store_of(surplus_tokens)
    kept = dict.fromkeys(NAMES, 0)
    for operation, name, tokens in given_operations:
        held, evicted, lost = dict(store.held), sum(store.evicted_tokens.values()), store.evicted
        match operation:
            case "protect":
                store.protect(name)
                kept[name] += 1
            case "unprotect" if kept[name]:
                store.unprotect(name)
                kept[name] -= 1
            case "write" if kept[name]:
                store.write(name, tokens)
                wanted = max(tokens // PAGE * PAGE, held.get(name, 0))
                assert store.held.get(name, 0) <= wanted
                if store.held.get(name, 0) < wanted:
                    assert not any(store.held.get(other) for other in NAMES if not kept[other])
                    assert store.used_tokens == CAPACITY
            case "release":
                store.release(name)
                assert name not in store.held
            case "cut":
                store.cut(name, tokens)
                assert store.held.get(name, 0) == min(held.get(name, 0), tokens // PAGE * PAGE)
        others = [other for other in NAMES if other != name]
        gone = {other: held.get(other, 0) - store.held.get(other, 0) for other in others}
        assert sum(gone.values()) == sum(store.evicted_tokens.values()) - evicted
        assert all(tokens == 0 for other, tokens in gone.items() if kept[other])
        assert store.evicted - lost == sum(other in held and other not in store.held for other in others)
        assert store.used_tokens == sum(store.held.values()) <= CAPACITY
        assert all(tokens > 0 and tokens % PAGE == 0 for tokens in store.held.values())


def test_the_least_recently_used_session_loses_its_end_first() -> None:
    store = store_of()
    written(store, ("a", 24), ("b", 24), ("c", 24))
    assert store.held == {"a": 16, "b": 24, "c": 24}
    written(store, ("a", 16), ("d", 20))  # a was used again
    assert store.held == {"a": 16, "b": 4, "c": 24, "d": 20}
    assert store.evicted_tokens == {"surplus": 0, "idle": 28}
    assert store.evicted == 0


def test_ends_that_a_next_round_can_spare_go_first() -> None:
    store = store_of(surplus_tokens=9)
    written(store, ("a", 24), ("b", 24), ("c", 32))
    assert store.held == {"a": 16, "b": 16, "c": 32}, "whole pages, so that 8 of 9 tokens are spared"
    written(store, ("d", 16))
    assert store.evicted_tokens == {"surplus": 24, "idle": 8}
    assert store.held == {"a": 8, "b": 16, "c": 24, "d": 16}


def test_what_does_not_fit_is_cut_off_at_its_end() -> None:
    store = store_of()
    written(store, ("a", 20))
    store.protect("a")
    written(store, ("b", 100))
    assert store.held == {"a": 20, "b": 44}


def test_copies_go_before_the_sessions_of_the_worker_and_do_not_count() -> None:
    store = store_of()
    store.copy("b")
    written(store, ("a", 24), ("b", 24))
    assert (store.used_tokens, store.session_tokens) == (48, 24)
    written(store, ("c", 32))
    assert store.held == {"a": 24, "b": 8, "c": 32}
    store.release("b")
    assert store.session_tokens == 56
