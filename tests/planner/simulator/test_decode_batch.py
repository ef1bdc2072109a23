"""What decisions see in the middle of a run of steps is what they would see token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampd.policies.base import RoutingSituation
from ampd.types import RouteDecision, Window
from planner.simulator.engine import LONGEST_RUN_STEPS
from planner.simulator.options import Cluster, SimulationOptions
from workloads.trace import Session

from .lab import DICE, RandomRouting, options, roomy_clusters, run, session_lists, steps_at_once

Seen = tuple[str, str, int, int, Window, int]


class Noting(RandomRouting):
    """Notes what it is shown of the decode worker."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def route(self, situation: RoutingSituation) -> RouteDecision:
        decode = situation.decode
        self.seen.append(
            (
                situation.task.task_id,
                decode.worker_id,
                decode.decode_batch,
                decode.decode_context_tokens,
                decode.itl,
                decode.kv_used_tokens,
            )
        )
        return super().route(situation)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(session_lists(least_tool_s=0.001), roomy_clusters, options, st.sampled_from([0.4937, 9.7131]))
def test_decode_workers_look_the_same(
    sessions: list[Session], cluster: Cluster, how: SimulationOptions, window_s: float
) -> None:
    # The lengths of the window are no multiple of anything else, so that no sample leaves at the moment of a look.
    seen = []
    for steps in (LONGEST_RUN_STEPS, 1):
        noting = Noting()
        with steps_at_once(steps):
            run(sessions, cluster, replace(DICE, routing=noting), replace(how, window_s=window_s))
        seen.append(noting.seen)
    assert len(seen[0]) == len(seen[1])
    for (*ours, our_window, our_kv), (*theirs, their_window, their_kv) in zip(*seen, strict=True):
        assert (ours, our_kv) == (theirs, their_kv)
        assert our_window.count == their_window.count
        assert our_window.mean_s == pytest.approx(their_window.mean_s, rel=1e-6, abs=1e-9)
