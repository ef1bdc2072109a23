"""Links: transfers share them equally, and no link is idle while it has work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulator.rounds import Links

from .lab import LOCAL, world_of

untimed = settings(deadline=None)


def transfers(*moves: tuple[str, str, float, float]) -> list[float]:
    """When moves of (source, target, start, seconds) end."""
    world = world_of(LOCAL)
    loop = world.loop
    links, ends = Links(world), [0.0] * len(moves)

    def begin(number: int) -> None:
        source, target, _, seconds = moves[number]

        def done() -> None:
            ends[number] = loop.now_s

        links.start(source, target, seconds, done)

    for number, move in enumerate(moves):
        loop.at(move[2], begin, number)
    loop.run()
    return ends


def test_a_lone_transfer_takes_its_time() -> None:
    assert transfers(("a", "b", 1.0, 0.5)) == [1.5]


@untimed
@given(st.integers(1, 6))
def test_equal_transfers_over_one_link_share_it(count: int) -> None:
    outgoing = transfers(*(("a", f"t{number}", 0.0, 1.0) for number in range(count)))
    incoming = transfers(*((f"s{number}", "b", 0.0, 1.0) for number in range(count)))
    assert outgoing == incoming == pytest.approx([float(count)] * count)


def test_other_pairs_and_the_other_direction_do_not_matter() -> None:
    assert transfers(("a", "b", 0.0, 1.0), ("c", "d", 0.0, 1.0), ("b", "a", 0.0, 1.0)) == [1.0, 1.0, 1.0]


def test_a_transfer_slows_down_while_another_one_shares_its_link() -> None:
    assert transfers(("a", "b", 0.0, 2.0), ("a", "c", 1.0, 0.25)) == pytest.approx([2.25, 1.5])


@untimed
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=8))
def test_a_link_is_never_idle_while_it_has_work(moves: list[tuple[float, float]]) -> None:
    ends = transfers(*(("a", "b", start_s, seconds) for start_s, seconds in moves))
    busy_until_s = 0.0
    for start_s, seconds in sorted(moves):
        busy_until_s = max(busy_until_s, start_s) + seconds
    assert max(ends) == pytest.approx(busy_until_s)
