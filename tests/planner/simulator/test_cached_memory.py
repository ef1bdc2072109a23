"""A device's memory in front of a store: only running rounds are safe on the device, and nothing is lost with them."""

from planner.simulator.kv_memory import KvMemory, KvStore

PAGE = 4


def memory_of(device_tokens: int, store_tokens: int) -> tuple[KvMemory, KvStore]:
    store = KvStore(store_tokens, PAGE, lambda *_: 0)
    return KvMemory(device_tokens, PAGE, store=store), store


def play(memory: KvMemory, session_id: str, tokens: int) -> None:
    assert memory.reserve(session_id, tokens)
    memory.settle(session_id, tokens)


def test_a_session_that_the_device_evicts_stays_in_the_store() -> None:
    memory, store = memory_of(40, 100)
    play(memory, "a", 30)
    play(memory, "b", 30)
    assert memory.held == {"b": 28}
    assert memory.held_tokens("a") == memory.held_tokens("b") == 28
    assert (memory.evicted, store.evicted) == (1, 0)


def test_the_device_has_what_the_store_has_lost() -> None:
    memory, store = memory_of(100, 40)
    play(memory, "a", 32)
    play(memory, "b", 32)
    assert store.held == {"a": 8, "b": 32}
    assert memory.held_tokens("a") == 32


def test_keeping_protects_the_store_and_not_the_device() -> None:
    memory, store = memory_of(40, 40)
    play(memory, "a", 32)
    memory.protect("a")
    play(memory, "b", 32)
    assert memory.held == {"b": 32}
    assert store.held == {"a": 32, "b": 8}, "the store has no room for all of b"
    memory.unprotect("a")
    play(memory, "b", 32)
    assert store.held == {"a": 8, "b": 32}


def test_a_running_session_keeps_its_place_in_the_store() -> None:
    memory, store = memory_of(100, 40)
    play(memory, "a", 32)
    assert memory.reserve("a", 40)
    play(memory, "b", 32)
    assert store.held == {"a": 32, "b": 8}
    memory.settle("a", 40)
    assert store.held == {"a": 40}


def test_cut_and_release_reach_both() -> None:
    memory, store = memory_of(100, 100)
    play(memory, "a", 32)
    memory.cut("a", 18)
    assert memory.held == store.held == {"a": 16}
    memory.release("a")
    assert not memory.held
    assert not store.held
    assert memory.used_tokens == store.used_tokens == 0
