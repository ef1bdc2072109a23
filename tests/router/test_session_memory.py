import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.keys import pack_tokens
from ampd.state.store import Binding, SessionLimits
from router.session_memory import Overlap, SessionMemory, SessionOwner, common_prefix_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
FEW = st.lists(st.integers(0, 2), max_size=40)
LIMITS = SessionLimits(ttl_s=1800.0, first_ttl_s=300.0)


def naive(first: list[int], second: list[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


@given(TOKENS | FEW, TOKENS | FEW, TOKENS | FEW)
def test_the_common_prefix_is_the_longest_one(shared: list[int], first: list[int], second: list[int]) -> None:
    first, second = shared + first, shared + second
    assert common_prefix_tokens(pack_tokens(first), pack_tokens(second)) == naive(first, second)


@given(FEW, FEW)
def test_a_prompt_that_extends_the_context_is_not_rewritten(context: list[int], more: list[int]) -> None:
    memory = SessionMemory(1 << 20, LIMITS)
    memory.remember(Binding("s", "w", 1), pack_tokens(context))
    overlap = memory.find("s").overlap(pack_tokens(context + more))
    assert overlap == Overlap(len(context), len(context), len(context))
    assert not overlap.is_rewritten


@pytest.mark.parametrize(("prompt", "kept_tokens"), [([1, 2, 3, 4, 5], 2), ([1, 9], 1), ([9], 0)])
def test_a_context_that_was_never_computed_is_not_kept(prompt: list[int], kept_tokens: int) -> None:
    """The client of the round before left while its prefill waited."""
    memory = SessionMemory(1 << 20, LIMITS)
    memory.remember(Binding("s", "w", 1), pack_tokens([1, 2, 3, 4]), computed_tokens=2)
    assert memory.find("s").overlap(pack_tokens(prompt)).kept_tokens == kept_tokens


def test_the_last_token_of_a_context_may_differ_for_it_has_no_kv() -> None:
    memory = SessionMemory(1 << 20, LIMITS)
    memory.remember(Binding("s", "w", 1), pack_tokens([1, 2, 3, 4]))
    assert not memory.find("s").overlap(pack_tokens([1, 2, 3, 9, 9])).is_rewritten
    assert memory.find("s").overlap(pack_tokens([1, 2, 9, 9, 9])).is_rewritten
    assert memory.find("s").overlap(pack_tokens([1, 2])).is_rewritten


def test_unknown_sessions_have_no_overlap_and_no_binding() -> None:
    memory = SessionMemory(1 << 20, LIMITS)
    assert memory.find("s").overlap(pack_tokens([1])) == Overlap()
    assert memory.find("s").binding is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=60))
def test_memory_stays_within_its_bound_and_forgets_the_oldest(writes: list[tuple[int, int]]) -> None:
    bound = 8_000
    memory = SessionMemory(bound, LIMITS)
    order: list[str] = []
    for number, tokens in writes:
        name = f"s{number}"
        memory.remember(Binding(name, "w", 1), bytes(4 * tokens))
        order = [earlier for earlier in order if earlier != name] + [name]
        assert memory._bytes <= bound
        kept = [kept_name for kept_name in order if memory.find(kept_name).binding]
        assert kept == order[len(order) - len(kept) :]
        assert len(memory) == len(kept)
    for name in order:
        memory.forget(name)
    assert memory._bytes == 0


def test_a_round_that_ends_after_its_session_moved_does_not_bring_the_old_binding_back() -> None:
    """Two rounds of the session ran at once, and the one that began later moved it."""
    memory = SessionMemory(1 << 20, LIMITS)
    memory.remember(Binding("s", "new", 2), pack_tokens([1]), owner=SessionOwner("s", "", 5.0))
    memory.remember(Binding("s", "old", 1), pack_tokens([1, 2]), owner=SessionOwner("s", "", 9.0))
    assert memory.find("s").binding == Binding("s", "new", 2)
    assert memory.find("s").moved_s == float("-inf")
    memory.remember(Binding("s", "newer", 3), pack_tokens([1, 2]), owner=SessionOwner("s", "", 12.0))
    assert (memory.find("s").binding, memory.find("s").moved_s) == (Binding("s", "newer", 3), 12.0)


def test_a_session_is_forgotten_with_its_ttl() -> None:
    """It has ended in the shared state by then, which would take the old binding for one that it has lost."""
    now_s = 0.0
    memory = SessionMemory(1 << 20, LIMITS, lambda: now_s)
    for name in ("once", "twice", "twice"):
        memory.remember(Binding(name, "w", 1), pack_tokens([1, 2]))
    now_s = 299.0
    assert memory.find("once").binding
    now_s = 300.0
    assert memory.find("once").binding is None
    assert memory.find("once").overlap(pack_tokens([1, 2])) == Overlap()
    assert memory.find("twice").binding
    now_s = 1800.0
    assert memory.find("twice").binding is None
    assert memory._bytes == len(memory) == 0
