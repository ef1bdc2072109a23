from hypothesis import given
from hypothesis import strategies as st

from workers.kv.offload_order import OffloadOrder


@given(st.lists(st.sets(st.integers(0, 9)), max_size=5))
def test_released_offloads_come_first_and_the_others_keep_their_order(releases: list[set[int]]) -> None:
    """`pending` is SGLang's list, whose entries must stay at the places of their numbers."""
    order = OffloadOrder()
    pending = [order.add() for _ in range(10)]
    released: set[int] = set()
    for numbers in releases:
        order.release(numbers - released, pending)
        released |= numbers
        assert order.completed == len(released)
        assert set(pending[: order.completed]) == released
        assert pending[order.completed :] == sorted(set(range(10)) - released)
    if order.completed:
        order.pop()
        assert order.completed == len(released) - 1
    order.clear()
    assert (order.completed, order.add()) == (0, 10)
