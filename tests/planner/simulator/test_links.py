"""Links: transfers share them equally, and no link is idle while it has work."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.types import Parallelism, Role
from planner.simulator import simulate as product
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from planner.simulator.rounds import Links
from planner.simulator.simulate import simulate
from planner.simulator.worker import SimulatedWorker

from .lab import LOCAL, MODEL, SLO, world_of

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


def test_kv_of_the_same_host_takes_no_link() -> None:
    world = world_of(LOCAL)
    links, ends = Links(world), list[float]()
    group = ReplicaGroup(1, Parallelism(1))
    source, here, there = (SimulatedWorker(name, Role.DECODE, group, world, name[0]) for name in ("a1", "a2", "b1"))
    for target in (here, here, there):
        links.move("kv-history", "s", source, target, 100_000, lambda: ends.append(world.loop.now_s))
    world.loop.run()
    seconds = [MODEL.kv_transfer_s(100_000, source.parallelism, target.parallelism) for target in (here, here, there)]
    assert ends == pytest.approx(seconds)
    assert 0 < seconds[0] < seconds[2]


@pytest.mark.parametrize(("gpus_per_host", "hosts"), [(0, ["", "", ""]), (8, ["0", "0", "0"]), (3, ["0", "0", "1"])])
def test_workers_fill_the_hosts_in_their_order(gpus_per_host: int, hosts: list[str]) -> None:
    found: list[str] = []

    class Noted(SimulatedWorker):
        def __init__(self, *of_worker: Any) -> None:
            super().__init__(*of_worker)
            found.append(self.parallelism.host)

    cluster = Cluster((ReplicaGroup(1, Parallelism(1)),), (ReplicaGroup(2, Parallelism(2)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "SimulatedWorker", Noted)
        simulate([], cluster, MODEL, LOCAL, SLO, SimulationOptions(gpus_per_host=gpus_per_host))
    assert found == hosts


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
