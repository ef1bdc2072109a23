"""Workers that believe in wrong times correct them. A belief that is right changes nothing, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from ampd.perf.model import ScaledModel
from ampd.policies.base import RoutingSituation
from ampd.policies.registry import create, create_named
from ampd.types import Factors, Parallelism, Role, RouteDecision, Slo
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.rounds import Links
from planner.simulator.simulate import simulate
from planner.simulator.worker import SimulatedWorker
from tests.planner.simulator.lab import MODEL, world_of
from workloads.trace import Round, Session

TP1 = Parallelism(1)
SLO = Slo(0.3, 0.02)
STORE = Cluster((ReplicaGroup(1, TP1, 6000, 60_000),), (ReplicaGroup(1, TP1, 6000, 60_000),))


class Watched:
    """A routing that notes the factors in the views."""

    def __init__(self) -> None:
        self._routing = create("routing", "predictive")
        self.seen: dict[str, Factors] = {}

    def route(self, situation: RoutingSituation) -> RouteDecision:
        for view in (situation.decode, *situation.prefill):
            self.seen[view.worker_id] = view.parallelism.factors
        return self._routing.route(situation)


def policies(slicing: str = "slack", routing: Watched | None = None) -> Policies:
    return Policies(
        binding=create("binding", "predictive"),
        routing=routing or create("routing", "predictive"),
        ordering=create("ordering", "on-time"),
        slicing=create_named("slicing", slicing),
    )


def sessions(rate: float, count: int = 120) -> list[Session]:
    return [
        Session(
            session_id=f"s{number}",
            arrival_s=number / rate,
            rounds=tuple(
                Round(
                    incr_tokens=300 + 97 * (number * (index + 3) % 17),
                    output_tokens=20 + number % 30,
                    tool_s=0.5 * (index > 0),
                )
                for index in range(4)
            ),
        )
        for number in range(count)
    ]


def run(
    belief: ScaledModel | None, chosen: Policies | None = None, *, corrects_times: bool = True, rate: float = 3.0
) -> SimulationRun:
    options = SimulationOptions(keeps_timeline=True, corrects_times=corrects_times)
    return simulate(sessions(rate), STORE, MODEL, chosen or policies(), SLO, options, belief=belief)


@pytest.mark.parametrize("slicing", ["slack", "whole"])
def test_a_belief_that_is_right_changes_nothing(slicing: str) -> None:
    learned = run(ScaledModel(MODEL), policies(slicing))
    plain = run(None, policies(slicing))
    assert (learned.rounds, learned.gaps, learned.timeline) == (plain.rounds, plain.gaps, plain.timeline)


@pytest.mark.parametrize("wrong", [(1.3, 1.3, 1.3), (0.77, 0.77, 0.77), (0.8, 1.25, 2.0)])
def test_factors_approach_what_is_wrong(wrong: tuple[float, float, float]) -> None:
    watched = Watched()
    run(ScaledModel(MODEL, *wrong), policies(routing=watched))
    prefill, decode = watched.seen["prefill-0"], watched.seen["decode-0"]
    assert prefill.prefill == pytest.approx(1 / wrong[0], rel=0.03)
    assert decode.step == pytest.approx(1 / wrong[1], rel=0.03)
    assert min(1 / wrong[0], 1 / wrong[1]) * 0.97 < decode.mixed < max(1 / wrong[0], 1 / wrong[1]) * 1.03
    assert prefill.read == pytest.approx(1 / wrong[2], rel=0.25)  # there are few reads
    assert prefill.load == pytest.approx(1 / wrong[2], rel=0.25)
    assert prefill.step == 1.0, "it has made no step"


def test_corrected_workers_serve_nearly_as_if_they_knew_the_times() -> None:
    def attained(belief: ScaledModel | None, *, corrects_times: bool = True) -> float:
        """The mean of loads that the workers nearly carry, because a few rounds decide at a single one."""
        runs = [run(belief, corrects_times=corrects_times, rate=rate) for rate in (0.9, 1.1, 1.2, 1.3)]
        return fmean(each.attainment(SLO).rounds for each in runs)

    belief = ScaledModel(MODEL, 0.5, 0.5, 0.5)
    right, wrong, corrected = attained(None), attained(belief, corrects_times=False), attained(belief)
    assert wrong < right
    assert corrected > right - 0.3 * (right - wrong)


def test_transfers_that_share_a_link_are_no_measure() -> None:
    """Otherwise a factor would follow the load."""
    world = replace(world_of(policies()), belief=ScaledModel(MODEL, transfer=0.5))
    source, target = (SimulatedWorker(name, Role.DECODE, ReplicaGroup(1, TP1), world) for name in "st")
    links, arrived = Links(world), list[None]()

    def move(times: int) -> float:
        for _ in range(times):
            links.move("kv-history", "s", source, target, 100_000, lambda: arrived.append(None))
        world.loop.run()
        assert target.times is not None
        return target.times.parallelism.factors.read

    assert move(2) == 1.0
    assert move(1) > 1.3
    assert len(arrived) == 3
