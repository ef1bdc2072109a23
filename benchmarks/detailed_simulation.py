"""`ampd simulate` with what only comparisons need: the overheads of a live graph, and all activities of the workers.

    python -m benchmarks.detailed_simulation TRACE ... --state-delay-s 0.05

takes the flags of `ampd simulate` and prints its JSON object, with `timelines`: for each simulation, all prefills,
decode steps and reads of KV, with their times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field

from ampd.settings import parse_settings
from planner.parallel import in_parallel
from planner.simulate_command import SimulateSettings, case_of, result_of, run_combination
from planner.simulator.outcome import Span
from workloads.trace import load_trace


class DetailedSettings(SimulateSettings):
    """The options of a simulation that `ampd simulate` leaves at their defaults, see `SimulationOptions`."""

    dispatch_s: float = Field(0.0, ge=0)
    hand_over_s: float = Field(0.0, ge=0)
    kv_read_s: float = Field(0.0, ge=0)
    hand_over_pass: bool = True
    state_delay_s: float = Field(0.0, ge=0)
    coordinators: int = Field(1, ge=1)


def detailed_result(argv: Sequence[str]) -> dict[str, Any]:
    """What `ampd simulate --json` prints, and the timelines."""
    settings = parse_settings(DetailedSettings, argv, "detailed_simulation")
    scene, combinations = case_of(settings, load_trace(settings.trace, settings.limit))
    scene = replace(scene, options=replace(scene.options, keeps_timeline=True))
    runs = in_parallel(partial(run_combination, scene), combinations, "simulating", settings.jobs)
    results = [result_of(scene, combination, run) for combination, run in zip(combinations, runs, strict=True)]
    timelines = [[_row(span) for span in run.timeline] for run in runs]
    return (results[0] if len(results) == 1 else {}) | {"results": results, "timelines": timelines}


def _row(span: Span) -> list[Any]:
    return [span.worker_id, span.lane, span.kind, span.start_s, span.end_s, dict(span.detail)]


if __name__ == "__main__":
    print(json.dumps(detailed_result(sys.argv[1:])))
