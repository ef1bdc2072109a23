"""Small random clusters and sessions, policies that decide by dice, and what must hold after every run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.perf.presets import analytic_model
from ampd.policies.base import Pick
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Route, RouteDecision, Slo, WorkerView
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate
from workloads.trace import Round, Session

MODEL = analytic_model("llama-3.1-8b", "h20")
SLO = Slo(0.5, 0.02)
NO_OPTIONS = SimulationOptions()


class RandomBinding:
    """Binds anywhere."""

    def bind(
        self,
        task: PrefillTask,  # noqa: ARG002
        decode: Sequence[WorkerView],
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> str:
        return rng.choice(decode).worker_id


class RandomRouting:
    """Routes anywhere."""

    def route(
        self,
        task: PrefillTask,  # noqa: ARG002
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> RouteDecision:
        worker = rng.choice([decode, *prefill])
        route = Route.LOCAL if worker is decode else Route.REMOTE
        return RouteDecision(route, worker.worker_id, "dice")


class RandomOrdering:
    """Picks anyone."""

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> Pick:
        index = rng.randrange(len(queue))
        return Pick(index, tuple(range(index)))


DICE = Policies(RandomBinding(), RandomRouting(), RandomOrdering())
AMPD = Policies(create("binding", "least-kv"), create("routing", "ampd"), create("ordering", "ampd"))
REMOTE = replace(AMPD, routing=create("routing", "always-remote"), ordering=create("ordering", "fcfs"))
LOCAL = replace(AMPD, routing=create("routing", "always-local"), ordering=create("ordering", "fcfs"))
policies = st.sampled_from([DICE, AMPD, REMOTE, LOCAL])


@st.composite
def session_lists(draw: st.DrawFn, most: int = 8, least_tool_s: float = 0.0) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, most))):
        rounds: list[Round] = []
        context = 0
        for index in range(draw(st.integers(1, 4))):
            keep = None
            if index and draw(st.booleans()) and draw(st.booleans()):
                keep = draw(st.integers(0, context))
            incr, output = draw(st.integers(1, 1500)), draw(st.one_of(st.just(1), st.integers(1, 60)))
            tool_s = draw(st.floats(least_tool_s, 2.0)) if index else 0.0
            rounds.append(Round(incr_tokens=incr, output_tokens=output, tool_s=tool_s, keep_tokens=keep))
            context = (context if keep is None else keep) + incr + output
        arrival_s = draw(st.floats(0, 2.0))
        sessions.append(Session(session_id=f"s{number}", arrival_s=arrival_s, rounds=tuple(rounds)))
    return sorted(sessions, key=lambda session: session.arrival_s)


@st.composite
def clusters(draw: st.DrawFn, tight: bool = False) -> Cluster:
    def group() -> ReplicaGroup:
        capacity = draw(st.integers(500, 12_000)) if tight else draw(st.sampled_from([0, 50_000]))
        return ReplicaGroup(draw(st.integers(1, 3)), Parallelism(draw(st.sampled_from([1, 2, 4]))), capacity)

    return Cluster(decode=(group(),), prefill=tuple(group() for _ in range(draw(st.integers(0, 2)))))


options = st.builds(
    SimulationOptions,
    seed=st.integers(0, 5),
    chunk_tokens=st.sampled_from([0, 0, 64, 700]),
    prefill_concurrency=st.integers(1, 2),
    prefetch=st.integers(0, 2),
    dispatch_s=st.sampled_from([0.0, 0.003]),
    hand_over_s=st.sampled_from([0.0, 0.002]),
    kv_read_s=st.sampled_from([0.0, 0.001]),
    hand_over_pass=st.booleans(),
    state_delay_s=st.sampled_from([0.0, 0.2]),
    coordinators=st.integers(1, 3),
    keeps_timeline=st.just(True),
)


def run(
    sessions: Sequence[Session], cluster: Cluster, policies: Policies = AMPD, options: SimulationOptions = NO_OPTIONS
) -> SimulationRun:
    return simulate(sessions, cluster, MODEL, policies, SLO, options)


def single(theta: int = 1, capacity: int = 0, prefill: int = 1) -> Cluster:
    """One decode worker and `prefill` prefill workers."""
    group = ReplicaGroup(1, Parallelism(theta), capacity)
    return Cluster((group,), (ReplicaGroup(prefill, Parallelism(theta), capacity),) if prefill else ())


def session(name: str, *rounds: tuple[int, int], arrival_s: float = 0.0, tool_s: float = 0.5) -> Session:
    """Rounds as (increment, output)."""
    return Session(
        session_id=name,
        arrival_s=arrival_s,
        rounds=tuple(
            Round(incr_tokens=incr, output_tokens=output, tool_s=tool_s if index else 0.0)
            for index, (incr, output) in enumerate(rounds)
        ),
    )
